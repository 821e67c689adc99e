#include "guest_lib/memory/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/memory/raw_file.hpp"
#include "guest_lib/memory/raw_map.hpp"

namespace vrdma::memory {
namespace {

constexpr unsigned memfd_cloexec = 1, memfd_allow_sealing = 2, memfd_noexec_seal = 8;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Raw system calls: sanitizers would take the kernel's copy for an unsynchronised access, and interposed wrappers may
// lock.
template <long Number>
Status transfer(int fd, std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes) {
  while (bytes > 0) {
    const long moved = ::syscall(Number, fd, memory, bytes, static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return last_error();
    if (moved == 0) return Errno{EIO};
    memory += static_cast<std::uint64_t>(moved);
    offset += static_cast<std::uint64_t>(moved);
    bytes -= static_cast<std::uint64_t>(moved);
  }
  return ok();
}

}  // namespace

Result<Window> Window::create() {
  if (!size_limit_allows()) return Errno{EFBIG};
  Window window;
  vmci::UniqueFd fd(static_cast<int>(::syscall(SYS_memfd_create, "vrdma-window", memfd_cloexec | memfd_noexec_seal)));
  if (!fd && errno == EINVAL)
    fd.reset(static_cast<int>(::syscall(SYS_memfd_create, "vrdma-window", memfd_cloexec | memfd_allow_sealing)));
  if (!fd) return last_error();
  if (::ftruncate(fd.get(), static_cast<off_t>(window_bytes)) != 0) return last_error();
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return last_error();
  auto id = file_id(fd.get());
  if (!id) return id.error();
  window.fd_.reset(std::move(fd));
  window.id_ = *id;
  return window;
}

bool Window::intact() const {
  if (lent_ != nullptr) return lent_->intact();
  auto id = file_id(fd_.get());
  return id && *id == id_;
}

bool Window::size_limit_allows() {
  struct rlimit limit;
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= window_bytes);
}

bool Window::holds(const Vma& vma) const {
  if (lent_ != nullptr) return lent_->holds(vma);
  return fd_ && vma.shared && vma.file == id_;
}

bool Window::holds_in_place(const Vma& vma) const {
  if (lent_ != nullptr) return lent_->holds_in_place(vma);
  return holds(vma) && vma.file_offset == vma.range.begin;
}

Status Window::copy_from_memory(Range range) const {
  if (lent_ != nullptr) return lent_->copy_from_memory(range);
  if (!intact()) return Errno{EBADF};
  return transfer<SYS_pwrite64>(fd_.get(), range.begin, range.begin, range.bytes());
}

Status Window::copy_to(void* to, Range range) const {
  if (lent_ != nullptr) return lent_->copy_to(to, range);
  if (!intact()) return Errno{EBADF};
  return transfer<SYS_pread64>(fd_.get(), reinterpret_cast<std::uint64_t>(to), range.begin, range.bytes());
}

Status Window::map(Range range, int protection) const {
  if (lent_ != nullptr) return lent_->map(range, protection);
  if (!intact()) return Errno{EBADF};
  if (raw_mmap(range.begin, range.bytes(), protection, MAP_SHARED | MAP_FIXED, fd_.get(), range.begin) == MAP_FAILED) return last_error();
  ::syscall(SYS_madvise, range.begin, range.bytes(), MADV_DONTFORK);
  // Reading maps 16 present pages per fault, writably; MAP_POPULATE would take one fault per page.
  ::syscall(SYS_madvise, range.begin, range.bytes(), populate_read);
  return ok();
}

// By advice that means nothing to a memfd, but keeps mappings from being merged.
void Window::set_apart(std::uint64_t page) const { ::syscall(SYS_madvise, page, page_bytes(), MADV_RANDOM); }

void Window::join(Range range) const {
  auto reader = VmaReader::open();
  if (!reader) return;
  const auto first = reader->at_or_after(range.begin);
  if (!first || first->range.end >= range.end) return;
  for (std::uint64_t at = range.begin; at < range.end;) {
    const auto vma = reader->at_or_after(at);
    if (!vma || vma->range.begin >= range.end) return;
    const Range part = vma->range.clipped_to(range);
    if (holds_in_place(*vma)) ::syscall(SYS_madvise, part.begin, part.bytes(), MADV_NORMAL);
    at = part.end;
  }
}

Status Window::punch(Range range) const {
  if (lent_ != nullptr) return Errno{EOPNOTSUPP};
  if (!intact()) return Errno{EBADF};
  if (!raw_punch(fd_.get(), static_cast<off_t>(range.begin), static_cast<off_t>(range.bytes()))) return last_error();
  return ok();
}

}  // namespace vrdma::memory
