#include "vmkernel_svc/fuzz_world.hpp"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/mad/management.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define VRDMA_HAS_LSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VRDMA_HAS_LSAN 1
#endif
#endif
#ifdef VRDMA_HAS_LSAN
#include <sanitizer/lsan_interface.h>
#endif

namespace vrdma::svc {

using namespace control;

namespace {

constexpr std::uint64_t victim_bytes = 64 << 10;
constexpr std::uint64_t victim_iova = 0x10000;
constexpr std::uint32_t all_access = 15;  // local write, remote write, read, atomic
constexpr uid_t victim_uid = 1000;
constexpr std::uint32_t small = 8;  // numbers of an input below this are names; see qpn(), lid(), key()

Config fuzz_config() {
  Config config;
  config.arena_bytes = 16 << 20;
  config.log_level = "off";
  config.quota.registered_bytes = 1ull << 40;
  config.quota.descriptors = 256;
  return config;
}

constexpr std::size_t request_bytes(std::uint32_t request) {
  switch (static_cast<Request>(request)) {
#define VRDMA_CASE(name, body, reply, socket) \
  case Request::name:                         \
    return std::is_empty_v<body> ? 0 : sizeof(body);
    VRDMA_CONTROL_REQUESTS(VRDMA_CASE)
#undef VRDMA_CASE
    default:
      return 0;
  }
}

#define VRDMA_COUNT(name, body, reply, socket) +1
static_assert(0 VRDMA_CONTROL_REQUESTS(VRDMA_COUNT) < 0x7f, "step_request() has that many numbers for them");
#undef VRDMA_COUNT

constexpr std::uint32_t slots_of(std::size_t bytes) { return static_cast<std::uint32_t>((bytes + slot_bytes - 1) / slot_bytes); }

// A writer for a queue whose reader is the service: it writes where the service looks next.
vmci::RecordWriter writer_of(const vmci::QueuePairView& view, const vmci::RecordReader& reader) {
  vmci::RecordWriter writer(view.produce(), view.geometry().produce_slots, reader.position());
  return writer;
}

}  // namespace

void fuzz_require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "the service broke its promise: %s\n", what);
  std::abort();
}

FuzzWorld& FuzzWorld::instance() {
#ifdef VRDMA_HAS_LSAN
  // Boost.Lockfree keeps its nodes behind tagged pointers, which the leak check cannot follow: these few live to the end.
  static FuzzWorld& world = [] () -> FuzzWorld& {
    __lsan::ScopedDisabler disabler;
    return *new FuzzWorld;
  }();
  return world;
#else
  static FuzzWorld world;
  return world;
#endif
}

FuzzWorld::FuzzWorld()
    : config_(fuzz_config()), shard_(config_, service_page_), desk_(shard_),
      page_(*vmci::Segment::create("fuzz-page", sizeof(ServicePage), vmci::HandedOut::read_only)), packets_(shard_, desk_, page_.fd()) {
  spdlog::set_level(spdlog::level::off);
  BusGuard::install();
  std::signal(SIGPIPE, SIG_IGN);  // the server blocks it in the shard's thread: pipes whose reader is gone

  std::vector<int> descriptors;
  std::vector<vmci::UniqueFd> keep, given;
  const auto attached = desk_.attach(AttachRequest{}, AttachInfo{{0, victim_uid, victim_uid}, {}, {}}, page_.fd(), descriptors, keep);
  fuzz_require(static_cast<bool>(attached), "a first guest is taken in");
  victim_ = find(attached->guest);
  const auto context = desk_.on(*victim_, OpenContextRequest{}, given)->context;
  victim_memory_ = *vmci::Segment::create("fuzz-victim", victim_bytes);
  std::memset(victim_memory_.data(), static_cast<int>(victim_byte), victim_bytes);
  const auto backing = desk_.on(*victim_, AddBackingRequest{}, vmci::UniqueFd(::dup(victim_memory_.fd())))->backing;
  StageExtentsRequest extents{};
  extents.count = 1;
  extents.extents[0] = {victim_iova, victim_bytes, 0, backing, 0};
  const auto pd = ask<Request::create_pd>(*victim_, {context, 0}).handle;
  ask<Request::stage_extents>(*victim_, extents);
  victim_key_ = ask<Request::reg_mr>(*victim_, {pd, all_access, victim_iova, victim_bytes, victim_iova}).key;
  const auto cq = ask<Request::create_cq>(*victim_, {context, 64, 0, 0}).cq;
  victim_rc_ = victim_->qps.at(bring_up(pd, cq, engine::QpType::rc)).get();
  victim_ud_ = victim_->qps.at(bring_up(pd, cq, engine::QpType::ud)).get();
  // Until its queue pairs are no longer looked at: from then on the service has no reason to write there.
  while (victim_rc_->core.port.runnable || victim_ud_->core.port.runnable) shard_.turn();
  victim_arena_.assign(victim_->arena.segment().data(), victim_->arena.segment().data() + victim_->arena.used_bytes());
  alone_ = counts();
  victim_tenant_ = *victim_->tenant;
}

FuzzWorld::~FuzzWorld() { desk_.detach(*victim_); }

template <Request R>
typename Message<R>::ReplyBody FuzzWorld::ask(Guest& guest, const typename Message<R>::RequestBody& body) {
  vmci::RecordReader replies(guest.control.consume_records(), guest.control.geometry().consume_entries, guest.replies.position());
  Head head{};
  std::vector<std::byte> record(sizeof(Head) + sizeof(body));
  std::memcpy(record.data(), &head, sizeof(head));
  std::memcpy(record.data() + sizeof(Head), &body, sizeof(body));
  put(guest, address_of(host_context, control_port), sizeof(body), static_cast<std::uint32_t>(R), slots_of(record.size()),
      std::span(record).subspan(sizeof(RecordHead)));
  desk_.serve(guest);
  alignas(64) std::byte reply[record_slots_max * slot_bytes];
  std::uint32_t slots = 0;
  fuzz_require(replies.peek(reply, record_slots_max, slots) == vmci::RecordReader::Peek::ready, "a request is answered");
  std::memcpy(&head, reply, sizeof(head));
  fuzz_require(head.status == 0, "a good request succeeds");
  std::atomic_ref(guest.control.header().creator.consumed).store(guest.replies.position());
  typename Message<R>::ReplyBody out{};
  if (!std::is_empty_v<decltype(out)>) std::memcpy(static_cast<void*>(&out), reply + sizeof(Head), sizeof(out));
  return out;
}

// A queue pair of the victim, connected to itself, that waits for a message.
std::uint32_t FuzzWorld::bring_up(std::uint32_t pd, std::uint32_t cq, engine::QpType type) {
  CreateQpRequest request{};
  request.context = victim_->contexts.begin()->first;
  request.pd = pd;
  request.send_cq = request.recv_cq = cq;
  request.type = static_cast<std::uint32_t>(type);
  request.max_send_wr = request.max_recv_wr = 4;
  request.max_send_sge = request.max_recv_sge = 1;
  const auto made = ask<Request::create_qp>(*victim_, request);
  for (std::uint32_t state = 1; state <= 3; ++state) {
    ModifyQpRequest modify{};
    modify.qp = made.qp;
    modify.attributes.state = state;
    modify.mask = qp_attr_state | engine::transition_masks(type, static_cast<engine::QpState>(state - 1), static_cast<engine::QpState>(state)).required;
    auto& a = modify.attributes;
    a.path_mtu = 3;
    a.dest_qp_num = made.qpn;
    a.access_flags = all_access;
    a.path.dlid = victim_->lid;
    a.path.port_num = a.port_num = 1;
    a.max_rd_atomic = a.max_dest_rd_atomic = 1;
    a.qkey = 0x5eed1234;
    ask<Request::modify_qp>(*victim_, modify);
  }
  QueuePair& qp = *victim_->qps.at(made.qp);
  auto writer = writer_of(qp.receive_view, qp.core.receive_ring);
  const Sge sge{victim_iova, 4096, victim_key_};
  writer.write(receive_wqe_payload_offset, std::as_bytes(std::span(&sge, 1)));
  writer.publish(1, 0, pack(WqeControl{WrOpcode::receive, 0, 1}), made.receive.record_slots);
  return made.qp;
}

Guest* FuzzWorld::find(std::uint32_t id) { return shard_.fabric().guest(GuestId{id}); }

Guest* FuzzWorld::attach(const AttachRequest& request) {
  std::vector<int> descriptors;
  std::vector<vmci::UniqueFd> keep;
  const auto reply = desk_.attach(request, AttachInfo{{0, guest_uid, guest_uid}, {}, {}}, page_.fd(), descriptors, keep);
  Guest* const guest = reply ? find(reply->guest) : nullptr;
  if (guest != nullptr) guest->reached_by_service = true;  // may register what no file backs; to reach it fails
  return guest;
}

void FuzzWorld::turn(int times) {
  while (times-- > 0 && shard_.turn()) {
  }
}

FuzzWorld::Counts FuzzWorld::counts() {
  Fabric& fabric = shard_.fabric();
  return {fabric.guests.size(), fabric.regions.size(), fabric.by_qpn.size(), fabric.multicast.size(), fabric.vmci.queue_pair_count(),
          fabric.jobs.size()};
}

void FuzzWorld::check() {
  shard_.fabric().departed.clear();  // nothing of an input is left for the next one, which also keeps the leak check quick
  fuzz_require(counts() == alone_, "a guest that left leaves no object behind");
  std::uint64_t mappings = 0;
  for (const auto& [uid, tenant] : shard_.fabric().tenants) mappings += tenant.mappings + tenant.arena_parts;
  fuzz_require(shard_.fabric().mappings == mappings, "all mappings are some tenant's");
  for (const auto& [uid, tenant] : shard_.fabric().tenants) {
    const Tenant& due = uid == victim_uid ? victim_tenant_ : Tenant{};
    fuzz_require(tenant.guests == due.guests, "a tenant's guests are counted back");
    fuzz_require(tenant.objects == due.objects, "a tenant's objects are counted back");
    fuzz_require(tenant.registered_bytes == due.registered_bytes, "a tenant's registered bytes are counted back");
    fuzz_require(tenant.queue_bytes == due.queue_bytes, "a tenant's queue bytes are counted back");
    fuzz_require(tenant.pieces == due.pieces, "a tenant's pieces are counted back");
    fuzz_require(tenant.mappings == due.mappings, "a tenant's mappings are counted back");
    fuzz_require(tenant.memberships == due.memberships, "a tenant's memberships are counted back");
    fuzz_require(tenant.descriptors == due.descriptors, "a tenant's descriptors are counted back");
  }
  const ConnectionManager& cm = *shard_.fabric().cm;
  fuzz_require(cm.channels().empty() && cm.identifiers().empty() && cm.memberships().empty() && !cm.waits(), "a guest that left leaves no connection behind");
  const Management& management = *shard_.fabric().management;
  fuzz_require(management.channel_count() == 0 && management.waiting_answers() == 0 && management.groups().all().empty(), "a guest that left leaves no datagram behind");
  fuzz_require(std::memcmp(victim_->arena.segment().data(), victim_arena_.data(), victim_arena_.size()) == 0,
               "another guest's rings and queues are left alone");
  const std::byte* const memory = victim_memory_.data();
  fuzz_require(memory[0] == victim_byte && std::memcmp(memory, memory + 1, victim_bytes - 1) == 0,
               "another guest's memory is left alone");
  fuzz_require(!victim_->broken && victim_rc_->core.state == engine::QpState::rts && victim_ud_->core.state == engine::QpState::rts,
               "another guest's queue pairs are left alone");
}

void FuzzWorld::check_routes() {
  MediatedPorts& ports = shard_.ports();  // with the routes that it has found so far
  UdOperand to_itself{};
  to_itself.remote_qpn = victim_ud_->core.qpn.value;
  to_itself.dlid = victim_->lid;
  fuzz_require(ports.datagram_peer(victim_ud_->core, to_itself) == &victim_ud_->core, "what others look up does not lead datagrams astray");
}

// --- names ----------------------------------------------------------------------------------------------------

// QPNs, LIDs and keys are the service's choice, keys a random one, so an input names them by small numbers: the victim's two,
// or the guest's own in order of their doorbells or handles.
std::uint32_t FuzzWorld::qpn(Guest& guest, std::uint32_t from_input) {
  if (from_input == 0) return victim_rc_->core.qpn.value;
  if (from_input == 1) return victim_ud_->core.qpn.value;
  if (from_input < small && from_input - 1 < guest.by_doorbell.size() && guest.by_doorbell[from_input - 1] != nullptr)
    return guest.by_doorbell[from_input - 1]->core.qpn.value;
  return from_input;
}

std::uint16_t FuzzWorld::lid(Guest& guest, std::uint16_t from_input) {
  return from_input == 0 ? victim_->lid : from_input == 1 ? guest.lid : from_input;
}

std::uint32_t FuzzWorld::key(Guest& guest, std::uint32_t from_input) {
  if (from_input == 0) return victim_key_;
  if (from_input >= small) return from_input;
  std::map<std::uint32_t, std::uint32_t> slots;  // by handle
  for (const auto& [handle, slot] : guest.mrs) slots[handle] = slot;
  for (const auto& [handle, window] : guest.mws) slots[handle] = window->slot;
  if (slots.empty()) return from_input;
  return shard_.fabric().regions.slot(std::next(slots.begin(), static_cast<std::ptrdiff_t>((from_input - 1) % slots.size()))->second).key.value;
}

// The connection manager's numbers go on from one input to the next: small ones name the guest's own channels and identifiers, or the
// memberships, in their order. Bodies begin with a channel's, or with an identifier's and its channel's, where 0 is the right one.
void FuzzWorld::name_connections(Guest& guest, Request request, std::span<std::byte> body) {
  const ConnectionManager& cm = *shard_.fabric().cm;
  const auto named = [](const auto& all, std::uint32_t from_input, const auto& is_meant) {
    if (from_input >= small) return from_input;
    for (std::uint32_t left = from_input; const auto& [number, one] : all)
      if (is_meant(one) && left-- == 0) return number;
    return from_input;
  };
  const auto is_own = [&](const auto& one) { return one->guest == &guest; };
  if (request == Request::cm_place || body.size() < sizeof(CmId)) return;
  CmId id;
  std::memcpy(&id, body.data(), sizeof(id));
  if (request == Request::cm_close || request == Request::cm_create_id || request == Request::cm_take_event) {
    id.id = named(cm.channels(), id.id, is_own);
  } else {
    id.id = request == Request::cm_leave ? named(cm.memberships(), id.id, [](std::uint32_t) { return true; }) : named(cm.identifiers(), id.id, is_own);
    const auto member = cm.memberships().find(id.id);
    const auto one = cm.identifiers().find(member != cm.memberships().end() ? member->second : id.id);
    id.channel = id.channel == 0 && one != cm.identifiers().end() ? one->second->channel->handle : named(cm.channels(), id.channel, is_own);
    if (request == Request::cm_migrate && body.size() >= sizeof(CmMigrateRequest)) {
      CmMigrateRequest migrate;
      std::memcpy(&migrate, body.data(), sizeof(migrate));
      migrate.to = named(cm.channels(), migrate.to, is_own);
      std::memcpy(body.data(), &migrate, sizeof(migrate));
    }
  }
  std::memcpy(body.data(), &id, sizeof(id));
}

// Channels of umad0 likewise: bodies begin with one. Of what is sent, the LID is a name, too.
void FuzzWorld::name_management(Guest& guest, Request request, std::span<std::byte> body) {
  if (body.size() < sizeof(std::uint32_t)) return;
  std::uint32_t channel;
  std::memcpy(&channel, body.data(), sizeof(channel));
  const auto own = shard_.fabric().management->channels_of(guest);
  if (channel < own.size()) channel = own[channel];
  std::memcpy(body.data(), &channel, sizeof(channel));
  constexpr std::size_t lid_at = offsetof(MadSendRequest, to) + offsetof(MadAddress, lid);
  if (request != Request::mad_send || body.size() < lid_at + sizeof(std::uint16_t)) return;
  std::uint16_t to;
  std::memcpy(&to, body.data() + lid_at, sizeof(to));
  to = lid(guest, to);
  std::memcpy(body.data() + lid_at, &to, sizeof(to));
}

// --- steps ----------------------------------------------------------------------------------------------------

// rest: the record from its 16th byte on; what it lacks of its slots stays as it is in the ring.
void FuzzWorld::put(Guest& guest, std::uint64_t tag, std::uint32_t word, std::uint32_t user, std::uint32_t slots,
                    std::span<const std::byte> rest) {
  auto writer = writer_of(guest.control, guest.requests);
  writer.write(sizeof(RecordHead), rest.first(std::min<std::size_t>(rest.size(), slots * slot_bytes - sizeof(RecordHead))));
  writer.publish(tag, word, user, slots);
}

// A datagram in the control ring: what (1 byte), how many bytes of its body follow (1), they.
//   what < 0x40       that control request; its body is filled up with zeroes
//   what & 0x40       that control request with exactly this body
//   what & 0xc0, both that control request, from 0x40 on, filled up
//   what & 0x80       a datagram to context, port (4 bytes each before the body; contexts 0 and 1: the victim, the guest itself)
//   what == 0xff      any record: control word and length word (4 bytes each before the rest of the record)
void FuzzWorld::step_request(Guest& guest, FuzzInput& input) {
  const auto what = input.value<std::uint8_t>();
  const auto given = input.value<std::uint8_t>();
  if (what == 0xff) {
    const auto control = input.value<std::uint32_t>();
    const auto word = input.value<std::uint32_t>();
    put(guest, address_of(host_context, control_port), word, control & control_user_mask,
        1 + ((control >> control_slots_shift) & control_slots_mask), input.take(given));
  } else {
    const bool later = (what & 0xc0) == 0xc0;
    const bool datagram = (what & 0x80) != 0 && !later;
    std::uint64_t tag = address_of(host_context, control_port);
    if (datagram) {
      const auto context = input.value<std::uint32_t>();
      tag = address_of(context == 0 ? victim_->id.value : context == 1 ? guest.id.value : context, input.value<std::uint32_t>());
    }
    const std::uint32_t request = (what & 0x3f) + (later ? 0x40 : 0);
    const auto body = input.take(given);
    const std::size_t bytes = datagram || (!later && (what & 0x40) != 0) ? body.size() : std::max(body.size(), request_bytes(request));
    std::vector<std::byte> record(sizeof(Head) + bytes);
    std::copy(body.begin(), body.end(), record.begin() + sizeof(Head));
    if (request == static_cast<std::uint32_t>(Request::modify_qp) && bytes >= sizeof(ModifyQpRequest)) {
      ModifyQpRequest modify;
      std::memcpy(&modify, record.data() + sizeof(Head), sizeof(modify));
      modify.attributes.dest_qp_num = qpn(guest, modify.attributes.dest_qp_num);
      modify.attributes.path.dlid = lid(guest, modify.attributes.path.dlid);
      std::memcpy(record.data() + sizeof(Head), &modify, sizeof(modify));
    }
    if (request == static_cast<std::uint32_t>(Request::create_xrc_qp) && bytes >= sizeof(CreateXrcQpRequest)) {
      CreateXrcQpRequest create;
      std::memcpy(&create, record.data() + sizeof(Head), sizeof(create));
      if (create.target != 0) create.target = qpn(guest, create.target);
      std::memcpy(record.data() + sizeof(Head), &create, sizeof(create));
    }
    if (request == static_cast<std::uint32_t>(Request::open_xrcd) && !datagram) {  // by the socket, where no file need go along
      OpenXrcdRequest open{};
      std::memcpy(&open, record.data() + sizeof(Head), std::min(sizeof(open), bytes));
      (void)desk_.on(guest, open, {});
      return;
    }
    const std::size_t key_at = request == static_cast<std::uint32_t>(Request::bind_mw)         ? offsetof(BindMwRequest, key)
                               : request == static_cast<std::uint32_t>(Request::invalidate_mw) ? offsetof(InvalidateMwRequest, key)
                                                                                               : 0;
    if (key_at != 0 && !datagram && key_at + sizeof(std::uint32_t) <= bytes) {
      std::uint32_t named;
      std::memcpy(&named, record.data() + sizeof(Head) + key_at, sizeof(named));
      named = key(guest, named);
      std::memcpy(record.data() + sizeof(Head) + key_at, &named, sizeof(named));
    }
    if ((request >= static_cast<std::uint32_t>(Request::cm_close) && request <= static_cast<std::uint32_t>(Request::cm_take_event)) ||
        request == static_cast<std::uint32_t>(Request::cm_write_event))
      name_connections(guest, static_cast<Request>(request), std::span(record).subspan(sizeof(Head)));
    if (request >= static_cast<std::uint32_t>(Request::mad_close) && request <= static_cast<std::uint32_t>(Request::mad_take) && !datagram)
      name_management(guest, static_cast<Request>(request), std::span(record).subspan(sizeof(Head)));
    put(guest, tag, static_cast<std::uint32_t>(bytes), request, slots_of(record.size()), std::span(record).subspan(sizeof(RecordHead)));
  }
  guest.control_held = true;
  shard_.turn();
  // It reads its answers: a guest that does not is another step's business (scribbling over its cursor).
  std::atomic_ref(guest.control.header().creator.consumed).store(guest.replies.position());
}

// A WQE: which queue pair (1 byte: its doorbell's number, top bit: a receive), control word (4), bytes that follow (1), they. Rung for.
void FuzzWorld::step_work_request(Guest& guest, FuzzInput& input) {
  const auto which = input.value<std::uint8_t>();
  const auto control = input.value<std::uint32_t>();
  std::array<std::byte, record_slots_max * slot_bytes> record{};
  const auto given = input.take(input.value<std::uint8_t>());
  std::copy(given.begin(), given.end(), record.begin() + sizeof(RecordHead));
  if (guest.by_doorbell.size() < 2) return;
  QueuePair* const qp = guest.by_doorbell[1 + (which & 0x7f) % (guest.by_doorbell.size() - 1)];
  if (qp == nullptr) return;

  const bool receive = (which & 0x80) != 0;
  const std::size_t sges_at = receive ? receive_wqe_payload_offset : send_wqe_payload_offset;
  if ((unpack_wqe_control(control).flags & wr_inline) == 0)
    for (std::size_t at = sges_at; at < sges_at + 4 * sizeof(Sge); at += sizeof(Sge)) {
      Sge sge;
      std::memcpy(&sge, record.data() + at, sizeof(sge));
      sge.lkey = key(guest, sge.lkey);
      std::memcpy(record.data() + at, &sge, sizeof(sge));
    }
  if (!receive && qp->core.type == engine::QpType::ud) {
    UdOperand operand;
    std::memcpy(&operand, record.data() + sizeof(RecordHead), sizeof(operand));
    operand.remote_qpn = qpn(guest, operand.remote_qpn);
    operand.dlid = lid(guest, operand.dlid);
    std::memcpy(record.data() + sizeof(RecordHead), &operand, sizeof(operand));
  } else if (!receive) {
    RemoteOperand operand;
    std::memcpy(&operand, record.data() + sizeof(RecordHead), sizeof(operand));
    operand.rkey = key(guest, operand.rkey);
    operand.srqn = qpn(guest, operand.srqn);
    std::memcpy(record.data() + sizeof(RecordHead), &operand, sizeof(operand));
  }

  SharedReceiveQueue* const srq = receive ? qp->srq : nullptr;
  auto writer = srq != nullptr ? writer_of(srq->view, srq->core.ring)
                : receive      ? writer_of(qp->receive_view, qp->core.receive_ring)
                               : writer_of(qp->send_view, qp->core.send_ring);
  if (receive && srq == nullptr && qp->srq != nullptr) return;
  const std::uint32_t slots = std::min(1 + ((control >> control_slots_shift) & control_slots_mask), writer.slot_count());
  writer.write(sizeof(RecordHead), std::span(record).subspan(sizeof(RecordHead), slots * slot_bytes - sizeof(RecordHead)));
  writer.publish(which, 0, control & control_user_mask, slots);
  if (srq != nullptr) ++srq->view.header().creator.produced_count;
  guest.doorbell.set(qp->doorbell);
}

// Any bytes anywhere in what the guest may write: where (4 bytes), how many (1), they.
void FuzzWorld::step_scribble(Guest& guest, FuzzInput& input) {
  const auto where = input.value<std::uint32_t>() % guest.arena.used_bytes();
  const auto bytes = input.take(input.value<std::uint8_t>());
  std::copy(bytes.begin(), bytes.end(), guest.arena.segment().data() + where);
}

// A bit of the doorbell's bitmap (2 bytes).
void FuzzWorld::step_doorbell(Guest& guest, FuzzInput& input) { guest.doorbell.set(input.value<std::uint16_t>()); }

}  // namespace vrdma::svc
