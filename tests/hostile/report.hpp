// What the honest pair tells the test that watches it, in memory that both map. Written by the pair, read by the test.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

namespace vrdma::hostile {

struct VictimReport {
  std::atomic<std::uint64_t> rounds;
  std::atomic<pid_t> second;  // of the pair; the first one is who was started
  std::atomic<std::uint32_t> failed;  // then the message says how
  char message[256];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace vrdma::hostile
