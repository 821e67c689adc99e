#include "vmkernel_svc/machines/run_state.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "vmkernel_svc/machines/monitor.hpp"

namespace vrdma::svc {
namespace {

TEST_CASE("a machine stands still from STOP to RESUME") {
  RunState state;
  CHECK(!state.still());
  state.stopped();
  CHECK(state.still());
  CHECK(!state.saved());
  state.resumed();
  CHECK(!state.still());
}

TEST_CASE("a machine that has suspended itself stands still until it wakes up, also where it was stopped meanwhile, and may be saved so") {
  RunState state;
  SUBCASE("and wakes up") {
    state.suspended();
    CHECK(state.still());
    CHECK(state.woken());
    CHECK(!state.still());
  }
  SUBCASE("as the service finds out when it begins") {
    state.ran_as("suspended");
    CHECK(state.still());
    CHECK(state.woken());
    CHECK(!state.still());
  }
  SUBCASE("and is stopped") {
    state.suspended();
    state.stopped();
    CHECK(!state.woken());
    CHECK(state.still());
    state.resumed();
    CHECK(!state.still());
  }
  SUBCASE("and is saved") {
    state.suspended();
    state.frozen(500);
    state.migrated("setup", 1000);
    state.migrated("active", 2000);
    state.migrated("completed", 3000);
    CHECK(state.saved());
    CHECK(state.woken());
    state.resumed();  // as the port does then
    CHECK(!state.still());
    CHECK(!state.saved());
  }
}

TEST_CASE("a machine is frozen while it is saved, runs or not, and saved once it is completed") {
  RunState state;
  state.migrated("setup", 1000);
  CHECK(state.still());
  state.frozen(1500);
  state.migrated("active", 2000);
  state.stopped();
  CHECK(!state.saved());
  state.migrated("completed", 3000);
  CHECK(state.saved());
  SUBCASE("unless it goes on where it is") {
    state.resumed();
    CHECK(!state.still());
    CHECK(!state.saved());
  }
  SUBCASE("until another QEMU comes") {
    state.qemu_came();
    CHECK(!state.saved());
  }
}

TEST_CASE("a migration that fails leaves a machine that goes on, or stands as still as it did") {
  for (const char* end : {"failed", "cancelled"}) {
    RunState state;
    state.migrated("setup", 1000);
    state.migrated(end, 2000);
    CHECK(!state.still());
    state.stopped();
    state.migrated("setup", 3000);
    state.migrated(end, 4000);
    CHECK(state.still());
    CHECK(!state.saved());
  }
}

TEST_CASE("a machine that runs again while it is saved stays frozen, and was saved in the background only") {
  RunState state;
  state.stopped();
  state.frozen(500);
  state.migrated("setup", 1000);
  state.migrated("active", 2000);
  state.resumed();
  CHECK(state.still());
  state.migrated("completed", 3000);
  CHECK(!state.still());
  CHECK(!state.saved());
}

TEST_CASE("pages that went out before the machine was frozen spoil what is saved") {
  for (const std::uint64_t frozen_at_us : {0, 2001}) {
    RunState state;
    state.migrated("setup", 1000);
    if (frozen_at_us != 0) state.frozen(frozen_at_us);
    state.migrated("active", 2000);
    state.stopped();
    state.migrated("completed", 3000);
    CHECK(!state.saved());
    CHECK(state.unsound());
    state.migrated("setup", 4000);  // the next one may be better
    state.frozen(2001);
    state.migrated("active", 5000);
    state.migrated("completed", 6000);
    CHECK(state.saved());
  }
}

TEST_CASE("what QEMU answers once the machine is frozen tells more than the clock") {
  RunState state;
  state.stopped();
  state.frozen(5000);
  const auto saved_at = [&](std::uint64_t at_us) {
    state.migrated("setup", at_us);
    state.migrated("active", at_us);
    state.migrated("completed", at_us);
    return state.saved();
  };
  SUBCASE("the clock was put back since") {
    CHECK(!saved_at(1000));
    state.answered();
    CHECK(saved_at(1000));
  }
  SUBCASE("the clock was set while it was saved") {
    state.migrated("setup", 6000);
    state.clock_was_set();
    state.migrated("active", 6000);
    state.migrated("completed", 6000);
    CHECK(state.unsound());
    CHECK(saved_at(7000));  // the next one is judged by itself
  }
  SUBCASE("the answer comes after the first page") {
    state.migrated("setup", 1000);
    state.migrated("active", 1000);
    state.answered();
    state.migrated("completed", 1000);
    CHECK(state.unsound());
  }
  SUBCASE("the answer is to what was asked before it ran again") {
    state.answered();
    state.resumed();
    state.thawed();
    state.stopped();
    state.answered();
    CHECK(!saved_at(1000));
    state.frozen(5000);
    CHECK(!saved_at(1000));
  }
}

TEST_CASE("a QEMU that loads a machine saves none") {
  RunState state;
  state.ran_as("inmigrate");
  CHECK(state.loading());
  for (const char* status : {"setup", "active"}) state.migrated(status, 1000);
  CHECK(!state.still());
  state.resumed();
  CHECK(!state.loading());
  state.migrated("completed", 2000);  // said after RESUME
  state.stopped();
  CHECK(!state.saved());
  RunState early;
  early.migrated("setup", 1000);  // heard before the answer
  early.ran_as("inmigrate");
  CHECK(!early.still());
  RunState fresh;
  fresh.ran_as("running");
  CHECK(!fresh.loading());
}

std::vector<MonitorNews> heard(std::string_view line) {
  std::vector<MonitorNews> news;
  Monitor::understand(line, [&](const MonitorNews& one) { news.push_back(one); });
  return news;
}

TEST_CASE("the monitor's lines are understood, and whatever else comes is left out") {
  const auto migration = heard(R"({"timestamp": {"seconds": 1795315572, "microseconds": 379032}, "event": "MIGRATION", "data": {"status": "setup"}})");
  REQUIRE(migration.size() == 1);
  CHECK(migration[0].kind == MonitorNews::Kind::migration);
  CHECK(migration[0].text == "setup");
  CHECK(migration[0].at_us == 1795315572379032);
  const auto state = heard(R"({"return": {"status": "inmigrate", "singlestep": false, "running": false}, "id": "vrdma-run-state"})");
  REQUIRE(state.size() == 1);
  CHECK(state[0].kind == MonitorNews::Kind::run_state);
  CHECK(state[0].text == "inmigrate");
  const auto answer = heard(R"({"return": {"status": "paused"}, "id": "vrdma-asked-17"})");
  REQUIRE(answer.size() == 1);
  CHECK(answer[0].kind == MonitorNews::Kind::answer);
  CHECK(answer[0].text == "17");
  CHECK(heard(R"({"event": "STOP"})").at(0).kind == MonitorNews::Kind::stopped);
  CHECK(heard(R"({"event": "RESUME", "timestamp": 7})").at(0).kind == MonitorNews::Kind::resumed);
  CHECK(heard(R"({"event": "SUSPEND"})").at(0).kind == MonitorNews::Kind::suspended);
  CHECK(heard(R"({"event": "WAKEUP"})").at(0).kind == MonitorNews::Kind::woken);
  CHECK(heard(R"({"event": "RESET", "timestamp": {"seconds": -1, "microseconds": "x"}})").at(0).kind == MonitorNews::Kind::reset);
  for (const char* line : {"", "no JSON", "7", "[]", "{}", R"({"event": 7})", R"({"event": "MIGRATION"})", R"({"event": "MIGRATION", "data": []})",
                           R"({"return": {"status": "running"}})", R"({"id": "vrdma-run-state", "error": {}})", R"({"id": "vrdma-run-state", "return": []})"})
    CHECK(heard(line).empty());
}

}  // namespace
}  // namespace vrdma::svc
