// simulation [--seed N] [--schedules N] [--first N] [--self-test]
// Runs seeds first, first + 1, …; the first violation is printed with its seed and ends the run with status 1.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "tests/sim/schedule.hpp"

namespace {

using vrdma::sim::Planted;

bool holds(std::uint64_t seed, Planted planted, vrdma::sim::Totals& totals, bool quiet = false) {
  try {
    vrdma::sim::Schedule(seed, planted).run(totals);
    return true;
  } catch (const vrdma::sim::Violation& violation) {
    if (!quiet) std::printf("seed %" PRIu64 ": %s\nagain: simulation --seed %" PRIu64 "\n", seed, violation.what(), seed);
    return false;
  }
}

// Every kind of planted fault must be noticed in some schedule; a checker that cannot fail proves nothing.
int self_test() {
  const struct {
    Planted planted;
    const char* name;
  } faults[] = {{Planted::lost_completion, "a lost completion"},   {Planted::doubled_completion, "a doubled completion"},
                {Planted::flipped_byte, "a flipped byte"},         {Planted::stray_write, "a write outside all buffers"},
                {Planted::late_write, "a write after completion"}, {Planted::lost_wake_up, "a lost wake-up"}};
  int missed = 0;
  for (const auto& fault : faults) {
    std::uint64_t seed = 1, noticed = 0;
    vrdma::sim::Totals totals;
    for (; seed <= 100; ++seed) noticed += !holds(seed, fault.planted, totals, true);
    std::printf("%-28s noticed in %" PRIu64 " of 100 schedules\n", fault.name, noticed);
    missed += noticed == 0;
  }
  return missed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t first = 1, schedules = 1000;
  for (int i = 1; i < argc; ++i) {
    const auto number = [&] { return i + 1 < argc ? std::strtoull(argv[++i], nullptr, 0) : 0; };
    if (std::strcmp(argv[i], "--seed") == 0)
      first = number(), schedules = 1;
    else if (std::strcmp(argv[i], "--first") == 0)
      first = number();
    else if (std::strcmp(argv[i], "--schedules") == 0)
      schedules = number();
    else if (std::strcmp(argv[i], "--self-test") == 0)
      return self_test();
    else
      return std::fprintf(stderr, "usage: simulation [--seed N] [--first N] [--schedules N] [--self-test]\n"), 2;
  }
  vrdma::sim::Totals totals;
  for (std::uint64_t seed = first; seed < first + schedules; ++seed)
    if (!holds(seed, Planted::none, totals)) return 1;
  std::printf("%" PRIu64 " schedules hold: %" PRIu64 " steps, %" PRIu64 " sends and %" PRIu64 " receives completed (%" PRIu64
              " errors, %" PRIu64 " of them flushes), %" PRIu64 " copies, %" PRIu64 " resets, %" PRIu64 " links cut, %" PRIu64
              " hosts begun anew, %.1f s of CPU\n",
              schedules, totals.steps, totals.sends, totals.receives, totals.errors, totals.flushes, totals.copies, totals.resets, totals.cuts, totals.restarts,
              static_cast<double>(std::clock()) / CLOCKS_PER_SEC);
  return 0;
}
