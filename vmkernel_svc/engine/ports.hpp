// What the engine needs from the world around it: the seam along which mediated, direct, remote and simulated runs differ
// (DESIGN.md D1). The engine is a template over one type that satisfies PortsFor; it owns no socket, thread, clock or global.
//
// Everything here is called by the thread that runs the queue pair.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

#include "vmkernel_svc/engine/types.hpp"
#include "vrdma/ids.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::engine {

// Why a copy or an atomic did not succeed.
enum class MemoryStatus : std::uint8_t {
  done,               // all of it
  pending,            // somebody else is at it: the queue pair is run again, and the same call then repeated
  source_fault,       // the source's registration is gone, or its memory unreachable
  destination_fault,  // likewise; for an atomic, its only operand
};

// A place in registered or private memory: an opaque reference that the ports resolve anew on every use, so that a
// registration that vanished while an operation was under way is noticed and its memory never touched.
struct Place {
  // Eight bytes each: two neighbours that were just stored compilers load as one word to copy them, which waits like a wide copy.
  enum class Kind : std::uint32_t { engine, registered };
  alignas(8) Kind kind = Kind::engine;
  alignas(8) std::uint32_t region = 0;  // registered: names the region, with …
  std::uint64_t generation = 0;  // … its generation
  std::uint64_t address = 0;     // engine: a pointer into the engine's own memory; registered: in the key's address space

  constexpr Place() = default;
  constexpr Place(Kind of, std::uint32_t at, std::uint64_t as, std::uint64_t where) : kind(of), region(at), generation(as), address(where) {}
  // Field by field: a wide copy of what was just put together waits for all stores before it, a payload's too.
  constexpr Place(const Place& other) : Place(other.kind, other.region, other.generation, other.address) {}
  constexpr Place& operator=(const Place& other) {
    kind = other.kind, region = other.region, generation = other.generation, address = other.address;
    return *this;
  }

  static Place in_engine(const void* memory) {
    return {Kind::engine, 0, 0, static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory))};
  }
  Place operator+(std::uint64_t bytes) const { return {kind, region, generation, address + bytes}; }
};

template <class P>
struct Qp;
template <class P>
struct Srq;

template <class P>
concept PortsFor = requires(P p, Qp<P>& qp, Srq<P>& srq, Key key, std::uint64_t u64, std::uint32_t u32, Place place,
                            std::uint64_t& value, Cqe& cqe, const CqeState& state, const UdOperand& ud, std::byte* bytes) {
  typename P::QpPort;   // default constructible; the ports' own data of a queue pair
  typename P::SrqPort;  // likewise of an SRQ

  // Looks a key up for `qp` (its protection domain counts), checks bounds and that the region grants all rights asked.
  // Never called for 0 bytes.
  { p.find(qp, key, u64 /*address*/, u64 /*bytes*/, u32 /*Access*/) } -> std::same_as<std::optional<Place>>;

  // Likewise for the buffers of a receive WQE that `qp` took: an SRQ has a protection domain of its own.
  { p.find_receive(qp, key, u64 /*address*/, u64 /*bytes*/) } -> std::same_as<std::optional<Place>>;

  // Moves `bytes` that find() granted, the last of them visible last (D7). At most slice_bytes per call. `qp` runs the
  // operation: a pending copy is remembered there.
  { p.copy(qp, place /*to*/, place /*from*/, u64) } -> std::same_as<MemoryStatus>;
  // Atomic on 8 aligned bytes; `value` receives what was there.
  { p.fetch_and_add(qp, place, u64 /*add*/, value) } -> std::same_as<MemoryStatus>;
  { p.compare_and_swap(qp, place, u64 /*compare*/, u64 /*swap*/, value) } -> std::same_as<MemoryStatus>;
  // Forgets a pending copy of `qp`.
  { p.abandon(qp) } -> std::same_as<void>;

  // Publishes a completion on the queue pair's lane for that direction and raises a completion event where the CQ is armed
  // for it. False: the CQ is overrun; nothing was written, the ports have told its owner, and every other queue pair that
  // completes there is in ERR with qp_fatal: with `qp` the engine does that itself. What it left free in the entry is theirs to fill.
  { p.complete(qp, Direction::send, cqe, state) } -> std::same_as<bool>;
  { p.event(qp, AsyncEvent::comm_est) } -> std::same_as<void>;
  { p.srq_limit(srq) } -> std::same_as<void>;
  // How many receive WQEs the owner says to have posted so far (free-running).
  { p.srq_posted(srq) } -> std::same_as<std::uint32_t>;
  // A queue pair is about to take a receive WQE of `srq`: whoever has some of them (an HCA) gives them back.
  { p.srq_wanted(srq) } -> std::same_as<void>;
  // Whether the WRITE that `qp` refuses is the first part of one whose immediate was to come by an HCA: its receive WQE is given back.
  { p.immediate_follows(qp) } -> std::same_as<bool>;
  // The state of `qp` was changed by the engine itself (to ERR or SQE): it must be run so that its queues flush.
  { p.state_changed(qp) } -> std::same_as<void>;
  // `sender` found no receive WQE at `receiver`: run `sender` again when one may have been posted.
  { p.await_receive(qp /*sender*/, qp /*receiver*/) } -> std::same_as<void>;

  { p.now_ns() } -> std::same_as<std::uint64_t>;
  // Runs `qp` at that time; a later call replaces the earlier.
  { p.wake_at(qp, u64 /*ns*/) } -> std::same_as<void>;

  // Who is at the far end, if on this host: of a connection (by qp.attributes), or of an address vector. For multicast,
  // the member of the group with the lowest number from `from` on that takes it; `from` becomes that number. nullptr: there are no more. A place
  // in a list would not do: members come and leave while one of them is waited for, and who stays gets each datagram once.
  { p.peer(qp) } -> std::same_as<Qp<P>*>;
  { p.datagram_peer(qp, ud) } -> std::same_as<Qp<P>*>;
  { p.multicast_peer(qp, ud, u32 /*from*/) } -> std::same_as<Qp<P>*>;
  // Whether the connection that `receiver` is set up for leads back to `sender`'s port (its LID or GID).
  { p.leads_back(qp /*receiver*/, qp /*sender*/) } -> std::same_as<bool>;
  // Writes the 40 bytes before a datagram: a GRH (true) or nothing of meaning (false). `packet`: ud_packet_bytes().
  { p.write_grh(qp /*sender*/, qp /*receiver*/, ud, u32 /*packet*/, bytes) } -> std::same_as<bool>;
  { p.lid(qp) } -> std::same_as<std::uint16_t>;
  { p.sl(qp /*sender*/, ud) } -> std::same_as<std::uint8_t>;
};

}  // namespace vrdma::engine
