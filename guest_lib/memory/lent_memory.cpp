#include "guest_lib/memory/lent_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "guest_lib/memory/high_descriptor.hpp"
#include "guest_lib/memory/raw_map.hpp"

namespace vrdma::memory {
namespace {


// Whole pages. Sanitizers have their own opinion of what lies between the application's objects.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("address", "thread")))
#endif
void copy_pages(void* to, const void* from, std::uint64_t bytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  for (std::uint64_t i = 0; i < bytes / sizeof(std::uint64_t); ++i)
    static_cast<volatile std::uint64_t*>(to)[i] = static_cast<const volatile std::uint64_t*>(from)[i];
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace

bool LentMemory::intact() const {
  if (!file_) return false;
  const auto id = file_id(file_.get());
  return id && *id == id_;
}

Status LentMemory::use(int file) {
  if (intact()) return ok();
  file_.reset();  // the number is the application's now
  const auto id = file_id(file);
  if (!id) return id.error();
  if (first_known_ && *id != id_) return Errno{EXDEV};
  file_.reset(high_duplicate(file));
  if (!file_) return last_error();
  id_ = *id;
  return ok();
}

Result<std::byte*> LentMemory::map_alias(int file, std::uint64_t offset, std::uint64_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return last_error();
  ::syscall(SYS_madvise, memory, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(memory);
}

Status LentMemory::learn_from(const LentPiece& piece) {
  if (first_known_) return ok();
  auto reader = VmaReader::open();
  if (!reader) return reader.error();
  const auto here = reinterpret_cast<std::uintptr_t>(piece.alias);
  const auto vma = reader->at_or_after(here);
  if (!vma) return vma.error();
  if (vma->range.begin > here || !holds(*vma)) return Errno{EFAULT};
  first_in_maps_ = vma->file_offset + (here - vma->range.begin) - piece.offset;
  first_known_ = true;
  return ok();
}

LentPiece* LentMemory::of(std::uint64_t address) {
  for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece)
    if (piece->range.begin <= address && address < piece->range.end) return &*piece;
  return nullptr;
}

bool LentMemory::holds_in_place(const Vma& vma) const {
  if (!holds(vma)) return false;
  const LentPiece* const piece = of(vma.range.begin);
  return piece != nullptr && vma.file_offset == first_in_maps_ + piece->offset + (vma.range.begin - piece->range.begin);
}

template <class Each>
Status LentMemory::for_each_part(Range range, Each&& each) const {
  for (std::uint64_t at = range.begin; at < range.end;) {
    const LentPiece* const piece = of(at);
    if (piece == nullptr) return Errno{EFAULT};
    const Range part{at, std::min(range.end, piece->range.end)};
    if (const Status done = each(part, *piece, at - piece->range.begin); !done) return done;
    at = part.end;
  }
  return ok();
}

Status LentMemory::copy_from_memory(Range range) const {
  return for_each_part(range, [](Range part, const LentPiece& piece, std::uint64_t within) -> Status {
    copy_pages(piece.alias + within, reinterpret_cast<const void*>(part.begin), part.bytes());
    return ok();
  });
}

Status LentMemory::copy_to(void* to, Range range) const {
  return for_each_part(range, [&](Range part, const LentPiece& piece, std::uint64_t within) -> Status {
    copy_pages(static_cast<std::byte*>(to) + (part.begin - range.begin), piece.alias + within, part.bytes());
    return ok();
  });
}

Status LentMemory::map(Range range, int protection) const {
  if (!intact()) return Errno{EBADF};
  return for_each_part(range, [&](Range part, const LentPiece& piece, std::uint64_t within) -> Status {
    if (raw_mmap(part.begin, part.bytes(), protection, MAP_SHARED | MAP_FIXED, file_.get(), piece.offset + within) == MAP_FAILED) return last_error();
    ::syscall(SYS_madvise, part.begin, part.bytes(), MADV_DONTFORK);
    return ok();
  });
}

}  // namespace vrdma::memory
