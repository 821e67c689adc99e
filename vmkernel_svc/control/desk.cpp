#include "vmkernel_svc/control/desk.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "vmkernel_svc/guest_mail.hpp"
#include "vmkernel_svc/memory_reserve.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using namespace control;

bool ControlDesk::serve(Guest& guest) {
  alignas(64) std::byte record[record_slots_max * slot_bytes];
  bool served = false;
  guest.control_held = false;
  for (int budget = 4; budget > 0 && !guest.broken; --budget) {
    std::uint32_t slots = 0;
    const auto peek = guest.requests.peek(record, record_slots_max, slots);
    if (peek == vmci::RecordReader::Peek::empty) return served;
    Head head;
    std::memcpy(&head, record, sizeof(head));
    if (peek == vmci::RecordReader::Peek::malformed || slots * slot_bytes < sizeof(Head) ||
        head.record.word > slots * slot_bytes - sizeof(Head)) {
      ++guest.protocol_errors;
      guest.broken = true;
      return true;
    }
    if (!answer(guest, head, {record + sizeof(Head), head.record.word})) {
      guest.control_held = true;  // it must wait: the request stays where it is
      if (guest.held_since_ns == 0) guest.held_since_ns = vmci::monotonic_ns();
      return served;
    }
    served = true;
    guest.held_since_ns = 0;
    guest.requests.advance(slots);
    std::atomic_ref(guest.control.header().attacher.consumed).store(guest.requests.position(), std::memory_order_release);
    VRDMA_CRASH_POINT("service.control.consumed");
  }
  guest.control_held = true;  // there may be more: others first
  return served;
}

bool ControlDesk::may_wait(const Guest& guest, std::uint64_t patience_ns) { return may_wait_on(guest.held_since_ns, patience_ns); }
bool ControlDesk::may_wait_on(std::uint64_t waiting_since_ns, std::uint64_t patience_ns) {
  return waiting_since_ns == 0 || vmci::monotonic_ns() - waiting_since_ns < patience_ns;
}

template <Request R>
bool ControlDesk::dispatch(Guest& guest, std::span<const std::byte> body, std::byte* reply, std::uint32_t& reply_bytes, int& status) {
  using M = Message<R>;
  if constexpr (M::on_socket) {
    status = EPROTO;
    return true;
  } else {
    typename M::RequestBody request{};
    if (!std::is_empty_v<typename M::RequestBody>) {
      constexpr std::size_t least = R == Request::stage_extents ? stage_extents_bytes(0) : sizeof(request);
      if (body.size() < least) {
        status = EINVAL;
        return true;
      }
      std::memcpy(static_cast<void*>(&request), body.data(), std::min(body.size(), sizeof(request)));
    }
    Result<typename M::ReplyBody> result = on<R>(guest, request);
    if (!result) {
      status = value(result.error());
      return status != EINPROGRESS;
    }
    if (!std::is_empty_v<typename M::ReplyBody>) {
      std::memcpy(reply, &*result, sizeof(typename M::ReplyBody));
      reply_bytes = sizeof(typename M::ReplyBody);
    }
    return true;
  }
}

bool ControlDesk::may_begin(Request request) {
  switch (request) {
    case Request::remove_backing:
    case Request::query_device:
    case Request::close_context:
    case Request::destroy_channel:
    case Request::destroy_pd:
    case Request::dereg_mr:
    case Request::destroy_cq:
    case Request::query_srq:
    case Request::modify_srq:
    case Request::destroy_srq:
    case Request::modify_qp:
    case Request::query_qp:
    case Request::destroy_qp:
    case Request::detach_mcast:
    case Request::unbind_port:
    case Request::queue_pair_detach:
    case Request::cm_close:
    case Request::cm_destroy_id:
    case Request::cm_reject:
    case Request::cm_disconnect:
    case Request::cm_query:
    case Request::cm_attributes:
    case Request::cm_leave:
    case Request::cm_take_event:
    case Request::close_xrcd:
    case Request::read_clock:
    case Request::dealloc_mw:
    case Request::invalidate_mw:
    case Request::read_counters:
    case Request::mad_close:
    case Request::mad_unregister:
    case Request::mad_take: return true;
    default: return MemoryReserve::is_there();
  }
}

// False: the request must wait and be tried again.
bool ControlDesk::answer(Guest& guest, const Head& head, std::span<const std::byte> body) {
  if (head.record.tag != address_of(host_context, control_port)) {
    fabric_.vmci.forward(guest, head, body);
    return true;
  }
  alignas(64) std::byte reply[body_bytes_max] = {};
  std::uint32_t reply_bytes = 0;
  int status = 0;
  const std::uint32_t user = head.record.control & control_user_mask;
  bool done = true;
  const bool possible = may_begin(static_cast<Request>(user));
  try {
    switch (possible ? static_cast<Request>(user) : Request::none) {
#define VRDMA_CASE(name, request, reply_type, socket)                          \
    case Request::name:                                                        \
      done = dispatch<Request::name>(guest, body, reply, reply_bytes, status); \
      break;
      VRDMA_CONTROL_REQUESTS(VRDMA_CASE)
#undef VRDMA_CASE
      default:
        status = possible ? EOPNOTSUPP : ENOMEM;
    }
  } catch (const std::bad_alloc&) {  // for more than is kept in reserve: what was begun is the guest's until it goes
    status = ENOMEM;
  }
  if (!done) return false;
  VRDMA_CRASH_POINT("service.control.executed");
  ++guest.requests_served;

  Head out{};
  out.record.tag = address_of(guest.id.value, head.source_port);
  out.source_context = host_context;
  out.source_port = control_port;
  out.sequence = head.sequence;
  out.status = status;
  if (!put_datagram(guest, out, user | reply_bit, {reply, reply_bytes}, 0)) {  // it asks without reading the answers
    ++guest.protocol_errors;
    guest.broken = true;
  }
  return true;
}

}  // namespace vrdma::svc
