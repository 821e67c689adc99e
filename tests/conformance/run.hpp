// What a test body is given, how tests register themselves, and how they wait.
//
//     CONFORMANCE(WriteThenSendIsVisibleInOrder, "WR-12 WR-13") {
//       ...                              // the same body runs in both processes; run.a() tells which one this is
//     }
//     CONFORMANCE(PdWithAnMrIsBusy, "OBJ-10", .solo = true) { ... }    // one process only
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/check.hpp"
#include "tests/conformance/peer.hpp"
#include "tests/conformance/rng.hpp"

namespace vrdma::conformance {

struct Settings {
  std::string device;  // empty: the first one
  int port = 1;
  int gid_index = -1;  // -1: chosen by link layer
  double timeout_scale = 1.0;
};

class Run {
 public:
  Run(bool is_a, std::uint64_t seed_value, const Settings& settings_value, Peer& peer_value)
      : peer(peer_value), settings(settings_value), seed(seed_value), rng(seed_value), is_a_(is_a) {}

  bool a() const { return is_a_; }
  bool b() const { return !is_a_; }

  Peer& peer;
  const Settings& settings;
  const std::uint64_t seed;
  Rng rng;  // the same sequence in both processes

 private:
  bool is_a_;
};

struct TestOptions {
  bool solo = false;   // no second process
  bool slow = false;   // only with --slow
  int timeout_s = 60;  // then both processes are killed and the test has failed
};

struct Test {
  const char* name;
  const char* items;  // ids of items.txt, separated by spaces
  const char* file;
  void (*body)(Run&);
  TestOptions options;
};

std::vector<Test>& registry();
struct Registrar {
  explicit Registrar(const Test& test) { registry().push_back(test); }
};

// Says where this process is, for the report of a hang; and the deadline that every wait obeys.
void mark_place(const char* file, int line, const char* what);

class Deadline {
 public:
  explicit Deadline(double seconds = 20.0);
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }
  int left_ms() const;

 private:
  std::chrono::steady_clock::time_point end_;
};

// Gives the processor away and ends this process if the other one has ended.
void pause_and_check_peer();

// Waits for a condition under the watchdog; `what` names it in the report.
template <class Condition>
void wait_until(const char* what, Condition condition, double seconds = 20.0,
                Where where = Where::current()) {
  mark_place(where.file_name(), where.line(), what);
  const Deadline deadline(seconds);
  while (!condition()) {
    if (deadline.passed()) fail(where.file_name(), where.line(), text("gave up waiting: ", what));
    pause_and_check_peer();
  }
}

// For rules about time itself ("never completes before ..."): keeps checking `holds` for that long. Not a synchronisation.
template <class Condition>
void holds_for(double seconds, const char* what, Condition holds,
               Where where = Where::current()) {
  mark_place(where.file_name(), where.line(), what);
  // Not a Deadline: the time is the rule's, --timeout-scale has no say in it.
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    if (!holds()) fail(where.file_name(), where.line(), text("does not hold: ", what));
    pause_and_check_peer();
  }
}

}  // namespace vrdma::conformance

#define CONFORMANCE(Name, Items, ...)                                                                        \
  static void conformance_##Name(::vrdma::conformance::Run& run);                                            \
  static const ::vrdma::conformance::Registrar conformance_registrar_##Name({                                \
      #Name, Items, __FILE__, conformance_##Name, ::vrdma::conformance::TestOptions{__VA_ARGS__}});          \
  static void conformance_##Name([[maybe_unused]] ::vrdma::conformance::Run& run)
