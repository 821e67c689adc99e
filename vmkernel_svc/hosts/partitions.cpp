#include "vmkernel_svc/hosts/partitions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

namespace vrdma::hosts {

namespace {

template <class Number>
std::optional<Number> number_in(std::string_view text, int base) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

std::optional<std::uint16_t> pkey_of(std::string_view text) {
  if (!text.starts_with("0x") || text.size() != 6) return std::nullopt;
  const auto pkey = number_in<std::uint16_t>(text.substr(2), 16);
  if (!pkey || partition_of(*pkey) == 0) return std::nullopt;
  return pkey;
}

std::string pkey_text(std::uint16_t pkey) { return fmt::format("0x{:04x}", pkey); }

std::string Membership::member() const {
  const std::string user = uid < 0 ? "*" : std::to_string(uid);
  return host.empty() ? user : host + "/" + user;
}

std::optional<Membership> membership_of(std::uint16_t pkey, std::string_view member) {
  Membership one{pkey, "", -1};
  if (const auto slash = member.find('/'); slash != std::string_view::npos) {
    one.host = member.substr(0, slash);
    member.remove_prefix(slash + 1);
    if (one.host.empty() || one.host.size() > 63) return std::nullopt;
    if (one.host == "*") one.host.clear();
    else if (one.host.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos) return std::nullopt;
  }
  if (member == "*") return one;
  const auto uid = number_in<std::uint32_t>(member, 10);
  if (!uid) return std::nullopt;
  one.uid = *uid;
  return one;
}

std::size_t Partitions::remove_partition(std::uint16_t partition) {
  return std::erase_if(memberships_, [&](const Membership& one) { return partition_of(one.pkey) == partition; });
}

std::vector<std::uint16_t> Partitions::keys_of(std::string_view host, std::int64_t uid) const {
  std::map<std::uint16_t, std::uint16_t> keys;  // by partition; a full membership outdoes a limited one
  for (const Membership& one : memberships_)
    if (one.names(host, uid)) keys[partition_of(one.pkey)] |= one.pkey;
  if (keys.empty()) return {pkey_default};
  std::vector<std::uint16_t> list;
  if (const auto standard = keys.extract(partition_of(pkey_default))) list.push_back(standard.mapped());
  for (const auto& [partition, pkey] : keys) list.push_back(pkey);
  return list;
}

bool Partitions::fill(PkeyTable& table, std::string_view host, std::int64_t uid) const {
  const auto keys = keys_of(host, uid);
  for (std::uint16_t& place : table)
    if (place != 0 && std::find(keys.begin(), keys.end(), place) == keys.end()) {
      // The same partition, in which it has become another kind of member, is still at that place.
      const auto same = std::find_if(keys.begin(), keys.end(), [&](std::uint16_t key) { return partition_of(key) == partition_of(place); });
      place = same != keys.end() ? *same : 0;
    }
  for (const std::uint16_t key : keys) {
    if (std::find(table.begin(), table.end(), key) != table.end()) continue;
    auto room = std::find(table.begin(), table.end(), std::uint16_t{0});
    const bool first_stands_twice = std::find(table.begin() + 1, table.end(), table[0]) != table.end();
    if (first_stands_twice && (room == table.end() || partition_of(key) == partition_of(pkey_default))) room = table.begin();
    if (room == table.end()) return false;
    *room = key;
  }
  if (table[0] == 0) table[0] = keys.front();  // most programs ask for no other; it keeps the place that it has, too
  return true;
}

bool Partitions::may_be_of(std::string_view host, std::uint16_t pkey) const {
  if (partition_of(pkey) == 0) return false;
  bool all_named = false, given = false;
  for (const Membership& one : memberships_) {
    if (!one.host.empty() && one.host != host) continue;
    given |= one.pkey == pkey;
    all_named |= one.uid < 0;
  }
  return given || (pkey == pkey_default && !all_named);
}

}  // namespace vrdma::hosts
