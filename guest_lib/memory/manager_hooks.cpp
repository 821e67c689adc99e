// What reaches MemoryManager from elsewhere than its user: fork, and the interposed functions.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cassert>
#include <cstring>
#include <memory>
#include <utility>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/manager_lock.hpp"
#include "guest_lib/memory/raw_map.hpp"

namespace vrdma::memory {
namespace {

constexpr int advice_free = 8, advice_do_fork = 11, advice_dont_need_locked = 24;

std::atomic<MemoryManager*> instance{nullptr};

int raw_madvise(Range range, int advice) {
  return ::syscall(SYS_madvise, range.begin, range.bytes(), advice) == 0 ? 0 : errno;
}

}  // namespace

MemoryManager::MemoryManager(FileBackings backings) : backings_(std::move(backings)) {
  pool_.emplace(&mapped_memory_);
  held_.emplace(&*pool_);
  by_process_.emplace(&*pool_);
  atomics_by_process_.emplace(&*pool_);
  resident_.emplace(&*pool_);
  views_.emplace(&*pool_);
  [[maybe_unused]] MemoryManager* other = instance.exchange(this, std::memory_order_acq_rel);
  assert(other == nullptr);
}

MemoryManager::~MemoryManager() {
  instance.store(nullptr, std::memory_order_release);
}

// Handlers run in the child in the order of their registration: ours come first, because those of others (of libvrdma
// too) may touch pages that the child has only when install() has run. Without an instance they do nothing.
void MemoryManager::watch_forks() {
  ::pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
}

void MemoryManager::before_fork() {
  MemoryManager* self = instance.load(std::memory_order_acquire);
  if (self == nullptr) return;
  self->fork_signals_.emplace();
  self->fork_gate_.emplace();
  self->mutex_.lock();
  self->kept_.drop_private();
  // With others of the heap in these pages, the C library needs them in the child before install() has run.
  const bool inherited = self->partial_pages_.load(std::memory_order_relaxed) == PartialPages::move && !self->lends_.load(std::memory_order_relaxed);
  self->fork_guard_.copy(self->window_, *self->resident_, inherited);
  self->forking_.store(true);
}

// The instance that before_fork() found, not one that another thread has made since.
MemoryManager* MemoryManager::forking_instance() {
  MemoryManager* self = instance.load(std::memory_order_acquire);
  return self != nullptr && self->forking_.exchange(false) ? self : nullptr;
}

void MemoryManager::after_fork_in_parent() {
  MemoryManager* self = forking_instance();
  if (self == nullptr) return;
  while (self->fork_visitors_.load() != 0) sched_yield();
  self->fork_guard_.end(self->window_);
  self->mutex_.unlock();
  self->fork_gate_.reset();
  self->fork_signals_.reset();
}

void MemoryManager::after_fork_in_child() {
  MemoryManager* self = forking_instance();
  if (self == nullptr) return;
  self->fork_visitors_.store(0);  // they are the parent's
  self->fork_guard_.install();
  self->become_child();
  self->mutex_.unlock();
  self->fork_gate_.reset();
  CopyGate::become_child();
  self->fork_signals_.reset();
}

void MemoryManager::become_child() {
  ++generation_;
  forget_maps();
  held_.reset();
  by_process_.reset();
  atomics_by_process_.reset();
  resident_.reset();
  views_.reset();  // they are not mapped here
  lent_.reset();  // the pieces' aliases are not mapped here
  pool_.emplace(&mapped_memory_);
  held_.emplace(&*pool_);
  by_process_.emplace(&*pool_);
  atomics_by_process_.emplace(&*pool_);
  resident_.emplace(&*pool_);
  views_.emplace(&*pool_);
  publish_bounds();
  window_ = Window{};
  lends_.store(false, std::memory_order_relaxed);
  window_refused_ = false;
  budget_ = VmaBudget{};
  kept_.forget();
  statistics_ = Statistics{};
  // Another thread may have been changing these at the fork, and the allocator may not be usable yet: start afresh.
  std::construct_at(&files_mutex_);
  std::construct_at(&files_);
}

std::optional<int> MemoryManager::on_madvise(std::uint64_t address, std::uint64_t bytes, int advice) {
  if (advice != MADV_DONTNEED && advice != advice_free && advice != advice_do_fork && advice != advice_dont_need_locked)
    return std::nullopt;
  MemoryManager* self = instance.load(std::memory_order_acquire);
  if (self == nullptr || address % page_bytes() != 0 || address + bytes < address) return std::nullopt;
  // R1: a stale hint is harmless: pages of this caller's own memory cannot move in or out unknown to it, unless it
  // races.
  const Range hint{self->resident_begin_.load(std::memory_order_relaxed),
                   self->resident_end_.load(std::memory_order_relaxed)};
  const Range range{address, page_ceiling(address + bytes)};
  if (range.empty() || !range.overlaps(hint)) return std::nullopt;
  // The caller may be an allocator with its locks held, and the thread that forks may be waiting for those in the allocator's own
  // fork handler (jemalloc's background threads): so this one never waits for a fork to end.
  const SignalsBlocked signals;
  for (int tries = 0;; ++tries) {
    if (const std::unique_lock lock(self->mutex_, std::try_to_lock); lock.owns_lock()) return self->advise(range, advice);
    bool visited = false;
    if (const auto result = self->advise_beside_fork(range, advice, visited); visited) return result;
    constexpr int yields = 16;
    constexpr timespec nap{0, 50'000};
    tries < yields ? static_cast<void>(sched_yield()) : static_cast<void>(::syscall(SYS_nanosleep, &nap, nullptr));
  }
}

// While another thread is forking. The child is owed what madvise promises, too, where its copies are made already.
std::optional<int> MemoryManager::advise_beside_fork(Range range, int advice, bool& visited) {
  // Sequentially consistent, as in after_fork_in_parent(): either it waits for us or we see that the fork is over.
  fork_visitors_.fetch_add(1);
  visited = forking_.load();
  std::optional<int> result;
  if (visited) {
    if (advice != advice_do_fork) fork_guard_.clear(range);
    result = advise(range, advice);
  }
  fork_visitors_.fetch_sub(1);
  return result;
}

std::optional<int> MemoryManager::advise(Range range, int advice) {
  if (!resident_->any(range)) return std::nullopt;
  auto reader = VmaReader::open();
  if (!reader) return EAGAIN;  // the kernel would leave old contents, of which allocators believe that they are zero
  int result = 0;
  for (std::uint64_t at = range.begin; at < range.end;) {
    const auto vma = reader->at_or_after(at);
    if (!vma || vma->range.begin > at) result = ENOMEM;  // as the kernel: goes on behind the hole, and tells of it
    if (!vma || vma->range.begin >= range.end) break;
    const Range part = vma->range.clipped_to({at, range.end});
    at = part.end;
    if (!window_.holds(*vma)) {
      if (const int error = raw_madvise(part, advice); error != 0 && result == 0) result = error;
      continue;
    }
    if (advice == advice_do_fork) continue;  // a child gets its copies from ForkGuard, never the window
    const std::uint64_t offset = vma->file_offset + (part.begin - vma->range.begin);
    // A shared mapping keeps its contents through MADV_DONTNEED; the application is owed zeroes.
    if (!window_.punch({offset, offset + part.bytes()}) && vma->writable)
      std::memset(reinterpret_cast<void*>(part.begin), 0, part.bytes());
  }
  return result;
}

bool MemoryManager::before_mremap(std::uint64_t address, std::uint64_t bytes) {
  MemoryManager* self = instance.load(std::memory_order_acquire);
  if (self == nullptr || address % page_bytes() != 0 || address + bytes < address) return true;
  const Range hint{self->resident_begin_.load(std::memory_order_relaxed),
                   self->resident_end_.load(std::memory_order_relaxed)};
  const Range range{address, page_ceiling(address + bytes)};
  if (range.empty() || !range.overlaps(hint)) return true;
  Locked lock(*self);
  return self->evict(range);
}

// Under the lock, so that whoever looks at the mappings finds none that is not known.
Result<std::byte*> MemoryManager::map_view(int fd, std::uint64_t offset, std::uint64_t bytes, Range blank) {
  MemoryManager* self = instance.load(std::memory_order_acquire);
  const SignalsBlocked signals;
  std::unique_lock<std::mutex> lock;
  if (self != nullptr) lock = std::unique_lock(self->mutex_);
  void* const memory = raw_mmap(blank.begin, bytes, read_write, MAP_SHARED | (blank.empty() ? 0 : MAP_FIXED), fd, offset);
  if (memory == MAP_FAILED) return last_error();
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  try {
    if (self != nullptr) self->views_->insert({address, page_ceiling(address + bytes)});
  } catch (const std::bad_alloc&) {
    raw_munmap(address, bytes);
    return Errno{ENOMEM};
  }
  return static_cast<std::byte*>(memory);
}

bool MemoryManager::end_view(Range view, Left left) {
  MemoryManager* self = instance.load(std::memory_order_acquire);
  const SignalsBlocked signals;
  std::unique_lock<std::mutex> lock;
  if (self != nullptr) lock = std::unique_lock(self->mutex_);
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const bool stays = left == Left::zeroes && raw_mmap(view.begin, view.bytes(), PROT_READ, flags, -1, 0) != MAP_FAILED;
  if (!stays) raw_munmap(view.begin, view.bytes());
  try {
    if (self != nullptr) self->views_->erase({view.begin, page_ceiling(view.end)});
  } catch (const std::bad_alloc&) {
    // What the application moves there later passes for a view.
  }
  return stays;
}

bool MemoryManager::evict(Range range) {
  const OtherThreads others = other_threads();
  for (std::uint64_t at = range.begin; at < range.end;) {
    const Range run = resident_->first_overlap({at, range.end});
    if (run.empty()) return true;
    auto reader = VmaReader::open();
    const auto vma = reader ? reader->at_or_after(run.begin) : Result<Vma>(reader.error());
    if (!vma && vma.error() != Errno{ENOENT}) return false;
    if (!vma || vma->range.begin >= run.end) {
      at = run.end;
      continue;
    }
    const Range part = run.clipped_to(vma->range);
    at = part.end;
    if (!window_.holds_in_place(*vma)) continue;
    kept_.unmap(part);
    const std::uint64_t moved = move_out(window_, part, vma->protection(), other_writers(part, others));
    statistics_.moved_out_bytes += moved;
    try {
      resident_->erase({part.begin, part.begin + moved});
    } catch (const std::bad_alloc&) {
      // Marked resident without being mapped in place: found out, and harmless, at the next look.
    }
  }
  return true;
}

}  // namespace vrdma::memory
