// Memory whose pages stay where they are in the machine's RAM, for as long as a descriptor of an io_uring is open that has them
// as registered buffers. (mlock(2) keeps pages in RAM, but the kernel moves them there.) Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "guest_agent/frames.hpp"
#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/segment.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

// Memory of ours: a sealed memfd, zero, mapped writable here. handed_out: as vmci::Segment::create().
struct PinnedSegment {
  vmci::Segment memory;
  vmci::UniqueFd ring;
  Runs runs;  // of all its pages
  std::uint64_t page_bytes = vm::page_bytes;

  // ENOSYS, EPERM: no io_uring (kernel.io_uring_disabled); EPERM: frames are hidden; ENOMEM.
  static Result<PinnedSegment> make(const char* name, std::uint64_t bytes, vmci::HandedOut handed_out = vmci::HandedOut::writable);
  // The same of huge pages of this size, at least `bytes`. They are taken from the kernel's ordinary memory, and go back there:
  // nobody has to reserve any. ENOMEM: it finds none in one piece. ENODEV, EINVAL: it knows no such size.
  static Result<PinnedSegment> make_huge(const char* name, std::uint64_t bytes, std::uint64_t page_bytes);


  // In two steps: pages come into being when they are touched, or else when they are pinned.
  static Result<PinnedSegment> unpinned(const char* name, std::uint64_t bytes, std::uint64_t page_bytes, vmci::HandedOut handed_out = vmci::HandedOut::writable);
  void touch();  // as far as that can be
  Status pin();
  // Gives up the pages that are not to be kept, for others that come when they are touched; not where it is HandedOut::read_only. What it had
  // stays pinned by the ring that is returned, and so is nobody's: it is not what comes.
  Result<vmci::UniqueFd> give_up(const std::function<bool(const vm::Run&)>& keep);
};

// Takes over the ring that a process has as `descriptor`, so that from now on nobody can unregister its buffers.
// EBADF, EINVAL: it is no ring. EPERM: one that was enabled before (it must be set up with IORING_SETUP_R_DISABLED), which
// others could have changed since. ESRCH: the process is gone. closer: of what is no ring; without one, it is closed here.
Result<vmci::UniqueFd> take_ring(int pidfd, int descriptor, const std::shared_ptr<vmci::Closer>& closer = nullptr);

// Whether the ring's buffers cover [address, address + bytes) of its process; for a ring that was taken. EFAULT: they do not.
Status covers(int ring, std::uint64_t address, std::uint64_t bytes);
// The same by the text of its /proc/self/fdinfo. EAGAIN: the kernel was kept from listing the buffers.
Status covers(const std::string& fdinfo, std::uint64_t address, std::uint64_t bytes);

}  // namespace vrdma::agent
