#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/show.hpp"

#include <arpa/inet.h>
#include <endian.h>
#include <rdma/rdma_user_cm.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/hosts/service.hpp"

namespace vrdma::svc {

namespace {

using nlohmann::json;
using namespace control;

const char* state_name(engine::QpState state) {
  constexpr const char* names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return names[static_cast<std::size_t>(state)];
}
const char* type_name(engine::QpType type) {
  switch (type) {
    case engine::QpType::rc: return "RC";
    case engine::QpType::uc: return "UC";
    case engine::QpType::xrc_send: return "XRC_INI";
    case engine::QpType::xrc_recv: return "XRC_TGT";
    default: return "UD";
  }
}

std::string hex(std::uint64_t value, int digits) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}
std::string gid_text(const Gid& gid) {
  char text[48];
  std::snprintf(text, sizeof(text), "%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x", gid[0], gid[1],
                gid[2], gid[3], gid[4], gid[5], gid[6], gid[7], gid[8], gid[9], gid[10], gid[11], gid[12], gid[13], gid[14], gid[15]);
  return text;
}

std::string address_text(const CmAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.family == 0 || ::inet_ntop(address.family == AF_IB ? AF_INET6 : address.family, address.ip.data(), text, sizeof(text)) == nullptr) return "";
  return address.family != AF_INET ? "[" + std::string(text) + "]:" + std::to_string(address.port) : std::string(text) + ":" + std::to_string(address.port);
}

// As rdma-resource(8) names them, as far as it knows them.
const char* cm_state_name(CmState state) {
  constexpr const char* names[] = {"IDLE", "ADDR_BOUND", "ADDR_QUERY", "ADDR_RESOLVED", "ROUTE_RESOLVED", "LISTEN", "CONNECT",
                                   "CONNECT", "REQUESTED", "ACCEPTED", "ESTABLISHED", "DISCONNECT", "ENDED"};
  return names[static_cast<std::size_t>(state)];
}
const char* port_space_name(std::uint32_t port_space) {
  switch (port_space) {
    case RDMA_PS_TCP: return "TCP";
    case RDMA_PS_UDP: return "UDP";
    case RDMA_PS_IPOIB: return "IPoIB";
    default: return "IB";
  }
}

json describe_identifiers(const Guest& guest, const ConnectionManager& cm) {
  json out = json::array();
  for (const auto& [id, one] : cm.identifiers())
    if (one->guest == &guest)
      out.push_back({{"cm_id", id}, {"type", type_name(one->type)}, {"state", cm_state_name(one->state)}, {"port_space", port_space_name(one->port_space)},
                     {"src_addr", address_text(one->source)}, {"dst_addr", address_text(one->destination)}});
  return out;
}

json describe(const engine::QpCounters& counters) {
  json out;
  engine::QpCounters::for_each(counters, [&](const char* name, std::uint64_t count) { out[name] = count; });
  return out;
}

const char* gid_type_name(std::uint32_t type) { return type == 0 ? "IB" : type == 1 ? "RoCE v1" : "RoCE v2"; }
const char* port_state_name(std::uint8_t state) {
  constexpr const char* names[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
  return state < std::size(names) ? names[state] : "?";
}

// What a query of the guest's device, port and GIDs answers: the same record, so that the two cannot differ.
json describe_device(const Guest& guest, const Fabric& fabric) {
  const DeviceReply device = device_reply(guest, fabric.config, fabric.device_generation);
  const bool ethernet = device.link_layer == link_layer_ethernet;
  json gids = json::array(), pkeys = json::array();
  for (std::size_t i = 0; i < std::size(device.gids); ++i)
    if (device.gids[i].gid != Gid{})
      gids.push_back({{"index", i}, {"gid", gid_text(device.gids[i].gid)}, {"type", gid_type_name(device.gids[i].type)}});
  for (const std::uint16_t pkey : device.pkeys)
    if (pkey != 0) pkeys.push_back(hex(be16toh(pkey), 4));
  json out{{"adapter", "vrdma virtual HCA"},
           {"physical_hca_available", false},
           {"fw_version", std::string(device.fw_version, ::strnlen(device.fw_version, sizeof(device.fw_version)))},
           {"node_guid", hex(be64toh(device.node_guid), 16)},
           {"sys_image_guid", hex(be64toh(device.sys_image_guid), 16)},
           {"port", 1},
           {"state", port_state_name(device.port_state)},
           {"link_layer", ethernet ? "Ethernet" : "InfiniBand"},
           {"lid", device.lid},
           {"sm_lid", device.sm_lid},
           {"active_mtu", 128u << device.active_mtu},
           {"max_mtu", 128u << device.max_mtu},
           {"srq_supported", device.srq_max != 0}};
  out["roce_versions"] = ethernet ? json{"v1", "v2"} : json::array();
  out["qp_types"] = {"RC", "UC", "UD"};
  out["limits"] = {{"qps", device.qp_max},          {"cqs", device.cq_max},      {"srqs", device.srq_max},
                   {"mrs", device.mr_max},          {"pds", device.pd_max},      {"qp_wr", device.qp_wr_max},
                   {"srq_wr", device.srq_wr_max},   {"cqe", device.cqe_max},     {"sge", device.sge_max},
                   {"inline_bytes", device.inline_max}, {"rd_atomic", device.rd_atomic_max}, {"mr_bytes", device.mr_bytes_max}};
  out["gids"] = std::move(gids);
  out["pkeys"] = std::move(pkeys);
  return out;
}

// How a connected queue pair's messages reach another host; null: they do not leave this one, or it does not know yet.
json describe_way(Fabric& fabric, const MediatedPorts::Qp& qp) {
  if (qp.far == nullptr) return json();
  if (fabric.far->hca() == nullptr) return {{"via", fabric.far->carrier().name()}, {"why", "only-carrier"}};
  const HcaDesk& hca = *fabric.far->hca();
  const std::string why = hca.why_not(qp);
  if (why.empty()) return {{"via", "hca"}, {"why", "both hosts have an HCA"}};
  if (hca.has_trunk(qp.far->host)) return {{"via", "hca"}, {"why", "as records: " + why}};
  return {{"via", fabric.far->carrier().name()}, {"why", why}};
}

// Without those that were written directly and are not counted yet.
std::uint32_t unpolled(const CompletionQueue& cq) {
  const std::uint32_t count = cq.produced - std::atomic_ref(cq.shared->consumed).load(std::memory_order_relaxed);
  return cq.direct_lanes != 0 && static_cast<std::int32_t>(count) < 0 ? 0 : count;
}

json describe(Guest& guest, Shard& shard) {
  Fabric& fabric = shard.fabric();
  json out{{"guest", guest.id.value},
           {"machine", guest.machine ? json(guest.machine->name) : json()},
           {"name", guest.name},
           {"uid", guest.credentials.uid},
           {"pid", guest.credentials.pid},
           {"lid", guest.lid},
           {"shard", guest.group->shard->number()},
           {"node_guid", hex(guest.guid, 16)},
           {"link_layer", guest.link_layer == link_layer_ethernet ? "Ethernet" : "InfiniBand"},
           {"requests", guest.requests_served},
           {"protocol_errors", guest.protocol_errors},
           {"bad_pkeys", guest.bad_pkeys},
           {"arena_bytes_used", guest.arena.used_bytes()},
           {"backings", guest.backings.size()},
           {"guest_copies", guest.copier ? guest.copier->jobs_served() : 0},
           {"channels", guest.channels.size()},
           {"device", describe_device(guest, fabric)}};
  const VmciCounters& vmci = guest.vmci.counters;
  out["vmci"] = {{"ports", guest.vmci.ports.size()},
                 {"queue_pairs", guest.vmci.queue_pairs.size()},
                 {"notices_held", guest.vmci.held.size()},
                 {"datagrams_sent", vmci.datagrams_sent},
                 {"datagrams_refused", vmci.datagrams_refused},
                 {"datagrams_received", vmci.datagrams_received},
                 {"datagrams_dropped", vmci.datagrams_dropped}};
  out["contexts"] = json::array();
  for (const auto& [handle, context] : guest.contexts) out["contexts"].push_back({{"ctx", handle}});
  out["pds"] = json::array();
  for (const auto& [handle, pd] : guest.pds) out["pds"].push_back({{"pd", pd->number}, {"ctx", pd->context}, {"users", pd->users}});
  engine::QpCounters totals = guest.totals;
  out["qps"] = json::array();
  for (auto& [handle, qp] : guest.qps) {
    const engine::QpCounters counters = shard.direct().counters(*qp);
    totals += counters;
    if (qp->completes_for_srq() || qp->stands_for != nullptr) continue;
    const auto& attributes = qp->core.attributes;
    out["qps"].push_back({{"qpn", qp->core.qpn.value},
                          {"type", type_name(qp->core.type)},
                          {"state", state_name(qp->core.state)},
                          {"mode", shard.direct().mode(*qp)},
                          {"mediated_because", fabric.config.direct == "auto" && !qp->mediated_because.empty() ? json(qp->mediated_because) : json()},
                          {"carrier", describe_way(fabric, qp->core)},
                          {"pkey", qp->core.port.pkey == 0 ? json() : json(hosts::pkey_text(qp->core.port.pkey))},
                          {"dest_qpn", attributes.dest_qp_num},
                          {"sq_psn", attributes.sq_psn},
                          {"rq_psn", attributes.rq_psn},
                          {"dlid", attributes.path.dlid},
                          {"dgid", attributes.path.is_global != 0 ? json(gid_text(std::to_array(attributes.path.dgid))) : json()},
                          {"path_mtu", attributes.path_mtu == 0 ? 0 : engine::mtu_bytes(attributes.path_mtu)},
                          {"pd", qp->pd->number},
                          {"send_cq", qp->send_cq->handle.value},
                          {"recv_cq", qp->receive_cq->handle.value},
                          {"srq", qp->srq != nullptr ? qp->srq->handle.value : 0},
                          {"max_send_wr", attributes.max_send_wr},
                          {"max_recv_wr", attributes.max_recv_wr},
                          {"counters", describe(counters)}});
  }
  out["counters"] = describe(totals);  // of all its queue pairs, those that are gone too
  out["cqs"] = json::array();
  for (auto& [handle, cq] : guest.cqs)
    out["cqs"].push_back({{"cq", handle},
                          {"ctx", cq->context},
                          {"cqe", cq->cqe},
                          {"completions", cq->produced},
                          {"unpolled", unpolled(*cq)},
                          {"users", cq->users.size()},
                          {"channel", cq->channel != nullptr ? cq->channel->handle.value : 0},
                          {"overrun", cq->overrun}});
  out["srqs"] = json::array();
  for (auto& [handle, srq] : guest.srqs)
    out["srqs"].push_back({{"srq", handle}, {"pd", srq->pd->number}, {"max_wr", srq->core.max_wr}, {"taken", srq->core.taken_now()}, {"limit", srq->core.limit},
                           {"qps", srq->users - (srq->completions != nullptr ? 1 : 0)},
                           {"type", srq->completions != nullptr ? "XRC" : "BASIC"}, {"srqn", srq->completions != nullptr ? srq->completions->core.qpn.value : handle}});
  out["cm_ids"] = describe_identifiers(guest, *fabric.cm);
  out["mrs"] = json::array();
  const char* const unmapped_by = guest.copier ? "guest-copy" : "process";
  for (auto& [handle, slot] : guest.mrs) {
    const Region& region = fabric.regions.slot(slot);
    std::uint64_t mapped = 0;
    for (const auto& piece : region.pieces) mapped += piece.host != nullptr ? piece.bytes : 0;
    out["mrs"].push_back({{"mr", handle},
                          {"key", region.key.value},
                          {"address", hex(region.address, 0)},
                          {"bytes", region.bytes},
                          {"access", region.access},
                          {"pd", region.pd},
                          {"pieces", region.pieces.size()},
                          {"mapped_bytes", mapped},
                          {"path", mapped == region.bytes ? (!guest.machine ? "mapped" : guest.machine->in_bar ? "bar" : "pinned") : mapped != 0 ? "mixed" : unmapped_by},
                          {"unmapped_by", mapped == region.bytes ? "none" : unmapped_by}});
  }
  return out;
}

// Of the subnet, as everybody may see it: nothing of a tenant is in it.
json describe(const hosts::Service& service, const std::string& folder) {
  const auto now = service.snapshot();
  const auto lids = [](hosts::LidRange range) { return range == hosts::no_lids ? json() : json::array({range.first, range.last}); };
  const auto left = std::chrono::duration_cast<std::chrono::seconds>(now->lease_until - hosts::BootClock::now()).count();
  json out{{"name", now->us.name},     {"folder", folder},           {"address", now->us.address}, {"port", now->us.port},       {"lids", lids(now->lids)},
           {"lease_s", std::max<std::int64_t>(left, 0)}, {"may_give", now->may_give()}, {"leader", now->leader},     {"problem", now->problem},
           {"manages", now->manages},  {"term", now->term},          {"strangers", now->strangers}, {"last_stranger", now->last_stranger}};
  out["others"] = json::array();
  for (const auto& [name, other] : now->others)
    out["others"].push_back({{"name", name}, {"address", other.host.address}, {"port", other.host.port}, {"id", other.host.id}, {"lids", lids(other.host.lids)},
                             {"reachable", other.reachable}, {"manages", other.manages}, {"leads", name == now->leader}, {"version", other.version},
                             {"problem", other.problem}});
  return out;
}

}  // namespace

Viewer Viewer::at(const vmci::PacketSocket& socket) {
  const auto peer = socket.peer();
  if (!peer) return {};
  return {peer->uid, peer->uid == 0 || peer->uid == ::geteuid(), ""};
}

bool Viewer::sees(const Guest& guest) const {
  if (machine.empty()) return all || guest.credentials.uid == uid;
  return guest.machine && guest.machine->name == machine && (all || guest.machine->uid == uid);
}

namespace {

// The other hosts: which LIDs are theirs, how they are reached, and why so.
json describe_carriers(Fabric& fabric) {
  json out = json::array();
  if (fabric.far == nullptr) return out;
  std::map<remote::HostId, std::string> lids;
  for (const auto& range : fabric.far->ranges())
    lids[range.host] += (lids[range.host].empty() ? "" : ",") + std::to_string(range.lids.first) + "-" + std::to_string(range.lids.last);
  for (const auto& [id, text] : lids) {
    const auto host = fabric.far->directory().host(id);
    if (!host) continue;
    const auto gauge = fabric.far->carrier().gauge(id);
    const auto count = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
    const std::uint64_t silent_ns = fabric.far->silent_ns(id);
    constexpr std::uint64_t quiet_ns = 2'000'000'000;  // it says something every 200 ms
    const bool known = fabric.far->session(id) != 0;
    const HcaDesk* const hca = fabric.far->hca();
    const std::string why_not = hca != nullptr ? hca->why_not(id) : "only-carrier";
    out.push_back({{"host", host->name},
                   {"address", host->address + ":" + std::to_string(host->carrier_port)},
                   {"lids", text},
                   {"via", why_not.empty() ? "hca" : fabric.far->carrier().name()},
                   {"why", why_not.empty() ? "both hosts have an HCA" : why_not},
                   {"records_via", hca != nullptr && hca->has_trunk(id) ? "hca" : fabric.far->carrier().name()},
                   {"records_why", hca != nullptr ? hca->why_no_trunk(id) : ""},
                   {"fallen_back", hca != nullptr ? hca->fallen_back(id) : ""},
                   {"encrypted", fabric.far->carrier().encrypts(id)},
                   {"state", !known ? "connecting" : silent_ns > quiet_ns ? "silent" : "connected"},
                   {"silent_ms", known ? silent_ns / 1'000'000 : 0},
                   {"sessions", fabric.far->session(id)},
                   {"connections_here", fabric.far->stand_in_count(id)},
                   {"groups", fabric.far->groups().count(id).value_or(0)},
                   {"multicast_datagrams", fabric.far->multicast_datagrams(id)},
                   {"queued_bytes", count(gauge->queued_bytes)},
                   {"counters", {{"sent_records", count(gauge->sent_records)}, {"sent_bytes", count(gauge->sent_bytes)},
                                 {"received_records", count(gauge->received_records)}, {"received_bytes", count(gauge->received_bytes)},
                                 {"resent_records", count(gauge->resent)}, {"reconnects", count(gauge->reconnects)},
                                 {"hca_records", count(gauge->bypassed_records)}, {"hca_bytes", count(gauge->bypassed_bytes)}}}});
  }
  return out;
}

// Multicast groups that have members which the viewer sees: how many, and the other hosts that have any. Not all of very many: each is
// looked for at every host, while messages wait (`multicast_groups` among the counters says how many there are).
json describe_groups(Fabric& fabric, const Viewer& viewer) {
  constexpr std::size_t shown_max = 256;
  json out = json::array();
  for (const auto& [group, members] : fabric.multicast) {
    if (out.size() == shown_max) break;
    const auto seen = std::count_if(members.begin(), members.end(), [&](const QueuePair* member) { return viewer.sees(*member->guest); });
    if (seen == 0) continue;
    json hosts = json::array();
    if (fabric.far != nullptr)
      for (const remote::HostId id : fabric.far->groups().receivers(group))
        if (const auto host = fabric.far->directory().host(id); host && fabric.far->groups().count(id)) hosts.push_back(host->name);
    out.push_back({{"mgid", gid_text(group)}, {"members", seen}, {"hosts", hosts}});
  }
  return out;
}

json describe_hca(Fabric& fabric) {
  HcaDesk* const desk = fabric.far != nullptr ? fabric.far->hca() : nullptr;
  if (desk == nullptr) return json();
  const auto& c = desk->counters();
  json out{{"state", "none"}, {"why", desk->why_no_device()}, {"connections", desk->connection_count()}, {"registrations", desk->registration_count()},
           {"counters", {{"sent_messages", c.sent}, {"received_messages", c.received}, {"copies", c.copies}, {"copied_bytes", c.copied_bytes},
                         {"by_records", c.by_records}, {"losses", c.losses}, {"stalled", c.stalled}, {"keys_asked", c.keys_asked}, {"keys_revoked", c.revoked},
                         {"refused_registrations", c.refused}}}};
  if (auto* const device = desk->device()) {
    out["state"] = device->port_state();
    out["device"] = device->name();
    out["port"] = device->port();
    out["link_layer"] = device->port_attributes().link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
    out["gid_index"] = device->gid_index();
    out["gid_type"] = device->gid_type();
    Gid gid;
    std::memcpy(gid.data(), device->gid().raw, gid.size());
    out["gid"] = gid_text(gid);
    out["active_mtu"] = 128u << device->port_attributes().active_mtu;
    out["mtu"] = 128u << device->mtu();
    out["pfc"] = device->flow_control();
  }
  return out;
}

}  // namespace

void answer_show(Shard& shard, const vmci::PacketSocket& socket, const Head& head, const Viewer& viewer) {
  Fabric& fabric = shard.fabric();
  Head reply{};
  reply.record.control = (head.record.control & control_user_mask) | reply_bit;
  reply.sequence = head.sequence;
  const bool all = viewer.all && viewer.machine.empty();
  // What is a tenant's.
  const auto owns = [&](uid_t tenant) { return all || (viewer.machine.empty() && tenant == viewer.uid); };

  json out;
  out["service"] = {{"version", VRDMA_VERSION},
                    {"channel_version", std::to_string(version_major) + "." + std::to_string(version_minor)},
                    {"pid", ::getpid()},
                    {"uid", ::geteuid()},
                    {"socket", fabric.config.socket},
                    {"vm_folder", fabric.config.machines_folder()},
                    {"link_layer", fabric.config.link_layer},
                    {"direct", fabric.config.direct},
                    {"active_mtu", fabric.config.active_mtu},
                    {"physical_hca", fabric.far != nullptr && fabric.far->hca() != nullptr && fabric.far->hca()->device() != nullptr},
                    {"all", viewer.all}};
  out["guests"] = json::array();
  for (auto& [id, guest] : fabric.guests)
    if (viewer.sees(*guest)) out["guests"].push_back(describe(*guest, shard));
  // A destination leads to a guest of this host, by LID or by GID, and is then a copy, or to another host.
  out["routes"] = json::array();
  for (auto& [id, guest] : fabric.guests) {
    if (!viewer.sees(*guest)) continue;
    json gids = json::array();
    for (const auto& entry : guest->gids)
      if (const auto text = gid_text(entry.gid); entry.gid != Gid{} && (gids.empty() || gids.back() != text)) gids.push_back(text);
    const bool ethernet = guest->link_layer == link_layer_ethernet;
    out["routes"].push_back({{"guest", id}, {"name", guest->name}, {"lid", ethernet ? 0 : guest->lid}, {"gids", gids}, {"via", "local"}});
  }
  out["carriers"] = describe_carriers(fabric);
  out["groups"] = describe_groups(fabric, viewer);
  out["hca"] = describe_hca(fabric);
  out["subnet"] = fabric.hosts ? describe(*fabric.hosts, fabric.config.hosts->folder) : json();
  out["vms"] = json::array();
  for (const auto& machine : fabric.machines)
    if (machine.name == viewer.machine || owns(machine.tenant))
      out["vms"].push_back({{"name", machine.name}, {"tenant", machine.tenant}, {"state", machine.state}, {"ram_bytes", machine.ram_bytes}, {"bar_bytes", machine.bar_bytes},
                            {"processes", machine.processes}, {"version", machine.version}});
  out["departed"] = json::array();
  for (const auto& guest : fabric.departed)
    if (owns(guest.credentials.uid))
      out["departed"].push_back({{"guest", guest.id.value}, {"name", guest.name}, {"uid", guest.credentials.uid}, {"pid", guest.credentials.pid},
                                 {"lid", guest.lid}, {"requests", guest.requests}, {"counters", describe(guest.totals)}});
  const auto& shards = fabric.shards.all();
  const auto moved_by_all = [&](const Tenant& tenant) {
    return std::accumulate(shards.begin(), shards.end(), std::uint64_t{0}, [&](std::uint64_t sum, const Shard* of) { return sum + of->moved_bytes(tenant); });
  };
  out["tenants"] = json::array();
  for (auto& [uid, tenant] : fabric.tenants)
    if (owns(uid))
      out["tenants"].push_back({{"uid", uid}, {"guests", tenant.guests}, {"objects", tenant.objects}, {"registered_bytes", tenant.registered_bytes},
                                {"queue_bytes", tenant.queue_bytes}, {"moved_bytes", moved_by_all(tenant)}});
  const auto describe_cache = [&](auto counters_of) {
    cache::CacheCounters sum;
    for (Shard* const of : shards) {
      const cache::CacheCounters& one = counters_of(of->ports());
      sum.hits += one.hits, sum.misses += one.misses, sum.invalidations += one.invalidations;
    }
    return json{{"hits", sum.hits}, {"misses", sum.misses}, {"invalidations", sum.invalidations}};
  };
  out["cache"] = {{"routes", describe_cache([](MediatedPorts& ports) { return ports.route_counters(); })},
                  {"keys", describe_cache([](MediatedPorts& ports) { return ports.key_counters(); })}};
  Shard::Counters c;
  out["shards"] = json::array();
  for (const Shard* const of : shards) {
    const auto& one = of->counters();
    c.turns += one.turns, c.sleeps += one.sleeps, c.doorbells += one.doorbells;
    out["shards"].push_back({{"shard", of->number()}, {"guests", of->guest_count()}, {"turns", one.turns}, {"sleeps", one.sleeps}, {"doorbells", one.doorbells}});
  }
  const auto& d = shard.direct().counters();
  out["counters"] = {{"turns", c.turns}, {"sleeps", c.sleeps}, {"doorbells", c.doorbells}, {"regions", fabric.regions.size()},
                     {"queue_pairs", fabric.by_qpn.size()}, {"multicast_groups", fabric.multicast.size()}, {"vmci_queue_pairs", fabric.vmci.queue_pair_count()},
                     {"direct_links", d.links}, {"direct_paths", d.paths}, {"direct_handed_out", d.handed_out}, {"direct_returned", d.returned}};
  if (fabric.far != nullptr) {
    const auto& from_network = fabric.far->carrier().counters();
    out["counters"]["unauthenticated_records"] = from_network.unauthenticated.load(std::memory_order_relaxed);
    out["counters"]["malformed_records"] = from_network.malformed.load(std::memory_order_relaxed) + fabric.far->malformed();
    out["counters"]["refused_connections"] = from_network.refused_connections.load(std::memory_order_relaxed);
    out["counters"]["dropped_far_datagrams"] = fabric.far->dropped_datagrams();
    out["counters"]["refused_pkeys"] = fabric.far->refused_pkeys();
  }

  // A guest chose its name: bytes that are not UTF-8 must not throw here.
  const std::string text = out.dump(-1, ' ', false, json::error_handler_t::replace);
  vmci::UniqueFd file(::memfd_create("vrdma-show", MFD_CLOEXEC));
  std::size_t written = 0;
  while (file && written < text.size()) {
    const ssize_t n = ::write(file.get(), text.data() + written, text.size() - written);
    if (n <= 0) break;
    written += static_cast<std::size_t>(n);
  }
  const int fd = file.get();
  if (!file || written != text.size()) reply.status = ENOMEM;
  const auto packet = std::as_bytes(std::span(&reply, 1));
  (void)(reply.status == 0 ? socket.send(packet, std::span(&fd, 1)) : socket.send(packet));
}

}  // namespace vrdma::svc
