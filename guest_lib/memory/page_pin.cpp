#include "guest_lib/memory/page_pin.hpp"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

Result<vmci::UniqueFd> pin_pages(std::uint64_t address, std::uint64_t bytes) {
  constexpr std::uint64_t buffer_bytes_max = std::uint64_t{1} << 30;  // of one registered buffer (io_uring_register(2))
  io_uring_params parameters{};
  parameters.flags = IORING_SETUP_R_DISABLED;
  vmci::UniqueFd ring(static_cast<int>(::syscall(SYS_io_uring_setup, 1, &parameters)));
  if (!ring) return last_error();
  std::vector<iovec> buffers;
  const std::uint64_t end = page_ceiling(address + bytes);
  for (std::uint64_t at = page_floor(address); at < end; at += buffer_bytes_max)
    buffers.push_back({reinterpret_cast<void*>(at), std::min(buffer_bytes_max, end - at)});
  if (::syscall(SYS_io_uring_register, ring.get(), IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) != 0) return last_error();
  return ring;
}

}  // namespace vrdma::memory
