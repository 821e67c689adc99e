#include "vmkernel_svc/memory/bus_guard.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <mutex>
#include <vector>

namespace vrdma::svc {

namespace {

// The handler may look at a range while another thread changes it: odd versions are of such a moment, and what was read counts only if
// the version is the same afterwards. The range that the handler is there for does not change: its memory is being used.
struct GuardedRange {
  std::atomic<std::uint32_t> version{0};
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<std::size_t> page_bytes{0};
  std::atomic<int> fd{-1};
  std::atomic<std::uint64_t> file_offset{0};
};
// Fixed, so that the handler needs no lock and no allocation. They are chunks of guests' files; see chunk_bytes.
constexpr std::size_t guarded_count = 65536;
GuardedRange guarded_ranges[guarded_count];
std::atomic<std::size_t> guarded_used{0};

// Who adds and removes.
struct Book {
  std::mutex mutex;
  boost::unordered_flat_map<std::uintptr_t, std::size_t> slots;  // by begin
  std::vector<std::size_t> unused;
};
Book& book() {
  static Book* const one = new Book;  // whoever unmaps last, at exit, still finds it
  return *one;
}

void write(GuardedRange& range, std::uintptr_t begin, std::uintptr_t end, std::size_t page_bytes, int fd, std::uint64_t file_offset) {
  const std::uint32_t version = range.version.load(std::memory_order_relaxed);
  range.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // B1: before what follows; pairs with B2
  range.begin.store(begin, std::memory_order_relaxed);
  range.end.store(end, std::memory_order_relaxed);
  range.page_bytes.store(page_bytes, std::memory_order_relaxed);
  range.fd.store(fd, std::memory_order_relaxed);
  range.file_offset.store(file_offset, std::memory_order_relaxed);
  range.version.store(version + 2, std::memory_order_release);  // B3: pairs with B4
}

struct Page {
  void* at;
  std::size_t bytes;
  int fd;
  std::uint64_t file_offset;
};

// False: nobody's guarded memory.
bool find(std::uintptr_t address, Page& page) {
  const std::size_t used = guarded_used.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < used; ++i) {
    const GuardedRange& range = guarded_ranges[i];
    const std::uint32_t version = range.version.load(std::memory_order_acquire);  // B4
    const std::uintptr_t begin = range.begin.load(std::memory_order_relaxed);
    if (address < begin || address >= range.end.load(std::memory_order_relaxed)) continue;
    const std::size_t bytes = range.page_bytes.load(std::memory_order_relaxed);
    const int fd = range.fd.load(std::memory_order_relaxed);
    const std::uint64_t file_offset = range.file_offset.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);  // B2
    if (version % 2 != 0 || range.version.load(std::memory_order_relaxed) != version) continue;
    const std::uintptr_t at = address / bytes * bytes;
    page = {reinterpret_cast<void*>(at), bytes, fd, file_offset + (at - begin)};
    return true;
  }
  return false;
}

// Of this thread. Changed around the access, seen by the handler in the midst of it: signal fences keep the compiler from moving them.
thread_local bool accessing = false;
thread_local std::uintptr_t survived_at = 0;
thread_local bool survived = false;
// Pages that the handler replaced within the Access that is under way. One copy touches two slices of 64 KiB at most.
constexpr std::size_t replaced_max = 64;
thread_local Page replaced[replaced_max];
thread_local std::size_t replaced_count = 0;

// A file without a page: whoever touches a mapping of it gets a bus error each time.
int empty_file() {
  static const int fd = ::memfd_create("vrdma-lost-pages", MFD_CLOEXEC);
  return fd;
}

bool map_again(const Page& page, int fd, std::uint64_t file_offset) {
  return fd >= 0 && ::mmap(page.at, page.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, static_cast<off_t>(file_offset)) != MAP_FAILED;
}

// Async-signal-safe: atomics and mmap only.
void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  Page page;
  if (!find(address, page) || ::mmap(page.at, page.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
    ::signal(signal, SIG_DFL);  // not a guest's memory: a bug of ours, die with the ordinary report
    return;
  }
  if (!accessing) return;
  if (page.fd >= 0 && replaced_count < replaced_max) replaced[replaced_count++] = page;
  survived = true;
  survived_at = address;
}

}  // namespace

void BusGuard::install() {
  (void)empty_file();
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGBUS, &action, nullptr);
}

BusGuard::Access::Access() {
  accessing = true;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

BusGuard::Access::~Access() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  accessing = false;
  if (!survived) [[likely]] return;
  survived = false;
  for (; replaced_count != 0; --replaced_count) {
    const Page& page = replaced[replaced_count - 1];
    // Not to be had again, as of a file that its owner has sealed meanwhile: what is written there must not seem to arrive.
    if (!map_again(page, page.fd, page.file_offset)) (void)map_again(page, empty_file(), 0);
  }
}

bool BusGuard::Access::failed() const {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return survived;
}

std::uintptr_t BusGuard::Access::where() const { return survived_at; }

bool BusGuard::add(std::byte* begin, std::size_t bytes, std::size_t page_bytes, int fd, std::uint64_t file_offset) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  Book& of = book();
  std::lock_guard lock(of.mutex);
  std::size_t slot = guarded_used.load(std::memory_order_relaxed);
  if (!of.unused.empty()) {
    slot = of.unused.back();
    of.unused.pop_back();
  } else if (slot == guarded_count) {
    return false;
  }
  of.slots[address] = slot;
  write(guarded_ranges[slot], address, address + bytes, page_bytes, fd, file_offset);
  if (slot == guarded_used.load(std::memory_order_relaxed)) guarded_used.store(slot + 1, std::memory_order_release);
  return true;
}

void BusGuard::remove(std::byte* begin) {
  Book& of = book();
  std::lock_guard lock(of.mutex);
  const auto found = of.slots.find(reinterpret_cast<std::uintptr_t>(begin));
  if (found == of.slots.end()) return;
  write(guarded_ranges[found->second], 0, 0, 0, -1, 0);
  of.unused.push_back(found->second);
  of.slots.erase(found);
}

}  // namespace vrdma::svc
