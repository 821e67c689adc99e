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

#include "vmci_channel/memory_room.hpp"

namespace vmci {

namespace {

// Of less it is not asked: that costs more than pinning a few pages.
constexpr std::uint64_t checked_bytes_min = 64 << 20;

}  // namespace

vrdma::Result<UniqueFd> pin_pages(std::span<const std::byte> memory) {
  // Pages that are not there yet come into being by being pinned; where memory ends meanwhile, the kernel ends programs.
  if (memory.size() >= checked_bytes_min && memory.size() > memory_room()) return vrdma::Errno{ENOMEM};
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
