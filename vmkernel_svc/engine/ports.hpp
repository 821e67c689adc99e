// What the engine needs from the world around it: the seam along which mediated, direct, remote and simulated runs differ
// (DESIGN.md D1). The engine is a template over one type that satisfies `Ports`; it owns no socket, thread, clock or global.
//
// Everything here is called by the thread that runs the queue pair, with the claims that the caller of the engine holds.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

#include "vmci_channel/lane.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vrdma/ids.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::engine {

enum class Direction : std::uint8_t { send, receive };

// IBA 10.6.3.1 access rights; the numbers of enum ibv_access_flags.
enum Access : std::uint32_t {
  access_local_read = 0,
  access_local_write = 1,
  access_remote_write = 2,
  access_remote_read = 4,
  access_remote_atomic = 8,
};

// Why a copy or a key look-up did not succeed.
enum class MemoryStatus : std::uint8_t {
  done,         // all requested bytes moved
  pending,      // a worker has it: the QP is run again when it is finished (Ports::copy is then called again with the same arguments)
  source_fault,       // the source's registration is gone, or its memory unreachable
  destination_fault,  // likewise
};

// A place in registered (or inline) memory: an opaque reference that the ports resolve again on every use, so that a
// registration that vanished while an operation was under way is noticed and never touched.
//   kind inline_bytes: `address` is a pointer into the engine's own private copy of a WQE.
//   kind registered:   `region`/`generation` name the MR; `address` is in the MR's iova space.
struct Place {
  enum class Kind : std::uint32_t { none, inline_bytes, registered } kind = Kind::none;
  std::uint32_t region = 0;
  std::uint64_t generation = 0;
  std::uint64_t address = 0;
};

// The asynchronous events that the engine raises on objects (enum ibv_event_type has the same numbers).
enum class AsyncEvent : std::uint32_t {
  cq_err = 0,
  qp_fatal = 1,
  qp_req_err = 2,
  qp_access_err = 3,
  comm_est = 4,
  sq_drained = 5,
  srq_err = 14,
  srq_limit_reached = 15,
  qp_last_wqe_reached = 16,
};

template <class Ports>
struct Qp;  // engine/qp.hpp

// P is a set of ports. `Q` is Qp<P>: the engine's private state of one queue pair, with P::QpPort inside it.
template <class P>
concept PortsLike = requires(P p, const P cp, Qp<P>& qp, Key key, std::uint64_t u64, std::uint32_t u32, Place place, Cqe cqe,
                             UdOperand ud) {
  typename P::QpPort;   // per QP: protection domain, rings, lanes, whatever the ports keep; default constructible
  typename P::SrqPort;  // per SRQ

  // Keys. Checks PD (of `qp`), bounds and rights (Access bits); a key that fails is nullopt. For local keys the rights asked
  // are access_local_read or access_local_write; for remote ones access_remote_*. Never called for 0 bytes.
  { p.find(qp, key, u64 /*address*/, u64 /*bytes*/, u32 /*Access*/) } -> std::same_as<std::optional<Place>>;

  // Moves at most `bytes` from `from` to `to`, which lie inside what find() granted; ascending, the last bytes of the
  // call last (D7) and, where bytes == 8 and both are 8-byte aligned, as one store. `last` says that this call ends the message.
  { p.copy(qp, place /*to*/, place /*from*/, u64 /*bytes*/, bool{} /*last*/) } -> std::same_as<MemoryStatus>;

  // 8-byte atomics on an aligned `place`; the old value is returned through `old_value`.
  { p.fetch_and_add(qp, place, u64 /*add*/, u64 /*&old_value*/) } -> std::same_as<MemoryStatus>;
  { p.compare_and_swap(qp, place, u64 /*compare*/, u64 /*swap*/, u64 /*&old_value*/) } -> std::same_as<MemoryStatus>;

  // Publishes a completion of `qp` (lane of the given direction), marks its CQ and raises a completion event when armed.
  // `solicited`: the armed-for-solicited rule applies (errors count as solicited). False: the CQ overran; the ports have
  // raised CQ_ERR and nothing was written.
  { p.complete(qp, Direction::send, cqe, CqeState{}, bool{} /*solicited*/) } -> std::same_as<bool>;
  { p.event(qp, AsyncEvent::comm_est) } -> std::same_as<void>;

  { cp.now_ns() } -> std::same_as<std::uint64_t>;
  // Runs `qp` again at that time (once); a later call replaces the earlier.
  { p.wake_at(qp, u64 /*ns*/) } -> std::same_as<void>;

  // The queue pair at the far end, if it is on this host; nullptr if nobody is there. RC and UC: the connection in
  // qp.attributes; UD: the given address vector.
  { p.find_peer(qp) } -> std::same_as<Qp<P>*>;
  { p.find_datagram_peer(qp, ud) } -> std::same_as<Qp<P>*>;
};

}  // namespace vrdma::engine
