// What must hold, judged from outside: it sees what applications post, what they poll, and their memory, and nothing of the
// engine's inside. A violation throws Violation.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "vmkernel_svc/engine/test_world.hpp"

namespace vrdma::sim {

using namespace vrdma::engine;

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Pieces of memory of one size with red zones between them, each lent to at most one work request at a time.
class Slots {
 public:
  static constexpr std::size_t zone_bytes = 16;
  static constexpr std::byte zone_fill{0xee};

  Slots(test::TestWorld::Memory& memory, std::uint32_t slot_count, std::uint32_t slot_size);
  static std::size_t bytes_for(std::uint32_t slot_count, std::uint32_t slot_size) {
    return zone_bytes + slot_count * (slot_size + zone_bytes);
  }

  int take();                  // -1: all lent
  void give_back(int slot);    // the application owns it again: nobody may write to it any more
  void forget(int slot);       // likewise, but what was under way may still arrive (its queue pair was reset)
  std::span<std::byte> bytes(int slot);
  std::uint64_t offset(int slot) const { return zone_bytes + static_cast<std::uint64_t>(slot) * (slot_size_ + zone_bytes); }
  std::uint32_t slot_size() const { return slot_size_; }
  test::TestWorld::Memory& memory() { return memory_; }

  // No red zone and no slot that its application owns has changed.
  void check(const char* what, bool owned_too);

 private:
  test::TestWorld::Memory& memory_;
  std::uint32_t slot_count_, slot_size_;
  std::vector<bool> lent_;
  std::vector<std::vector<std::byte>> owned_;  // contents when given back; empty: not known
};

// One message, from the moment it is posted.
struct Message {
  WrOpcode opcode;
  std::uint32_t sender;  // index of the queue pair
  std::vector<std::byte> payload;
  bool sent = false;      // its sender was told success
  std::uint32_t received = 0;
};

struct PostedSend {
  std::uint64_t wr_id;
  bool signaled;
  std::uint32_t message;
  std::uint32_t position;  // after it
  Slots* far = nullptr;    // WRITE: where it goes
  int far_slot = -1;
  Slots* near = nullptr;   // READ and atomics: where the answer goes
  int near_slot = -1;
};
struct PostedReceive {
  std::uint64_t wr_id;
  Slots* slots;
  int slot;
};

class Checker {
 public:
  struct Queue {
    QpType type;
    std::deque<PostedSend> sends;
    std::deque<PostedReceive> receives;
    std::vector<PostedReceive> poisoned;  // places of WRITEs that failed
    bool failed = false;        // an error completed: everything after it must flush
    std::uint32_t last_message = 0;  // of a reliable sender: received in order
    std::uint64_t sends_completed = 0, receives_completed = 0;
  };
  struct Shared {
    std::map<std::uint64_t, PostedReceive> outstanding;
  };

  std::vector<Queue> queues;
  std::vector<Shared> shared;
  std::vector<Message> messages{1};  // 0 is none
  bool calm = false;                 // nothing goes wrong in this schedule: nothing may fail
  bool contents = true;              // whether what is in memory can be foretold

  void published(std::uint32_t qp, Direction direction, const Cqe& cqe, CqeState state);
  void send_polled(std::uint32_t qp, const test::Completion& completion);
  void receive_polled(std::uint32_t qp, int srq, const test::Completion& completion);
  // The queue pair was reset: what was posted will not complete.
  void forget(std::uint32_t qp);
  void atomic_result(std::uint64_t old_value);
  std::uint64_t atomics_seen() const { return old_values_.size(); }
  std::uint64_t old_value_max() const { return old_values_.empty() ? 0 : *old_values_.rbegin(); }

  [[noreturn]] static void fail(const std::string& what) { throw Violation(what); }

 private:
  void retire_send(Queue& queue, std::uint32_t qp, const PostedSend& send, bool success);
  std::set<std::uint64_t> old_values_;
};

}  // namespace vrdma::sim
