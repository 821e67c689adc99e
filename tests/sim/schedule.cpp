#include "tests/sim/schedule.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace vrdma::sim {

using test::Completion;
using test::ReceiveSpec;
using test::SendSpec;
using test::TestPorts;

namespace {
constexpr std::uint32_t depth = 16;
constexpr std::uint32_t outstanding_max = 12;
constexpr std::uint32_t slot_count = 8;
}  // namespace

// --- the world ------------------------------------------------------------------------------------------------

Schedule::Schedule(std::uint64_t seed, Planted planted) : random_(seed), planted_(planted) {
  calm_ = random_.chance(40);
  strict_ = calm_ || random_.chance(75);  // otherwise queue pairs are reset while copies are under way, and memory is anybody's
  checker_.calm = calm_;
  checker_.contents = strict_;
  const std::uint32_t kind = random_.below(100);
  payload_max_ = kind < 3 ? 200'000 : kind < 30 ? 3'000 : 300;
  slow_percent_ = random_.chance(40) ? 0 : random_.chance(50) ? 10 : 60;
  steps_ = kind < 3 ? 300 : random_.between(200, 900);

  world_.ports.atomics_pend = slow_percent_ != 0 && random_.chance(50);
  world_.ports.copy_pends = [this](const TestPorts::Qp&, std::uint64_t) { return slow_percent_ != 0 && random_.chance(slow_percent_); };
  world_.ports.on_completion = [this](TestPorts::Qp& qp, Direction direction, const Cqe& cqe, CqeState state) {
    for (std::uint32_t i = 0; i < nodes_.size(); ++i)
      if (nodes_[i].qp != nullptr && &nodes_[i].qp->core == &qp) checker_.published(i, direction, cqe, state);
  };

  host_count_ = random_.chance(50) ? 1 : random_.between(2, 3);
  if (random_.chance(30)) hosts_.room_bytes = random_.between(1, 4) * 1000;
  const std::uint32_t guest_count = random_.between(host_count_, 4);
  for (std::uint32_t i = 0; i < guest_count; ++i) {
    Guest guest{};
    guest.pd = i + 1;
    guest.lid = static_cast<std::uint16_t>(i + 1);
    guest.host = i < host_count_ ? i : random_.below(host_count_);
    hosts_.host_of_lid[guest.lid] = guest.host;
    guest.source = &world_.memory(payload_max_ * 2 + 4096, guest.pd);
    std::uint64_t word = random_.next();
    for (std::size_t at = 0; at < guest.source->bytes.size(); ++at) {
      if (at % 8 == 0) word = word * 6364136223846793005u + 1442695040888963407u;
      guest.source->bytes[at] = static_cast<std::byte>(word >> (8 * (at % 8)));
    }
    guest.counter = &world_.memory(8, guest.pd);
    guest.counter_start = std::uint64_t{i} << 32;
    std::memcpy(guest.counter->bytes.data(), &guest.counter_start, 8);
    if (random_.chance(30)) {
      guest.srq = std::make_unique<test::TestSrq>(slot_count, guest.pd);
      guest.srq_slots = std::make_unique<Slots>(world_.memory(Slots::bytes_for(slot_count, payload_max_ + grh_bytes), guest.pd),
                                                slot_count, payload_max_ + grh_bytes);
      checker_.shared.emplace_back();
    } else {
      checker_.shared.emplace_back();
    }
    guests_.push_back(std::move(guest));
  }
  group_[0] = 0xff;
  const std::uint32_t pairs = random_.between(1, kind < 3 ? 2 : 4);
  for (std::uint32_t i = 0; i < pairs; ++i) {
    const QpType type = random_.chance(70) ? QpType::rc : QpType::uc;
    const std::uint32_t a = add_node(type, random_.below(guest_count), random_.chance(50));
    // Now and then one that talks to itself.
    const std::uint32_t b = random_.chance(5) ? a : add_node(type, random_.below(guest_count), random_.chance(50));
    join(a, b);
    connect(a, b);
  }
  for (std::uint32_t i = random_.below(4); i > 0; --i) {
    const std::uint32_t node = add_node(QpType::ud, random_.below(guest_count), random_.chance(50));
    bring_up(node, 0, 0, 5);
    if (random_.chance(50)) world_.ports.groups[group_].push_back(&nodes_[node].qp->core);
  }
}

std::uint32_t Schedule::add_node(QpType type, std::uint32_t guest_index, bool uses_srq) {
  Guest& guest = guests_[guest_index];
  Node node{};
  node.type = type;
  node.guest = guest_index;
  node.uses_srq = uses_srq && guest.srq != nullptr;
  node.qp = &world_.add(type, guest.pd, guest.lid, node.uses_srq ? &guest.srq->core : nullptr, depth);
  node.qp->core.port.host = guest.host;
  const auto slots = [&](std::uint32_t bytes) {
    return std::make_unique<Slots>(world_.memory(Slots::bytes_for(slot_count, bytes), guest.pd), slot_count, bytes);
  };
  node.inbox = slots(payload_max_ + grh_bytes);
  node.answers = slots(std::max(payload_max_, 8u));
  node.outside = slots(payload_max_);
  nodes_.push_back(std::move(node));
  checker_.queues.push_back({});
  checker_.queues.back().type = type;
  return static_cast<std::uint32_t>(nodes_.size() - 1);
}

void Schedule::join(std::uint32_t a, std::uint32_t b) { nodes_[a].peer = b, nodes_[b].peer = a; }

bool Schedule::bring_up(std::uint32_t index, std::uint32_t psn_in, std::uint32_t psn_out, std::uint32_t mtu) {
  Node& node = nodes_[index];
  QpAttributes a{};
  if (node.type != QpType::ud)
    a = test::connection(nodes_[node.peer].qp->core.qpn.value, guests_[nodes_[node.peer].guest].lid);
  else
    a = test::connection(0, 0);
  a.rq_psn = psn_in, a.sq_psn = psn_out, a.path_mtu = mtu;
  a.timeout = static_cast<std::uint8_t>(random_.between(8, 14));
  a.retry_cnt = static_cast<std::uint8_t>(random_.below(8));
  a.rnr_retry = static_cast<std::uint8_t>(calm_ ? 7 : random_.below(8));
  a.min_rnr_timer = static_cast<std::uint8_t>(random_.between(1, 14));
  for (const QpState next : {QpState::init, QpState::rtr, QpState::rts})
    if (!world_.modify(*node.qp, next, a)) return false;
  return true;
}

void Schedule::connect(std::uint32_t a, std::uint32_t b) {
  // Mostly connections have them in common: what of an earlier one is still on its way between hosts is not heard for another reason.
  const auto psn = [&] { return (0xfffff0 + (random_.chance(20) ? random_.below(0x10000) : 0)) & psn_mask; };
  const std::uint32_t ab = psn(), ba = a == b ? ab : psn(), mtu = random_.between(1, 5);
  if (!bring_up(a, ba, ab, mtu) || (a != b && !bring_up(b, ab, ba, mtu))) Checker::fail("a connection was refused");
}

// --- posting --------------------------------------------------------------------------------------------------

std::uint32_t Schedule::size() {
  const std::uint32_t kind = random_.below(10);
  return kind == 0 ? 0 : kind == 1 ? random_.below(9) : kind < 8 ? random_.below(std::min(payload_max_, 300u) + 1) : random_.below(payload_max_ + 1);
}

std::vector<Sge> Schedule::cut(const test::TestWorld::Memory& memory, std::uint64_t offset, std::uint32_t bytes, std::uint32_t parts_max) {
  std::vector<Sge> sges;
  for (std::uint32_t parts = random_.between(1, parts_max); parts > 1 && bytes > 0; --parts) {
    const std::uint32_t part = random_.below(bytes + 1);
    sges.push_back(memory.sge(offset, part));
    offset += part, bytes -= part;
  }
  sges.push_back(memory.sge(offset, bytes));
  return sges;
}

std::vector<Sge> Schedule::gather(Guest& guest, std::uint32_t bytes, std::vector<std::byte>& payload) {
  std::vector<Sge> sges;
  for (std::uint32_t parts = random_.chance(70) ? 1 : random_.between(2, 5); parts > 0; --parts) {
    const std::uint32_t part = parts == 1 ? bytes : random_.below(bytes + 1);
    const std::uint32_t at = random_.below(payload_max_);
    sges.push_back(guest.source->sge(at, part));
    payload.insert(payload.end(), guest.source->bytes.begin() + at, guest.source->bytes.begin() + at + part);
    bytes -= part;
  }
  return sges;
}

void Schedule::post_send(std::uint32_t index) {
  Node& node = nodes_[index];
  auto& queue = checker_.queues[index];
  const QpState state = node.qp->core.state;
  if (state < QpState::rts || queue.sends.size() >= outstanding_max || !node.qp->send_writer.has_room(send_wqe_slots_max)) return;
  Guest& guest = guests_[node.guest];
  Message message{};
  message.sender = index;
  SendSpec spec;
  PostedSend posted{};
  const std::uint32_t kind = node.type == QpType::ud ? 0 : random_.below(node.type == QpType::rc ? 100 : 70);
  if (kind < 40) {
    message.opcode = WrOpcode::send_with_imm;
    const std::uint32_t bytes = node.type == QpType::ud ? std::min(size(), limits::mtu_max_bytes) : size();
    if (bytes <= inline_bytes_max && random_.chance(30)) {
      gather(guest, bytes, message.payload);
      spec.flags |= wr_inline;
      spec.inline_data = message.payload;
    } else {
      spec.sges = gather(guest, bytes, message.payload);
    }
  } else if (kind < 70) {
    message.opcode = random_.chance(50) ? WrOpcode::rdma_write : WrOpcode::rdma_write_with_imm;
    posted.far = nodes_[node.peer].outside.get();
    posted.far_slot = posted.far->take();
    if (posted.far_slot < 0) return;
    spec.sges = gather(guest, size(), message.payload);
    spec.remote = posted.far->memory().remote(posted.far->offset(posted.far_slot));
  } else {
    posted.near = node.answers.get();
    posted.near_slot = posted.near->take();
    if (posted.near_slot < 0) return;
    const std::uint64_t near_offset = posted.near->offset(posted.near_slot);
    Guest& far = guests_[nodes_[node.peer].guest];
    if (kind < 90) {
      message.opcode = WrOpcode::rdma_read;
      const std::uint32_t bytes = size(), at = random_.below(payload_max_);
      spec.remote = far.source->remote(at);
      spec.sges = cut(posted.near->memory(), near_offset, bytes, 3);
      message.payload.assign(far.source->bytes.begin() + at, far.source->bytes.begin() + at + bytes);
    } else {
      message.opcode = WrOpcode::atomic_fetch_and_add;
      spec.remote = far.counter->remote(0, 1);
      ++far.adds_posted;
      spec.sges = cut(posted.near->memory(), near_offset, 8, 2);
    }
  }
  spec.wr_id = posted.wr_id = next_wr_id_++;
  spec.opcode = message.opcode;
  posted.signaled = random_.chance(60) || queue.sends.size() + 2 >= outstanding_max;
  if (!posted.signaled) spec.flags = static_cast<std::uint8_t>(spec.flags & ~wr_signaled);
  posted.message = static_cast<std::uint32_t>(checker_.messages.size());
  spec.imm = posted.message;
  if (node.type == QpType::ud) {
    const bool multicast = random_.chance(30);
    const Node& target = nodes_[random_.below(static_cast<std::uint32_t>(nodes_.size()))];
    if (!multicast && target.qp == nullptr) return;
    spec.ud.remote_qpn = multicast ? multicast_qpn.value : target.qp->core.qpn.value;
    spec.ud.dlid = multicast ? 0xc000 : target.qp->core.port.lid;
    if (multicast) std::memcpy(spec.ud.dgid, group_.data(), 16);
    spec.ud.remote_qkey = random_.chance(5) ? 0x4444 : 0x1111;
    spec.ud.route_flags = random_.chance(50) ? route_global : 0;
  }
  checker_.messages.push_back(std::move(message));
  node.qp->post(spec);
  posted.position = node.qp->send_writer.position();
  queue.sends.push_back(posted);
}

void Schedule::post_receive(std::uint32_t index) {
  Node& node = nodes_[index];
  Guest& guest = guests_[node.guest];
  if (node.uses_srq) return post_shared_receive(guest);
  auto& queue = checker_.queues[index];
  if (node.qp->core.state == QpState::reset || queue.receives.size() >= slot_count) return;
  const int slot = node.inbox->take();
  if (slot < 0) return;
  const std::uint32_t room = calm_ || random_.chance(97) ? node.inbox->slot_size() : random_.below(60);
  const ReceiveSpec spec{next_wr_id_++, cut(node.inbox->memory(), node.inbox->offset(slot), room, 4)};
  queue.receives.push_back({spec.wr_id, node.inbox.get(), slot});
  node.qp->post(spec);
}

void Schedule::post_shared_receive(Guest& guest) {
  auto& shared = checker_.shared[guest.pd - 1];
  const int slot = shared.outstanding.size() < slot_count ? guest.srq_slots->take() : -1;
  if (slot < 0) return;
  const ReceiveSpec spec{next_wr_id_++,
                         cut(guest.srq_slots->memory(), guest.srq_slots->offset(slot), guest.srq_slots->slot_size(), 4)};
  shared.outstanding[spec.wr_id] = {spec.wr_id, guest.srq_slots.get(), slot};
  guest.srq->post(spec);
}

// --- running --------------------------------------------------------------------------------------------------

// Records arrive, or what arrived earlier is run.
void Schedule::run_network() {
  if (random_.chance(50)) {
    const std::uint32_t from = random_.below(host_count_), to = random_.below(host_count_);
    if (from != to) hosts_.deliver(from, to, random_.between(1, 6));
    return;
  }
  hosts_.for_each_stand_in([&](auto& stand_in) {
    if (random_.chance(50)) hosts_.run(stand_in);
  });
}

void Schedule::run_one() {
  if (host_count_ > 1 && random_.chance(60)) return run_network();
  const std::uint32_t first = random_.below(static_cast<std::uint32_t>(nodes_.size()));
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    Node& node = nodes_[(first + i) % nodes_.size()];
    if (node.qp == nullptr || node.dead) continue;
    auto& core = node.qp->core;
    if (!core.port.runnable && !random_.chance(3)) continue;  // now and then one that nobody rang for
    if (planted_ == Planted::lost_wake_up && core.port.runnable && random_.chance(2)) {
      node.dead = true;
      core.port.runnable = false;
      return;
    }
    Budget budget{random_.chance(50) ? random_.between(1, 2000) : 200'000, static_cast<std::int32_t>(random_.between(1, 4))};
    const bool was = core.port.runnable;
    core.port.runnable = false;
    const Progress progress = world_.engine.run(core, budget);
    core.port.runnable |= progress == Progress::worked;
    if (!was && progress == Progress::worked) core.port.runnable = true;
    return;
  }
}

void Schedule::finish_some_copy() {
  auto& ports = world_.ports;
  if (ports.jobs.empty()) return;
  const std::size_t which = random_.below(static_cast<std::uint32_t>(ports.jobs.size()));
  if (!ports.jobs[which]->begun && random_.chance(50)) ports.begin_copy(which);
  else ports.finish_copy(which);
}

template <class See>
void Schedule::for_each_core(See&& see) {
  for (Node& node : nodes_)
    if (node.qp != nullptr && !node.dead) see(node.qp->core);
  hosts_.for_each_stand_in([&](auto& stand_in) { see(stand_in.core); });
}

std::uint64_t Schedule::next_timer() {
  std::uint64_t next = ~std::uint64_t{0};
  for_each_core([&](auto& core) {
    if (core.port.wake_ns != 0) next = std::min(next, core.port.wake_ns);
  });
  return next;
}

void Schedule::fire_timers() {
  for_each_core([&](auto& core) {
    if (core.port.wake_ns == 0 || core.port.wake_ns > world_.ports.time_ns) return;
    core.port.wake_ns = 0;
    core.port.runnable = true;
  });
}

void Schedule::let_time_pass() {
  const std::uint64_t next = next_timer();
  std::uint64_t ns = random_.between(1, 20'000);
  if (!calm_ && next != ~std::uint64_t{0} && next > world_.ports.time_ns && random_.chance(50)) ns = next - world_.ports.time_ns;
  // Where contents are checked no copy lasts so long that anybody gives up waiting for it.
  if (strict_ && ns > 20'000)
    while (!world_.ports.jobs.empty()) finish_some_copy();
  world_.ports.time_ns += ns;
  fire_timers();
}

void Schedule::poll(std::uint32_t index) {
  Node& node = nodes_[index];
  if (node.qp == nullptr) return;
  for (const Direction direction : {Direction::receive, Direction::send}) {
    for (std::uint32_t limit = random_.between(1, 8); limit > 0; --limit) {
      const auto completion = node.qp->poll(direction);
      if (!completion) break;
      count_.errors += completion->status != WcStatus::success;
      count_.flushes += completion->status == WcStatus::wr_flush_err;
      if (planted_ == Planted::lost_completion && random_.chance(1)) continue;
      if (direction == Direction::send) {
        ++count_.sends;
        checker_.send_polled(index, *completion);
        if (planted_ == Planted::doubled_completion && random_.chance(1)) checker_.send_polled(index, *completion);
      } else {
        ++count_.receives;
        const auto& receives = checker_.queues[index].receives;
        if (planted_ == Planted::flipped_byte && !receives.empty() && completion->byte_len > 41 && random_.chance(2))
          receives.front().slots->bytes(receives.front().slot)[41] ^= std::byte{1};
        checker_.receive_polled(index, node.uses_srq ? static_cast<int>(node.guest) : -1, *completion);
      }
    }
  }
}

// --- one schedule ---------------------------------------------------------------------------------------------

void Schedule::step() {
  const std::uint32_t index = random_.below(static_cast<std::uint32_t>(nodes_.size()));
  const std::uint32_t what = random_.below(100);
  const bool there = nodes_[index].qp != nullptr;
  if (what < 20) {
    if (there) post_send(index);
  } else if (what < 40) {
    if (there) post_receive(index);
  } else if (what < 70) {
    run_one();
  } else if (what < 80) {
    finish_some_copy();
  } else if (what < 90) {
    poll(index);
  } else if (what < 97 || calm_) {
    let_time_pass();
  } else {
    go_wrong();
  }
  if (planted_ == Planted::stray_write && random_.chance(1)) {
    auto& memory = nodes_[index].inbox->memory();
    memory.bytes[Slots::zone_bytes - 1] = std::byte{0};
  }
  if (planted_ == Planted::late_write && random_.chance(5))
    for (std::uint32_t slot = 0; slot < slot_count; ++slot) nodes_[index].inbox->bytes(static_cast<int>(slot))[0] ^= std::byte{1};
}

void Schedule::poll_all() {
  for (std::uint32_t i = 0; i < nodes_.size(); ++i)
    for (int again = 0; again < 16; ++again) poll(i);
}

// Everybody's copies come to an end, records arrive, timers go off; nobody who is not runnable is run.
void Schedule::run_until_quiet(std::uint64_t ns) {
  slow_percent_ = 0;
  const std::uint64_t until = world_.ports.time_ns + ns;
  for (;;) {
    while (!world_.ports.jobs.empty()) world_.ports.finish_copy(0);
    for (bool more = true; more;) {
      more = false;
      for (Node& node : nodes_) {
        if (node.qp == nullptr || node.dead || !node.qp->core.port.runnable) continue;
        Budget budget{1 << 20, 64};
        node.qp->core.port.runnable = false;
        if (world_.engine.run(node.qp->core, budget) == Progress::worked) node.qp->core.port.runnable = true;
        more = true;
      }
      for (std::uint32_t from = 0; from < host_count_; ++from)
        for (std::uint32_t to = 0; to < host_count_; ++to)
          if (hosts_.anything_on_the_way(from, to)) hosts_.deliver(from, to, 64), more = true;
      more |= hosts_.run_stand_ins();
    }
    poll_all();
    if (!world_.ports.jobs.empty()) continue;
    const std::uint64_t next = std::max(next_timer(), world_.ports.time_ns);
    if (next >= until) break;
    world_.ports.time_ns = next;
    fire_timers();
  }
  world_.ports.time_ns = until;
}

void Schedule::drain() {
  for (std::uint32_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].qp != nullptr && nodes_[i].qp->core.state == QpState::sqd) world_.modify(*nodes_[i].qp, QpState::rts, {});
  // What stays broken is found out: a host that is silent for longer than all retries take is given up.
  for (std::uint32_t from = 0; from < host_count_; ++from)
    for (std::uint32_t to = 0; to < host_count_; ++to)
      if (random_.chance(70)) hosts_.heal(from, to);
  // As long as somebody waits for a receive, one is posted; a calm schedule ends with everything delivered.
  for (int round = 0; round < 40; ++round) {
    for (std::uint32_t i = 0; i < nodes_.size(); ++i)
      if (nodes_[i].qp != nullptr)
        for (int each = 0; each < 8; ++each) post_receive(i);
    run_until_quiet(400'000'000);  // beyond the longest RNR timer used
    bool left = false;
    for (std::uint32_t i = 0; i < nodes_.size(); ++i)
      for (const PostedSend& send : checker_.queues[i].sends) left |= nodes_[i].qp != nullptr && send.signaled;
    if (!left) return;
  }
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].qp == nullptr) continue;
    for (const PostedSend& send : checker_.queues[i].sends)
      if (send.signaled)
        Checker::fail("queue pair " + std::to_string(i) + " is stuck: a send neither completes nor fails (state " +
                      std::to_string(static_cast<int>(nodes_[i].qp->core.state)) + ")");
  }
}

void Schedule::tear_down() {
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].qp == nullptr) continue;
    world_.modify(*nodes_[i].qp, QpState::err, {});
    // Its completion accounts for the unsignalled ones before it.
    PostedSend posted{};
    posted.wr_id = next_wr_id_++;
    posted.signaled = true;
    SendSpec spec{.wr_id = posted.wr_id};
    nodes_[i].qp->post(spec);
    posted.position = nodes_[i].qp->send_writer.position();
    checker_.queues[i].sends.push_back(posted);
  }
  checker_.calm = false;
  run_until_quiet(2'000'000'000);
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].qp == nullptr) continue;
    if (!checker_.queues[i].sends.empty()) Checker::fail("a send was neither completed nor flushed");
    if (!nodes_[i].uses_srq && !checker_.queues[i].receives.empty()) Checker::fail("a receive was neither completed nor flushed");
    if (nodes_[i].qp->core.serves != nullptr || nodes_[i].qp->core.accepted_by != nullptr)
      Checker::fail("a queue pair in ERR still has to do with another");
  }
  for (Guest& guest : guests_) {
    if (guest.srq == nullptr) continue;
    const std::uint64_t left = guest.srq->core.port.posted - guest.srq->core.taken;
    if (left != checker_.shared[guest.pd - 1].outstanding.size()) Checker::fail("a shared receive is neither queued nor completed");
  }
  for (Node& node : nodes_) {
    node.inbox->check("receive buffers", strict_);
    node.answers->check("answers", strict_);
    node.outside->check("far memory", false);
  }
  for (Guest& guest : guests_) {
    if (guest.srq_slots) guest.srq_slots->check("shared receive buffers", strict_);
    std::uint64_t word;
    std::memcpy(&word, guest.counter->bytes.data(), 8);
    if (word - guest.counter_start > guest.adds_posted) Checker::fail("a fetch-and-add was carried out twice");
    if (checker_.atomics_seen() != 0 && strict_ && (checker_.old_value_max() >> 32) == (guest.counter_start >> 32) &&
        checker_.old_value_max() >= word)
      Checker::fail("a fetch-and-add returned a value that the word never had");
  }
  for (Node& node : nodes_)
    if (node.qp != nullptr) world_.engine.abandon(node.qp->core);
}

void Schedule::run(Totals& totals) {
  for (std::uint32_t i = 0; i < steps_; ++i) step();
  drain();
  tear_down();
  totals.sends += count_.sends, totals.receives += count_.receives, totals.errors += count_.errors;
  totals.flushes += count_.flushes, totals.steps += steps_, totals.copies += world_.ports.copies, totals.resets += count_.resets;
  totals.cuts += count_.cuts, totals.restarts += count_.restarts;
}

}  // namespace vrdma::sim
