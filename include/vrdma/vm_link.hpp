// The link between the host service and the agent in a virtual machine (DESIGN.md D11): what lies in the shared BAR of the
// machine's ivshmem device, and what travels there. The agent owns the device and serves the processes of its machine; each of
// them is a guest of the service, a *connection* of the link.
//
//   BAR:   LinkHeader (one page) | a byte queue pair (vmci_channel/byte_queue.hpp), created by the agent: agent → service, back
//
// Data and queues never pass here: they lie in the machine's RAM, which the service maps, in pages that the agent has pinned. Where the
// RAM is nobody's but the machine's (service_lends_bar), they lie in the rest of a BAR that is bigger, in pages that the agent lends to
// processes. Pages (Run, Hello::page) then count from the BAR's beginning, and none of the first bar_bytes is lent.
//
// A session begins when the agent writes a new `boot` and ends with the next one, with another `service_epoch` (the service has
// started anew, or knows that the machine ended or is not what it was), or when the service's `heartbeat` stands still for
// session_patience_ms:
//
//   agent    boot = 0; zeroes its cursor; boot = random; rings
//   service  drops the guests of the session before; zeroes its cursor; accepted = boot
//   agent    hello, then whatever its processes want
//
// Where nobody can be interrupted (ivshmem-plain, User Mode Linux) the service says service_polls: then it looks by itself, also at
// `doorbells` in place of doorbell_vector, and an agent whose `heartbeat` stands still for agent_patience_ms has ended, unless
// something better tells of the machine's end. From agent_silence_ms on it is left alone, until it beats again: it may be another kernel
// that boots there.
//
// Either side may be hostile: what one reads of the other's is read once and bounded. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::vm {

constexpr std::uint32_t magic = 0x4d565256;  // "VRVM"
constexpr std::uint16_t version_major = 2;   // another one is refused
constexpr std::uint16_t version_minor = 2;   // 1: service_lends_bar; 2: Hello::low_end, Welcome::ram

struct alignas(128) ServiceLine {  // written by the service only
  std::uint32_t magic;
  std::uint16_t major, minor;
  std::uint64_t service_epoch;  // random, never 0; 0 while the service is not ready
  std::uint64_t accepted;       // the boot for which its cursor is ready
  std::uint64_t heartbeat;      // changes at least every heartbeat_ms
  std::uint64_t flags;          // service_polls, service_lends_bar
  std::uint64_t vectors;        // by which it can interrupt the machine, from 0 on; 0: an older service, which has fixed_vectors
  std::uint64_t reserved[10];
};
constexpr std::uint64_t service_polls = 1;      // ringing has no effect
constexpr std::uint64_t service_lends_bar = 2;  // it has no RAM of the machine's: memory is of the BAR
struct alignas(128) AgentLine {  // written by the agent only
  std::uint64_t boot;            // random; 0: between two sessions
  std::uint64_t heartbeat;       // changes at least every heartbeat_ms
  std::uint64_t doorbells;       // counts what would have been rung with doorbell_vector
  std::uint64_t page;            // of its session, where that is of the BAR (Hello::page): for who outlives it; else 0
  std::uint64_t reserved[12];
};
struct LinkHeader {
  ServiceLine service;
  AgentLine agent;
};
static_assert(WireRecord<ServiceLine> && WireRecord<AgentLine> && sizeof(LinkHeader) == 256);
constexpr std::uint32_t heartbeat_ms = 250;
constexpr std::uint32_t session_patience_ms = 5000;
constexpr std::uint32_t agent_silence_ms = 3000, agent_patience_ms = 10000;

constexpr std::uint64_t queues_offset = 4096;
constexpr vmci::QueuePairGeometry queues{4096, 4096, vmci::QueueKind::bytes, 0};  // 256 KiB each way
constexpr std::uint64_t bar_bytes = 1 << 20;  // of the BAR, at least; a power of two, as PCI wants
static_assert(queues_offset + queues.total_bytes() <= bar_bytes);
// Where memory is of the BAR: how big that may be; also a power of two.
constexpr std::uint64_t lent_bar_bytes_min = std::uint64_t{32} << 20, lent_bar_bytes_max = std::uint64_t{64} << 30;

// ivshmem: the machine is peer 0, as QEMU wants of one that can be saved (master=on), the service peer 1. Both have the fixed vectors; the
// machine has more, as many as vm.json says, which the agent lends to completion channels (control::EventRing).
// Writing (peer << 16 | vector) to the doorbell register (BAR 0, offset 12) interrupts that peer.
constexpr std::uint32_t machine_peer = 0, service_peer = 1;
constexpr std::uint32_t link_vector = 0;      // there is something on the link
constexpr std::uint32_t doorbell_vector = 1;  // some process has set a bit in its doorbell bitmap and found the shard asleep
constexpr std::uint32_t fixed_vectors = 2;
constexpr std::uint32_t vectors_max = 32;     // of a machine's device
constexpr std::uint64_t doorbell_register = 12;

// --- frames: FrameHead, then `bytes` of body -----------------------------------------------------------------------
enum class Frame : std::uint16_t {
  // agent → service
  hello = 1,    // Hello; the first frame of a session, once
  open,         // Open: a process has connected
  packet,       // one packet of a process for the service, as on its socket (vrdma/control.hpp)
  segment,      // Run[]: appends to segment `item` of the connection, to be used by a packet that follows
  close,        // the process has gone
  // service → agent
  welcome = 64, // answers hello: Welcome
  reply,        // one packet for the process; `flags` streams begin with it, numbered from `item` on
  stream,       // bytes of stream `item`: what the process reads from a pipe
  stream_end,   // that pipe has no writer any more
  closed,       // the service is through with the connection and touches nothing of its memory
};
struct FrameHead {
  std::uint32_t bytes;       // of the body, at most frame_bytes_max
  std::uint16_t kind;        // Frame
  std::uint16_t flags;
  std::uint32_t connection;  // the agent's number, never 0 and never used again in its session; 0: of the link itself
  std::uint32_t item;        // a segment's or stream's number
};
static_assert(WireRecord<FrameHead> && sizeof(FrameHead) == 16);
constexpr std::uint32_t frame_bytes_max = 8192;

// Consecutive pages (4096 bytes) of the machine's physical memory, or of the BAR.
struct Run {
  std::uint64_t page;   // guest-physical address / 4096
  std::uint64_t pages;
};
static_assert(WireRecord<Run> && sizeof(Run) == 16);
constexpr std::uint32_t page_bytes = 4096;
constexpr std::uint32_t runs_per_frame = frame_bytes_max / sizeof(Run);

// Where the file that is a machine's RAM lies in its physical memory: from 0 on, and the rest from 4 GiB on, past the hole for devices.
struct RamLayout {
  std::uint64_t low_bytes = 0, high_bytes = 0;
  // Where pages lie in the file; nothing if not all of them do.
  constexpr std::optional<std::uint64_t> offset_of(Run run) const {
    constexpr std::uint64_t four_gib = std::uint64_t{1} << 32, pages_max = std::uint64_t{1} << 40;
    if (run.pages == 0 || run.page > pages_max || run.pages > pages_max) return std::nullopt;
    const std::uint64_t begin = run.page * page_bytes, end = begin + run.pages * page_bytes;
    if (end <= low_bytes) return begin;
    if (begin >= four_gib && end - four_gib <= high_bytes) return begin - four_gib + low_bytes;
    return std::nullopt;
  }
};
static_assert(WireRecord<RamLayout> && sizeof(RamLayout) == 16);

struct Hello {
  std::uint16_t major, minor;
  std::uint32_t flags;       // hello_interrupts, hello_bar
  std::uint64_t high_bytes;  // of the machine's RAM from 4 GiB on: it follows the rest in the file that is the RAM
  std::uint64_t page;        // guest-physical address / 4096 of a page for the machine's copy of the ServicePage …
  std::uint64_t proof;       // … whose first 8 bytes hold this until welcome: the service sees the memory that the agent means
  char version[32];
  // From minor 2 of both on:
  std::uint64_t low_end;     // where its RAM below 4 GiB ends, but for what its firmware keeps; 0: unknown
};
constexpr std::uint32_t hello_interrupts = 1;  // the agent sleeps until it is interrupted; else it polls
constexpr std::uint32_t hello_bar = 2;         // what it lends is of the BAR, `page` too
struct Welcome {
  std::int32_t status;   // 0, or an errno value: EPROTONOSUPPORT, EFAULT (the proof is not there), ENODEV (no RAM that can be mapped)
  std::uint16_t major, minor;
  std::uint64_t arena_bytes;  // of each process's arena: what segment_arena must have
  char name[32];         // the machine's
  char version[32];
  // Of the file that is the RAM: a segment's runs must be whole such pages, as no part of one can be mapped alone.
  std::uint64_t ram_page_bytes;
  // From minor 2 of both on. Beyond is memory that was plugged in beside that file (DIMMs, virtio-mem), which cannot be lent. Pages of the
  // BAR: 0, 0.
  RamLayout ram;
};
struct Open {
  std::uint32_t uid, gid, pid;  // in the machine
  std::uint32_t reserved;
};
static_assert(WireRecord<Hello> && WireRecord<Welcome> && WireRecord<Open>);
constexpr std::uint16_t minor_of_plugged_memory = 2;
constexpr std::size_t hello_bytes(std::uint16_t minor) { return minor >= minor_of_plugged_memory ? sizeof(Hello) : offsetof(Hello, low_end); }
constexpr std::size_t welcome_bytes(std::uint16_t minor) { return minor >= minor_of_plugged_memory ? sizeof(Welcome) : offsetof(Welcome, ram); }

// Segments that the agent makes for a process, sealed memfds whose pages are pinned, rounded up to pages of the RAM's file. Others
// (from segment_first on) are memory that the process registers, wherever it lies: the service reaches that through its mapping of
// all RAM.
constexpr std::uint32_t segment_arena = 1;   // goes before the packet with Request::attach; all zero
constexpr std::uint32_t segment_copier = 2;  // before Request::reach_process; copying::segment_bytes, all zero
constexpr std::uint32_t segment_first = 16;

}  // namespace vrdma::vm
