// How much memory this process could still come to have. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace vmci {

struct MemoryFiles {
  std::string proc = "/proc";
  std::string cgroups = "/sys/fs/cgroup";  // of one hierarchy, or of several
};

// At most so many bytes, what it has by now included, whatever else the machine and the control groups that it is in give up. ~0: nobody
// knows.
std::uint64_t memory_room(const MemoryFiles& files = {});

// What the machine has, and what of it this process can have without anything being swapped out, or any file that programs keep in memory
// being lost; 0: nobody knows. No more than its control groups allow.
struct MemoryLeft {
  std::uint64_t all_bytes = 0, available_bytes = 0;
};
MemoryLeft memory_left(const MemoryFiles& files = {});

}  // namespace vmci
