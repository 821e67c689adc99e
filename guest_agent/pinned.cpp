#include "guest_agent/pinned.hpp"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "guest_agent/text_file.hpp"
#include "vmci_channel/page_pin.hpp"

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

namespace vrdma::agent {

using vmci::UniqueFd;

namespace {

long register_with(int ring, unsigned operation, const void* argument, unsigned count) {
  return ::syscall(SYS_io_uring_register, ring, operation, argument, count);
}

// A ring that is restricted can do nothing but what it was allowed to do when it was enabled. Here that is to be enabled, which
// a ring can be once. (No rule at all would say the same, if every kernel took that for a set of rules.)
Status close_for_good(int ring) {
  io_uring_restriction only{};
  only.opcode = IORING_RESTRICTION_REGISTER_OP;
  only.register_op = IORING_REGISTER_ENABLE_RINGS;
  if (register_with(ring, IORING_REGISTER_RESTRICTIONS, &only, 1) != 0) return last_error();
  if (register_with(ring, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) != 0) return last_error();
  return ok();
}

// Lets the kernel make huge pages of ordinary memory when they are touched, as long as this lives: who has none reserved gets some.
class Surplus {
 public:
  static Result<Surplus> allow(std::uint64_t page_bytes, std::uint64_t pages) {
    Surplus surplus("/sys/kernel/mm/hugepages/hugepages-" + std::to_string(page_bytes >> 10) + "kB/");
    const auto now = surplus.read("surplus_hugepages");
    const auto before = surplus.read("nr_overcommit_hugepages");
    if (!now || !before) return now ? before.error() : now.error();
    if (const Status set = surplus.write(*now + *before + pages); !set) return set.error();
    surplus.before_ = *before;
    return surplus;
  }
  // What was made stays until it is given back.
  ~Surplus() {
    if (before_) (void)write(*before_);
  }
  Surplus(Surplus&& other) noexcept : folder_(std::move(other.folder_)), before_(std::exchange(other.before_, std::nullopt)) {}
  Surplus& operator=(Surplus&&) = delete;

 private:
  explicit Surplus(std::string folder) : folder_(std::move(folder)) {}
  Result<std::uint64_t> read(const char* what) const {
    const auto text = read_all(AT_FDCWD, folder_ + what);
    if (!text) return text.error();
    return std::strtoull(text->c_str(), nullptr, 10);
  }
  Status write(std::uint64_t pages) const {
    UniqueFd file(::open((folder_ + "nr_overcommit_hugepages").c_str(), O_WRONLY | O_CLOEXEC));
    const std::string text = std::to_string(pages);
    if (!file || ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) return last_error();
    return ok();
  }

  std::string folder_;
  std::optional<std::uint64_t> before_;
};

}  // namespace

Result<PinnedSegment> PinnedSegment::make(const char* name, std::uint64_t bytes, vmci::HandedOut handed_out) {
  if (bytes == 0 || bytes % vm::page_bytes != 0) return Errno{EINVAL};
  auto segment = unpinned(name, bytes, vm::page_bytes, handed_out);
  if (const Status pinned = segment ? segment->pin() : segment.error(); !pinned) return pinned.error();
  return segment;
}

Result<PinnedSegment> PinnedSegment::make_huge(const char* name, std::uint64_t bytes, std::uint64_t page_bytes) {
  if (bytes == 0 || !std::has_single_bit(page_bytes) || page_bytes < vm::page_bytes) return Errno{EINVAL};
  auto segment = unpinned(name, bytes, page_bytes);
  if (const Status pinned = segment ? segment->pin() : segment.error(); !pinned) return pinned.error();
  return segment;
}

Result<PinnedSegment> PinnedSegment::unpinned(const char* name, std::uint64_t bytes, std::uint64_t page_bytes, vmci::HandedOut handed_out) {
  const std::uint64_t pages = bytes / page_bytes + (bytes % page_bytes != 0);
  auto memory = vmci::Segment::create(name, pages * page_bytes, handed_out, page_bytes);
  if (!memory) return memory.error();
  PinnedSegment segment;
  segment.memory = std::move(*memory);
  segment.page_bytes = page_bytes;
  return segment;
}

void PinnedSegment::touch() { ::madvise(memory.data(), memory.bytes(), populate_write); }

Status PinnedSegment::pin() {
  std::optional<Surplus> surplus;
  if (page_bytes != vm::page_bytes) {
    auto allowed = Surplus::allow(page_bytes, memory.bytes() / page_bytes);
    if (!allowed) return allowed.error();
    surplus.emplace(std::move(*allowed));
  }
  // Pinning brings the pages into being; who touches them first dies of SIGBUS where there is no memory for them.
  auto pinned = vmci::pin_pages(std::span(memory.data(), memory.bytes()));
  if (!pinned) return value(pinned.error()) == EFAULT ? Errno{ENOMEM} : pinned.error();
  ring = std::move(*pinned);
  auto self = Pagemap::of_self();
  if (!self) return self.error();
  auto found = self->runs(reinterpret_cast<std::uintptr_t>(memory.data()), memory.bytes());
  if (!found) return found.error();
  runs = std::move(*found);
  return ok();
}

Result<UniqueFd> PinnedSegment::give_up(const std::function<bool(const vm::Run&)>& keep) {
  std::uint64_t at = 0;
  for (const vm::Run& run : runs) {
    const std::uint64_t bytes = run.pages * vm::page_bytes;
    if (!keep(run) && ::fallocate(memory.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at), static_cast<off_t>(bytes)) != 0) return last_error();
    at += bytes;
  }
  return std::move(ring);
}

Result<UniqueFd> take_ring(int pidfd, int descriptor, const std::shared_ptr<vmci::Closer>& closer) {
  if (descriptor < 0) return Errno{EBADF};
  vmci::GivenFd ring(UniqueFd(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd, descriptor, 0))), closer);  // whatever it is
  if (!ring) return last_error();
  char target[64];
  const std::string link = "/proc/self/fd/" + std::to_string(ring.get());
  const ssize_t length = ::readlink(link.c_str(), target, sizeof(target));
  if (length < 0) return last_error();
  if (std::string_view(target, static_cast<std::size_t>(length)) != "anon_inode:[io_uring]") return Errno{EINVAL};
  if (!close_for_good(ring.get())) return Errno{EPERM};
  return UniqueFd(ring.release());
}

Status covers(int ring, std::uint64_t address, std::uint64_t bytes) {
  const std::string path = "/proc/self/fdinfo/" + std::to_string(ring);
  for (int tries = 0;; ++tries) {
    const auto text = read_all(AT_FDCWD, path);
    if (!text) return text.error();
    const Status covered = covers(*text, address, bytes);
    // Someone is inside the ring just now; one that is closed for good lets nobody stay.
    if (covered || value(covered.error()) != EAGAIN || tries == 100) return covered;
    ::sched_yield();
  }
}

Status covers(const std::string& fdinfo, std::uint64_t address, std::uint64_t bytes) {
  std::istringstream lines(fdinfo);
  std::string line;
  unsigned long long count = 0;
  do
    if (!std::getline(lines, line)) return Errno{EAGAIN};
  while (std::sscanf(line.c_str(), "UserBufs: %llu", &count) != 1);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> buffers;  // first byte, end; of whole pages
  for (unsigned long long i = 0; i < count; ++i) {
    unsigned long long index = 0, first = 0, length = 0;
    const int parts = std::getline(lines, line) ? std::sscanf(line.c_str(), " %llu: 0x%llx/%llu", &index, &first, &length) : 0;
    if (parts < 1) return Errno{EAGAIN};
    if (parts == 3) buffers.emplace_back(page_floor(first), page_ceiling(first + length));  // else an empty place in the table
  }
  std::sort(buffers.begin(), buffers.end());
  std::uint64_t covered_to = page_floor(address);
  for (const auto& [first, end] : buffers)
    if (first <= covered_to) covered_to = std::max(covered_to, end);
  if (covered_to < page_ceiling(address + bytes)) return Errno{EFAULT};
  return ok();
}

}  // namespace vrdma::agent
