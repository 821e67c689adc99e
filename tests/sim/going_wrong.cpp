// What goes wrong in a schedule: queue pairs that are reset or die, memory that goes away, links that break, hosts that begin anew.
#include <string>
#include <utility>

#include "tests/sim/schedule.hpp"

namespace vrdma::sim {

using test::TestPorts;

// As the service does before it resets or destroys a queue pair: copies have a while to end, then what others have under way is called off.
bool Schedule::may_reset(std::uint32_t index) {
  if (!strict_) return true;
  auto& core = nodes_[index].qp->core;
  if (Engine<TestPorts>::copies_under_way(core) && random_.chance(50)) return false;
  world_.engine.turn_away_requester(core);
  await_last_steps(core);  // the service answers its owner only then, and nobody is served meanwhile
  return true;
}

// … and after it: what the queue pair itself had under way was called off by that.
void Schedule::await_last_steps(const test::TestPorts::Qp& core) {
  auto& jobs = world_.ports.jobs;
  for (std::size_t i = 0; strict_ && i < jobs.size();) {
    if (jobs[i]->begun && (jobs[i]->of == &core || jobs[i]->receiver == &core)) world_.ports.finish_copy(i);
    else ++i;
  }
}

void Schedule::reset_pair(std::uint32_t index) {
  const std::uint32_t other = nodes_[index].type == QpType::ud ? index : nodes_[index].peer;
  for (const std::uint32_t each : {index, other}) {
    if (nodes_[each].qp == nullptr || !may_reset(each)) return;
    while (nodes_[each].qp->poll(Direction::send)) {}  // completions of a queue pair that is reset are dropped
    while (true) {
      const auto completion = nodes_[each].qp->poll(Direction::receive);
      if (!completion) break;
      checker_.receive_polled(each, nodes_[each].uses_srq ? static_cast<int>(nodes_[each].guest) : -1, *completion);
    }
    if (!world_.modify(*nodes_[each].qp, QpState::reset, {})) Checker::fail("RESET was refused");
    await_last_steps(nodes_[each].qp->core);
    nodes_[each].qp->send_writer.set_freed(nodes_[each].qp->send_writer.position());
    nodes_[each].qp->receive_writer.set_freed(nodes_[each].qp->receive_writer.position());
    checker_.forget(each);
    ++count_.resets;
  }
  if (nodes_[index].type == QpType::ud)
    bring_up(index, 0, 0, 5);
  else
    connect(index, other);
}

// Destroys a queue pair, as when its process dies. False: not now.
bool Schedule::bury(std::uint32_t index) {
  Node& node = nodes_[index];
  if (!may_reset(index)) return false;
  while (node.qp->poll(Direction::send)) {}
  while (true) {
    const auto completion = node.qp->poll(Direction::receive);
    if (!completion) break;
    checker_.receive_polled(index, node.uses_srq ? static_cast<int>(node.guest) : -1, *completion);
  }
  world_.engine.abandon(node.qp->core);
  await_last_steps(node.qp->core);
  for (auto& [gid, members] : world_.ports.groups) std::erase(members, &node.qp->core);
  std::erase_if(world_.qps, [&](const auto& qp) { return qp.get() == node.qp; });
  node.qp = nullptr;
  checker_.forget(index);
  return true;
}

// Who has lost its peer goes on alone for a while: it must find out.
void Schedule::survive(std::uint32_t index) {
  for (std::uint32_t i = 0; i < 30; ++i) {
    if (random_.chance(30)) post_send(index);
    run_one(), finish_some_copy(), let_time_pass(), poll(index);
  }
}

// … and puts a new one in its place.
void Schedule::replace(std::uint32_t index) {
  const Node node = {nullptr, nodes_[index].type, nodes_[index].guest, nodes_[index].peer, false, nullptr, nullptr, nullptr};
  if (node.type == QpType::ud || node.peer == index || !bury(index)) return;
  if (nodes_[node.peer].qp != nullptr && random_.chance(50)) survive(node.peer);
  if (nodes_[node.peer].qp == nullptr || !may_reset(node.peer)) return;
  const std::uint32_t fresh = add_node(node.type, node.guest, random_.chance(50));
  join(fresh, node.peer);
  reset_pair(node.peer);
}

// The service of a host ends, and with it all of its guests; another one takes its place. Connections within the host are not made anew.
void Schedule::restart(std::uint32_t host) {
  std::vector<std::uint32_t> survivors;
  for (std::uint32_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].qp == nullptr || guests_[nodes_[i].guest].host != host) continue;
    if (!bury(i)) return;
    const std::uint32_t peer = nodes_[i].peer;
    if (nodes_[i].type != QpType::ud && nodes_[peer].qp != nullptr && guests_[nodes_[peer].guest].host != host) survivors.push_back(peer);
  }
  hosts_.restart(host);
  ++count_.restarts;
  for (const std::uint32_t survivor : survivors) {
    if (random_.chance(50)) survive(survivor);
    if (nodes_[survivor].qp == nullptr || !may_reset(survivor)) continue;
    const Node& gone = nodes_[nodes_[survivor].peer];
    const std::uint32_t fresh = add_node(gone.type, gone.guest, random_.chance(50));
    join(fresh, survivor);
    reset_pair(survivor);
  }
}

// One direction of a link, as firewalls and broken cables have it, or what was broken heals.
void Schedule::break_link() {
  const std::uint32_t from = random_.below(host_count_), to = random_.below(host_count_);
  if (from == to) return;
  if (hosts_.link(from, to).cut_since_ns != 0) return hosts_.heal(from, to);
  hosts_.cut(from, to);
  ++count_.cuts;
}

// Who is on the same host as its peer is out of its reach for a moment: another path, no common partition, a machine that stands still.
void Schedule::hide(std::uint32_t index) {
  const Node& peer = nodes_[nodes_[index].peer];
  if (nodes_[index].type == QpType::ud || nodes_[index].peer == index || peer.qp == nullptr || guests_[peer.guest].host != guests_[nodes_[index].guest].host) return;
  auto& port = nodes_[index].qp->core.port;
  const std::uint16_t lid = std::exchange(port.lid, std::uint16_t{0xbfff});
  for (std::uint32_t i = random_.between(1, 8); i > 0; --i) {
    peer.qp->core.port.runnable = true;
    run_one(), finish_some_copy();
    if (random_.chance(20)) let_time_pass();
  }
  port.lid = lid;
  peer.qp->core.port.runnable = true;
}

void Schedule::lose_memory(std::uint32_t index) {
  Node& node = nodes_[index];
  Guest& guest = guests_[node.guest];
  test::TestWorld::Memory* const all[] = {&node.inbox->memory(), &node.answers->memory(), &node.outside->memory(), guest.source};
  test::TestWorld::Memory& memory = *all[random_.below(4)];
  auto& regions = world_.ports.regions;
  const auto found = regions.find(memory.key);
  if (found == regions.end()) return;
  const test::TestRegion region = found->second;
  if (!world_.ports.remove_region(memory.key)) return;  // copies are under way on it
  memory.key = world_.ports.add_region({region.pd, region.access, region.iova, region.bytes, region.memory, 0, 0});
}

void Schedule::go_wrong() {
  const std::uint32_t index = random_.below(static_cast<std::uint32_t>(nodes_.size()));
  if (nodes_[index].qp == nullptr) return;
  auto& qp = *nodes_[index].qp;
  switch (random_.below(host_count_ > 1 ? 12 : 8)) {
    case 0:
      world_.modify(qp, QpState::err, {});
      break;
    case 1:
    case 2:
      reset_pair(index);
      break;
    case 3:
      if (random_.chance(50)) replace(index);
      break;
    case 4:
      lose_memory(index);
      break;
    case 5:
      if (qp.core.state == QpState::rts)
        world_.modify(qp, QpState::sqd, {});
      else if (qp.core.state == QpState::sqd)
        world_.modify(qp, QpState::rts, {});
      break;
    case 7:
      hide(index);
      break;
    case 8:
    case 9:
    case 10:
      break_link();
      break;
    case 11:
      if (random_.chance(30)) restart(random_.below(host_count_));
      break;
    default:
      if (qp.core.state == QpState::sqe && qp.core.send_ring.empty() && checker_.queues[index].sends.empty()) {
        if (!world_.modify(qp, QpState::rts, {})) Checker::fail("SQE to RTS was refused");
        checker_.queues[index].failed = false;
      }
  }
}

}  // namespace vrdma::sim
