// How long add() and remove() take, cold and warm, beside a plain copy of the same bytes. Not a test: run it by hand.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "guest_lib/memory/manager.hpp"

using namespace vrdma::memory;
using Clock = std::chrono::steady_clock;

namespace {

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

struct Samples {
  std::vector<double> values;
  double at(double quantile) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(quantile * static_cast<double>(values.size() - 1))];
  }
};

void measure(MemoryManager& manager, std::uint64_t bytes, const char* threads) {
  constexpr int rounds = 101;
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::vector<char> copy(bytes);
  Samples add, remove, plain;
  double cold = 0;
  std::uint64_t in_window = 0;
  for (int i = 0; i < rounds; ++i) {
    std::memset(p, i, bytes);
    auto start = Clock::now();
    std::memcpy(copy.data(), p, bytes);
    plain.values.push_back(microseconds_since(start));
    start = Clock::now();
    auto registration = manager.add(reinterpret_cast<std::uint64_t>(p), bytes, 7);
    const double added = microseconds_since(start);
    if (!registration) std::abort();
    in_window += registration->extents[0].backing == window_backing;
    if (i == 0)
      cold = added;
    else
      add.values.push_back(added);
    std::memset(p, i + 1, bytes);
    start = Clock::now();
    manager.remove(std::move(*registration));
    remove.values.push_back(microseconds_since(start));
  }
  std::printf("%9llu bytes, %s: add cold %.1f, warm p50 %.1f p99 %.1f; remove p50 %.1f p99 %.1f; memcpy p50 %.1f us; %llu/%d moved\n",
              static_cast<unsigned long long>(bytes), threads, cold, add.at(0.5), add.at(0.99), remove.at(0.5), remove.at(0.99),
              plain.at(0.5), static_cast<unsigned long long>(in_window), rounds);
  ::munmap(p, bytes);
}

}  // namespace

int main() {
  MemoryManager manager({});
  for (const std::uint64_t bytes : {4096u, 65536u, 1u << 20, 64u << 20}) measure(manager, bytes, "alone");
  std::atomic<bool> stop{false};
  std::thread sleeper([&] { stop.wait(false); });
  for (const std::uint64_t bytes : {4096u, 65536u, 1u << 20}) measure(manager, bytes, "beside a thread");
  stop.store(true);
  stop.notify_one();
  sleeper.join();
}
