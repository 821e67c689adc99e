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

}  // namespace vmci
