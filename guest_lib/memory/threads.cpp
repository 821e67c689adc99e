#include "guest_lib/memory/threads.hpp"

#include <signal.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <cstring>

#include "guest_lib/memory/raw_file.hpp"

namespace vrdma::memory {
namespace {

struct DirectoryEntry {  // linux_dirent64
  std::uint64_t inode;
  std::int64_t next;
  std::uint16_t bytes;
  std::uint8_t type;
  char name[];
};
constexpr std::size_t name_offset = 19;

// f(tid) for each thread; returns how many, 0 on failure.
template <class F>
std::uint64_t for_each_thread(F&& f) {
  const vmci::UniqueFd directory = raw_open("/proc/self/task", O_RDONLY | O_DIRECTORY);
  if (!directory) return 0;
  alignas(std::uint64_t) char buffer[4096];
  std::uint64_t count = 0;
  for (;;) {
    const long got = ::syscall(SYS_getdents64, directory.get(), buffer, sizeof buffer);
    if (got <= 0) return got == 0 ? count : 0;
    for (long at = 0; at < got;) {
      std::uint16_t bytes;
      std::memcpy(&bytes, buffer + at + offsetof(DirectoryEntry, bytes), sizeof bytes);
      const char* name = buffer + at + name_offset;
      int tid = 0;
      if (std::from_chars(name, name + std::strlen(name), tid).ec == std::errc{}) {
        ++count;
        f(tid);
      }
      at += bytes;
    }
  }
}

}  // namespace

std::uint64_t thread_count() {
  // The directory has a link per thread besides its own two; one system call instead of four.
  struct stat status;
  if (raw_stat("/proc/self/task", status) && status.st_nlink > 2) return status.st_nlink - 2;
  return for_each_thread([](int) {});
}

std::pmr::vector<std::uint64_t> thread_control_blocks(std::pmr::memory_resource* resource) {
  std::pmr::vector<std::uint64_t> blocks(resource);
  const int main_thread = ::getpid();
  for_each_thread([&](int tid) {
    // The first thread's block was allocated by the dynamic linker, above whatever was mapped later; its stack is
    // elsewhere.
    if (tid == main_thread) return;
    std::uint64_t head = 0, bytes = 0;
    if (::syscall(SYS_get_robust_list, tid, &head, &bytes) == 0 && head != 0) blocks.push_back(head);
  });
  return blocks;
}

std::uint64_t main_stack_address() {
  return ::getauxval(AT_RANDOM);
}

SignalsBlocked::SignalsBlocked() {
  const std::uint64_t all = ~std::uint64_t{0};
  ::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &previous_, sizeof all);
}

SignalsBlocked::~SignalsBlocked() {
  ::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &previous_, nullptr, sizeof previous_);
}

}  // namespace vrdma::memory
