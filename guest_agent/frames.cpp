#include "guest_agent/frames.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <istream>
#include <string>

namespace vrdma::agent {

namespace {
// Documentation/admin-guide/mm/pagemap.rst
constexpr std::uint64_t entry_present = std::uint64_t{1} << 63;
constexpr std::uint64_t entry_of_file = std::uint64_t{1} << 61;  // also shared anonymous memory
constexpr std::uint64_t entry_exclusive = std::uint64_t{1} << 56;
constexpr std::uint64_t entry_frame = (std::uint64_t{1} << 55) - 1;
}  // namespace

Result<Pagemap> Pagemap::of(int process) {
  Pagemap map;
  map.fd_.reset(::openat(process, "pagemap", O_RDONLY | O_CLOEXEC));
  if (!map.fd_) return last_error();
  return map;
}

Result<Pagemap> Pagemap::of_self() {
  vmci::UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!self) return last_error();
  return of(self.get());
}

Result<Runs> Pagemap::runs(std::uint64_t address, std::uint64_t bytes, Pages which) const {
  Runs runs;
  std::array<std::uint64_t, 2048> entries;
  for (std::uint64_t page = address / vm::page_bytes, end = page + bytes / vm::page_bytes; page < end;) {
    const std::uint64_t wanted = std::min<std::uint64_t>(end - page, entries.size());
    const ssize_t got = ::pread(fd_.get(), entries.data(), wanted * sizeof(entries[0]), static_cast<off_t>(page * sizeof(entries[0])));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return last_error();
    const std::uint64_t count = static_cast<std::uint64_t>(got) / sizeof(entries[0]);
    if (count == 0) return Errno{EFAULT};  // beyond the address space, or the program has gone
    if (const Status appended = append_frames(std::span(entries).first(count), runs, which); !appended) return appended.error();
    page += count;
  }
  return runs;
}

Status append_frames(std::span<const std::uint64_t> entries, Runs& runs, Pages which) {
  for (const std::uint64_t entry : entries) {
    if ((entry & entry_present) == 0) return Errno{EFAULT};
    const std::uint64_t frame = entry & entry_frame;
    if (frame == 0) return Errno{EPERM};
    if (which == Pages::own && (entry & (entry_of_file | entry_exclusive)) != entry_exclusive) return Errno{EACCES};
    if (!runs.empty() && runs.back().page + runs.back().pages == frame)
      ++runs.back().pages;
    else
      runs.push_back({frame, 1});
  }
  return ok();
}

RamExtent RamExtent::of(std::istream& iomem) {
  constexpr std::uint64_t high = std::uint64_t{1} << 32;
  RamExtent extent;
  for (std::string line; std::getline(iomem, line);) {
    unsigned long long first = 0, last = 0;
    if (line.empty() || line.front() == ' ') continue;  // part of the one above
    if (line.find(" : System RAM") == std::string::npos || std::sscanf(line.c_str(), "%llx-%llx", &first, &last) != 2 || last <= first) continue;
    if (first >= high) extent.high_bytes = std::max<std::uint64_t>(extent.high_bytes, last + 1 - high);
    else extent.low_end = std::max<std::uint64_t>(extent.low_end, last + 1);
  }
  return extent;
}

std::uint64_t part_begin(std::istream& iomem, std::uint64_t address) {
  for (std::string line; std::getline(iomem, line);) {
    unsigned long long first = 0, last = 0;
    if (line.empty() || line.front() == ' ' || std::sscanf(line.c_str(), "%llx-%llx", &first, &last) != 2) continue;  // virtio-mem's is part of its device
    if (first <= address && address <= last) return first;
  }
  return 0;
}

}  // namespace vrdma::agent
