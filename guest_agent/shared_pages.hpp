// Memory that a process shares with others, and may write to: a file that lies in RAM (memfd, tmpfs, MAP_SHARED | MAP_ANONYMOUS, System V,
// hugetlbfs). Its pages are those of the file, so the agent maps that itself and pins its own mapping: whatever the process maps there
// meanwhile, what is lent is of that file, and pinned. One thread; does not wait for the process.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "guest_agent/frames.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

struct SharedPages {
  vmci::UniqueFd ring;  // the agent's, which pins them
  Runs runs;
};

// process: its folder in /proc, open. Both numbers are multiples of the page size. EACCES: this is not part of one such mapping.
Result<SharedPages> pin_shared(int process, std::uint64_t address, std::uint64_t bytes);

// One that may be written to, as /proc/PID/maps tells.
struct SharedMapping {
  std::uint64_t begin = 0, end = 0;
  std::uint64_t offset = 0;  // of its beginning, in the file
  unsigned device_major = 0, device_minor = 0;
  std::uint64_t inode = 0;
};
// That in which all of [address, address + bytes) lies. EACCES: there is none.
Result<SharedMapping> shared_mapping(std::istream& maps, std::uint64_t address, std::uint64_t bytes);

}  // namespace vrdma::agent
