// The process that plays one role: takes orders from the runner, runs bodies, reports verdicts.
// Only child_main() may make verbs calls; the runner never does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/conformance/run.hpp"

namespace vrdma::conformance {

enum class Verdict : std::uint32_t { passed = 1, failed = 2, skipped = 3, peer_ended = 4 };

// One packet from runner to child: which test, with which seed. End of file: leave.
struct Order {
  std::uint32_t test_index;
  std::uint32_t reserved;
  std::uint64_t seed;
};
struct Report {
  Verdict verdict;
  char text[4000];
};

// A page both the runner and the child map: where the child is. Read only after a hang, so torn text is acceptable.
struct Place {
  char text[512];
};

struct ChildArguments {
  bool is_a = true;
  int orders_fd = -1;
  int peer_fd = -1;
  int place_fd = -1;
  Settings settings;
};
int child_main(const ChildArguments& arguments);

}  // namespace vrdma::conformance
