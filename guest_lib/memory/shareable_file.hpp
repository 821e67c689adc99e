// Finds a descriptor of the file behind a shared mapping, so that the file can be passed to the service.
//
// The application's own is passed on as it is: a process that closes any descriptor of a file, be it a duplicate, loses its locks on it
// (fcntl(2), "Advisory record locking"). One is opened only where the application has none, which ended its locks, and closed afterwards.
//
// Any thread; allocates. Takes what is nothing but memory: memfds, which it seals against shrinking where the application has not and where
// they can be sealed; files of tmpfs (also those of shm_open, System V segments, shared anonymous memory) and hugetlbfs, which cannot, and
// which therefore only the service maps: it survives what becomes of them. Not files on a disk, whose pages may be long in coming, nor memfds
// that are sealed against writing: nobody can map them for it any more, while who has mapped them before, and the kernel, still read and write.
#pragma once

#include <cstdint>

#include "guest_lib/memory/vma.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

struct ShareableFile {
  int fd = -1;            // another thread may close it, and have the number name another file
  std::uint64_t bytes = 0;
  vmci::UniqueFd opened;  // fd, where it is not the application's

  bool still_is(const FileId& wanted) const;
};
// ENOENT: no descriptor of this process names it for reading and writing. EPERM: it is not memory, or sealed against writing.
Result<ShareableFile> open_shareable(const Vma& vma);

}  // namespace vrdma::memory
