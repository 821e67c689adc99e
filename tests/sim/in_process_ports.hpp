// The engine without a service: two queue pairs of one process, each run by the thread that posts to it, inside its own post
// and poll. The third set of ports after the mediated and the simulated ones, and the shape that direct mode will have: what
// differs is where the ports find memory, peers and completions; the engine does not know.
//
// One claim per connection is held while either end runs; polling takes none. Regions are registered before the first post.
// RC only; keys are looked up in a short list, and nothing here waits.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "vmci_channel/backoff.hpp"
#include "vmci_channel/placement_copy.hpp"
#include "vmkernel_svc/engine/engine.hpp"

namespace vrdma::sim {

class InProcessPorts {
 public:
  using Qp = engine::Qp<InProcessPorts>;
  using Srq = engine::Srq<InProcessPorts>;
  struct QpPort {
    Qp* peer = nullptr;
    std::thread::id last_runner;  // who carried out the last copy of a message of this queue pair
  };
  struct SrqPort {};
  struct Region {
    std::byte* memory;
    std::uint64_t bytes;
    std::uint32_t access;
  };

  std::uint32_t add(std::span<std::byte> memory, std::uint32_t access) {
    regions_.push_back({memory.data(), memory.size(), access});
    return static_cast<std::uint32_t>(regions_.size());
  }

  std::optional<engine::Place> find(Qp&, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    if (key.value == 0 || key.value > regions_.size()) return std::nullopt;
    const Region& region = regions_[key.value - 1];
    const std::uint64_t start = reinterpret_cast<std::uintptr_t>(region.memory), offset = address - start;
    if ((region.access & access) != access || address < start || offset > region.bytes || bytes > region.bytes - offset)
      return std::nullopt;
    return engine::Place{engine::Place::Kind::registered, key.value, 1, address};
  }
  std::optional<engine::Place> find_receive(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes) {
    return find(qp, key, address, bytes, engine::access_local_write);
  }
  engine::MemoryStatus copy(Qp& qp, const engine::Place& to, const engine::Place& from, std::uint64_t bytes) {
    vmci::placement_copy(reinterpret_cast<std::byte*>(to.address), reinterpret_cast<const std::byte*>(from.address), bytes);
    qp.port.last_runner = std::this_thread::get_id();
    return engine::MemoryStatus::done;
  }
  engine::MemoryStatus fetch_and_add(Qp&, const engine::Place& place, std::uint64_t add, std::uint64_t& old_value) {
    old_value = word(place).fetch_add(add, std::memory_order_acq_rel);
    return engine::MemoryStatus::done;
  }
  engine::MemoryStatus compare_and_swap(Qp&, const engine::Place& place, std::uint64_t compare, std::uint64_t swap,
                                        std::uint64_t& old_value) {
    old_value = compare;
    word(place).compare_exchange_strong(old_value, swap, std::memory_order_acq_rel);
    return engine::MemoryStatus::done;
  }
  void abandon(Qp&) {}
  bool complete(Qp& qp, engine::Direction direction, const Cqe& cqe, const CqeState& state) {
    (direction == engine::Direction::send ? qp.send_lane : qp.receive_lane).push(cqe, pack(state));
    return true;
  }
  void event(Qp&, engine::AsyncEvent) {}
  void srq_limit(Srq&) {}
  std::uint32_t srq_posted(Srq&) { return 0; }
  void srq_wanted(Srq&) {}
  bool immediate_follows(Qp&) { return false; }
  void state_changed(Qp&) {}  // its owner runs it in its next poll
  void await_receive(Qp&, Qp&) {}
  std::uint64_t now_ns() { return vmci::monotonic_ns(); }
  void wake_at(Qp&, std::uint64_t) {}  // likewise
  Qp* peer(Qp& qp) { return qp.port.peer; }
  Qp* datagram_peer(Qp&, const UdOperand&) { return nullptr; }
  Qp* multicast_peer(Qp&, const UdOperand&, std::uint32_t&) { return nullptr; }
  bool leads_back(Qp& receiver, Qp& sender) { return receiver.port.peer == &sender; }
  bool write_grh(Qp&, Qp&, const UdOperand&, std::uint32_t, std::byte*) { return false; }
  std::uint16_t lid(Qp&) { return 0; }
  std::uint8_t sl(Qp&, const UdOperand&) { return 0; }

 private:
  static std::atomic_ref<std::uint64_t> word(const engine::Place& place) {
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(place.address));
  }
  std::vector<Region> regions_;
};
static_assert(engine::PortsFor<InProcessPorts>);

// One end of a connection as its thread sees it: post and poll, both of which run the engine.
class InProcessEnd {
 public:
  static constexpr std::uint32_t slots = 256, entries = 128;

  InProcessEnd(InProcessPorts& ports, std::atomic_flag& claim, std::uint32_t qpn) : engine_(ports), claim_(claim) {
    core.qpn = Qpn{qpn};
    core.send_ring = {send_slots_[0].bytes, slots};
    core.receive_ring = {receive_slots_[0].bytes, slots};
    core.send_lane = {send_entries_.data(), entries};
    core.receive_lane = {receive_entries_.data(), entries};
    core.attributes.access_flags = engine::access_local_write | engine::access_remote_write;
    core.attributes.path_mtu = 5;
    core.attributes.rnr_retry = 7;
    core.attributes.min_rnr_timer = 1;
  }
  InProcessEnd(const InProcessEnd&) = delete;
  static void join(InProcessEnd& a, InProcessEnd& b) {
    a.core.port.peer = &b.core, b.core.port.peer = &a.core;
    a.core.attributes.dest_qp_num = b.core.qpn.value, b.core.attributes.dest_qp_num = a.core.qpn.value;
    a.core.state = b.core.state = engine::QpState::rts;
  }

  void post_receive(std::uint64_t wr_id, Sge sge) {
    receive_writer_.write(receive_wqe_payload_offset, std::as_bytes(std::span(&sge, 1)));
    receive_writer_.publish(wr_id, 0, pack(WqeControl{WrOpcode::receive, 0, 1}), 1);
  }
  void post_send(std::uint64_t wr_id, WrOpcode opcode, Sge sge, RemoteOperand remote = {}) {
    send_writer_.write(sizeof(RecordHead), std::as_bytes(std::span(&remote, 1)));
    send_writer_.write(send_wqe_payload_offset, std::as_bytes(std::span(&sge, 1)));
    send_writer_.publish(wr_id, 0, pack(WqeControl{opcode, wr_signaled, 1}), 1);
    run();
  }
  std::optional<Cqe> poll(engine::Direction direction) {
    vmci::LaneReader& reader = direction == engine::Direction::send ? send_reader_ : receive_reader_;
    const Cqe* next = reader.next();
    if (next == nullptr && (engine_.busy(core) || !core.send_ring.empty())) run(), next = reader.next();
    if (next == nullptr) return std::nullopt;
    const Cqe cqe = *next;
    reader.pop();
    if (direction == engine::Direction::send)
      send_writer_.set_freed(cqe.queue_position);
    else
      receive_writer_.set_freed(receive_writer_.freed() + 1);
    return cqe;
  }

  InProcessPorts::Qp core;

 private:
  struct alignas(64) Slot {
    std::byte bytes[slot_bytes];
  };
  void run() {
    // Q1: pairs with Q2: what the other end's thread did to either queue pair under the claim.
    while (claim_.test_and_set(std::memory_order_acquire)) vmci::cpu_relax();
    engine::Budget budget{1 << 20, 16};
    engine_.run(core, budget);
    claim_.clear(std::memory_order_release);  // Q2
  }

  std::array<Slot, slots> send_slots_{}, receive_slots_{};
  std::array<Cqe, entries> send_entries_{}, receive_entries_{};
  vmci::RecordWriter send_writer_{send_slots_[0].bytes, slots}, receive_writer_{receive_slots_[0].bytes, slots};
  vmci::LaneReader send_reader_{send_entries_.data(), entries}, receive_reader_{receive_entries_.data(), entries};
  engine::Engine<InProcessPorts> engine_;
  std::atomic_flag& claim_;
};

}  // namespace vrdma::sim
