// Shared memory segments on the process substrate: sealed memfds, mapped by Boost.Interprocess. A VM's substrate maps a BAR
// or guest RAM instead; nothing above this header may know which it is.
//
// Any thread. A segment never shrinks under its users: create() seals it, map_sealed() refuses one that is not sealed.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

enum class Writable : bool { no, yes };
// What descriptors of a segment that are handed out can be mapped for, whoever has them.
enum class HandedOut : bool { writable, read_only };

// A mapping that is undone by its destructor.
class Mapping {
 public:
  Mapping() = default;
  // [offset, offset + bytes) of the descriptor; offset a multiple of the page size. ENOMEM, EACCES, ENODEV as mmap(2).
  static vrdma::Result<Mapping> map(int fd, std::uint64_t offset, std::uint64_t bytes, Writable writable);

  std::byte* data() const { return static_cast<std::byte*>(region_.get_address()) + skipped_bytes_; }
  std::uint64_t bytes() const { return region_.get_size() - spare_bytes_; }
  explicit operator bool() const { return region_.get_address() != nullptr; }

  // Parts of files, one behind the other: what a virtual machine's scattered pages look like in one piece. Offsets and bytes are
  // multiples of the page size, of huge pages for files of such. EINVAL where they are not, ENOMEM as mmap(2), for one where there
  // are too many parts.
  struct Part {
    int fd;
    std::uint64_t offset, bytes;
  };
  static vrdma::Result<Mapping> gather(std::span<const Part> parts, std::uint64_t page_bytes = 4096);

  // For where the address range has been given to someone else (a fork's child): forgets the mapping without unmapping.
  void abandon();

 private:
  boost::interprocess::mapped_region region_;
  std::uint64_t skipped_bytes_ = 0, spare_bytes_ = 0;  // for the alignment of huge pages: before data(), and in all
};

class Segment {
 public:
  Segment() = default;
  // A new, zero-filled, sparse memfd of `bytes`, sealed against shrinking and growing, mapped writable.
  // page_bytes: of huge pages, which the kernel must have when they are touched.
  static vrdma::Result<Segment> create(const char* name, std::uint64_t bytes, HandedOut handed_out = HandedOut::writable, std::uint64_t page_bytes = 4096);

  // The same of a peer's descriptor, by map_sealed().
  static vrdma::Result<Segment> adopt(UniqueFd fd, std::uint64_t bytes, Writable writable);

  // Over memory that somebody else owns: it has no descriptor. keeper: what lives for as long as the mapping.
  static Segment over(Mapping mapping, std::shared_ptr<void> keeper) {
    Segment segment;
    segment.mapping_ = std::move(mapping);
    segment.keeper_ = std::move(keeper);
    return segment;
  }

  int fd() const { return fd_.get(); }
  std::byte* data() const { return mapping_.data(); }
  std::uint64_t bytes() const { return mapping_.bytes(); }
  explicit operator bool() const { return static_cast<bool>(mapping_); }

  // The object of type T at `offset`, or nullptr where it would not lie wholly inside or is misaligned.
  template <class T>
  T* at(std::uint64_t offset) const {
    if (offset > bytes() || sizeof(T) > bytes() - offset || offset % alignof(T) != 0) return nullptr;
    return reinterpret_cast<T*>(data() + offset);
  }
  std::byte* range(std::uint64_t offset, std::uint64_t length) const {
    if (offset > bytes() || length > bytes() - offset) return nullptr;
    return data() + offset;
  }
  void abandon() { mapping_.abandon(); }

 private:
  UniqueFd fd_;
  Mapping mapping_;
  std::shared_ptr<void> keeper_;  // goes first
};

// New zero-filled, sparse memory of a fixed size that the caller does not map. EINVAL, ENFILE, …
vrdma::Result<UniqueFd> create_sealed(const char* name, std::uint64_t bytes);

// Whether the descriptor is memory that its owner can no longer make smaller, and how much. EPERM if not.
vrdma::Result<std::uint64_t> sealed_bytes(int fd);

// A peer's segment, mapped whole: more than `bytes` where it has huge pages, of which no part can be mapped. EPERM: it could be made smaller;
// EPROTO: it is smaller.
vrdma::Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Writable writable);

// Whether the descriptor is a file that is nothing but memory (a memfd, or a regular file of tmpfs or hugetlbfs), and of how many bytes. Unless
// it is sealed, its owner can make it smaller at any time: only for who survives bus errors. EPERM if it is no such file.
vrdma::Result<std::uint64_t> memory_file_bytes(int fd);

}  // namespace vmci
