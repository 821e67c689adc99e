// One simulated run: hosts, guests, queue pairs, posters, pollers, slow memory, slow and broken links, time, and what goes wrong, all drawn
// from one seed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/sim/checker.hpp"
#include "vmkernel_svc/engine/test_hosts.hpp"

namespace vrdma::sim {

// Faults that the harness plants to show that the checker would notice.
enum class Planted { none, lost_completion, doubled_completion, flipped_byte, stray_write, late_write, lost_wake_up };

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}
  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>((next() >> 32) * n >> 32); }
  std::uint32_t between(std::uint32_t low, std::uint32_t high) { return low + below(high - low + 1); }
  bool chance(std::uint32_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

struct Totals {
  std::uint64_t sends = 0, receives = 0, errors = 0, flushes = 0, steps = 0, copies = 0, resets = 0, cuts = 0, restarts = 0;
};

class Schedule {
 public:
  Schedule(std::uint64_t seed, Planted planted);
  void run(Totals& totals);  // throws Violation

 private:
  struct Guest {
    std::uint32_t pd;
    std::uint16_t lid;
    std::uint32_t host;
    test::TestWorld::Memory* source;   // never changes: what SENDs and WRITEs send and READs read
    test::TestWorld::Memory* counter;  // fetch-and-add
    std::uint64_t counter_start;
    std::uint64_t adds_posted = 0;     // of 1 each, to that counter
    std::unique_ptr<test::TestSrq> srq;
    std::unique_ptr<Slots> srq_slots;
  };
  struct Node {
    test::TestQp* qp;  // nullptr: destroyed
    QpType type;
    std::uint32_t guest;
    std::uint32_t peer;  // node that it is connected to
    bool uses_srq;
    std::unique_ptr<Slots> inbox, answers, outside;
    bool dead = false;  // planted: never run again
  };

  std::uint32_t add_node(QpType type, std::uint32_t guest, bool uses_srq);
  void join(std::uint32_t a, std::uint32_t b);
  bool bring_up(std::uint32_t node, std::uint32_t psn_in, std::uint32_t psn_out, std::uint32_t mtu);
  void connect(std::uint32_t a, std::uint32_t b);

  void step();
  void post_send(std::uint32_t node);
  void post_receive(std::uint32_t node);
  void post_shared_receive(Guest& guest);
  void run_one();
  void run_network();
  void poll(std::uint32_t node);
  void finish_some_copy();
  void let_time_pass();
  void go_wrong();
  bool may_reset(std::uint32_t node);
  void await_last_steps(const test::TestPorts::Qp& core);
  void reset_pair(std::uint32_t node);
  void replace(std::uint32_t node);
  bool bury(std::uint32_t node);
  void survive(std::uint32_t node);
  void restart(std::uint32_t host);
  void break_link();
  void hide(std::uint32_t node);
  void lose_memory(std::uint32_t node);

  template <class See>
  void for_each_core(See&& see);
  std::uint64_t next_timer();
  void fire_timers();
  void drain();
  void tear_down();
  void run_until_quiet(std::uint64_t ns);
  void poll_all();
  std::vector<Sge> cut(const test::TestWorld::Memory& memory, std::uint64_t offset, std::uint32_t bytes, std::uint32_t parts_max);
  std::vector<Sge> gather(Guest& guest, std::uint32_t bytes_max, std::vector<std::byte>& payload);
  std::uint32_t size();

  Random random_;
  Planted planted_;
  bool calm_, strict_;
  std::uint32_t payload_max_, slow_percent_, steps_, host_count_;
  test::TestWorld world_;
  test::TestHosts hosts_{world_.ports, world_.engine};
  Checker checker_;
  std::vector<Guest> guests_;
  std::vector<Node> nodes_;
  std::vector<std::unique_ptr<Slots>> retired_;
  Gid group_{};
  std::uint64_t next_wr_id_ = 1;
  Totals count_;
};

}  // namespace vrdma::sim
