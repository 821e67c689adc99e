// What the tests of this folder share: a manager with a recorded service, a second view of the window, children.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/threads.hpp"
#include "guest_lib/memory/write_freeze.hpp"

namespace vrdma::memory::test {

constexpr unsigned writable_access = 7;  // local write, remote write, remote read
constexpr std::uint64_t page = 4096;

inline std::uint64_t at(const void* p) {
  return reinterpret_cast<std::uint64_t>(p);
}

inline unsigned char* map_anonymous(std::uint64_t bytes, void* where = nullptr) {
  void* p = ::mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (where ? MAP_FIXED : 0), -1, 0);
  REQUIRE(p != MAP_FAILED);
  return static_cast<unsigned char*>(p);
}

// Zero pages, none of which could be the head of an arena.
struct Pages {
  explicit Pages(std::uint64_t count) : bytes(count * page + alignment), mapped(map_anonymous(bytes)) {
    REQUIRE(count * page < alignment);
    p = reinterpret_cast<unsigned char*>(((at(mapped) + alignment - 1) & ~(alignment - 1)) + page);
  }
  Pages(const Pages&) = delete;
  ~Pages() { ::munmap(mapped, bytes); }
  static constexpr std::uint64_t alignment = 2 << 20;
  std::uint64_t bytes;
  unsigned char *mapped, *p;
};

struct Service {
  std::uint32_t announced = 0, withdrawn = 0;
  bool accept = true;
  FileBackings backings() {
    return {[this](int, std::uint64_t) -> Result<std::uint32_t> {
              ++announced;
              if (!accept) return Errno{EPERM};
              return announced;
            },
            [this](std::uint32_t) { ++withdrawn; }};
  }
};

// What the service sees of the window.
class View {
 public:
  View(MemoryManager& manager, const void* address, std::uint64_t bytes) : bytes_(bytes) {
    const auto fd = manager.window_fd();
    REQUIRE(fd.has_value());
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, static_cast<off_t>(at(address)));
    REQUIRE(p != MAP_FAILED);
    data_ = static_cast<unsigned char*>(p);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { ::munmap(data_, bytes_); }
  unsigned char& operator[](std::uint64_t i) { return data_[i]; }
  unsigned char* data() { return data_; }

 private:
  unsigned char* data_;
  std::uint64_t bytes_;
};

// Runs `body` in a child made by fork(); its return value, or 1000 + the signal that ended it.
template <class F>
int in_child(F&& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// The same of a body that may hang with signals blocked; 1000 + SIGKILL then.
template <class F>
int in_child_under_watchdog(F&& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  constexpr int tries = 6000;  // a minute
  for (int i = 0; ::waitpid(child, &status, WNOHANG) == 0; ++i) {
    if (i == tries) ::kill(child, SIGKILL);
    ::usleep(10'000);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

inline bool in_window(const Registration& r) {
  return r.extents.size() == 1 && r.extents[0].backing == window_backing;
}

// Registered memory of its own, which has moved into the window where it can.
struct Moved {
  Service service;
  MemoryManager manager{service.backings()};
  static constexpr std::uint64_t bytes = 16 * page;
  unsigned char* p = map_anonymous(bytes);
  Registration registration;
  Moved() {
    std::memset(p, 1, bytes);
    auto r = manager.add(at(p), bytes, writable_access);
    REQUIRE(r.has_value());
    registration = std::move(*r);
  }
  ~Moved() { ::munmap(p, bytes); }
  bool works() const { return in_window(registration); }
};

// Whether memory moves beside a second thread here, for which the kernel has to have userfaultfd, and to permit it.
inline bool can_move_with_threads() {
  const vmci::UniqueFd file(::memfd_create("like-a-window", MFD_CLOEXEC));
  REQUIRE(::ftruncate(file.get(), page) == 0);
  void* const shared = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  REQUIRE(shared != MAP_FAILED);
  unsigned char* const anonymous = map_anonymous(page);
  bool can;
  {
    const SignalsBlocked signals;
    can = WriteFreeze::freeze({at(anonymous), at(anonymous) + page}, WriteFreeze::Memory::anonymous).has_value() &&
          WriteFreeze::freeze({at(shared), at(shared) + page}, WriteFreeze::Memory::window).has_value();
  }
  ::munmap(anonymous, page);
  ::munmap(shared, page);
  return can;
}

#define REQUIRE_OR_SKIP(condition, why) \
  if (!(condition)) {                   \
    MESSAGE("skipped: " why);           \
    return;                             \
  }

#define REQUIRE_MOVED(m) REQUIRE_OR_SKIP((m).works(), "a second thread and no userfaultfd")

}  // namespace vrdma::memory::test
