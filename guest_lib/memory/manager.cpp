#include "guest_lib/memory/manager.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <memory>
#include <new>
#include <utility>

#include "guest_lib/memory/manager_lock.hpp"
#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/memory/shareable_file.hpp"
#include "vrdma/access.hpp"

namespace vrdma::memory {
namespace {

constexpr std::uint64_t give_back_bytes = 4 << 20;  // as much as is moved at once

std::vector<Extent> to_extents(const Plan& plan) {
  std::vector<Extent> extents;
  for (const Piece& piece : plan) {
    Extent next{piece.range.begin, piece.range.bytes(), piece.range.begin, backing_process, 0};
    if (piece.kind == Piece::Kind::window) next.backing = window_backing;
    if (piece.kind == Piece::Kind::file) {
      next.backing = piece.backing;
      next.backing_offset = piece.file_offset();
    }
    if (!extents.empty()) {
      Extent& last = extents.back();
      if (last.backing == next.backing && last.backing_offset + last.bytes == next.backing_offset) {
        last.bytes += next.bytes;
        continue;
      }
    }
    extents.push_back(next);
  }
  return extents;
}

}  // namespace

OtherThreads MemoryManager::other_threads() const {
  const auto count = static_cast<std::int64_t>(thread_count());
  const int kept_out = gate_closed_ ? CopyGate::threads() : 0;
  const bool alone = count != 0 && count - kept_out <= 1;
  return alone ? OtherThreads::none : OtherThreads::some;
}

// Who may write to the pages while they move: the service itself, too, where a registration has it reach them through the process.
// A thread of ours that copies in its place is kept out by the gate.
OtherThreads MemoryManager::other_writers(Range range, OtherThreads threads) const {
  const bool service_kept_out = gate_closed_ && CopyGate::threads() != 0;
  return by_process_->any(range) && !service_kept_out ? OtherThreads::some : threads;
}

Result<int> MemoryManager::window_fd() {
  Locked lock(*this);
  return window_fd_locked();
}

Result<int> MemoryManager::window_fd_locked() {
  if (window_) return window_.fd();
  if (window_refused_) return Errno{EFBIG};
  auto window = Window::create();
  if (!window) {
    window_refused_ = true;
    return window.error();
  }
  window_ = std::move(*window);
  keep_maps();  // from when on there is memory that nothing may be done to before it has been looked at
  return window_.fd();
}

void MemoryManager::publish_bounds() {
  const Range bounds = resident_->bounds();
  resident_begin_.store(bounds.begin, std::memory_order_relaxed);
  resident_end_.store(bounds.end, std::memory_order_relaxed);
}

Result<Registration> MemoryManager::add(std::uint64_t address, std::uint64_t bytes, unsigned access) {
  const std::uint64_t end = address + bytes;
  if (bytes == 0 || end < address || end > ~std::uint64_t{0} - page_bytes()) return Errno{EINVAL};
  const bool writes = (access & (access_local_write | access_remote_write | access_remote_atomic)) != 0;
  const bool atomics = (access & (access_remote_atomic | access_mw_bind)) != 0;  // a window may allow them, too
  const Range range{address, end};
  if (lends_) return add_lent(range, writes);

  alignas(std::max_align_t) char buffer[4096];
  MappedMemory outside(range);  // our own page in a hole of the range would pass for the application's
  std::pmr::monotonic_buffer_resource scratch(buffer, sizeof buffer, &outside);
  UsedFiles files(&scratch);
  Registration registration{address, bytes, 0, backings_.service(), {}, {}, atomics};
  bool held = false;
  Errno failed{ENOMEM};
  try {
    Plan plan(&scratch);
    if (Status taken = plan_and_hold(plan, range, writes, registration, files, &scratch); !taken) {
      failed = taken.error();
    } else {
      // From here on the plan's window pieces are held: an exception must undo that through the extents, or not at all.
      try {
        registration.extents = to_extents(plan);
        held = true;
      } catch (const std::bad_alloc&) {
        let_go(plan, atomics);
      }
    }
  } catch (const std::bad_alloc&) {
  }
  for (const UsedFile& file : files) {
    const auto uses = [&](const Extent& extent) { return extent.backing == file.backing; };
    if (!held || std::none_of(registration.extents.begin(), registration.extents.end(), uses))
      release_file(file.backing, registration.service);
  }
  if (!held) return failed;
  return Result<Registration>(std::move(registration));
}

Status MemoryManager::plan_and_hold(Plan& plan, Range range, bool writes, Registration& registration, UsedFiles& files, std::pmr::memory_resource* scratch) {
  const auto is_file = [](const Piece& piece) { return piece.kind == Piece::Kind::file; };
  const PartialPages partial_pages = partial_pages_.load(std::memory_order_relaxed);
  const Stays stays{in_place_.load(std::memory_order_relaxed), keeps_private_pages_.load(std::memory_order_relaxed), registration.atomics};
  // Under the lock, as what follows from it.
  const auto look = [&]() -> Status {
    auto found = make_plan(range, writes, partial_pages, window_, scratch);
    if (!found) return found.error();
    plan = std::move(*found);
    leave_alone(plan, stays, scratch);
    return ok();
  };
  const auto take = [&] {
    move_and_hold(plan, range, files, stays.atomics, scratch);
    registration.generation = generation_;
  };
  {
    Locked lock(*this);
    if (Status looked = look(); !looked) return looked;
    if (std::none_of(plan.begin(), plan.end(), is_file)) return take(), ok();
  }
  // Announcing calls back, so not under the lock; what the memory consists of is then looked at again.
  for (const Piece& piece : plan)
    if (is_file(piece)) use_file(piece, registration.service, files);
  Locked lock(*this);
  if (Status looked = look(); !looked) return looked;
  take();
  return ok();
}

void MemoryManager::leave_alone(Plan& plan, const Stays& stays, std::pmr::memory_resource* scratch) {
  for (Piece& piece : plan)
    if ((stays.in_place && piece.kind != Piece::Kind::window) || (stays.private_pages && piece.kind == Piece::Kind::movable)) piece.kind = Piece::Kind::process;
  leave_where_replaced(plan, scratch);
  // Those by the process and those by a mapping would not be atomic with each other.
  if (!stays.atomics || atomics_by_process_->empty()) return;
  for (const Piece::Kind kind : {Piece::Kind::movable, Piece::Kind::window}) leave_where_counted(plan, kind, *atomics_by_process_);
}

void MemoryManager::let_go(const Plan& plan, bool atomics) {
  Locked lock(*this);
  for (const Piece& piece : plan) {
    if (piece.kind == Piece::Kind::process) count_out(whole_pages_around(piece.range), atomics);
    if (piece.kind == Piece::Kind::window)
      held_->lower(whole_pages_around(piece.range), [this](Range zero) { give_back(zero); });
  }
  publish_bounds();
}

// Who copies there for the service is a writer that a page that moves must not lose (other_writers).
Result<Registration> MemoryManager::add_on_demand(std::uint64_t address, std::uint64_t bytes) {
  try {
    Registration registration{address, bytes, 0, backings_.service(), {{address, bytes, address, backing_process, 0}}, {}};
    Locked lock(*this);
    by_process_->raise(whole_pages_around({address, address + bytes}));
    registration.generation = generation_;
    return Result<Registration>(std::move(registration));
  } catch (const std::bad_alloc&) {
    return Errno{ENOMEM};
  }
}

void MemoryManager::move_and_hold(Plan& plan, Range range, const UsedFiles& files, bool atomics, std::pmr::memory_resource* scratch) {
  for (Piece& piece : plan) {
    if (piece.kind != Piece::Kind::file) continue;
    const auto used = std::find_if(files.begin(), files.end(), [&](const UsedFile& f) { return f.id == piece.vma.file && f.holds(piece); });
    if (used != files.end())
      piece.backing = used->backing;
    else
      piece.kind = Piece::Kind::process;
  }
  move_pieces(plan, scratch);
  for (Piece& piece : plan) {
    if (piece.kind == Piece::Kind::window && piece.range.begin < range.begin) window_.set_apart(piece.range.begin);
    piece.range = piece.range.clipped_to(range);
  }
  publish_bounds();
  hold(plan, atomics);
}

void MemoryManager::move_pieces(Plan& plan, std::pmr::memory_resource* scratch) {
  const auto movable = [](const Piece& piece) { return piece.kind == Piece::Kind::movable; };
  if (std::none_of(plan.begin(), plan.end(), movable)) return;
  const bool possible = static_cast<bool>(window_fd_locked()) && window_.intact() && Window::size_limit_allows();
  const OtherThreads others = other_threads();
  std::pmr::vector<std::uint64_t> control_blocks(scratch);
  if (possible && others == OtherThreads::some) control_blocks = thread_control_blocks(scratch);
  spare_stacks(plan, control_blocks);
  plan.reserve(2 * plan.size());  // so that nothing below throws with pages moved but unknown
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!movable(plan[i])) continue;
    const std::uint64_t moved = possible ? take_in(plan[i], other_writers(plan[i].range, others)) : 0;
    Piece rest = plan[i];
    plan[i].kind = Piece::Kind::window;
    plan[i].range.end = plan[i].range.begin + moved;
    rest.kind = Piece::Kind::process;
    rest.range.begin = plan[i].range.end;
    if (moved == 0)
      plan[i] = rest;
    else if (!rest.range.empty())
      plan.insert(plan.begin() + static_cast<std::ptrdiff_t>(++i), rest);
  }
}

// Memory that was registered, and has been unmapped and mapped anew since: peers of that registration go on with its pages, as with an
// adapter, and these cannot be in the window as well.
void MemoryManager::leave_where_replaced(Plan& plan, std::pmr::memory_resource* scratch) {
  PageCounts taken(scratch);
  for (const Piece& piece : plan)
    if (piece.kind == Piece::Kind::movable) for_common(*resident_, *held_, piece.range, [&](Range both) { taken.insert(both); });
  if (!taken.empty()) leave_where_counted(plan, Piece::Kind::movable, taken);
}

std::uint64_t MemoryManager::take_in(const Piece& piece, OtherThreads others) {
  if (!budget_.take(piece.range.bytes())) return 0;
  // Marked resident but not mapped in place: the application has replaced the mapping since. What the window still
  // holds at these offsets is nobody's, unless the old mapping lives on at another address.
  const bool known = resident_->any(piece.range), quick = others == OtherThreads::none && piece.protection == read_write;
  if (known || !quick) kept_.unmap(piece.range);
  if (known && mapped_elsewhere(piece.range)) return 0;
  resident_->insert(piece.range);
  const std::uint64_t moved = quick && kept_.move_in(piece.range)
                                  ? piece.range.bytes()
                                  : move_in(window_, piece.range, piece.protection, others);
  if (moved < piece.range.bytes()) resident_->erase({piece.range.begin + moved, piece.range.end});
  statistics_.moved_in_bytes += moved;
  kept_.moved_in({piece.range.begin, piece.range.begin + moved});
  return moved;
}

bool MemoryManager::mapped_elsewhere(Range offsets) {
  auto reader = VmaReader::open();
  if (!reader) return true;
  for (std::uint64_t at = 0;;) {
    const auto vma = reader->at_or_after(at);
    if (!vma) return vma.error() != Errno{ENOENT};
    const Range file{vma->file_offset, vma->file_offset + vma->range.bytes()};
    if (window_.holds(*vma) && !window_.holds_in_place(*vma) && file.overlaps(offsets) && !is_view(vma->range)) return true;
    at = vma->range.end;
  }
}

void MemoryManager::count_in(const Piece& piece, bool atomics) {
  const Range pages = whole_pages_around(piece.range);
  if (piece.kind == Piece::Kind::window) held_->raise(pages);
  if (piece.kind != Piece::Kind::process) return;
  by_process_->raise(pages);
  if (!atomics) return;
  try {
    atomics_by_process_->raise(pages);
  } catch (...) {
    by_process_->lower(pages, [](Range) {});
    throw;
  }
}
void MemoryManager::count_out(Range pages, bool atomics) {
  by_process_->lower(pages, [](Range) {});
  if (atomics) atomics_by_process_->lower(pages, [](Range) {});
}

void MemoryManager::hold(const Plan& plan, bool atomics) {
  std::size_t done = 0;
  try {
    for (; done < plan.size(); ++done) count_in(plan[done], atomics);
  } catch (...) {
    for (std::size_t i = 0; i < plan.size(); ++i) {
      const Range pages = whole_pages_around(plan[i].range);
      if (plan[i].kind == Piece::Kind::process && i < done) count_out(pages, atomics);
      if (plan[i].kind != Piece::Kind::window) continue;
      if (i < done) held_->lower(pages, [](Range) {});
      give_back_unheld(pages);
    }
    publish_bounds();
    throw;
  }
}

void MemoryManager::give_back_unheld(Range range) {
  for (std::uint64_t at = range.begin; at < range.end;) {
    const Range held = held_->first_overlap({at, range.end});
    const std::uint64_t free_end = held.empty() ? range.end : held.begin;
    if (at < free_end) give_back({at, free_end});
    at = held.empty() ? range.end : held.end;
  }
}

void MemoryManager::remove(Registration&& registration) {
  const Registration taken = std::move(registration);
  if (lends_) return remove_lent(taken);
  {
    Locked lock(*this);
    if (taken.generation != generation_) return;  // made before the fork that this process comes from
    try {
      for (const Extent& extent : taken.extents) {
        const Range pages = whole_pages_around({extent.address, extent.address + extent.bytes});
        if (extent.backing == backing_process) count_out(pages, taken.atomics);
        if (extent.backing == window_backing) held_->lower(pages, [this](Range zero) { give_back(zero); });
      }
    } catch (const std::bad_alloc&) {
      // The pages stay in the window, which is safe.
    }
    publish_bounds();
  }
  std::vector<std::uint32_t> backings;
  for (const Extent& extent : taken.extents) {
    const auto known = std::find(backings.begin(), backings.end(), extent.backing);
    if (extent.backing == window_backing || extent.backing == backing_process || known != backings.end()) continue;
    backings.push_back(extent.backing);
    release_file(extent.backing, taken.service);
  }
}

void MemoryManager::give_back(Range range) {
  const OtherThreads others = other_threads();
  if (!window_.lent() && others == OtherThreads::none) window_.join(range);  // it can be kept aside as it was moved in
  alignas(std::max_align_t) char buffer[2048];
  std::pmr::monotonic_buffer_resource scratch(buffer, sizeof buffer, &mapped_memory_);
  std::pmr::vector<Vma> mapped(&scratch);
  auto reader = VmaReader::open();
  if (!reader) return;
  bool lost = false;
  for (std::uint64_t at = range.begin; at < range.end;) {
    auto vma = reader->at_or_after(at);
    if (!vma && vma.error() != Errno{ENOENT}) return;
    if (!vma || vma->range.begin >= range.end) {
      lost = true;
      break;
    }
    lost = lost || vma->range.begin > at || !window_.holds_in_place(*vma);
    at = vma->range.end;
    const Range part = vma->range.clipped_to(range);
    const bool ours = window_.holds_in_place(*vma);
    vma->range = part;
    if (ours) mapped.push_back(*vma);
  }
  // Of what the application unmapped or replaced, nothing is put back; the window's pages go, unless mremap took them
  // along.
  if (lost) kept_.unmap(range);
  if (lost && (window_.lent() || !mapped_elsewhere(range))) {
    std::uint64_t at = range.begin;
    for (std::size_t i = 0; i <= mapped.size(); ++i) {
      const Range gap{at, i < mapped.size() ? mapped[i].range.begin : range.end};
      if (!gap.empty()) {
        resident_->erase(gap);
        (void)window_.punch(gap);
      }
      if (i < mapped.size()) at = mapped[i].range.end;
    }
  }
  for (const Vma& vma : mapped) {
    // More than is kept afterwards goes in pieces, so that the pages that one gives up serve for the next: else all of it would exist
    // twice, and the second half be pages that the machine has to find anew.
    const bool kept = !window_.lent() && vma.range.bytes() <= KeptPages::bytes_max;
    const OtherThreads writers = other_writers(vma.range, others);
    if (kept && writers == OtherThreads::none && vma.protection() == read_write && kept_.move_out(vma.range)) {
      statistics_.moved_out_bytes += vma.range.bytes();
      resident_->erase(vma.range);
      continue;
    }
    kept_.unmap(vma.range);
    for (std::uint64_t at = vma.range.begin; at < vma.range.end;) {
      const Range piece{at, kept ? vma.range.end : std::min(vma.range.end, (at / give_back_bytes + 1) * give_back_bytes)};
      const std::uint64_t moved = move_out(window_, piece, vma.protection(), writers);
      if (moved == 0) {
        if (!window_.lent()) window_.set_apart(at);
        break;
      }
      statistics_.moved_out_bytes += moved;
      const Range freed{at, at + moved};
      resident_->erase(freed);
      if (kept)
        kept_.retain(freed);
      else
        (void)window_.punch(freed);
      if (moved < piece.bytes()) break;
      at = piece.end;
    }
  }
}

void MemoryManager::use_file(const Piece& piece, std::uint64_t service, UsedFiles& used) {
  const auto suits = [&](const UsedFile& file) { return file.id == piece.vma.file && file.holds(piece); };
  if (std::any_of(used.begin(), used.end(), suits)) return;
  used.reserve(used.size() + 1);
  const std::lock_guard lock(files_mutex_);
  auto [next, end] = files_.equal_range(piece.vma.file);
  auto known = files_.end();  // the last one told of: those from when the file was smaller go with their registrations
  while (next != end) {
    const auto entry = next++;
    if (entry->second.service != service) files_.erase(entry);  // told to one that is gone
    else if (suits({entry->first, entry->second.backing, entry->second.bytes})) known = entry;
  }
  if (known == files_.end()) {
    auto file = open_shareable(piece.vma);
    if (!file || !backings_.announce || !suits({piece.vma.file, 0, file->bytes})) return;
    auto backing = backings_.announce(file->fd, file->bytes);
    if (!backing) return;
    if (!file->still_is(piece.vma.file)) {
      if (backings_.withdraw) backings_.withdraw(*backing);
      return;
    }
    try {
      known = files_.emplace(piece.vma.file, File{*backing, service, file->bytes, 0});
    } catch (...) {
      if (backings_.withdraw) backings_.withdraw(*backing);
      throw;
    }
  }
  ++known->second.registrations;
  used.push_back({known->first, known->second.backing, known->second.bytes});
}

void MemoryManager::release_file(std::uint32_t backing, std::uint64_t service) {
  const std::lock_guard lock(files_mutex_);
  const auto file =
      std::find_if(files_.begin(), files_.end(), [&](const auto& entry) {
        return entry.second.backing == backing && entry.second.service == service;
      });
  if (file == files_.end() || --file->second.registrations != 0) return;
  files_.erase(file);
  if (backings_.withdraw && backings_.service() == service) backings_.withdraw(backing);  // to another one that number is another file
}

Statistics MemoryManager::statistics() {
  Locked lock(*this);
  Statistics now = statistics_;
  now.resident_bytes = resident_->bytes();
  std::uint64_t held = 0;
  for_common(*held_, *resident_, {0, ~std::uint64_t{0}}, [&](Range both) { held += both.bytes(); });
  now.stranded_bytes = now.resident_bytes - held;
  return now;
}

}  // namespace vrdma::memory
