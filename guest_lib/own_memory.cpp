#include "guest_lib/own_memory.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace vrdma::guest {

namespace {


std::uint64_t bytes_of(std::span<const iovec> ranges) {
  std::uint64_t bytes = 0;
  for (const iovec& range : ranges) bytes += range.iov_len;
  return bytes;
}

// Raw system calls: sanitizers would take the kernel's copy for an unsynchronised access. A short count is a range that ended:
// the files are memory, and no signal reaches the thread.
Status outcome(long moved, std::uint64_t wanted) {
  if (moved < 0) return last_error();
  return static_cast<std::uint64_t>(moved) == wanted ? ok() : Status(Errno{EFAULT});
}

}  // namespace

OwnMemory::OwnMemory(vmci::Mapping segment, vmci::UniqueFd fd) : segment_(std::move(segment)), fd_(std::move(fd)) {
  if (!fd_) return;
  if (const auto id = memory::file_id(fd_.get())) id_ = *id;
}

bool OwnMemory::intact() const {
  if (!fd_) return false;
  const auto id = memory::file_id(fd_.get());
  return id && *id == id_;
}

template <long OnFile, long OnProcess>
Status OwnMemory::transfer(std::span<const iovec> ranges, std::uint64_t offset) {
  const std::uint64_t wanted = bytes_of(ranges);
  if (intact()) {
    const Status moved = outcome(::syscall(OnFile, fd_.get(), ranges.data(), ranges.size(), static_cast<off_t>(offset), 0), wanted);
    if (moved || value(moved.error()) == EFAULT) return moved;
  } else {
    fd_.reset();  // the number is the application's now
  }
  const iovec here{segment_.data() + offset, wanted};
  return outcome(::syscall(OnProcess, ::syscall(SYS_gettid), &here, 1, ranges.data(), ranges.size(), 0), wanted);
}

Status OwnMemory::gather(std::span<const iovec> ranges, std::uint64_t offset) {
  return transfer<SYS_pwritev, SYS_process_vm_readv>(ranges, offset);
}

Status OwnMemory::scatter(std::span<const iovec> ranges, std::uint64_t offset) {
  return transfer<SYS_preadv, SYS_process_vm_writev>(ranges, offset);
}

void OwnMemory::abandon() {
  segment_.abandon();
  fd_.reset();
}

}  // namespace vrdma::guest
