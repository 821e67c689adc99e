// What the service keeps of a guest: the private truth behind every handle. Only the shard that runs the guest touches it, in its turns,
// and who is alone (turnstile.hpp); the main thread owns the socket and talks to the shards by tasks.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/event_ring.hpp"
#include "vmkernel_svc/arena.hpp"
#include "vmkernel_svc/mediated_ports.hpp"
#include "vmkernel_svc/memory/backing.hpp"
#include "vmkernel_svc/memory/guest_copier.hpp"
#include "vmkernel_svc/memory/process_memory.hpp"
#include "vmkernel_svc/numbers.hpp"
#include "vmkernel_svc/tenant.hpp"
#include "vmkernel_svc/vmci_end.hpp"
#include "vrdma/control.hpp"
#include "vrdma/direct.hpp"

namespace vrdma::svc {

struct Channel {  // completion channel
  Handle handle;
  std::uint32_t context;
  vmci::UniqueFd pipe;  // write end; the guest holds the only read end
  std::uint32_t users = 0;
  std::vector<control::CompletionRecord> backlog;  // records that the full pipe did not take
  // Where the guest can be interrupted for this channel, in place of the pipe:
  vmci::EventRingWriter ring = {};
  std::uint64_t ring_offset = 0;  // in the arena
  int interrupt = -1;             // its machine's eventfd
  bool interrupt_owed = false;    // the kernel could not ring it yet
  // Another pipe, for reading and writing: what is given to posters in direct mode, whose records the guest reads, too. A poster that comes
  // too late still has a reader then, itself: no SIGPIPE. Empty: it has no direct connections.
  vmci::GivenFd peers = {};
};

struct Context {
  std::uint32_t handle;
  vmci::UniqueFd async_pipe;
  std::vector<control::AsyncRecord> backlog;
};

struct ProtectionDomain {
  Handle handle;
  std::uint32_t context;
  std::uint64_t number;  // unique in the service
  std::uint32_t users = 0;
};

// What XRC target queue pairs and the SRQs that they receive by have in common: of one program, or, named by a file, of several of one tenant's.
struct XrcDomain {
  vmci::GivenFd file;          // of this host, which names it: for as long, no other file is taken for that one
  std::vector<Guest*> guests;  // each once for each handle
  std::vector<QueuePair*> targets;
};
struct Xrcd {  // a program's handle of it
  Handle handle;
  std::uint32_t context;
  std::shared_ptr<XrcDomain> domain;
  std::uint32_t users = 0;
};

struct SharedReceiveQueue;
struct MemoryWindow {
  Handle handle;
  std::uint32_t context;
  ProtectionDomain* pd;
  std::uint32_t slot;  // of its region, which says what it is bound to
  bool of_queue_pair;  // type 2
  std::uint32_t bound_to = 0;  // the queue pair in whose bound_windows it stands, or stood
};

struct CompletionQueue {
  Handle handle;
  std::uint32_t context;
  Guest* guest;
  Channel* channel;
  std::uint64_t offset;
  control::CqShared* shared;
  vmci::ReadyBitmap ready;
  std::uint32_t cqe;
  std::uint32_t produced = 0;  // completions written, all lanes; the guest says in shared->consumed how many it took
  std::uint32_t consumed_seen = 0;
  std::uint32_t direct_lanes = 0;  // handed out: their completions are counted when they come back
  std::uint64_t depth = 0;         // of all work queues that complete here, shared ones once
  std::unordered_map<const SharedReceiveQueue*, std::uint32_t> srqs;  // of how many queue pairs that complete here
  bool overrun = false;
  bool timed = false;  // its completions carry their time
  std::uint32_t lanes_used = 0;
  std::vector<std::uint32_t> free_lanes;
  std::vector<QueuePair*> users;  // a queue pair stands here once for each direction
  std::uint32_t take_lane() {
    if (free_lanes.empty()) return lanes_used++;
    const std::uint32_t lane = free_lanes.back();
    free_lanes.pop_back();
    return lane;
  }
};

struct SharedReceiveQueue {
  Handle handle;
  std::uint32_t context;
  Guest* guest;
  vmci::QueuePairView view;
  ProtectionDomain* pd;
  std::uint32_t max_sge;
  std::uint64_t offset;
  engine::Srq<MediatedPorts> core;
  std::uint32_t users = 0;
  // Of an XRC SRQ: a queue pair that is never connected, by whose receive lane it completes, and whose number is the SRQ's.
  QueuePair* completions = nullptr;
  // Direct mode: who else takes there (direct::Turns), by numbers of this SRQ's. 0 is the service.
  std::uint64_t turns_offset = 0;
  std::uint32_t takers_used = 1;
  std::vector<std::uint32_t> free_takers;
};

struct QueuePair {
  engine::Qp<MediatedPorts> core;
  Handle handle;
  std::uint32_t context;
  Guest* guest;
  ProtectionDomain* pd;
  CompletionQueue* send_cq;
  CompletionQueue* receive_cq;
  SharedReceiveQueue* srq = nullptr;
  std::uint32_t doorbell;  // member of the guest's bitmap
  std::uint64_t send_offset, receive_offset;
  std::uint32_t send_lane, receive_lane;
  std::uint32_t send_depth, receive_depth;  // what its CQs must have room for
  vmci::QueuePairView send_view, receive_view;
  std::uint32_t mcast_groups = 0;
  std::unordered_set<std::uint32_t> bound_windows;  // slots of windows of type 2 that were bound to it, and to no other since
  Xrcd* xrcd = nullptr;  // of an XRC target, and of what completes for an XRC SRQ
  // Another handle of an XRC target: a queue pair that stands ready to be it.
  QueuePair* stands_for = nullptr;
  std::vector<QueuePair*> stand_bys;
  // Of one that has become it: the address by which initiators know it, its first guest's, who may be gone.
  struct Address {
    std::uint16_t lid;
    std::array<control::GidEntry, 16> gids;
  };
  std::optional<Address> inherited;
  bool completes_for_srq() const { return xrcd != nullptr && srq != nullptr; }
  QpAttributes caps{};
  std::string mediated_because = "not in RTS";  // where it has no direct link

  // Whether the guest must ring after posting: for sends while nobody looks at the queue, for receives while one is waited for
  // or flushed. The caller looks at the queue once more after setting it.
  void watch_sends(bool on) { set(send_view, on); }
  void watch_receives(bool on) {
    if (srq == nullptr) set(receive_view, on);
  }

 private:
  void set(const vmci::QueuePairView& view, bool on);
};

template <class T>
using Table = std::unordered_map<std::uint32_t, std::unique_ptr<T>>;

// Eventfds by which a machine is interrupted, by vector. Its QEMU holds them, too: eventfd_signal.hpp.
using Interrupts = std::vector<vmci::UniqueFd>;

// What is different about a guest that is a process of a virtual machine.
struct InMachine {
  std::string name;  // the machine's
  std::uint32_t uid, pid;  // in the machine
  std::shared_ptr<const Interrupts> interrupts;
  bool in_bar = false;     // its memory is lent of the BAR
  vmci::Segment copier_segment = {};  // lent for its copying thread, until it is used
  std::uint32_t arena_parts = 0;      // each a mapping of the service
};

class KeyBook;
struct GuestGroup;

struct Guest {
  Guest();
  ~Guest();

  // What the shard looks at of each guest all the time, in one cache line.
  alignas(64) vmci::ReadyBitmap doorbell;
  std::uint32_t silent_looks = 0;  // of the shard: in succession, nothing was found
  bool control_held = false;  // its control ring is to be looked at: rung for, not emptied, or its first request must wait
  bool events_held = false;   // some backlog of its pipes is not empty
  bool notices_held = false;  // vmci.held is not empty
  bool broken = false;  // its bytes made no sense: to be detached
  bool ended = false;   // it is being detached (ControlDesk::detach)
  // Its machine stands still or is being saved: nothing of its memory, queues included, is read or written, and to its peers its
  // queue pairs are silent. Shard::freeze() and thaw() say so.
  bool frozen = false;
  bool is_heard() const { return !broken && !ended && !frozen; }

  GuestId id;
  std::string name;
  Tenant* tenant;
  GuestGroup* group = nullptr;  // whose shard runs it (shards.hpp)
  std::uint32_t line = 0;       // in ServicePage::shards
  vmci::Credentials credentials;
  std::unique_ptr<InMachine> machine;  // nullptr: a process of this host
  std::uint16_t lid;
  std::uint64_t guid;  // host order
  std::uint32_t link_layer;
  std::uint16_t minor = 0;  // of the channel's version that it speaks
  std::array<control::GidEntry, 16> gids{};

  Arena arena;
  bool arena_was_full = false;  // said once
  std::uint64_t control_offset = 0, doorbell_offset = 0;
  vmci::QueuePairView control;
  vmci::RecordReader requests;
  vmci::RecordWriter replies;
  vmci::UniqueFd doorbell_fd;     // eventfd: the guest writes, the shard's epoll waits, nobody reads
  vmci::GivenFd socket;           // shut down to be rid of a guest whose bytes make no sense
  vmci::UniqueFd wake_pipe;       // write end: a thread of the guest sleeps for a reply
  std::shared_ptr<const vmci::UniqueFd> pidfd = std::make_shared<vmci::UniqueFd>();  // of a process of this host, where the kernel tells
  bool mediated = false;              // it may not be direct
  std::unique_ptr<KeyBook> key_book;  // once it has a peer that may be direct
  ProcessMemory process;          // how memory without a backing is reached, …
  std::unique_ptr<GuestCopier> copier;  // … or where that is not possible and the guest knows
  std::vector<LastStep> last_steps;
  bool asked_how_reached = false;
  bool reached_by_service = false;      // it has asked, and the service reaches it: so may its direct peers, who look for …
  control::ReachProcessRequest probe{};  // … this there
  std::unordered_map<std::uint32_t, Backing> backings;
  std::uint32_t window_backing = 0;  // of these, its memory window, which peers keep mapped; 0: none
  // Of backings: those that keys have room for (direct::KeyEntry), and where none of them is to be had, others, which peers cannot map.
  Numbers backing_numbers{1, direct::key_backings - 1};
  Numbers further_backing_numbers{direct::key_backings, control::backing_process - 1};
  std::vector<control::Extent> staged;  // count as the pieces that they will be
  bool staged_too_many = false;         // for its tenant: those before are gone, and what wants them is told
  void drop_staged() { take_staged(); }
  std::vector<control::Extent> take_staged() {
    tenant->pieces -= staged.size();
    return std::exchange(staged, {});
  }

  Numbers handle_numbers{1, ~std::uint32_t{0}};
  // For an object of whatever kind: never 0, which names none, nor one that is taken.
  std::uint32_t new_handle();
  Table<Context> contexts;
  Table<Channel> channels;
  Table<ProtectionDomain> pds;
  std::unordered_map<std::uint32_t, std::uint32_t> mrs;  // handle → region slot
  Table<MemoryWindow> mws;
  Table<CompletionQueue> cqs;
  Table<SharedReceiveQueue> srqs;
  Table<QueuePair> qps;
  Table<Xrcd> xrcds;
  std::vector<QueuePair*> by_doorbell;  // index: QueuePair::doorbell; 0 is the control pair
  std::vector<std::uint32_t> free_doorbells;

  VmciEnd vmci;  // ports, datagrams and queue pairs between guests

  // For a context or a channel. An eighth of what the tenant may have is for programs that come later, and for the first few of each.
  bool take_pipe() {
    constexpr std::uint32_t always = 16;
    const std::uint32_t kept = pipes < always ? 0 : tenant->quota.descriptors / 8;
    if (tenant->descriptors + kept >= tenant->quota.descriptors) return false;
    ++pipes;
    ++tenant->descriptors;
    return true;
  }
  void give_pipe() {
    --pipes;
    --tenant->descriptors;
  }
  std::uint32_t pipes = 0;
  std::uint32_t cm_written = 0;  // events of rdma_cm that it has written for itself and not read

  bool submit(std::unique_ptr<ProcessJob> job) {
    return copier ? copier->submit(std::move(job)) : process.submit(std::move(job));
  }
  std::size_t jobs = 0;  // that its worker has, or the sink
  std::size_t room_for_jobs() const { return jobs_max - std::min(jobs_max, jobs); }
  std::deque<std::uint64_t> waiting_for_room;  // Fabric::waiting
  std::size_t called_for_room = 0;             // of whom so many have been called and have not come yet
  bool may_call_for_room() const {             // one more
    constexpr std::size_t jobs_of_a_copy = 2;  // at most: one reads, one writes
    return (called_for_room + 1) * jobs_of_a_copy <= room_for_jobs();
  }
  std::uint64_t jobs_ended = 0;
  std::uint32_t take_doorbell() {
    if (free_doorbells.empty()) {
      by_doorbell.push_back(nullptr);
      return static_cast<std::uint32_t>(by_doorbell.size() - 1);
    }
    const std::uint32_t member = free_doorbells.back();
    free_doorbells.pop_back();
    return member;
  }

  void count_bad_pkey() { std::atomic_ref(bad_pkeys).fetch_add(1, std::memory_order_relaxed); }  // any shard
  std::uint64_t bad_pkeys = 0;  // who wanted to reach it and is in no partition of its own: connections each time they were looked up, datagrams
  engine::QpCounters totals{};  // of queue pairs that are gone
  std::uint64_t requests_served = 0;
  std::uint64_t protocol_errors = 0;
  std::uint64_t held_since_ns = 0;  // since when the request at the head waits; 0: it has not been tried
};

inline void QueuePair::set(const vmci::QueuePairView& view, bool on) {
  if (guest->frozen) return;  // thaw() sets it
  // D1: pairs with the fence in the guest's post: either it sees the flag or we see its record.
  std::atomic_ref(view.header().attacher.needs_doorbell).store(on ? 1 : 0, std::memory_order_relaxed);
  if (on) vmci::store_load_fence();
}

// A guest that has left, for those who ask afterwards.
struct DepartedGuest {
  GuestId id;
  std::string name;
  vmci::Credentials credentials;
  std::uint16_t lid;
  std::uint64_t requests;
  engine::QpCounters totals;
};

}  // namespace vrdma::svc
