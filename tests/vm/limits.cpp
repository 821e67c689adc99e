// Registers fresh memory of each size in turn, as much as it is let, and says of each what became of it and how much of this process is
// pinned: a client of libibverbs alone.
//
//   limits [now] BYTES [BYTES…]
//
// "1073741824 refused EDQUOT pinned 0 kB", "268435456 registered pinned 262144 kB"; what is registered, a word in it too, is held until
// SIGTERM. Then lets all go and says "ends pinned 0 kB". Pinned is what is more than before the first; it is waited for until it has
// become what it should be: the kernel takes a ring down in the background. now: it is said as it is, for where pages may be pinned in vain.
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/vm/meeting.hpp"

namespace {

using vrdma::test::must;

constexpr auto patience = std::chrono::seconds(30);

std::uint64_t pinned_kib() {
  std::FILE* const file = must(std::fopen("/proc/self/status", "re"), "open /proc/self/status");
  unsigned long long kib = 0;
  char line[256];
  while (std::fgets(line, sizeof(line), file) != nullptr) std::sscanf(line, "VmPin: %llu", &kib);
  std::fclose(file);
  return kib;
}

// As much as is due, or what there is when that does not come.
std::uint64_t settled_pinned_kib(std::uint64_t before, std::uint64_t due) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (pinned_kib() != before + due && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return pinned_kib() - before;
}

struct Held {
  void* memory;
  std::size_t bytes;
  ibv_mr* mr;
};

}  // namespace

int main(int count, char** words) {
  sigset_t end;
  sigemptyset(&end);
  sigaddset(&end, SIGTERM);
  sigprocmask(SIG_BLOCK, &end, nullptr);
  ibv_device** const devices = must(ibv_get_device_list(nullptr), "list devices");
  ibv_context* const context = must(ibv_open_device(must(devices[0], "find a device")), "open the device");
  ibv_free_device_list(devices);
  ibv_pd* const pd = must(ibv_alloc_pd(context), "make a PD");
  const bool now = count > 1 && std::strcmp(words[1], "now") == 0;
  const std::uint64_t before = pinned_kib();
  std::uint64_t due = 0;
  std::vector<Held> held;
  for (int i = now ? 2 : 1; i < count; ++i) {
    const std::size_t bytes = std::strtoull(words[i], nullptr, 10);
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(memory != MAP_FAILED, "map memory");
    constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    ibv_mr* const mr = ibv_reg_mr(pd, memory, bytes, access);
    const int error = errno;
    if (mr != nullptr) {
      held.push_back({memory, bytes, mr});
      // Where it is pinned it is so at once, and where not, not a page of it is.
      if (pinned_kib() > before + due) due += bytes >> 10;
    } else {
      ::munmap(memory, bytes);
    }
    std::printf("%zu %s%s pinned %llu kB\n", bytes, mr != nullptr ? "registered" : "refused ", mr != nullptr ? "" : strerrorname_np(error),
                static_cast<unsigned long long>(now ? pinned_kib() - before : settled_pinned_kib(before, due)));
    std::fflush(stdout);
  }
  std::printf("holds\n");
  std::fflush(stdout);
  siginfo_t ignored;
  while (::sigwaitinfo(&end, &ignored) < 0) continue;
  for (const Held& each : held) {
    std::memcpy(each.memory, &count, sizeof(count));
    must(ibv_dereg_mr(each.mr) == 0, "deregister");
    ::munmap(each.memory, each.bytes);
  }
  std::printf("ends pinned %llu kB\n", static_cast<unsigned long long>(settled_pinned_kib(before, 0)));
  std::fflush(stdout);
  must(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0, "take down the rest");
}
