#include "vmkernel_svc/fabric.hpp"

#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/mad/management.hpp"
#include "vmkernel_svc/direct/key_book.hpp"
#include "vmkernel_svc/hosts/service.hpp"

#include <cstring>
#include <fstream>

namespace vrdma::svc {

namespace {
// A quarter is left to the service itself.
std::uint64_t mappings_allowed() {
  std::uint64_t most = 65530;  // the kernel's default
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  return most / 4 * 3;
}
}  // namespace

Guest::Guest() = default;
Guest::~Guest() = default;

std::uint32_t Guest::new_handle() {
  const auto is_taken = [this](std::uint32_t handle) {
    return contexts.contains(handle) || channels.contains(handle) || pds.contains(handle) || mrs.contains(handle) || mws.contains(handle) ||
           cqs.contains(handle) || srqs.contains(handle) || qps.contains(handle) || xrcds.contains(handle);
  };
  return handle_numbers.take(~std::uint32_t{0}, is_taken).value();  // a guest's objects are far fewer (limits.hpp)
}

Fabric::Fabric(const Config& config_in, Shards& shards_in)
    : config(config_in), shards(shards_in), mappings_max(mappings_allowed()), cm(std::make_unique<ConnectionManager>(*this)), management(std::make_unique<Management>(*this)) {}
Fabric::~Fabric() = default;

std::uint32_t Fabric::new_qpn() {
  // Round the 24-bit space, so that a number rests for as long as possible. 0 and 1 are the management QPs.
  for (;;) {
    const std::uint32_t qpn = next_qpn_;
    next_qpn_ = next_qpn_ >= 0xfffffe ? 0x11 : next_qpn_ + 1;
    if (!by_qpn.contains(qpn)) return qpn;
  }
}

bool Fabric::may_give_lids() const { return may_give_lids_ && (!hosts || hosts->snapshot()->may_give()); }

std::uint16_t Fabric::new_lid(uid_t uid) { return may_give_lids() ? lids.take(uid) : std::uint16_t{0}; }

void Fabric::lease_lids(hosts::LidRange leased, bool may_give) {
  may_give_lids_ = may_give;
  lids.lease(leased);
}

bool Fabric::leads_to(std::uint16_t lid, const std::array<control::GidEntry, 16>& gids, std::uint32_t sender_link_layer,
                      std::uint16_t dlid, bool global, const std::uint8_t* dgid) {
  if (sender_link_layer == control::link_layer_infiniband && dlid != 0) return lid == dlid;
  if (!global) return false;
  for (const auto& entry : gids)
    if (entry.gid != Gid{} && std::memcmp(entry.gid.data(), dgid, 16) == 0) return true;
  return false;
}

}  // namespace vrdma::svc
