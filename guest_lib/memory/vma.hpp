// The mappings of this process as the kernel tells them, one at a time, in ascending order.
//
// Any thread, one reader each; never allocates. Uses the PROCMAP_QUERY ioctl (Linux 6.11), else reads /proc/self/maps.
// Nothing is cached across readers: open one, walk forward, change mappings only after the walk. Where no file can be opened (the limit of
// descriptors, a chroot(2) without /proc), readers share one that was kept for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

// Half open, in bytes of address space.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t bytes() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool overlaps(Range other) const { return begin < other.end && other.begin < end; }
  Range clipped_to(Range other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
  bool operator==(const Range&) const = default;
};

struct FileId {
  std::uint32_t device_major = 0;
  std::uint32_t device_minor = 0;
  std::uint64_t inode = 0;
  auto operator<=>(const FileId&) const = default;
};
Result<FileId> file_id(int fd);

struct Vma {
  Range range;
  std::uint64_t file_offset = 0;
  FileId file;
  bool readable = false, writable = false, executable = false, shared = false;

  bool private_anonymous() const { return !shared && file.inode == 0; }
  int protection() const;  // PROT_*
};

class VmaReader {
 public:
  enum class Method { best, text };
  static Result<VmaReader> open(Method method = Method::best);
  VmaReader(vmci::UniqueFd maps, int shared, Method method) : maps_(std::move(maps)), shared_(shared), text_(method == Method::text) {}  // open() does

  // The first mapping that ends above `address`. ENOENT where there is none; EIO where the kernel's answer makes no
  // sense.
  Result<Vma> at_or_after(std::uint64_t address);

  // Once it has answered: whether it had to read /proc/self/maps.
  bool reads_text() const { return text_; }

 private:
  int file() const { return maps_ ? maps_.get() : shared_; }
  Result<Vma> query(std::uint64_t address);
  Result<Vma> scan(std::uint64_t address);
  Result<Vma> scan_from_here(std::uint64_t address);
  Result<Vma> next_line();
  void start_over();

  // What the kernel gives in one go, on stacks that may be small. A line is about 80 characters, and a path that may be longer than this: PATH_MAX
  // bounds what one call is given, and a newline in it is written as four characters.
  static constexpr std::size_t buffer_bytes = 4096;
  vmci::UniqueFd maps_;
  int shared_ = -1;  // the kept one, where maps_ could not be opened
  bool text_ = false;
  bool starts_over_ = false;  // with what it reads next
  bool within_line_ = false;  // the buffer begins with the rest of a line that has been told of
  bool have_current_ = false;
  Vma current_;
  std::uint64_t last_address_ = 0;
  off_t position_ = 0;
  std::size_t head_ = 0, tail_ = 0;
  char buffer_[buffer_bytes];
};

// Keeps a descriptor for readers that cannot open one, unless this process has one already. Under a lock of the caller's.
void keep_maps();
// In a fork's child, before it has other threads: the kept one shows its parent.
void forget_maps();

std::uint64_t page_bytes();
inline std::uint64_t page_floor(std::uint64_t address) {
  return address & ~(page_bytes() - 1);
}
// Callers check for wrap-around first.
inline std::uint64_t page_ceiling(std::uint64_t address) {
  return page_floor(address + page_bytes() - 1);
}
inline Range whole_pages_around(Range range) {
  return {page_floor(range.begin), page_ceiling(range.end)};
}

// How many mappings the process has; reads all of /proc/self/maps.
Result<std::uint64_t> count_mappings();

}  // namespace vrdma::memory
