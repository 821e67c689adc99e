#include "vmkernel_svc/memory/bus_guard.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>

namespace vrdma::svc {

namespace {

struct GuardedRange {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::size_t> page_bytes{0};
  std::atomic<int> fd{-1};
  std::atomic<std::uint64_t> file_offset{0};
};
// Fixed, so that the handler needs no lock and no allocation. They are chunks of guests' files; see chunk_bytes.
constexpr std::size_t guarded_count = 65536;
GuardedRange guarded_ranges[guarded_count];
std::atomic<std::size_t> guarded_used{0};

thread_local std::uint64_t survived_count = 0;
thread_local std::uintptr_t survived_at = 0;

// Pages that this thread's handler replaced since its last restore(). One copy touches two slices of 64 KiB at most.
struct Replaced {
  void* at;
  std::size_t bytes;
  int fd;
  std::uint64_t file_offset;
};
constexpr std::size_t replaced_max = 64;
thread_local Replaced replaced[replaced_max];
thread_local std::size_t replaced_count = 0;

// Async-signal-safe: atomics and mmap only.
void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const std::size_t used = guarded_used.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < used; ++i) {
    const std::uintptr_t begin = guarded_ranges[i].begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= guarded_ranges[i].end.load(std::memory_order_relaxed)) continue;
    const std::size_t page = guarded_ranges[i].page_bytes.load(std::memory_order_relaxed);
    void* const at = reinterpret_cast<void*>(address / page * page);
    if (::mmap(at, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) break;
    if (replaced_count < replaced_max)
      replaced[replaced_count++] = {at, page, guarded_ranges[i].fd.load(std::memory_order_relaxed),
                                    guarded_ranges[i].file_offset.load(std::memory_order_relaxed) + (address / page * page - begin)};
    ++survived_count;
    survived_at = address;
    return;
  }
  ::signal(signal, SIG_DFL);  // not a guest's memory: a bug of ours, die with the ordinary report
}

}  // namespace

void BusGuard::install() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGBUS, &action, nullptr);
}

std::uint64_t BusGuard::survived() { return survived_count; }
std::uintptr_t BusGuard::where() { return survived_at; }

void BusGuard::restore() {
  for (; replaced_count != 0; --replaced_count) {
    const Replaced& page = replaced[replaced_count - 1];
    ::mmap(page.at, page.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, page.fd,
           static_cast<off_t>(page.file_offset));
  }
}

bool BusGuard::add(std::byte* begin, std::size_t bytes, std::size_t page_bytes, int fd, std::uint64_t file_offset) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  for (std::size_t i = 0; i < guarded_count; ++i) {
    std::uintptr_t expected = 0;
    if (!guarded_ranges[i].begin.compare_exchange_strong(expected, 1)) continue;  // 1: taken, not yet valid
    guarded_ranges[i].page_bytes.store(page_bytes, std::memory_order_relaxed);
    guarded_ranges[i].end.store(address + bytes, std::memory_order_relaxed);
    guarded_ranges[i].fd.store(fd, std::memory_order_relaxed);
    guarded_ranges[i].file_offset.store(file_offset, std::memory_order_relaxed);
    guarded_ranges[i].begin.store(address, std::memory_order_release);  // pairs with the handler's acquire
    std::size_t used = guarded_used.load();
    while (used < i + 1 && !guarded_used.compare_exchange_weak(used, i + 1)) {
    }
    return true;
  }
  return false;
}

void BusGuard::remove(std::byte* begin) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t used = guarded_used.load();
  for (std::size_t i = 0; i < used; ++i) {
    if (guarded_ranges[i].begin.load() != address) continue;
    guarded_ranges[i].end.store(0);
    guarded_ranges[i].begin.store(0);
    return;
  }
}

}  // namespace vrdma::svc
