#include "vmkernel_svc/pkeys.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/events.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

namespace {
constexpr std::uint32_t event_pkey_change = 12;  // IBV_EVENT_PKEY_CHANGE
}

bool give_pkeys(const Fabric& fabric, Tenant& tenant) {
  const auto before = tenant.pkeys;
  if (!fabric.partitions.fill(tenant.pkeys, fabric.host_name, tenant.uid))
    log::warn("uid {} is in more partitions than the {} that a port's table has: it has the first of them", tenant.uid, tenant.pkeys.size());
  return tenant.pkeys != before;
}

void use_partitions(Shard& shard, const hosts::Partitions& partitions) {
  Fabric& fabric = shard.fabric();
  if (fabric.partitions == partitions) return;
  fabric.partitions = partitions;
  std::vector<Tenant*> changed;
  for (auto& [uid, tenant] : fabric.tenants) {
    if (!give_pkeys(fabric, tenant)) continue;
    changed.push_back(&tenant);
    for (auto& [id, guest] : fabric.guests) {
      if (guest->tenant != &tenant) continue;
      for (auto& [handle, qp] : guest->qps) {
        const std::uint16_t pkey = tenant.pkeys[qp->core.attributes.pkey_index];
        if (std::exchange(qp->core.port.pkey, pkey) == pkey) continue;
        if (fabric.far != nullptr) fabric.far->tell_pkey(qp->core);
      }
    }
  }
  ++fabric.topology_generation;  // who found somebody by the tables before looks again
  if (fabric.far != nullptr) fabric.far->look_at_partitions();
  shard.direct().look_again();
  shard.direct().settle();  // before the event, too: who has it sends nothing by itself that it may not send any more
  if (changed.empty()) return;
  shard.devices_changed();  // before the event: who has it sees the new table
  for (auto& [id, guest] : fabric.guests)
    if (std::find(changed.begin(), changed.end(), guest->tenant) != changed.end())
      for (auto& [handle, context] : guest->contexts) raise_async(*guest, context->handle, event_pkey_change, Handle{0});
  for (Shard* const of_some : fabric.shards.all()) of_some->wake();  // what a full pipe has not taken is tried again
}

}  // namespace vrdma::svc
