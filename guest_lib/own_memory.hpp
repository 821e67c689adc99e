// Copies between memory of this process that may vanish at any moment and a segment that stays, without ever faulting: the
// kernel copies, and says EFAULT where a load or store of ours would be a SIGSEGV in somebody else's program.
//
//   pwritev, preadv        on the segment's descriptor; allowed under every system call filter that lets a program do anything
//   process_vm_readv, …    on our own pid, where the application closed that descriptor (closefrom) or limits file sizes
//
// /proc/self/mem is not among them: it writes through read-only mappings, and a process that is not dumpable may not open it.
// A plain copy with a handler for SIGSEGV would take the application's handler away. The price: no atomic instruction on the
// application's memory; see copier.hpp.
//
// One thread.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"

namespace vrdma::guest {

class OwnMemory {
 public:
  // fd: what `segment` maps, from its start; none: memory of a device, which the kernel copies to by addresses only.
  OwnMemory(vmci::Mapping segment, vmci::UniqueFd fd);

  // The ranges, in order, to `offset` of the segment, or from there. All or an error.
  Status gather(std::span<const iovec> ranges, std::uint64_t offset);
  Status scatter(std::span<const iovec> ranges, std::uint64_t offset);

  std::byte* segment() const { return segment_.data(); }
  // In a fork's child, where the segment is not mapped.
  void abandon();

 private:
  bool intact() const;
  template <long OnFile, long OnProcess>
  Status transfer(std::span<const iovec> ranges, std::uint64_t offset);

  vmci::Mapping segment_;
  OwnFd fd_;
  memory::FileId id_;
};

}  // namespace vrdma::guest
