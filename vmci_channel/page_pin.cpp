#include "vmci_channel/page_pin.hpp"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace vmci {

namespace {

// Of less it is not asked: that costs more than pinning a few pages.
constexpr std::uint64_t checked_bytes_min = 64 << 20;

// A short text of the kernel's; empty: it cannot be read.
template <std::size_t Size>
const char* read_text(const char* path, char (&text)[Size]) {
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t got = file ? ::read(file.get(), text, Size - 1) : 0;
  text[std::max<ssize_t>(got, 0)] = 0;
  return text;
}

// False: this machine has not so much for it, whatever else it gives up. What is there already may be part of the memory.
bool could_be_there(std::uint64_t bytes) {
  char meminfo[4096], statm[256];
  read_text("/proc/meminfo", meminfo);
  std::uint64_t kib = 0;
  for (const char* const name : {"\nMemAvailable:", "\nSwapFree:", "\nShmem:", "\nHugetlb:"})
    if (const char* const line = std::strstr(meminfo, name)) kib += std::strtoull(line + std::strlen(name), nullptr, 10);
  if (kib == 0) return true;  // no such file here
  char* rest = nullptr;
  std::strtoull(read_text("/proc/self/statm", statm), &rest, 10);
  const std::uint64_t resident_pages = std::strtoull(rest, nullptr, 10);
  return bytes <= (kib << 10) + resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace

vrdma::Result<UniqueFd> pin_pages(std::span<const std::byte> memory) {
  // Pages that are not there yet come into being by being pinned; where memory ends meanwhile, the kernel ends programs.
  if (memory.size() >= checked_bytes_min && !could_be_there(memory.size())) return vrdma::Errno{ENOMEM};
  constexpr std::size_t buffer_bytes_max = std::size_t{1} << 30;  // of one registered buffer (io_uring_register(2))
  io_uring_params parameters{};
  parameters.flags = IORING_SETUP_R_DISABLED;
  UniqueFd ring(static_cast<int>(::syscall(SYS_io_uring_setup, 1, &parameters)));
  if (!ring) return vrdma::last_error();
  std::vector<iovec> buffers;
  for (; !memory.empty(); memory = memory.subspan(buffers.back().iov_len))
    buffers.push_back({const_cast<std::byte*>(memory.data()), std::min(memory.size(), buffer_bytes_max)});
  if (::syscall(SYS_io_uring_register, ring.get(), IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) != 0) return vrdma::last_error();
  return ring;
}

}  // namespace vmci
