#include "vmkernel_svc/memory_reserve.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <new>

#include "vmkernel_svc/log/log.hpp"

namespace vrdma::svc {

namespace {

constexpr std::size_t piece_bytes = 256 << 10, pieces_max = 64, pieces_min = 4;
constinit std::size_t pieces_wanted = pieces_max;  // an eighth of them is enough to begin something
constinit std::array<std::atomic<void*>, pieces_max> reserved{};  // never touched: they take no memory, only the right to it
constinit std::atomic<std::size_t> reserved_count{0};
constinit std::atomic<bool> said_to_be_short{false};

// Called by operator new until it succeeds.
void give_a_piece() {
  for (auto& piece : reserved)
    if (void* const memory = piece.exchange(nullptr, std::memory_order_relaxed); memory != nullptr) {
      reserved_count.fetch_sub(1, std::memory_order_relaxed);
      ::munmap(memory, piece_bytes);
      return;
    }
  throw std::bad_alloc();
}

void lay_by() {
  for (std::size_t i = 0; i < pieces_wanted; ++i) {
    auto& piece = reserved[i];
    if (piece.load(std::memory_order_relaxed) != nullptr) continue;
    void* const memory = ::mmap(nullptr, piece_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    void* none = nullptr;
    if (piece.compare_exchange_strong(none, memory, std::memory_order_relaxed)) reserved_count.fetch_add(1, std::memory_order_relaxed);
    else ::munmap(memory, piece_bytes);
  }
}

}  // namespace

void MemoryReserve::install() {
  for (const auto which : {RLIMIT_AS, RLIMIT_DATA}) {
    constexpr rlim_t share = 16;  // of what it may have: the stacks of threads come out of the rest
    rlimit limit;
    if (::getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      pieces_wanted = std::clamp<std::size_t>(limit.rlim_cur / share / piece_bytes, pieces_min, pieces_wanted);
  }
  lay_by();
  std::set_new_handler(give_a_piece);
}

bool MemoryReserve::is_there() {
  if (reserved_count.load(std::memory_order_relaxed) == pieces_wanted) [[likely]] return true;
  lay_by();
  if (reserved_count.load(std::memory_order_relaxed) >= std::max<std::size_t>(pieces_wanted / 8, 1)) {
    said_to_be_short.store(false, std::memory_order_relaxed);
    return true;
  }
  if (!said_to_be_short.exchange(true, std::memory_order_relaxed))
    log::warn("memory is short: nothing new is begun until there is more; raise the limits under which vrdmad was started (ulimit -v, -d)");
  return false;
}

}  // namespace vrdma::svc
