// Garbage in what a guest shares: rings, cursors, lanes, CQs, doorbells, pipes.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/hostile/raid.hpp"

namespace vrdma::hostile {

void strike_with_wqe(Raid& raid, Property& own) {
  Dice& dice = raid.dice;
  OwnedQp& qp = dice.of(own.qps);
  Memory& memory = dice.of(own.memories);
  const auto address = reinterpret_cast<std::uint64_t>(memory.address);
  std::vector<Sge> sges(dice.one_in(8) ? dice.below(31) : 1 + dice.below(3));
  for (auto& sge : sges) {
    sge = {address + dice.below(memory.bytes), 1 + dice.below(8192), memory.key};
    if (dice.one_in(6)) sge.address = dice.nasty();
    if (dice.one_in(6)) sge.bytes = static_cast<std::uint32_t>(dice.nasty());
    if (dice.one_in(6)) sge.lkey = static_cast<std::uint32_t>(dice.nasty());
  }
  WqeControl control{static_cast<WrOpcode>(dice.below(7)), wr_signaled, static_cast<std::uint16_t>(sges.size())};
  if (dice.one_in(8)) control.opcode = static_cast<WrOpcode>(dice.below(256));
  if (dice.one_in(4)) control.flags = static_cast<std::uint8_t>(dice.below(128));
  if (dice.one_in(8)) control.count = static_cast<std::uint16_t>(dice.below(1024));
  if (control.opcode == WrOpcode::atomic_cmp_and_swp || control.opcode == WrOpcode::atomic_fetch_and_add) {
    sges.assign(1, {address + dice.below(512) * 8, 8, memory.key});
    control.count = 1;
  }
  RemoteOperand remote{address + dice.below(memory.bytes / 8) * 8, dice.any(), dice.any(), memory.key, 0};
  if (dice.one_in(6)) remote.address = dice.nasty();
  if (dice.one_in(6)) remote.rkey = static_cast<std::uint32_t>(dice.any());
  if (qp.type == 4) {
    const UdOperand ud{dice.one_in(3) ? static_cast<std::uint32_t>(dice.nasty()) : qp.made.qpn, 0x1111, own.lid, 0,
                       static_cast<std::uint8_t>(dice.below(256)), static_cast<std::uint8_t>(dice.below(256)), 0, 0, 0, {}};
    std::memcpy(&remote, &ud, sizeof(ud));
  }
  own.send(qp, control, sges, remote, dice.one_in(10) ? 1 + dice.below(64) : 0);
}

void strike_with_receive(Raid& raid, Intruder& in, Property& own) {
  Dice& dice = raid.dice;
  Memory& memory = dice.of(own.memories);
  std::vector<Sge> sges(dice.below(4), Sge{reinterpret_cast<std::uint64_t>(memory.address), 4096, memory.key});
  for (auto& sge : sges)
    if (dice.one_in(6)) sge = {dice.nasty(), static_cast<std::uint32_t>(dice.nasty()), memory.key};
  WqeControl control{WrOpcode::receive, 0, static_cast<std::uint16_t>(sges.size())};
  if (dice.one_in(12)) control = {static_cast<WrOpcode>(dice.below(256)), 0, static_cast<std::uint16_t>(dice.below(1024))};
  if (dice.one_in(3)) {
    own.receive(own.srq_writer, own.srq.queue.record_slots, sges, control);
    own.view(own.srq.queue).header().creator.produced_count += dice.one_in(8) ? static_cast<std::uint32_t>(dice.any()) : 1;
    return;
  }
  OwnedQp& qp = dice.of(own.qps);
  if (qp.made.receive.geometry.produce_slots > 2) own.receive(qp.receives, qp.made.receive.record_slots, sges, control);
  in.ring(qp.made.doorbell);
}

namespace {

// Any bytes over any of its queues: headers, cursors, rings, lanes, CQs, the doorbell's words.
void strike_at_random(Raid& raid, Intruder& in, Property& own) {
  Dice& dice = raid.dice;
  std::byte noise[256];
  const std::size_t length = 1 + dice.below(sizeof(noise));
  dice.fill(std::span(noise, length));
  const auto over = [&](std::uint64_t offset, std::uint64_t bytes) {
    const std::uint64_t at = dice.below(bytes);
    std::memcpy(in.arena() + offset + at, noise, std::min<std::uint64_t>(length, bytes - at));
  };
  OwnedQp& qp = dice.of(own.qps);
  switch (dice.below(8)) {
    case 0: return over(qp.made.send.offset, qp.made.send.geometry.total_bytes());
    case 1: return over(qp.made.receive.offset, qp.made.receive.geometry.total_bytes());
    case 2: return over(own.srq.queue.offset, own.srq.queue.geometry.total_bytes());
    case 3: return over(dice.of(own.cqs).offset, sizeof(CqShared));
    case 4: return over(in.info().doorbell_offset, sizeof(vmci::ReadyWords));
    case 5: return over(qp.made.send.offset, sizeof(vmci::QueuePairHeader));
    case 6: {  // phases of a whole ring flipped
      auto* head = own.view(qp.made.send).produce();
      for (std::uint32_t i = 0; i < qp.made.send.geometry.produce_slots; ++i)
        reinterpret_cast<RecordHead*>(head + i * slot_bytes)->control ^= control_phase_bit;
      return in.ring(qp.made.doorbell);
    }
    default: {
      auto* const cq = reinterpret_cast<CqShared*>(in.arena() + dice.of(own.cqs).offset);
      cq->consumed = static_cast<std::uint32_t>(dice.nasty());
      cq->arm = static_cast<std::uint32_t>(dice.any());
      cq->hot[dice.below(hot_lanes)] = static_cast<std::uint32_t>(dice.nasty());
    }
  }
}

}  // namespace

void raid_rings(Raid& raid) {
  Intruder in = raid.intrude("rings");
  Property own(in);
  if (!in.attached() || !own.make() || own.add(1 << 20, Property::sealed_file(1 << 20)) == nullptr || own.add(1 << 16, -1) == nullptr)
    return;
  ++raid.attached;
  for (int i = 0; i < 3000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    switch (raid.dice.below(12)) {
      case 0: strike_at_random(raid, in, own); break;
      case 1: case 2: case 3: strike_with_receive(raid, in, own); break;
      case 4: in.doorbell_words().set(raid.dice.below(vmci::ready_members_max)); break;
      case 5: {  // back to life, so that later blows meet a queue pair that works
        OwnedQp& qp = raid.dice.of(own.qps);
        own.change_state(qp, 0);
        const std::size_t index = static_cast<std::size_t>(&qp - own.qps.data());
        constexpr std::size_t peer[] = {1, 0, 3, 2, 4, 6, 5};
        own.connect(qp, own.qps[raid.dice.one_in(4) ? raid.dice.below(own.qps.size()) : peer[index]].made.qpn,
                    static_cast<std::uint8_t>(raid.dice.below(32)));
        break;
      }
      case 6: pretend_to_poll(in, own); break;
      case 7:
        if (raid.dice.one_in(40)) {  // a queue pair goes, and what it was tied to with it
          in.call<Request::destroy_qp>({own.qps.back().made.qp, 0});
          if (own.qps.size() > 2) own.qps.pop_back();
        }
        [[fallthrough]];
      default: strike_with_wqe(raid, own);
    }
  }
}

// Events that nobody reads, and the shared descriptions bent as far as they go.
void raid_events(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in = raid.intrude("events");
  Property own(in);
  if (!in.attached() || !own.make(16) || own.add(1 << 16, Property::sealed_file(1 << 16)) == nullptr) return;
  ++raid.attached;
  for (std::size_t i = 0; i < 4; ++i) {
    ::fcntl(in.descriptor(i), F_SETFL, 0);
    ::fcntl(in.descriptor(i), F_SETPIPE_SZ, 4096);
  }
  for (auto& pipe : own.pipes) ::fcntl(pipe.get(), F_SETPIPE_SZ, 4096), ::fcntl(pipe.get(), F_SETFL, 0);
  ::fcntl(in.socket().fd(), F_SETFL, 0);
  ::fcntl(in.descriptor(2), F_SETFL, O_NONBLOCK);  // the doorbell: filled up without waiting for room
  for (std::uint64_t part = std::uint64_t{1} << 63; part != 0 && dice.one_in(2); part >>= 1)
    while (::write(in.descriptor(2), &part, sizeof(part)) == sizeof(part)) {
    }
  auto* const cq = reinterpret_cast<CqShared*>(in.arena() + own.cqs[0].offset);
  const Memory& memory = own.memories[0];
  const Sge sge{reinterpret_cast<std::uint64_t>(memory.address), 8, memory.key};
  const RemoteOperand remote{sge.address + 64, 0, 0, memory.key, 0};
  in.control().header().creator.waiting = 1;  // every answer writes into the wake pipe
  // Whatever read(2) holds while it waits for memory, what is written there must not wait for.
  std::atomic<bool> over{false};
  UnsuppliedPage nowhere;
  std::vector<std::jthread> readers;
  const auto read_into_nowhere = [&](int pipe) {
    pollfd readable{pipe, POLLIN, 0};
    while (!over)
      if (::poll(&readable, 1, 20) == 1 && ::read(pipe, nowhere.data(), 64) <= 0) return;
  };
  if (nowhere.data() != nullptr && dice.one_in(2)) {
    readers.emplace_back(read_into_nowhere, in.descriptor(3));
    for (auto& pipe : own.pipes) readers.emplace_back(read_into_nowhere, pipe.get());
  }
  for (int i = 0; i < 20000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    cq->arm = static_cast<std::uint32_t>(i) << 2 | arm_next;
    pretend_to_poll(in, own);
    OwnedQp& qp = own.qps[dice.below(2)];
    own.send(qp, {WrOpcode::rdma_write, wr_signaled, 1}, std::span(&sge, 1), remote);
    if (i % 8 == 7) {  // an asynchronous event each time
      own.send(qp, {static_cast<WrOpcode>(0), 0, 1023}, std::span(&sge, 1), remote, 1);
      own.change_state(qp, 0);
      own.connect(qp, own.qps[&qp == own.qps.data() ? 1 : 0].made.qpn);
    }
  }
  over = true;
  nowhere.supply();
}

}  // namespace vrdma::hostile
