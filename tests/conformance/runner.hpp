// Runs tests: starts a pair of processes per test, gives orders, collects verdicts, kills what hangs, prints and totals.
// Single-threaded; makes no verbs call, so that no role inherits anything of a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/run.hpp"

namespace vrdma::conformance {

class Stream;

enum class Outcome { passed, failed, skipped };

struct Result {
  std::string name;
  std::string items;
  Outcome outcome = Outcome::failed;
  std::string detail;
  std::uint64_t seed = 0;
  double seconds = 0;
};

struct RunnerOptions {
  std::string filter = "*";
  std::vector<std::string> except;
  std::size_t sample = 0;  // so many of them, drawn by the seed; 0: all
  std::uint64_t seed = 0;
  unsigned repeat = 1;
  bool reuse = false;
  bool slow = false;
  bool fail_fast = false;
  bool quiet = false;
  Stream* far = nullptr;  // who plays role b on another machine (far.hpp); tests of one process are left out then
  Settings settings;
};

std::vector<Result> run_tests(const RunnerOptions& options);
std::string summary(const std::vector<Result>& results);  // "N passed, N failed, N skipped"
std::string to_json(const std::vector<Result>& results);

// argv of a process that the runner started begins with this word; main() hands over to child_from_arguments().
inline constexpr const char* child_word = "--conformance-role";
int child_from_arguments(int argc, char** argv);

}  // namespace vrdma::conformance
