// ibv_post_send, ibv_post_recv, ibv_post_srq_recv: work requests into WQEs in shared memory. No allocation, no system call
// unless the service sleeps, one full fence per call. What direct mode allocates as it takes up an offer, or maps memory, it does
// while no claim is held; without memory for it the service carries out what is posted.
#include "guest_lib/memory_window.hpp"
#include "guest_lib/objects.hpp"

#include <cstring>
#include <new>

#include "vmci_channel/arch.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

static_assert(offsetof(ibv_sge, addr) == offsetof(Sge, address) && offsetof(ibv_sge, length) == offsetof(Sge, bytes) &&
              offsetof(ibv_sge, lkey) == offsetof(Sge, lkey) && sizeof(ibv_sge) == sizeof(Sge));
static_assert(IBV_WR_RDMA_WRITE == int(WrOpcode::rdma_write) && IBV_WR_SEND_WITH_IMM == int(WrOpcode::send_with_imm) &&
              IBV_WR_RDMA_READ == int(WrOpcode::rdma_read) &&
              IBV_WR_ATOMIC_FETCH_AND_ADD == int(WrOpcode::atomic_fetch_and_add));
static_assert(IBV_SEND_FENCE == int(wr_fence) && IBV_SEND_SIGNALED == int(wr_signaled) &&
              IBV_SEND_SOLICITED == int(wr_solicited) && IBV_SEND_INLINE == int(wr_inline));

namespace {

constexpr std::uint32_t bit(ibv_wr_opcode opcode) { return 1u << opcode; }
constexpr std::uint32_t send_opcodes = bit(IBV_WR_SEND) | bit(IBV_WR_SEND_WITH_IMM);
constexpr std::uint32_t write_opcodes = bit(IBV_WR_RDMA_WRITE) | bit(IBV_WR_RDMA_WRITE_WITH_IMM);
constexpr std::uint32_t fetch_opcodes = bit(IBV_WR_RDMA_READ) | bit(IBV_WR_ATOMIC_CMP_AND_SWP) | bit(IBV_WR_ATOMIC_FETCH_AND_ADD);
constexpr std::uint32_t with_immediate = bit(IBV_WR_SEND_WITH_IMM) | bit(IBV_WR_RDMA_WRITE_WITH_IMM) | bit(IBV_WR_SEND_WITH_INV);  // whose key lies there
constexpr std::uint32_t local_opcodes = bit(IBV_WR_LOCAL_INV) | bit(IBV_WR_BIND_MW);
constexpr std::uint32_t without_operand = send_opcodes | bit(IBV_WR_SEND_WITH_INV);
// Opcodes of the specification that this device does not have (yet), or not in machines.
constexpr std::uint32_t not_offered = local_opcodes | bit(IBV_WR_SEND_WITH_INV) | bit(IBV_WR_TSO);

// IBA 10.8.2, table 114: which operations a transport service has.
constexpr std::uint32_t legal_opcodes(ibv_qp_type type) {
  switch (type) {
    case IBV_QPT_RC:
    case IBV_QPT_XRC_SEND:
      return send_opcodes | write_opcodes | fetch_opcodes | bit(IBV_WR_ATOMIC_WRITE);
    case IBV_QPT_UC:
      return send_opcodes | write_opcodes;
    case IBV_QPT_UD:
      return send_opcodes;
    default:  // an XRC target only receives
      return 0;
  }
}

constexpr std::uint32_t window_opcodes(ibv_qp_type type) {
  const bool reliable = type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND;
  return reliable ? local_opcodes | bit(IBV_WR_SEND_WITH_INV) : type == IBV_QPT_UC ? local_opcodes : 0;
}

}  // namespace

std::uint32_t opcodes_of(ibv_qp_type type, bool windows) { return legal_opcodes(type) | (windows ? window_opcodes(type) : 0); }

namespace {

RemoteOperand remote_operand(const ibv_send_wr& wr) {
  if (bit(wr.opcode) & (bit(IBV_WR_ATOMIC_CMP_AND_SWP) | bit(IBV_WR_ATOMIC_FETCH_AND_ADD)))
    return {wr.wr.atomic.remote_addr, wr.wr.atomic.compare_add, wr.wr.atomic.swap, wr.wr.atomic.rkey, 0};
  return {wr.wr.rdma.remote_addr, 0, 0, wr.wr.rdma.rkey, 0};
}

// The payload bytes of an inline request, or -1: more than the queue pair takes.
int inline_bytes(const Qp& qp, const ibv_send_wr& wr) {
  std::uint64_t bytes = wr.num_sge > 0 ? wr.sg_list[0].length : 0;
  for (int i = 1; i < wr.num_sge; ++i) bytes += wr.sg_list[i].length;
  return bytes > qp.max_inline_data ? -1 : static_cast<int>(bytes);
}

// A request as its WQE will have it.
struct Shape {
  std::uint32_t slots;
  std::uint16_t count;  // SGEs, or inline payload bytes
};

// 0: of no opcode that there is.
std::uint32_t opcode_bit_of(const ibv_send_wr& wr) {
  const auto opcode = static_cast<std::uint32_t>(wr.opcode);
  return opcode < 32 ? 1u << opcode : 0;
}

// 0, or the errno value for a request that this queue pair does not take.
[[gnu::always_inline]] inline int check(const Qp& qp, const ibv_send_wr& wr, std::uint32_t opcode_bit, Shape& shape) {
  if ((opcode_bit & qp.opcodes) == 0) return opcode_bit & not_offered ? EOPNOTSUPP : EINVAL;
  if (opcode_bit & local_opcodes) [[unlikely]] return shape = {send_wqe_slots(0), 0}, check_window(qp, wr);
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > qp.max_send_sge) return EINVAL;

  std::uint32_t payload_bytes = static_cast<std::uint32_t>(wr.num_sge) * static_cast<std::uint32_t>(sizeof(Sge));
  shape.count = static_cast<std::uint16_t>(wr.num_sge);
  if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    const int bytes = opcode_bit & fetch_opcodes ? -1 : inline_bytes(qp, wr);
    if (bytes < 0) return EINVAL;
    payload_bytes = static_cast<std::uint32_t>(bytes);
    shape.count = static_cast<std::uint16_t>(bytes);
  }
  if (qp.verbs.qp_base.qp_type == IBV_QPT_UD && wr.wr.ud.ah == nullptr) return EINVAL;
  shape.slots = send_wqe_slots(payload_bytes);
  return 0;
}

std::uint8_t flags_of(const Qp& qp, const ibv_send_wr& wr) {
  return static_cast<std::uint8_t>((wr.send_flags | qp.implied_flags) & (wr_fence | wr_signaled | wr_solicited | wr_inline));
}

void put_sges(vmci::RecordWriter& ring, std::size_t offset, const ibv_sge* sges, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) ring.put(offset + i * sizeof(Sge), sges[i]);
}
// Field by field, as Lane does it: nothing waits for the stores that put the operand together.
void put_operand(vmci::RecordWriter& ring, const RemoteOperand& operand) {
  constexpr std::size_t at = offsetof(SendWqe, remote);
  ring.put(at + offsetof(RemoteOperand, address), operand.address);
  ring.put(at + offsetof(RemoteOperand, compare_add), operand.compare_add);
  ring.put(at + offsetof(RemoteOperand, swap), operand.swap);
  ring.put(at + offsetof(RemoteOperand, rkey), operand.rkey);
  ring.put(at + offsetof(RemoteOperand, srqn), operand.srqn);
}

// A BIND_MW's or LOCAL_INV's.
WindowOperand window_operand(const ibv_send_wr& wr) {
  if (wr.opcode == IBV_WR_LOCAL_INV) return {0, 0, 0, wr.invalidate_rkey, 0, 0};
  const ibv_mw_bind_info& info = wr.bind_mw.bind_info;
  return {wr.bind_mw.mw->handle, info.mr != nullptr ? info.mr->handle : 0, info.mw_access_flags, wr.bind_mw.rkey, info.addr, info.length};
}

void put_operand(vmci::RecordWriter& ring, const UdOperand& operand) {
  constexpr std::size_t at = offsetof(SendWqe, ud);
  static_assert(offsetof(UdOperand, dlid) == 8 && sizeof(UdOperand) == 32);
  ring.put(at + offsetof(UdOperand, remote_qpn), operand.remote_qpn);
  ring.put(at + offsetof(UdOperand, remote_qkey), operand.remote_qkey);
  for (std::size_t word = 1; word < 4; ++word) ring.put(at + word * sizeof(std::uint64_t), word_of(operand, word));
}

// There is room for it. word: the WQE's, where its opcode has one.
void write(Qp& qp, const ibv_send_wr& wr, const Shape& shape, std::uint32_t word) {
  const std::uint32_t opcode_bit = 1u << wr.opcode;
  VRDMA_CRASH_POINT("guest.post_send.before_write");
  vmci::RecordWriter& ring = qp.send.writer();
  if (qp.base().qp_type == IBV_QPT_UD) {
    const UdOperand operand = ud_operand(wr);
    put_operand(ring, operand);
  } else if (opcode_bit & local_opcodes) {
    const WindowOperand operand = window_operand(wr);
    ring.write(offsetof(SendWqe, window), std::as_bytes(std::span(&operand, 1)));
  } else {
    // A SEND's operand is not looked at, but its bytes shall not be those of an older request.
    RemoteOperand operand = opcode_bit & without_operand ? RemoteOperand{} : remote_operand(wr);
    if (qp.base().qp_type == IBV_QPT_XRC_SEND) operand.srqn = wr.qp_type.xrc.remote_srqn;
    put_operand(ring, operand);
  }
  if (opcode_bit & local_opcodes) {
    // no payload
  } else if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    std::size_t offset = send_wqe_payload_offset;
    for (int i = 0; i < wr.num_sge; ++i) {
      const ibv_sge& sge = wr.sg_list[i];
      ring.write(offset, {reinterpret_cast<const std::byte*>(sge.addr), sge.length});
      offset += sge.length;
    }
  } else {
    put_sges(ring, send_wqe_payload_offset, wr.sg_list, shape.count);
  }
  VRDMA_CRASH_POINT("guest.post_send.before_publish");
  qp.send.publish(wr.wr_id, word,
                  pack(WqeControl{static_cast<WrOpcode>(wr.opcode), flags_of(qp, wr), shape.count}), shape.slots);
  VRDMA_CRASH_POINT("guest.post_send.published");
}

// direct: what can carry it out past the ring (DirectConnection, DatagramSender), or nullptr.
template <class Direct>
[[gnu::always_inline]] inline int post_one(Qp& qp, const ibv_send_wr& wr, Direct* direct) {
  Shape shape;
  const std::uint32_t opcode_bit = opcode_bit_of(wr);
  if (const int error = check(qp, wr, opcode_bit, shape); error != 0) return error;
  if (!qp.send.has_room(shape.slots)) return ENOMEM;
  if constexpr (std::is_same_v<Direct, DatagramSender>) {  // once it is posted, its address handle may go
    if (direct == nullptr && !qp.liveness->gone()) qp.datagrams->look_at(wr);
  }
  if (opcode_bit & local_opcodes) [[unlikely]] {
    const auto outcome = changes_windows_in_turn(*qp.attachment) ? Result<std::uint32_t>(window_in_turn) : carry_out_window(qp, wr);
    if (!outcome) return value(outcome.error());
    return write(qp, wr, shape, *outcome), 0;
  }
  if (direct == nullptr || !direct->carry_out(qp.send, wr, flags_of(qp, wr))) write(qp, wr, shape, opcode_bit & with_immediate ? wr.imm_data : 0);
  return 0;
}

// Returns 0 or the errno value with the request that failed in *bad_wr; those before it were published.
template <class Wr, class PostOne>
int publish_chain(Wr* wr, Wr** bad_wr, PostOne&& post) {
  int error = 0;
  while (wr != nullptr) {
    Wr* const next = wr->next;  // once one is posted and has completed, it is its owner's again
    error = post(*wr);
    if (error != 0) {
      *bad_wr = wr;
      break;
    }
    wr = next;
  }
  return error;
}

template <class Queue>
void ring_for(Queue& queue, const Doorbell& doorbell, std::uint32_t member) {
  // D1: pairs with the service's fence between its store of needs_doorbell and its last look at the queue.
  vmci::store_load_fence();
  if (queue.needs_doorbell().load(std::memory_order_relaxed) != 0) doorbell.ring(member);
  VRDMA_CRASH_POINT("guest.post.doorbell_rung");
}

// False: `function` says so, or there was no memory for it.
template <class Function>
bool with_memory(Function&& function) noexcept {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// The service offers the connection, or does not any more.
void follow_offer(Qp& qp, std::uint32_t offer) {
  qp.direct.reset();
  qp.datagrams.reset();
  qp.direct_offer.store(offer, std::memory_order_relaxed);
  if (offer == 0 || qp.liveness->gone()) return;
  // Where it cannot be opened, everything goes by the service.
  const auto use = [](auto opened, auto& direct) { return opened ? direct = std::move(*opened), true : false; };
  DirectRooms& rooms = qp.attachment->direct_rooms();
  with_memory([&] {
    return qp.base().qp_type == IBV_QPT_UD ? use(rooms.open_datagrams(*qp.attachment, qp, offer), qp.datagrams)
                                           : use(rooms.open(*qp.attachment, qp, offer), qp.direct);
  });
}

void look_for_offer(Qp& qp) {
  if (const std::uint32_t offer = qp.send.direct_offer().load(std::memory_order_acquire); offer != qp.direct_offer.load(std::memory_order_relaxed)) [[unlikely]]
    follow_offer(qp, offer);
}

// direct, its direction claimed, for what is posted there; nullptr: the service carries it out.
template <class Direct>
[[gnu::always_inline]] inline Direct* entered(const Qp& qp, Direct* direct) {
  return direct != nullptr && direct->enter([&qp] { return !qp.liveness->gone(); }) ? direct : nullptr;
}
DirectConnection* connection_of(const Qp& qp) { return qp.direct != nullptr ? &qp.direct->connection : nullptr; }

// What a message needed and was not there. Whether it can be had now.
bool map_missing(Qp& qp, DirectConnection& direct) {
  return direct.has_unmapped() &&
         with_memory([&] { return qp.attachment->direct_rooms().map(*qp.attachment, qp.direct->reach, *direct.take_unmapped()); });
}
// Datagrams do not wait for it: theirs is had for the next one.
bool map_missing(Qp&, DatagramSender&) { return false; }

void fetch_missing(Qp& qp, DirectConnection& direct) { map_missing(qp, direct); }
void fetch_missing(Qp& qp, DatagramSender& datagrams) {
  if (!datagrams.wants()) [[likely]] return;
  DirectRooms& rooms = qp.attachment->direct_rooms();
  with_memory([&] {
    if (DatagramPath* const path = datagrams.take_unmapped_path()) rooms.map(*qp.attachment, path->reach, *path->take_unmapped());
    while (const auto address = datagrams.take_wanted()) rooms.open_path(*qp.attachment, qp, datagrams, *address);
    return true;
  });
}

// Carries out what lies in the queue, and leaves; what is left there is the service's.
template <class Direct>
[[gnu::always_inline]] inline void run_and_leave(Qp& qp, Direct& direct) {
  bool all = direct.has_run(qp.send) || direct.run_queue(), told = direct.leave();
  while (!all && map_missing(qp, direct) && entered(qp, &direct) != nullptr) {
    all = direct.run_queue();
    told &= direct.leave();
  }
  if (direct.take_own_event_due()) (void)raise_missed(Cq::of(qp.base().send_cq));
  if (!all || !told) ring_for(qp.send, qp.doorbell, qp.doorbell_member);
  fetch_missing(qp, direct);
}

template <class Direct>
int post_sends(Qp& qp, ibv_send_wr* chain, ibv_send_wr** bad_wr, Direct* direct) {
  const int error = publish_chain(chain, bad_wr, [&](const ibv_send_wr& one) { return post_one(qp, one, direct); });
  if (direct != nullptr) run_and_leave(qp, *direct);
  else ring_for(qp.send, qp.doorbell, qp.doorbell_member);
  return error;
}

bool asks_the_service(const ibv_send_wr* chain) {
  for (; chain != nullptr; chain = chain->next)
    if (static_cast<std::uint32_t>(chain->opcode) < 32 && (bit(chain->opcode) & local_opcodes) != 0) return true;
  return false;
}

// Under send_lock.
int post_sends(Qp& qp, ibv_send_wr* chain, ibv_send_wr** bad_wr) {
  ++sends_posted;
  look_for_offer(qp);
  if (windows_in_use() && asks_the_service(chain) && !changes_windows_in_turn(*qp.attachment)) [[unlikely]] {  // not while a claim is held that it may be waiting for
    const int error = post_sends(qp, chain, bad_wr, static_cast<DirectConnection*>(nullptr));
    run_send_queue(qp);
    return error;
  }
  DatagramSender* const datagrams = qp.datagrams.get();
  if (datagrams == nullptr) return post_sends(qp, chain, bad_wr, entered(qp, connection_of(qp)));
  if (DatagramSender* const direct = entered(qp, datagrams)) return post_sends(qp, chain, bad_wr, direct);
  const int error = post_sends(qp, chain, bad_wr, static_cast<DatagramSender*>(nullptr));
  fetch_missing(qp, *datagrams);
  return error;
}

// From now on both directions may complete on its one completion queue. An XRC target has none.
void begin_receiving(Qp& qp) {
  qp.has_received = true;
  ibv_cq* const cq = qp.base().recv_cq;
  if (cq != nullptr && cq == qp.base().send_cq) Cq::of(cq).ask_for_stamps();
}

int post_one_receive(ReceiveQueue& queue, std::uint32_t max_sge, const ibv_recv_wr& wr) {
  if (!queue.has_room()) return ENOMEM;
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > max_sge) return EINVAL;
  VRDMA_CRASH_POINT("guest.post_recv.before_write");
  const auto count = static_cast<std::uint16_t>(wr.num_sge);
  put_sges(queue.writer(), receive_wqe_payload_offset, wr.sg_list, count);
  VRDMA_CRASH_POINT("guest.post_recv.before_publish");
  queue.publish(wr.wr_id, pack(WqeControl{WrOpcode::receive, 0, count}));
  VRDMA_CRASH_POINT("guest.post_recv.published");
  return 0;
}

template <class Wr>
int refuse(Wr* wr, Wr** bad_wr, int error) {
  *bad_wr = wr;
  return error;
}

}  // namespace

// Who has armed, and polled, since the service went is told of what is flushed now.
void tell_if_gone(const Qp& qp, ibv_cq* cq) {  // nullptr: an XRC target's
  if (cq != nullptr && cq->channel != nullptr && qp.liveness->gone()) [[unlikely]] watch_for_posted(Cq::of(cq));
}

int post_send(ibv_qp* verbs, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
  Qp& qp = Qp::of(verbs);
  if (qp.liveness->inherited()) [[unlikely]]
    return refuse(wr, bad_wr, EIO);
  int error = 0;
  {
    std::lock_guard guard(qp.send_lock);
    // IBA 10.8.3.1: a request may be posted in RTS, SQD, SQE and ERR.
    if (verbs->state < IBV_QPS_RTS) [[unlikely]]
      return refuse(wr, bad_wr, EINVAL);
    error = post_sends(qp, wr, bad_wr);
  }
  tell_if_gone(qp, verbs->send_cq);
  return error;
}

int post_all(Qp& qp, ibv_send_wr* chain) {
  if (qp.liveness->inherited()) return EIO;
  if (qp.base().state < IBV_QPS_RTS) return EINVAL;
  std::uint32_t slots = 0, count = 0;
  Shape shape;
  for (const ibv_send_wr* wr = chain; wr != nullptr; wr = wr->next, ++count) {
    if (const int error = check(qp, *wr, opcode_bit_of(*wr), shape); error != 0) return error;
    slots += shape.slots;
  }
  if (count == 0) return 0;
  if (!qp.send.has_room(slots, count)) return ENOMEM;
  ibv_send_wr* none = nullptr;
  return post_sends(qp, chain, &none);
}

void run_send_queue(Qp& qp) {
  look_for_offer(qp);
  if (DatagramSender* const datagrams = entered(qp, qp.datagrams.get())) run_and_leave(qp, *datagrams);
  if (DirectConnection* const direct = entered(qp, connection_of(qp))) run_and_leave(qp, *direct);
}

int post_recv(ibv_qp* verbs, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  Qp& qp = Qp::of(verbs);
  if (qp.liveness->inherited()) [[unlikely]]
    return refuse(wr, bad_wr, EIO);
  int error = 0;
  {
    std::lock_guard guard(qp.receive_lock);
    if (verbs->state == IBV_QPS_RESET || verbs->srq != nullptr) [[unlikely]]
      return refuse(wr, bad_wr, EINVAL);
    if (!qp.has_received) [[unlikely]] begin_receiving(qp);
    error = publish_chain(wr, bad_wr, [&](const ibv_recv_wr& one) { return post_one_receive(qp.receive, qp.max_recv_sge, one); });
    ring_for(qp.receive, qp.doorbell, qp.doorbell_member);
  }
  tell_if_gone(qp, verbs->recv_cq);
  return error;
}

int post_srq_recv(ibv_srq* verbs, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  Srq& srq = Srq::of(verbs);
  if (srq.liveness->inherited()) [[unlikely]]
    return refuse(wr, bad_wr, EIO);
  std::lock_guard guard(srq.lock);
  const int error = publish_chain(wr, bad_wr, [&](const ibv_recv_wr& one) { return post_one_receive(srq.queue, srq.max_sge, one); });
  VRDMA_CRASH_POINT("guest.post_srq.before_count");
  srq.queue.publish_count();
  return error;
}

}  // namespace vrdma::guest
