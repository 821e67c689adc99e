// Registering where memory moves to lent pages (lent_memory.hpp). What differs from a window of our own: pages must be borrowed before
// the lock is taken, and given back when it is released; and they move while one thread runs, only.
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/manager_lock.hpp"

namespace vrdma::memory {
namespace {

constexpr std::uint64_t piece_bytes_max = 16 << 20;  // a lender may have no large one left

bool movable(const Piece& piece) { return piece.kind == Piece::Kind::movable; }

// One of each piece of lent memory: they are counted.
std::vector<Extent> lent_extents(const Plan& plan) {
  std::vector<Extent> extents;
  for (const Piece& piece : plan) {
    const bool lent = piece.kind == Piece::Kind::window;
    const std::uint32_t backing = lent ? piece.backing : backing_process;
    if (!lent && !extents.empty() && extents.back().backing == backing_process) {
      extents.back().bytes += piece.range.bytes();
      continue;
    }
    extents.push_back({piece.range.begin, piece.range.bytes(), lent ? piece.backing_offset : piece.range.begin, backing, 0});
  }
  return extents;
}

}  // namespace

void MemoryManager::move_to_lent_pages() {
  Locked lock(*this);
  if (lends_ || window_) return;
  lent_.emplace(&*pool_);
  window_ = Window::over(*lent_);
  keep_maps();
  lends_.store(true, std::memory_order_relaxed);
}

Result<Registration> MemoryManager::add_lent(Range range, bool writes) {
  alignas(std::max_align_t) char buffer[4096];
  MappedMemory outside(range);
  std::pmr::monotonic_buffer_resource scratch(buffer, sizeof buffer, &outside);
  Registration registration{range.begin, range.bytes(), 0, backings_.service(), {}, {}};
  std::pmr::vector<LentPiece> spares(&scratch);
  Plan plan(&scratch);
  bool held = false;
  Errno failed{0};
  try {
    std::pmr::vector<std::uint64_t> sizes(&scratch);
    {
      Locked lock(*this);
      auto found = plan_lent(range, writes, registration.service, &scratch);
      if (!found) return found.error();
      for (const Piece& piece : *found)
        for (std::uint64_t left = movable(piece) ? piece.range.bytes() : 0; left != 0; left -= sizes.back()) sizes.push_back(std::min(left, piece_bytes_max));
    }
    spares.reserve(sizes.size());
    for (const std::uint64_t bytes : sizes) {
      auto piece = borrow(bytes, registration.service);
      if (!piece) {
        failed = piece.error();
        break;
      }
      spares.push_back(*piece);
    }
    if (value(failed) == 0) {
      Locked lock(*this);
      auto found = plan_lent(range, writes, registration.service, &scratch);
      if (found) {
        plan = std::move(*found);
        move_into(plan, spares);
        publish_bounds();
        hold(plan);
        for (const Piece& piece : plan)
          if (piece.kind == Piece::Kind::window) ++lent_->of(piece.range.begin)->users;
        registration.generation = generation_;
        held = true;
      } else {
        failed = found.error();
      }
    }
    if (held) registration.extents = lent_extents(plan);
  } catch (const std::bad_alloc&) {
    failed = Errno{ENOMEM};
  }
  if (held && value(failed) != 0) {
    Locked lock(*this);
    for (const Piece& piece : plan) {
      if (piece.kind == Piece::Kind::process) by_process_->lower(whole_pages_around(piece.range), [](Range) {});
      if (piece.kind == Piece::Kind::window) end_use({piece.range.begin, piece.range.bytes(), 0, piece.backing, 0}, registration.service);
    }
    publish_bounds();
  }
  for (const LentPiece& spare : spares) return_piece(spare);
  give_back_pieces();
  if (value(failed) != 0) return failed;
  return Result<Registration>(std::move(registration));
}

// Under the lock. Its movable pieces can be moved now.
Result<Plan> MemoryManager::plan_lent(Range range, bool writes, std::uint64_t service, std::pmr::memory_resource* scratch) {
  auto plan = make_plan(range, writes, PartialPages::stay, window_, scratch);
  if (!plan) return plan.error();
  const auto of_another = [&](const Piece& piece) {
    return piece.kind == Piece::Kind::window && lent_->of(piece.range.begin)->service != service;
  };
  if (std::any_of(plan->begin(), plan->end(), of_another)) {
    for (const Piece& piece : *plan)
      if (of_another(piece)) evict(whole_pages_around(piece.range));
    plan = make_plan(range, writes, PartialPages::stay, window_, scratch);
    if (!plan) return plan.error();
    if (std::any_of(plan->begin(), plan->end(), of_another)) return Errno{EBUSY};
  }
  leave_to_process(*plan, scratch);
  for (Piece& piece : *plan) {
    if (piece.kind != Piece::Kind::window) continue;
    const LentPiece& lent = *lent_->of(piece.range.begin);
    piece.backing = lent.backing;
    piece.backing_offset = piece.range.begin - lent.range.begin;
  }
  return plan;
}

// What is not to be moved: all of it beside other threads, or where the program wants it so; stacks; and pages of which another registration has a part copied through the
// process, which the kernel would not copy to and from lent pages.
void MemoryManager::leave_to_process(Plan& plan, std::pmr::memory_resource* scratch) {
  const bool stays = keeps_private_pages_.load(std::memory_order_relaxed) || other_threads() == OtherThreads::some;
  for (Piece& piece : plan)
    if (piece.kind == Piece::Kind::file || (movable(piece) && stays)) piece.kind = Piece::Kind::process;
  spare_stacks(plan, std::pmr::vector<std::uint64_t>(scratch));
  leave_where_counted(plan, Piece::Kind::movable, *by_process_);
}

// Not under the lock.
Result<LentPiece> MemoryManager::borrow(std::uint64_t bytes, std::uint64_t service) {
  auto lent = backings_.lend(bytes);
  if (!lent) return lent.error();
  LentPiece piece{lent->offset, bytes, lent->backing, service, nullptr, {}, 0};
  const auto alias = LentMemory::map_alias(lent->file, lent->offset, bytes);
  Status usable = alias ? ok() : Status(alias.error());
  if (alias) {
    piece.alias = *alias;
    // Only while the lender lives: who comes after it may not have seen this mapping, and have lent the pages again.
    if (backings_.service() != service) {
      return_piece(piece);
      return Errno{EIO};
    }
    Locked lock(*this);
    usable = lent_->use(lent->file);
    if (usable) usable = lent_->learn_from(piece);
  }
  if (usable) return piece;
  return_piece(piece);
  return usable.error();
}

// Under the lock. Takes of `spares` what it uses; what finds none is left to the process.
void MemoryManager::move_into(Plan& plan, std::pmr::vector<LentPiece>& spares) {
  lent_->pieces().reserve(lent_->pieces().size() + spares.size());
  plan.reserve(plan.size() + 2 * spares.size());  // so that nothing below throws with pages moved but unknown
  auto spare = spares.begin();
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!movable(plan[i])) continue;
    Piece rest = plan[i];
    const std::uint64_t bytes = spare == spares.end() ? 0 : std::min(rest.range.bytes(), spare->bytes);
    const Range range{rest.range.begin, rest.range.begin + bytes};
    std::uint64_t moved = 0;
    // Another writer: the service itself, where it copies through the process.
    if (bytes != 0 && window_.intact() && budget_.take(bytes) && other_writers(range, other_threads()) == OtherThreads::none) {
      resident_->insert(range);
      spare->range = range;
      lent_->pieces().push_back(*spare);
      moved = move_in(window_, range, rest.protection, OtherThreads::none);
      statistics_.moved_in_bytes += moved;
      if (moved < bytes) resident_->erase({range.begin + moved, range.end});
      lent_->pieces().back().range.end = range.begin + moved;
      if (moved == 0)
        lent_->pieces().pop_back();
      else
        spare->alias = nullptr, ++spare;  // is not spare any more
    }
    if (moved == 0) {
      plan[i].kind = Piece::Kind::process;
      continue;
    }
    plan[i].kind = Piece::Kind::window;
    plan[i].range.end = range.begin + moved;
    plan[i].backing = lent_->pieces().back().backing;
    plan[i].backing_offset = 0;
    rest.range.begin = plan[i].range.end;
    if (moved < bytes) rest.kind = Piece::Kind::process;
    if (!rest.range.empty()) plan.insert(plan.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
  }
  spares.erase(spares.begin(), spare);
}

void MemoryManager::remove_lent(const Registration& registration) {
  {
    Locked lock(*this);
    if (registration.generation != generation_) return;  // made before the fork that this process comes from
    try {
      for (const Extent& extent : registration.extents) {
        if (extent.backing == backing_process)
          by_process_->lower(whole_pages_around({extent.address, extent.address + extent.bytes}), [](Range) {});
        else
          end_use(extent, registration.service);
      }
    } catch (const std::bad_alloc&) {
      // The pages stay where they are, which is safe.
    }
    publish_bounds();
  }
  give_back_pieces();
}

// Under the lock.
void MemoryManager::end_use(const Extent& extent, std::uint64_t service) {
  for (LentPiece& piece : lent_->pieces())
    if (piece.backing == extent.backing && piece.service == service && piece.users != 0) --piece.users;
  held_->lower(whole_pages_around({extent.address, extent.address + extent.bytes}), [this](Range zero) { give_back(zero); });
}

// What nobody uses any more goes back to the lender, unless its pages could not be moved out because other threads ran: then they are
// looked at again the next time.
void MemoryManager::give_back_pieces() {
  for (;;) {
    LentPiece unused;
    {
      Locked lock(*this);
      auto& pieces = lent_->pieces();
      const auto at = std::find_if(pieces.begin(), pieces.end(), [this](const LentPiece& piece) {
        if (piece.users == 0 && resident_->any(piece.range)) give_back_unheld(piece.range);
        return piece.users == 0 && !resident_->any(piece.range);
      });
      publish_bounds();
      if (at == pieces.end()) return;
      unused = *at;
      pieces.erase(at);
    }
    return_piece(unused);
  }
}

// Not under the lock.
void MemoryManager::return_piece(const LentPiece& piece) {
  if (piece.alias != nullptr) ::munmap(piece.alias, piece.bytes);
  if (piece.service == backings_.service() && backings_.withdraw) backings_.withdraw(piece.backing);
}

}  // namespace vrdma::memory
