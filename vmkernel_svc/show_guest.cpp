#include "vmkernel_svc/show_guest.hpp"

#include <arpa/inet.h>
#include <endian.h>
#include <fmt/format.h>
#include <rdma/rdma_user_cm.h>

#include <array>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/show_text.hpp"

namespace vrdma::svc {

namespace {

using nlohmann::json;
using namespace control;
using namespace shown;

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
           {"physical_hca_available", has_hca(fabric)},
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
  out["qp_types"] = {"RC", "UC", "UD", "XRC"};
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

// What its guest has not taken yet. Both count on meanwhile where completions are written directly.
std::uint32_t unpolled(const CompletionQueue& cq, std::uint32_t produced) {
  const std::uint32_t count = produced - std::atomic_ref(cq.shared->consumed).load(std::memory_order_relaxed);
  return cq.direct_lanes != 0 && static_cast<std::int32_t>(count) < 0 ? 0 : count;
}

json describe(const Guest& guest, const Fabric& fabric) {
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
  return out;
}

json describe(const QueuePair& qp, const engine::QpCounters& counters, Shard& shard) {
  Fabric& fabric = shard.fabric();
  const auto& attributes = qp.core.attributes;
  return json{{"qpn", qp.core.qpn.value},
                          {"type", type_name(qp.core.type)},
                          {"state", state_name(qp.core.state)},
                          {"mode", shard.direct().mode(qp)},
                          {"mediated_because", fabric.config.direct == "auto" && !qp.mediated_because.empty() ? json(qp.mediated_because) : json()},
                          {"carrier", describe_way(fabric, qp.core)},
                          {"pkey", qp.core.port.pkey == 0 ? json() : json(hosts::pkey_text(qp.core.port.pkey))},
                          {"dest_qpn", attributes.dest_qp_num},
                          {"sq_psn", attributes.sq_psn},
                          {"rq_psn", attributes.rq_psn},
                          {"dlid", attributes.path.dlid},
                          {"dgid", attributes.path.is_global != 0 ? json(gid_text(std::to_array(attributes.path.dgid))) : json()},
                          {"path_mtu", attributes.path_mtu == 0 ? 0 : engine::mtu_bytes(attributes.path_mtu)},
                          {"pd", qp.pd->number},
                          {"send_cq", qp.send_cq->handle.value},
                          {"recv_cq", qp.receive_cq->handle.value},
                          {"srq", qp.srq != nullptr ? qp.srq->handle.value : 0},
                          {"max_send_wr", attributes.max_send_wr},
                          {"max_recv_wr", attributes.max_recv_wr},
                          {"counters", shown::describe(counters)}};
}

json describe(std::uint32_t handle, const SharedReceiveQueue& srq) {
  return json{{"srq", handle}, {"pd", srq.pd->number}, {"max_wr", srq.core.max_wr}, {"taken", srq.core.taken_now()}, {"limit", srq.core.limit},
                           {"qps", srq.users - (srq.completions != nullptr ? 1 : 0)},
                           {"type", srq.completions != nullptr ? "XRC" : "BASIC"}, {"srqn", srq.completions != nullptr ? srq.completions->core.qpn.value : handle}};
}

json describe(std::uint32_t id, const CmIdentifier& one) {
  return json{{"cm_id", id}, {"type", type_name(one.type)}, {"state", cm_state_name(one.state)}, {"port_space", port_space_name(one.port_space)},
              {"src_addr", address_text(one.source)}, {"dst_addr", address_text(one.destination)}};
}

// Of these there may be very many: without the detour by a tree. Nothing that a guest chose is text in it.
void write(std::string& text, std::uint32_t handle, const CompletionQueue& cq, const DirectDesk& direct) {
  const std::uint32_t produced = direct.produced(cq);
  fmt::format_to(std::back_inserter(text), R"({{"cq":{},"ctx":{},"cqe":{},"completions":{},"unpolled":{},"users":{},"channel":{},"overrun":{}}})", handle, cq.context, cq.cqe,
                 produced, unpolled(cq, produced), cq.users.size(), cq.channel != nullptr ? cq.channel->handle.value : 0, cq.overrun);
}

void write(std::string& text, std::uint32_t handle, const Region& region, const Guest& guest) {
  std::uint64_t mapped = 0;
  for (const auto& piece : region.pieces) mapped += piece.host != nullptr ? piece.bytes : 0;
  const char* const unmapped_by = guest.copier ? "guest-copy" : "process";
  const char* const whole = !guest.machine ? "mapped" : guest.machine->in_bar ? "bar" : "pinned";
  fmt::format_to(std::back_inserter(text), R"({{"mr":{},"key":{},"address":"0x{:x}","bytes":{},"access":{},"pd":{},"pieces":{},"mapped_bytes":{},"path":"{}","unmapped_by":"{}"}})",
                 handle, region.key.value, region.address, region.bytes, region.access, region.pd, region.pieces.size(), mapped,
                 mapped == region.bytes ? whole : mapped != 0 ? "mixed" : unmapped_by, mapped == region.bytes ? "none" : unmapped_by);
}

constexpr const char* part_names[] = {"contexts", "pds", "qps", "cqs", "srqs", "cm_ids", "mrs"};

}  // namespace

bool has_hca(const Fabric& fabric) { return fabric.far != nullptr && fabric.far->hca() != nullptr && fabric.far->hca()->device() != nullptr; }

void ShownGuest::begin(const Guest& guest, Shard& shard, std::string& text) {
  text += text_of(describe(guest, shard.fabric()));
  text.back() = ',';  // its closing brace, which end() writes
  totals_ = guest.totals;
  open(Part::contexts, guest, text);
}

void ShownGuest::open(Part part, const Guest& guest, std::string& text) {
  part_ = part;
  first_ = true;
  next_ = 0;
  handles_.clear();
  fmt::format_to(std::back_inserter(text), "\"{}\":[", part_names[static_cast<std::size_t>(part)]);
  const auto list = [this](const auto& table) {
    handles_.reserve(table.size());
    for (const auto& entry : table) handles_.push_back(entry.first);
  };
  switch (part) {
    case Part::contexts: return list(guest.contexts);
    case Part::pds: return list(guest.pds);
    case Part::qps: return list(guest.qps);
    case Part::cqs: return list(guest.cqs);
    case Part::srqs: return list(guest.srqs);
    case Part::mrs: return list(guest.mrs);
    case Part::cm_ids: return;
  }
}

bool ShownGuest::go_on(Guest& guest, Shard& shard, std::string& text) {
  if (part_ == Part::cm_ids && write_identifiers(guest, shard, text)) return true;
  if (part_ != Part::cm_ids && next_ < handles_.size()) return write_object(guest, shard, handles_[next_++], text), true;
  text += ']';
  open_ = part_ != Part::mrs;
  if (!open_) return false;
  text += ',';
  open(static_cast<Part>(static_cast<int>(part_) + 1), guest, text);
  return true;
}

void ShownGuest::end(std::string& text) {
  if (open_) text += ']';
  // Where the guest has gone meanwhile the rest is there, too, and empty.
  for (std::size_t left = static_cast<std::size_t>(part_) + 1; left < std::size(part_names); ++left) fmt::format_to(std::back_inserter(text), ",\"{}\":[]", part_names[left]);
  text += ",\"counters\":" + text_of(shown::describe(totals_)) + '}';  // of all its queue pairs, those that are gone, too
}

// Those of all guests are in one table, by their numbers.
bool ShownGuest::write_identifiers(const Guest& guest, Shard& shard, std::string& text) {
  constexpr int looked_at_once = 64;
  const auto& all = shard.fabric().cm->identifiers();
  auto at = all.lower_bound(static_cast<std::uint32_t>(next_));
  for (int i = 0; i < looked_at_once && at != all.end(); ++i, ++at)
    if (at->second->guest == &guest) separate(text), text += text_of(describe(at->first, *at->second));
  if (at == all.end()) return false;
  next_ = at->first;
  return true;
}

void ShownGuest::write_object(Guest& guest, Shard& shard, std::uint32_t handle, std::string& text) {
  // What has gone meanwhile is left out.
  const auto with = [&](auto& table, const auto& use) {
    if (const auto found = table.find(handle); found != table.end()) use(found->second);
  };
  switch (part_) {
    case Part::contexts:
      return with(guest.contexts, [&](auto&) { separate(text), fmt::format_to(std::back_inserter(text), R"({{"ctx":{}}})", handle); });
    case Part::pds:
      return with(guest.pds, [&](auto& pd) {
        separate(text), fmt::format_to(std::back_inserter(text), R"({{"pd":{},"ctx":{},"users":{}}})", pd->number, pd->context, pd->users);
      });
    case Part::qps:
      return with(guest.qps, [&](auto& qp) {
        const engine::QpCounters counters = shard.direct().counters(*qp);
        totals_ += counters;
        if (!qp->completes_for_srq() && qp->stands_for == nullptr) separate(text), text += text_of(describe(*qp, counters, shard));
      });
    case Part::cqs: return with(guest.cqs, [&](auto& cq) { separate(text), write(text, handle, *cq, shard.direct()); });
    case Part::srqs: return with(guest.srqs, [&](auto& srq) { separate(text), text += text_of(describe(handle, *srq)); });
    case Part::mrs: return with(guest.mrs, [&](auto slot) { separate(text), write(text, handle, shard.fabric().regions.slot(slot), guest); });
    case Part::cm_ids: return;
  }
}

}  // namespace vrdma::svc
