#include "tests/sim/checker.hpp"

#include <algorithm>
#include <cstring>

namespace vrdma::sim {

Slots::Slots(test::TestWorld::Memory& memory, std::uint32_t slot_count, std::uint32_t slot_size)
    : memory_(memory), slot_count_(slot_count), slot_size_(slot_size), lent_(slot_count), owned_(slot_count) {
  std::fill(memory_.bytes.begin(), memory_.bytes.end(), zone_fill);
}

int Slots::take() {
  for (std::uint32_t i = 0; i < slot_count_; ++i) {
    if (lent_[i]) continue;
    lent_[i] = true;
    owned_[i].clear();
    return static_cast<int>(i);
  }
  return -1;
}
void Slots::give_back(int slot) {
  const auto index = static_cast<std::size_t>(slot);
  if (!lent_[index]) Checker::fail("a buffer was given back twice");
  lent_[index] = false;
  const auto now = bytes(slot);
  owned_[index].assign(now.begin(), now.end());
}
void Slots::forget(int slot) { lent_[static_cast<std::size_t>(slot)] = false; }

std::span<std::byte> Slots::bytes(int slot) { return {memory_.bytes.data() + offset(slot), slot_size_}; }

void Slots::check(const char* what, bool owned_too) {
  for (std::uint32_t i = 0; i <= slot_count_; ++i)
    for (std::size_t at = 0; at < zone_bytes; ++at)
      if (memory_.bytes[i * (slot_size_ + zone_bytes) + at] != zone_fill)
        Checker::fail(std::string("a byte outside the buffers was written: ") + what);
  for (std::uint32_t i = 0; owned_too && i < slot_count_; ++i) {
    if (lent_[i] || owned_[i].empty()) continue;
    if (!std::ranges::equal(bytes(static_cast<int>(i)), owned_[i]))
      Checker::fail(std::string("a buffer changed after its work request had completed: ") + what);
  }
}

// At the moment a completion becomes visible: a reliable sender hears of success only when the receiver's completion is there.
void Checker::published(std::uint32_t qp, Direction direction, const Cqe& cqe, CqeState state) {
  if (state.status != WcStatus::success) return;
  if (direction == Direction::receive) {
    if (cqe.imm_data == 0 || cqe.imm_data >= messages.size()) fail("a receive completion names a message that was never sent");
    Message& message = messages[cqe.imm_data];
    const QpType type = queues[qp].type;
    ++message.received;
    if (message.received > 1 && type != QpType::ud) fail("a message was received twice");
    return;
  }
  if (queues[qp].type != QpType::rc) return;
  for (const PostedSend& send : queues[qp].sends) {
    if (send.wr_id != cqe.wr_id) continue;
    const Message& message = messages[send.message];
    const bool takes_receive = message.opcode == WrOpcode::send_with_imm || message.opcode == WrOpcode::rdma_write_with_imm;
    if (takes_receive && message.received != 1) fail("a reliable sender was told success before the receiver had it");
  }
}

void Checker::retire_send(Queue& queue, std::uint32_t, const PostedSend& send, bool success) {
  ++queue.sends_completed;
  Message& message = messages[send.message];
  message.sent = success;
  if (send.far != nullptr) {
    if (success && contents && queue.type == QpType::rc &&
        !std::ranges::equal(send.far->bytes(send.far_slot).first(message.payload.size()), message.payload))
      fail("RDMA WRITE: the far memory is not what was written");
    // What a request that failed had under way may still arrive: its place is not used again before the reset.
    if (success)
      send.far->forget(send.far_slot);
    else
      queue.poisoned.push_back({0, send.far, send.far_slot});
  }
  if (send.near != nullptr) {
    if (success && message.opcode == WrOpcode::rdma_read && contents &&
        !std::ranges::equal(send.near->bytes(send.near_slot).first(message.payload.size()), message.payload))
      fail("RDMA READ: what was read is not what was there");
    if (success && (message.opcode == WrOpcode::atomic_fetch_and_add) && contents) {
      std::uint64_t old_value;
      std::memcpy(&old_value, send.near->bytes(send.near_slot).data(), 8);
      atomic_result(old_value);
    }
    send.near->give_back(send.near_slot);
  }
}

void Checker::atomic_result(std::uint64_t old_value) {
  if (!old_values_.insert(old_value).second) fail("two fetch-and-adds returned the same value");
}

void Checker::send_polled(std::uint32_t qp, const test::Completion& completion) {
  Queue& queue = queues[qp];
  const bool success = completion.status == WcStatus::success;
  if (calm && !success)
    fail("a send failed with status " + std::to_string(static_cast<int>(completion.status)) + " although nothing went wrong");
  if (success && queue.failed) fail("a send succeeded behind one that failed");
  if (!success) {
    const bool flushed = completion.status == WcStatus::wr_flush_err;
    if (queue.failed && !flushed) fail("a second error on a queue in error");
    queue.failed = true;
  }
  for (;;) {
    if (queue.sends.empty()) fail("a send completion for a request that is not outstanding");
    const PostedSend send = queue.sends.front();
    queue.sends.pop_front();
    if (send.wr_id == completion.wr_id) {
      if (success && !send.signaled) fail("an unsignalled request completed without an error");
      if (completion.position != send.position) fail("a send completion frees other slots than those up to its request");
      retire_send(queue, qp, send, success);
      return;
    }
    // One that was passed over: unsignalled and good.
    if (send.signaled) fail("send completions are not in the order of posting");
    retire_send(queue, qp, send, true);
  }
}

void Checker::receive_polled(std::uint32_t qp, int srq, const test::Completion& completion) {
  Queue& queue = queues[qp];
  PostedReceive receive{};
  if (srq >= 0) {
    auto& outstanding = shared[static_cast<std::size_t>(srq)].outstanding;
    const auto found = outstanding.find(completion.wr_id);
    if (found == outstanding.end()) fail("a shared receive completed that is not outstanding");
    receive = found->second;
    outstanding.erase(found);
  } else {
    if (queue.receives.empty() || queue.receives.front().wr_id != completion.wr_id)
      fail("receive completions are not in the order of posting");
    receive = queue.receives.front();
    queue.receives.pop_front();
  }
  ++queue.receives_completed;
  if (completion.status == WcStatus::success) {
    const Message& message = messages[completion.imm];
    const std::size_t head = queue.type == QpType::ud ? grh_bytes : 0;
    if (completion.byte_len != message.payload.size() + head) fail("a receive completion has the wrong length");
    if (completion.opcode == WcOpcode::recv && contents &&
        !std::ranges::equal(receive.slots->bytes(receive.slot).subspan(head, message.payload.size()), message.payload))
      fail("what was received is not what was sent");
    if (queue.type == QpType::rc) {
      if (completion.imm <= queue.last_message) fail("a reliable connection delivered out of order");
      queue.last_message = completion.imm;
    }
  } else if (calm) {
    fail("a receive failed although nothing went wrong");
  }
  receive.slots->give_back(receive.slot);
}

void Checker::forget(std::uint32_t qp) {
  Queue& queue = queues[qp];
  for (const PostedSend& send : queue.sends) {
    if (send.far != nullptr) send.far->forget(send.far_slot);
    if (send.near != nullptr) send.near->give_back(send.near_slot);  // its owner's again, as if it had completed
  }
  for (const PostedReceive& place : queue.poisoned) place.slots->forget(place.slot);
  for (const PostedReceive& receive : queue.receives) receive.slots->give_back(receive.slot);
  queue.sends.clear();
  queue.receives.clear();
  queue.poisoned.clear();
  queue.failed = false;
  queue.last_message = 0;
}

}  // namespace vrdma::sim
