// Makes registered application memory reachable for the host service, without the application noticing: what is a
// shareable file already is announced, private anonymous pages move into the window, the rest is left to process_vm_*.
// See DESIGN.md.
//
// One per process, any thread. Never calls malloc or a callback under its lock: an allocator may be waiting for that
// lock in madvise. After fork() the child's manager is empty, with no window; what it had registered before is void
// there.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <vector>

#include "guest_lib/memory/copy_gate.hpp"
#include "guest_lib/memory/fork_guard.hpp"
#include "guest_lib/memory/kept_pages.hpp"
#include "guest_lib/memory/lent_memory.hpp"
#include "guest_lib/memory/mapped_memory.hpp"
#include "guest_lib/memory/mover.hpp"
#include "guest_lib/memory/page_counts.hpp"
#include "guest_lib/memory/plan.hpp"
#include "guest_lib/memory/threads.hpp"
#include "guest_lib/memory/vma_budget.hpp"
#include "guest_lib/memory/window.hpp"
#include "vrdma/control.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

using control::Extent;
constexpr std::uint32_t window_backing = 0;  // the service's first backing of a guest
using control::backing_process;

struct Lent {
  int file;  // the lender's descriptor
  std::uint64_t offset;
  std::uint32_t backing;
};
// How the service learns of the application's shareable files. announce: at most once per file and size while registrations use
// it; the descriptor is sealed against shrinking and stays the caller's; returns the backing's id. withdraw: no
// registration uses it. service: a number of the service that would be asked now; what another one was told does not count.
struct FileBackings {
  std::function<Result<std::uint32_t>(int fd, std::uint64_t bytes)> announce;
  std::function<void(std::uint32_t backing)> withdraw;
  std::function<std::uint64_t()> service = [] { return std::uint64_t{0}; };
  // Where memory is moved to what the service lends in the window's place (lent_memory.hpp): a piece of so many bytes, zero, which
  // withdraw() gives back. ENOMEM: none is left.
  std::function<Result<Lent>(std::uint64_t bytes)> lend = {};
};

struct Registration {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t generation = 0;
  std::uint64_t service = 0;  // that the extents' files were announced to
  std::vector<Extent> extents;  // ascending, without gaps, exactly the registered bytes
  std::vector<std::uint32_t> pinned;  // backings that somebody else holds pages of it by, to be withdrawn with it
  bool atomics = false;  // peers may ask for them
};

struct Statistics {
  std::uint64_t moved_in_bytes = 0, moved_out_bytes = 0;  // since the start
  std::uint64_t resident_bytes = 0;                       // in the window now
  std::uint64_t stranded_bytes = 0;  // of those, no longer registered but not movable back without risk
};

class MemoryManager {
 public:
  explicit MemoryManager(FileBackings backings);
  ~MemoryManager();  // every registration has been removed
  MemoryManager(const MemoryManager&) = delete;
  MemoryManager& operator=(const MemoryManager&) = delete;

  // The window's descriptor, to pass to the service at attach; created on first use and after fork. EFBIG and others
  // where there can be none: then all private memory is reached by process_vm_*.
  Result<int> window_fd();

  // From now on nothing moves and no file is announced: memory is reached where it is.
  void keep_in_place() { in_place_.store(true, std::memory_order_relaxed); }
  // From now on no private page moves: for programs that have the kernel, or a device, hold on to theirs.
  void keep_private_pages() { keeps_private_pages_.store(true, std::memory_order_relaxed); }
  // From now on. `move` is for programs of one thread, or that do not fork: DESIGN.md says what it means for others.
  void set_partial_pages(PartialPages which) { partial_pages_.store(which, std::memory_order_relaxed); }
  // From now on what moves goes to lent pages, and no file is announced. Only while one thread runs: with others, memory is reached where
  // it is. Once it moved to a window, it goes on doing so.
  void move_to_lent_pages();

  // access: ibv_access_flags. EINVAL: no bytes, or the range wraps. EFAULT: part of it is not mapped, or not readable,
  // or not writable where local write, remote write or atomics are asked for. ENOMEM. EBUSY: part of it lies in pages that an earlier
  // service lent, and other threads run.
  Result<Registration> add(std::uint64_t address, std::uint64_t bytes, unsigned access);
  // Addresses, whatever is mapped there when they are reached: nothing is looked at, nothing moves. ENOMEM.
  Result<Registration> add_on_demand(std::uint64_t address, std::uint64_t bytes);
  // The service has confirmed that it no longer touches the registration.
  void remove(Registration&& registration);

  Statistics statistics();

  // For the interposed functions, which run in any thread at any time. madvise: what to return, or nothing where the
  // caller shall do it. before_mremap: takes the range out of the window, so that it can move; false: nobody can tell what is there.
  static std::optional<int> on_madvise(std::uint64_t address, std::uint64_t bytes, int advice);
  static bool before_mremap(std::uint64_t address, std::uint64_t bytes);

  // Files that this library maps for itself, for writing: where one is the window, that is not memory which the application has moved. Errors
  // as mmap(2). Whole pages.
  // blank: a range that blank_view() has left, of at least so many bytes, to be mapped over; empty: anywhere.
  static Result<std::byte*> map_view(int fd, std::uint64_t offset, std::uint64_t bytes, Range blank = {});
  static void unmap_view(Range view) { end_view(view, Left::nothing); }
  // Takes the file out of the range, which stays, to be read as zeroes. False: it does not, and is anybody's.
  static bool blank_view(Range view) { return end_view(view, Left::zeroes); }

 private:
  struct File {
    std::uint32_t backing;
    std::uint64_t service;
    std::uint64_t bytes;
    std::uint64_t registrations;
  };
  class Locked;
  struct UsedFile {
    FileId id;
    std::uint32_t backing;
    std::uint64_t bytes;

    bool holds(const Piece& piece) const { return piece.file_offset() <= bytes && piece.range.bytes() <= bytes - piece.file_offset(); }
  };
  using UsedFiles = std::pmr::vector<UsedFile>;

  // With lent pages (manager_lent.cpp).
  Result<Registration> add_lent(Range range, bool writes);
  Result<Plan> plan_lent(Range range, bool writes, std::uint64_t service, std::pmr::memory_resource* scratch);
  void leave_to_process(Plan& plan, std::pmr::memory_resource* scratch);
  Result<LentPiece> borrow(std::uint64_t bytes, std::uint64_t service);
  void move_into(Plan& plan, std::pmr::vector<LentPiece>& spares);
  void remove_lent(const Registration& registration);
  void end_use(const Extent& extent, std::uint64_t service);
  void give_back_pieces();
  void return_piece(const LentPiece& piece);

  OtherThreads other_threads() const;
  OtherThreads other_writers(Range range, OtherThreads threads) const;
  Result<int> window_fd_locked();
  void publish_bounds();

  struct Stays {  // where it is, of memory that is registered
    bool in_place, private_pages;
    bool atomics;  // of peers are allowed
  };

  // What `range` consists of, moved and held: takes the lock, and nothing is held where it fails or throws.
  Status plan_and_hold(Plan& plan, Range range, bool writes, Registration& registration, UsedFiles& files, std::pmr::memory_resource* scratch);
  void let_go(const Plan& plan, bool atomics);  // takes the lock
  // Registering. Under the lock, except for the files.
  void leave_alone(Plan& plan, const Stays& stays, std::pmr::memory_resource* scratch);
  void move_and_hold(Plan& plan, Range range, const UsedFiles& files, bool atomics, std::pmr::memory_resource* scratch);
  void move_pieces(Plan& plan, std::pmr::memory_resource* scratch);
  void leave_where_replaced(Plan& plan, std::pmr::memory_resource* scratch);
  std::uint64_t take_in(const Piece& piece, OtherThreads others);
  bool mapped_elsewhere(Range offsets);
  enum class Left { nothing, zeroes };
  static bool end_view(Range view, Left left);
  bool is_view(Range range) const { return views_->first_overlap(range) == range; }
  void hold(const Plan& plan, bool atomics = false);
  void count_in(const Piece& piece, bool atomics);
  void count_out(Range pages, bool atomics);  // … of a process piece
  void give_back_unheld(Range range);
  void give_back(Range range);
  void use_file(const Piece& piece, std::uint64_t service, UsedFiles& used);
  void release_file(std::uint32_t backing, std::uint64_t service);

  std::optional<int> advise(Range range, int advice);
  std::optional<int> advise_beside_fork(Range range, int advice, bool& visited);
  bool evict(Range range);

  [[gnu::constructor(101)]] static void watch_forks();
  static void before_fork();
  static MemoryManager* forking_instance();
  static void after_fork_in_parent();
  static void after_fork_in_child();
  void become_child();

  const FileBackings backings_;
  std::atomic<bool> in_place_{false}, keeps_private_pages_{false}, lends_{false};
  std::atomic<PartialPages> partial_pages_{PartialPages::of_mapped_buffers};
  std::atomic<std::uint64_t> resident_begin_{0},
      resident_end_{0};  // hint for the interposed functions: bounds of resident_

  std::mutex mutex_;  // guards all below
  std::uint64_t generation_ = 0;
  bool gate_closed_ = false;  // the lock's holder keeps the copying thread out
  MappedMemory mapped_memory_;
  std::optional<std::pmr::unsynchronized_pool_resource> pool_;
  std::optional<PageCounts> held_;  // registrations per page of a window extent
  std::optional<PageCounts> by_process_;  // the same of extents that are reached through the process, by whoever copies for the service
  std::optional<PageCounts> atomics_by_process_;  // of these, of regions that allow atomics
  std::optional<PageCounts>
      resident_;  // pages whose contents live in the window (unless the application replaced the mapping)
  std::optional<PageCounts> views_;
  std::optional<LentMemory> lent_;
  Window window_;  // of its own, or over lent_
  bool window_refused_ = false;
  VmaBudget budget_;
  KeptPages kept_{window_, resident_};
  Statistics statistics_;
  ForkGuard fork_guard_;
  std::optional<SignalsBlocked> fork_signals_;
  std::optional<CopyGate::Closed> fork_gate_;
  // While a thread forks it holds the lock and changes nothing: others may read then, who must not wait (on_madvise).
  std::atomic<bool> forking_{false};
  std::atomic<std::uint32_t> fork_visitors_{0};

  // Announced files; never taken while mutex_ is held. A file's inode cannot be used again while the service holds it.
  std::mutex files_mutex_;
  // One that has grown since it was told of, beyond which a registration reaches, is told of once more: reached in two ways, one of them through
  // the process, its words would not be atomic. The service has a descriptor and a mapping for each time.
  std::multimap<FileId, File> files_;
};

}  // namespace vrdma::memory
