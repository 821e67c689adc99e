#include "vmkernel_svc/show.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <new>
#include <numeric>
#include <string_view>
#include <utility>

#include "vmci_channel/descriptor_passing.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/show_text.hpp"
#include "vmkernel_svc/users.hpp"

namespace vrdma::svc {

namespace {

using nlohmann::json;
using namespace control;
using namespace shown;

// Of the subnet, as everybody may see it: nothing of a tenant is in it.
json describe(const hosts::Service& service, const std::string& folder) {
  const auto now = service.snapshot();
  const auto lids = [](hosts::LidRange range) { return range == hosts::no_lids ? json() : json::array({range.first, range.last}); };
  const auto left = std::chrono::duration_cast<std::chrono::seconds>(now->lease_until - hosts::BootClock::now()).count();
  json out{{"name", now->us.name},     {"folder", folder},           {"address", now->us.address}, {"port", now->us.port},       {"lids", lids(now->lids)},
           {"lease_s", std::max<std::int64_t>(left, 0)}, {"may_give", now->may_give()}, {"leader", now->leader},     {"problem", now->problem},
           {"manages", now->manages},  {"manager_problem", now->manager_problem}, {"term", now->term},          {"strangers", now->strangers}, {"last_stranger", now->last_stranger}};
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
  if (may_be_several(peer->uid)) return {peer->uid, false, "", peer->pid != 0, peer->pid};
  return {peer->uid, peer->uid == 0 || peer->uid == ::geteuid(), "", peer->pid != 0};
}

bool Viewer::sees(const Guest& guest) const {
  if (!is_known()) return one_of_several != 0 && !guest.machine && guest.credentials.pid == one_of_several;
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
    const int failed = count(gauge->connect_error);
    const HcaDesk* const hca = fabric.far->hca();
    const std::string why_not = hca != nullptr ? hca->why_not(id) : "only-carrier";
    out.push_back({{"host", host->name},
                   {"address", hosts::with_port(host->address, host->carrier_port)},
                   {"lids", text},
                   {"via", why_not.empty() ? "hca" : fabric.far->carrier().name()},
                   {"why", why_not.empty() ? "both hosts have an HCA" : why_not},
                   {"records_via", hca != nullptr && hca->has_trunk(id) ? "hca" : fabric.far->carrier().name()},
                   {"records_why", hca != nullptr ? hca->why_no_trunk(id) : ""},
                   {"fallen_back", hca != nullptr ? hca->fallen_back(id) : ""},
                   {"encrypted", fabric.far->carrier().encrypts(id)},
                   {"disagreement", fabric.far->carrier().disagreement(id)},
                   {"unauthenticated", count(gauge->unauthenticated)},
                   {"small_packets", count(gauge->small_packets)},
                   {"dials", fabric.far->carrier().dials(id)},
                   {"problem", failed == 0 ? "" : failed == ETIMEDOUT ? "no answer" : std::strerror(failed)},
                   {"other_protocol", count(gauge->other_protocol)},
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
    const auto seen = std::count_if(members.begin(), members.end(), [&](const auto& member) { return viewer.sees(*member.second->guest); });
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
           {"being_registered", desk->being_registered()},
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

// A destination leads to a guest of this host, by LID or by GID, and is then a copy, or to another host.
json describe_route(const Guest& guest) {
  json gids = json::array();
  for (const auto& entry : guest.gids)
    if (const auto text = gid_text(entry.gid); entry.gid != Gid{} && (gids.empty() || gids.back() != text)) gids.push_back(text);
  const bool ethernet = guest.link_layer == link_layer_ethernet;
  return json{{"guest", guest.id.value}, {"name", guest.name}, {"lid", ethernet ? 0 : guest.lid}, {"gids", gids}, {"via", "local"}};
}

// All but the guests and the routes to them.
json describe_service(Shard& shard, const Viewer& viewer) {
  Fabric& fabric = shard.fabric();
  const bool all = viewer.all && viewer.machine.empty();
  // What is a tenant's.
  const auto owns = [&](uid_t tenant) { return all || (viewer.machine.empty() && viewer.is_known() && tenant == viewer.uid); };

  // By which other hosts know this one; empty: there are none. Machines and containers have a network of their own.
  std::string address;
  if (viewer.machine.empty() && viewer.is_visible) address = fabric.config.hosts ? fabric.config.hosts->address : fabric.config.remote.address;
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
                    {"physical_hca", has_hca(fabric)},
                    {"address", address},
                    {"all", viewer.all},
                    {"sees_caller", viewer.is_visible},
                    {"knows_caller", viewer.is_known()}};
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
                                 {"lid", guest.lid}, {"requests", guest.requests}, {"counters", shown::describe(guest.totals)}});
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
  return out;
}

}  // namespace

bool ShowDesk::Unread::waits() const {
  const auto still_there = connection.lock();
  return still_there && vmci::unread_bytes(socket) > 0;
}

void ShowDesk::ask(const vmci::PacketSocket& socket, const Head& head, const Viewer& viewer, std::weak_ptr<const void> connection,
                   std::shared_ptr<vmci::Closer> closer) {
  const auto refuse = [&](int status) { reply(socket.fd(), head, status); };
  std::erase_if(unread_, [](const Unread& one) { return !one.waits(); });
  const auto of_this_user = [&](const auto& one) { return one.uid == viewer.uid; };
  const auto has = std::count_if(unread_.begin(), unread_.end(), of_this_user) +
                   std::count_if(jobs_.begin(), jobs_.end(), [&](const auto& job) { return job->viewer.uid == viewer.uid; });
  constexpr std::ptrdiff_t of_a_user_max = 16;
  if (has >= of_a_user_max) return refuse(EBUSY);
  try {
    auto job = std::make_unique<Job>();
    job->viewer = viewer;
    job->head = head;
    job->unread = {viewer.uid, socket.fd(), std::move(connection)};
    job->socket = vmci::GivenFd(vmci::UniqueFd(::fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0)), std::move(closer));
    job->file.reset(::memfd_create("vrdma-show", MFD_CLOEXEC));
    if (!job->socket || !job->file) return refuse(value(last_error()));
    for (const auto& [id, guest] : shard_.fabric().guests)
      if (viewer.sees(*guest)) job->guests.push_back(id);
    std::sort(job->guests.begin(), job->guests.end());
    job->text = "{\"guests\":[";
    jobs_.push_back(std::move(job));
    if (jobs_.size() == 1) step_soon();
  } catch (const std::bad_alloc&) {
    refuse(ENOMEM);
  }
}

void ShowDesk::step_soon() {
  shard_.submit([this](Shard&) { step(); });
}

// One slice of the oldest answer, once in a turn of the shard, whatever else there is to do.
void ShowDesk::step() {
  if (shard_.counters().turns == stepped_in_turn_) return step_soon();
  stepped_in_turn_ = shard_.counters().turns;
  Job& job = *jobs_.front();
  int status = 0;
  bool done = false;
  try {
    done = write_some(job);
    if (done) {
      const std::string rest = text_of(describe_service(shard_, job.viewer));
      job.text += "],\"routes\":[" + job.routes + "]," + rest.substr(1);
    }
  } catch (const std::bad_alloc&) {
    status = ENOMEM;
  }
  for (std::string_view left = job.text; status == 0 && !left.empty();) {
    const ssize_t n = ::write(job.file.get(), left.data(), left.size());
    if (n <= 0) status = ENOMEM;
    else left.remove_prefix(static_cast<std::size_t>(n));
  }
  job.text.clear();
  if (!done && status == 0) return step_soon();
  reply(job.socket.get(), job.head, status, job.file.get());
  if (status == 0 && job.unread.waits()) unread_.push_back(std::move(job.unread));
  jobs_.pop_front();
  if (!jobs_.empty()) step_soon();
}

// True: all guests are written down.
bool ShowDesk::write_some(Job& job) {
  constexpr std::uint64_t slice_ns = 50'000;
  const std::uint64_t until = vmci::monotonic_ns() + slice_ns;
  while (job.next < job.guests.size()) {
    Guest* const guest = shard_.fabric().guest(GuestId{job.guests[job.next]});
    if (!job.inside && guest != nullptr) {
      if (!job.routes.empty()) job.routes += ',', job.text += ',';
      job.routes += text_of(describe_route(*guest));
      job.guest = ShownGuest();
      job.guest.begin(*guest, shard_, job.text);
      job.inside = true;
    } else if (guest == nullptr || !job.guest.go_on(*guest, shard_, job.text)) {
      if (std::exchange(job.inside, false)) job.guest.end(job.text);
      ++job.next;
    }
    if (vmci::monotonic_ns() >= until) return false;
  }
  return true;
}

void ShowDesk::reply(int socket, const Head& head, int status, int file) {
  Head out{};
  out.record.control = (head.record.control & control_user_mask) | reply_bit;
  out.sequence = head.sequence;
  out.status = status;
  if (!vmci::send_with_descriptors(socket, std::as_bytes(std::span(&out, 1)), std::span(&file, status == 0 ? 1 : 0))) ::shutdown(socket, SHUT_RDWR);  // who asks waits
}

}  // namespace vrdma::svc
