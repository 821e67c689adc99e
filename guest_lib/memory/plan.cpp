#include "guest_lib/memory/plan.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "guest_lib/memory/raw_copy.hpp"
#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/memory/threads.hpp"

namespace vrdma::memory {
namespace {

bool may_move(const Vma& vma) {
  return vma.private_anonymous() && vma.readable && vma.writable && !vma.executable &&
         !(vma.range.begin <= main_stack_address() && main_stack_address() < vma.range.end) &&
         vma.range.end <= window_bytes;
}

void append(Plan& plan, Piece::Kind kind, Range range, const Vma& vma) {
  if (range.empty()) return;
  plan.push_back({kind, range, vma.protection(), vma, 0, 0});
}

// Not what the C library uses without knowing that it is away for a moment, in another thread or in a fork's child before any handler:
// a thread's control block, with the thread-local data below it, and the head of an allocator's arena.
bool may_move_with_neighbours(std::uint64_t page) {
  constexpr std::uint64_t arena_alignment = 2 << 20;  // of glibc 64 MiB, or four huge pages
  const auto control_block = reinterpret_cast<std::uint64_t>(::pthread_self());
  const Range control{page_floor(control_block) - page_bytes(), page_floor(control_block) + 2 * page_bytes()};
  return page % arena_alignment != 0 && !control.overlaps({page, page + page_bytes()});
}

// The words before a block of glibc's malloc.
constexpr std::uint64_t header_bytes = 16, header_flags = 7, flag_in_use_before = 1, flag_mapped = 2;
struct Header {
  std::uint64_t before, bytes, flags;  // bytes of the block before, and of the block from `address`
};
std::optional<Header> header_at(VmaReader& reader, const Window& window, Range registration, std::uint64_t address) {
  const auto vma = reader.at_or_after(address);
  if (!vma || vma->range.begin > address || vma->range.end - address < header_bytes || address % header_bytes != 0) return std::nullopt;
  if (!may_move(*vma) && !window.holds_in_place(*vma)) return std::nullopt;
  // A page that is not registered may be guarded.
  const bool registered = whole_pages_around(registration).overlaps({address, address + header_bytes});
  if (!registered && ::syscall(SYS_madvise, page_floor(address), page_bytes(), populate_read) != 0) return std::nullopt;
  std::uint64_t words[2];
  raw_copy(reinterpret_cast<std::uint64_t>(words), address, sizeof(words));
  const Header header{words[0], words[1] & ~header_flags, words[1] & header_flags};
  return header.bytes <= window_bytes ? std::optional(header) : std::nullopt;
}

// A block of glibc's heap that begins at a page, up to where its last whole page ends: the words below it tell its length, and the words
// behind that it is in use. aligned_blocks.cpp sees to it that there is such a page where `registration` ends. Empty where it does not look so.
Range aligned_block(VmaReader& reader, const Window& window, Range registration) {
  const std::uint64_t begin = page_floor(registration.begin), address = begin - header_bytes;
  const auto header = header_at(reader, window, registration, address);
  if (!header || (header->flags & flag_mapped) != 0 || address + header->bytes < page_ceiling(registration.end)) return {};
  const auto behind = header_at(reader, window, registration, address + header->bytes);
  return behind && (behind->flags & flag_in_use_before) != 0 ? Range{begin, page_floor(address + header->bytes)} : Range{};
}

// What glibc's malloc has mapped for the buffer that `registration` is in, whole pages: a flag below the buffer says so. Empty where it does
// not look so.
Range mapped_buffer(VmaReader& reader, const Window& window, Range registration) {
  for (const std::uint64_t address : {registration.begin - header_bytes, page_floor(registration.begin)}) {
    const auto header = header_at(reader, window, registration, address);
    if (!header || header->flags != flag_mapped || header->before > address) continue;
    const Range block{address - header->before, address + header->bytes};
    const bool whole_pages = page_floor(block.begin) == block.begin && page_floor(block.end) == block.end;
    if (whole_pages && block.bytes() > page_bytes() && address + header_bytes <= registration.begin && registration.end <= block.end) return block;
  }
  return {};
}

Range own_block(VmaReader& reader, const Window& window, Range registration) {
  const Range aligned = aligned_block(reader, window, registration);
  return aligned.empty() ? mapped_buffer(reader, window, registration) : aligned;
}

Range movable_pages(VmaReader& reader, const Window& window, Range registration, PartialPages partial) {
  Range pages = whole_pages_around(registration);
  if (pages == registration) return pages;
  const Range own = partial == PartialPages::stay ? Range{} : own_block(reader, window, registration);
  const auto stays = [&](std::uint64_t page) {
    return !own.overlaps({page, page + page_bytes()}) && (partial != PartialPages::move || !may_move_with_neighbours(page));
  };
  if (pages.begin != registration.begin && stays(pages.begin)) pages.begin += page_bytes();
  if (pages.end != registration.end && !pages.empty() && stays(pages.end - page_bytes())) pages.end -= page_bytes();
  return pages;
}

void append_movable(Plan& plan, Range part, Range movable, const Vma& vma) {
  const Range pages = whole_pages_around(part).clipped_to(movable);
  if (pages.empty()) return append(plan, Piece::Kind::process, part, vma);
  append(plan, Piece::Kind::process, {part.begin, pages.begin}, vma);
  append(plan, Piece::Kind::movable, pages, vma);
  append(plan, Piece::Kind::process, {pages.end, part.end}, vma);
}

// A mapping may reach further than its file: an adapter's driver, which would have these pages pinned, says EFAULT. Kernels before 5.14
// cannot tell.
bool beyond_its_file(const Vma& vma, Range part) {
  return vma.file.inode != 0 && ::syscall(SYS_madvise, page_floor(part.end - 1), page_bytes(), populate_read) != 0 && errno == EFAULT;
}

}  // namespace

Result<Plan> make_plan(Range range, bool writes, PartialPages partial, const Window& window, std::pmr::memory_resource* resource) {
  Plan plan(resource);
  auto reader = VmaReader::open();
  if (!reader) {
    // Without /proc nothing is known but that process_vm_* may still work; the service finds out.
    append(plan, Piece::Kind::process, range, Vma{});
    return Result<Plan>(std::move(plan));
  }
  const Range movable = movable_pages(*reader, window, range, partial);
  for (std::uint64_t at = range.begin; at < range.end;) {
    const auto vma = reader->at_or_after(at);
    if (!vma || vma->range.begin > at) return Errno{EFAULT};
    if (!vma->readable || (writes && !vma->writable)) return Errno{EFAULT};
    const Range part = Range{at, range.end}.clipped_to(vma->range);
    if (window.holds_in_place(*vma))
      append(plan, Piece::Kind::window, part, *vma);
    else if (beyond_its_file(*vma, part))
      return Errno{EFAULT};
    else if (may_move(*vma))
      append_movable(plan, part, movable, *vma);
    else if (vma->shared && vma->file.inode != 0 && !window.holds(*vma))
      append(plan, Piece::Kind::file, part, *vma);
    else
      append(plan, Piece::Kind::process, part, *vma);
    at = part.end;
  }
  return Result<Plan>(std::move(plan));
}

void leave_where_counted(Plan& plan, Piece::Kind kind, const PageCounts& counts) {
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].kind != kind) continue;
    const Range used = counts.first_overlap(plan[i].range);
    if (used.empty()) continue;
    Piece middle = plan[i], rest = plan[i];
    middle.kind = Piece::Kind::process;
    middle.range = used;
    rest.range.begin = used.end;
    plan[i].range.end = used.begin;
    if (plan[i].range.empty())
      plan[i] = middle;
    else
      plan.insert(plan.begin() + static_cast<std::ptrdiff_t>(++i), middle);
    if (!rest.range.empty()) plan.insert(plan.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
  }
}

void spare_stacks(Plan& plan, const std::pmr::vector<std::uint64_t>& control_blocks) {
  // This thread may run on memory that is nobody's stack officially (a coroutine's): around its stack pointer, and where our callers'
  // frames are above it, nothing moves.
  const std::uint64_t here = reinterpret_cast<std::uint64_t>(__builtin_frame_address(0));
  const Range active{here - (256 << 10), here + (64 << 10)};
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].kind != Piece::Kind::movable) continue;
    if (plan[i].range.overlaps(active)) plan[i].kind = Piece::Kind::process;
    // A stack lies below its thread's control block, down to the guard page where the mapping ends; other memory may
    // have merged with the mapping above.
    std::uint64_t top = 0;
    for (const std::uint64_t block : control_blocks)
      if (plan[i].vma.range.begin <= block && block < plan[i].vma.range.end)
        top = std::max(top, page_floor(block) + page_bytes());
    if (top <= plan[i].range.begin || plan[i].kind != Piece::Kind::movable) continue;
    Piece above = plan[i];
    plan[i].kind = Piece::Kind::process;
    if (top >= plan[i].range.end) continue;
    above.range.begin = top;
    plan[i].range.end = top;
    plan.insert(plan.begin() + static_cast<std::ptrdiff_t>(i) + 1, above);
  }
}

}  // namespace vrdma::memory
