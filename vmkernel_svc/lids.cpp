#include "vmkernel_svc/lids.hpp"

#include <algorithm>

namespace vrdma::svc {

void Lids::lease(hosts::LidRange lids) {
  if (count_ != 0 || lids == hosts::no_lids) return;
  first_ = lids.first;
  count_ = lids.last - lids.first + 1u;
}

std::uint16_t Lids::take(uid_t uid) {
  const std::uint32_t for_root = std::min(count_ / 32, 8u);
  if (uid != 0 && count_ - next_ + resting_.size() <= for_root) return 0;
  if (next_ < count_) return static_cast<std::uint16_t>(first_ + next_++);
  if (resting_.empty()) return 0;
  const std::uint16_t lid = resting_.front();
  resting_.pop_front();
  if (const auto named = secret_of_.find(lid); named != secret_of_.end()) {
    shared_.erase(named->second);
    secret_of_.erase(named);
  }
  return lid;
}

void Lids::give_back(std::uint16_t lid) {
  if (const auto named = secret_of_.find(lid); named != secret_of_.end() && --shared_.at(named->second).users > 0) return;
  resting_.push_back(lid);
}

std::optional<Lids::Shared> Lids::share(const Secret& secret, std::uint16_t lid, const Address& address, bool may_give) {
  if (secret_of_.contains(lid)) return std::nullopt;  // it has an address that it shares
  const auto found = shared_.find(secret);
  if (found == shared_.end()) {
    shared_.emplace(secret, Entry{lid, address, 1});
    secret_of_.emplace(lid, secret);
    return std::nullopt;
  }
  Entry& entry = found->second;
  if (entry.users == 0 && !may_give) return std::nullopt;
  if (entry.address.uid != address.uid || entry.address.link_layer != address.link_layer) return std::nullopt;
  if (entry.users++ == 0) resting_.erase(std::find(resting_.begin(), resting_.end(), entry.lid));
  give_back(lid);
  return Shared{entry.lid, entry.address.guid};
}

}  // namespace vrdma::svc
