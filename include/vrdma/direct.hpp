// What lies in shared memory for direct mode (docs/direct.md): the thread that posts runs the engine itself, on queues of its own
// arena and of its peer's.
//
//   Room      of two guests: the directions of their connections; the service and both guests map it
//   KeyTable  of one guest: where its registered memory lies; the service writes, it and its peers read
//   Turns     of a shared receive queue, beside it: which of its records was taken by whom
//
// A direction is one half of a connection: the send queue of one queue pair, the receive queue of the other, and the two lanes
// where its messages complete. A UD queue pair, which is connected to nobody, has two, in a room of its guest's own: its send queue, which
// only its guest's posters run, and its receive queue, its *inbox*, to which posters of many guests deliver by turns, a datagram each.
// Nobody touches these but the holder of the direction's claim (vmci_channel/claim.hpp). Plain data; any thread.
#pragma once

#include <cstdint>

#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::direct {

// Lowest byte of a claim; the high half is the epoch of the connection, so that whoever still knows an older one claims nothing. Between
// them, of an inbox: the number of the poster that is inside.
enum Holder : std::uint32_t {
  held_by_service = 0,
  held_by_nobody = 1,
  held_by_poster = 2,
  held_by_revocable_poster = 3,  // by vmci_channel/claimed_stores.hpp
  revoked = 4,                   // from that one, who has not seen it yet
  given_up_by_poster = 5         // it has
};
constexpr std::uint64_t claim_word(std::uint32_t epoch, Holder holder, std::uint32_t poster = 0) {
  return std::uint64_t{epoch} << 32 | std::uint64_t{poster} << 8 | holder;
}
constexpr std::uint32_t epoch_of(std::uint64_t claim) { return static_cast<std::uint32_t>(claim >> 32); }
constexpr std::uint32_t poster_of(std::uint64_t claim) { return static_cast<std::uint32_t>(claim) >> 8; }
constexpr std::uint8_t holder_of(std::uint64_t claim) { return static_cast<std::uint8_t>(claim); }
constexpr std::uint32_t poster_number(std::uint32_t guest) { return guest & 0xffffff; }  // of all posters of that guest

// Where a direction stands, at a message boundary. Counts run free, from the connection's start.
struct alignas(128) Positions {
  std::uint32_t send_head;     // of the send queue: the WQEs before it are done
  std::uint32_t send_lane;     // completions written there
  std::uint32_t receive_head;  // of the receive queue; of a shared one: after the last record that the direction took and completed
  std::uint32_t receive_lane;
  std::uint32_t psn;           // of the next message, at both ends
  std::uint32_t reserved;
  std::uint64_t sent_messages, sent_bytes;
  std::uint64_t read_messages, read_bytes;
  std::uint64_t atomics;
  std::uint64_t received_messages, received_bytes;
  std::uint64_t reserved_too[6];
};
static_assert(WireRecord<Positions> && sizeof(Positions) == 128);

// What the poster must know of the two queue pairs' attributes; the service writes it before it hands the direction out.
struct Terms {
  std::uint32_t path_mtu;           // enum ibv_mtu
  std::uint32_t remote_access;      // what the far queue pair lets be done to its memory
  std::uint32_t max_rd_atomic;      // of the poster; 0: it may not read
  std::uint32_t max_dest_rd_atomic; // of the far end
  std::uint32_t qkey;               // of a UD queue pair
  std::uint32_t reserved;
};

// The record of a shared receive queue that the poster is about to take, or has taken. Done where Positions::receive_head is after it.
struct Taking {
  std::uint32_t index;  // of the record, among all that were ever posted there; written last
  // 1: it was taken, and the message given up after that. The service gives it back before anybody goes on here.
  std::uint32_t unfinished;
  std::uint64_t wr_id;
  Sge buffer;           // all of it; 0 bytes: none
};
static_assert(WireRecord<Taking> && sizeof(Taking) == 32);

struct alignas(128) Direction {
  std::uint64_t claim;     // claim_word()
  std::uint32_t stop;      // the service wants the claim: the poster leaves at the next message boundary
  std::uint32_t handouts;  // times that the service gave the direction away; both write the rest only under the claim
  std::uint32_t current;   // positions[current & 1] is what counts; the other one is being written
  // The arm of the receiver's completion queue that the poster is about to claim, or has claimed and not reported yet; 0: none. Who runs
  // the direction next reports it.
  std::uint32_t claimed_arm;
  Terms terms;
  std::uint64_t reserved_too[2];
  Taking taking;
  std::uint64_t reserved_as_well[4];
  Positions positions[2];
};
static_assert(WireRecord<Direction> && sizeof(Direction) == 384);

constexpr std::uint32_t room_links = 8192;  // connections of two guests that can be direct at a time; memory is taken as they are made
struct Room {
  Direction directions[room_links * 2];
};

// Of a shared receive queue: from it take the posters of all its connections that are direct, and the service, which is taker 0. Every
// record takes the same number of slots, so that its index tells where it is.
constexpr std::uint32_t takers_max = 1024;
struct alignas(128) Turns {
  std::uint64_t last;   // turn_word() of the record taken last
  std::uint32_t limit;  // with fewer records left the service wants to take them itself; 0: never. The service's
  std::uint32_t reserved[29];
  std::uint64_t passed[takers_max];  // by taker: turn_word() of the last that it took, once somebody took the next one
};
static_assert(WireRecord<Turns> && sizeof(Turns) == 128 + 8 * takers_max);
// next: the index after the record's.
constexpr std::uint64_t turn_word(std::uint32_t next, std::uint32_t taker) { return std::uint64_t{next} << 32 | taker; }

// What a key names and peers can map: the part of its region that lies in one shareable file, its first 4 GiB. Two to a cache line and in few
// pages, as programs with many regions pay for the cache lines and translations that a key costs.
struct alignas(32) KeyEntry {
  std::uint32_t key;  // 0: free. Written last and taken away first; the rest, and its KeyRegion, changes only while no direction is handed out
  std::uint32_t pd;     // pd_number() of its protection domain
  std::uint32_t file;   // key_file()
  std::uint32_t bytes;  // of the part; 0: none
  std::uint64_t address;         // where it begins, as work requests have it
  std::uint64_t backing_offset;  // … and in the file
};
static_assert(WireRecord<KeyEntry> && sizeof(KeyEntry) == 32);

// The access of a region (of enum ibv_access_flags those that say who may do what) and the backing of its guest that the part lies in.
constexpr std::uint32_t key_access = 0xff, key_backings = 1u << 24;
constexpr std::uint32_t key_file(std::uint32_t access, std::uint32_t backing) { return backing << 8 | (access & key_access); }
constexpr std::uint32_t key_backing(std::uint32_t file) { return file >> 8; }

// All of the region of the key in the same place, for what its entry does not tell.
struct KeyRegion {
  std::uint64_t iova, bytes;
  std::uint64_t address;  // in the guest's memory; 0: not to be reached through its process
  std::uint64_t mapped_from, mapped_bytes;  // the entry's part, from the region's start; no bytes: it lies in no such file
  std::uint64_t backing_offset;             // of mapped_from
};
static_assert(WireRecord<KeyRegion> && sizeof(KeyRegion) == 48);

// Files of a guest, not its memory window, that its peers had mapped, and that no key names any more, for them to unmap. Changes only while
// no direction that could read the guest's keys is handed out: who finds it changed, before it uses a key, knows that nobody uses what was
// mapped of them.
constexpr std::uint32_t let_go_kept = 63;
struct LetGo {
  std::uint32_t count;                 // of all that ever were
  std::uint32_t backings[let_go_kept];  // number n of these at n % let_go_kept: the last ones
};
static_assert(WireRecord<LetGo> && sizeof(LetGo) == 256);

constexpr std::uint32_t key_entries = 1 << 18;  // a power of two; likewise
constexpr std::uint32_t key_probes = 8;      // keys are random: one lies within so many entries of its place, or not here
struct KeyTable {
  KeyEntry entries[key_entries];
  KeyRegion regions[key_entries];
  LetGo let_go;  // not there in the shorter tables of older services
};
// Of the number that the service gives a protection domain; it counts up.
constexpr std::uint32_t pd_number(std::uint64_t pd) { return static_cast<std::uint32_t>(pd); }
constexpr std::uint32_t key_place(std::uint32_t key, std::uint32_t probe) { return (key + probe) & (key_entries - 1); }

// A peer's files are mapped in chunks that overlap, so that every message lies in one of them. Longer ones are the service's.
constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 28;
constexpr std::uint64_t message_bytes_max = std::uint64_t{1} << 24;

}  // namespace vrdma::direct
