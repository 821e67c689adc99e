// Waits for events end by signals as reads from a device do: a handler with SA_RESTART does not end them, any other one does, whatever other
// handlers the program has.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <functional>

#include "guest_lib/test/cm_channel.hpp"
#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr int restarting = SIGUSR2, interrupting = SIGUSR1;
std::atomic<int> handled;

// The program has these handlers, and no others: doctest's are put aside.
class Handlers {
 public:
  explicit Handlers(std::initializer_list<int> with) {
    for (const int number : {SIGINT, SIGTERM, SIGABRT, restarting, interrupting}) {
      struct sigaction action {};
      if (std::ranges::find(with, number) != with.end()) {
        action.sa_handler = [](int) { ++handled; };
        action.sa_flags = number == restarting ? SA_RESTART : 0;
      }
      Before& one = before_[count_++];
      one.number = number;
      REQUIRE(::sigaction(number, &action, &one.action) == 0);
    }
    handled = 0;
  }
  ~Handlers() {
    for (const Before& one : before_) ::sigaction(one.number, &one.action, nullptr);
  }

 private:
  struct Before {
    int number;
    struct sigaction action;
  };
  std::array<Before, 5> before_{};
  std::size_t count_ = 0;
};

// A thread that waits for an event that does not come.
class Sleeper {
 public:
  explicit Sleeper(const std::function<int()>& wait)
      : thread_([this, wait] {
          id_ = ::gettid();
          if (wait() < 0) error_ = errno;
        }) {
    asleep(0);
  }
  void strike(int number) { REQUIRE(pthread_kill(thread_.native_handle(), number) == 0); }
  // It has handled so many signals, and sleeps again or has ended.
  void asleep(int signals) {
    eventually("the handler has run, and it sleeps or has ended", [&] { return id_ != 0 && handled >= signals && (error_ != 0 || sleeps(id_)); });
  }
  int error() const { return error_; }
  ~Sleeper() {
    if (error_ == 0) pthread_cancel(thread_.native_handle());
    thread_.join();
  }

 private:
  std::atomic<pid_t> id_ = 0;
  std::atomic<int> error_ = 0;
  std::thread thread_;
};

void try_all(const std::function<int()>& wait) {
  {
    const Handlers handlers{restarting};
    Sleeper sleeper(wait);
    sleeper.strike(restarting);
    sleeper.asleep(1);
    CHECK(sleeper.error() == 0);
  }
  {
    const Handlers handlers{interrupting};
    Sleeper sleeper(wait);
    sleeper.strike(interrupting);
    sleeper.asleep(1);
    CHECK(sleeper.error() == EINTR);
  }
  const Handlers handlers{restarting, interrupting};
  std::this_thread::sleep_for(std::chrono::milliseconds(150));  // handlers are looked at every 100 ms
  Sleeper sleeper(wait);
  for (int i = 1; i <= 3; ++i) {
    sleeper.strike(restarting);
    sleeper.asleep(i);
    CHECK(sleeper.error() == 0);
  }
  // At once: both run, and the second one ends the wait.
  sleeper.strike(restarting);
  sleeper.strike(interrupting);
  sleeper.asleep(5);
  eventually("it has ended", [&] { return sleeper.error() != 0; });
  CHECK(sleeper.error() == EINTR);
}

}  // namespace

TEST_CASE("A signal ends the wait for an event of rdma_cm if its handler does not ask for going on") {
  Service service;
  service.start();
  const CmChannel channel;
  try_all([&] { return channel.next_event() < 0 ? -1 : 0; });
  ::close(channel.fd);
}

TEST_CASE("Likewise that for a completion, and for an asynchronous event") {
  Service service;
  service.start();
  Device device;
  const ChannelPtr channel(ibv_create_comp_channel(device.context));
  try_all([&] {
    ibv_cq* cq;
    void* context;
    return ibv_get_cq_event(channel.get(), &cq, &context);
  });
  try_all([&] {
    ibv_async_event event;
    return ibv_get_async_event(device.context, &event);
  });
}

TEST_CASE("A handler that runs while its thread waits may use memory that is looked after by a handler") {
  Service service;
  service.start();
  Device device;
  const ChannelPtr channel(ibv_create_comp_channel(device.context));
  static char* page;
  page = static_cast<char*>(::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(page != MAP_FAILED);
  struct sigaction guard {}, before;
  guard.sa_handler = [](int) { ::mprotect(page, 4096, PROT_READ | PROT_WRITE); };
  REQUIRE(::sigaction(SIGSEGV, &guard, &before) == 0);
  const Handlers handlers{restarting, interrupting};
  struct sigaction touching {};
  touching.sa_handler = [](int) { page[0] = 1, ++handled; };
  touching.sa_flags = SA_RESTART;
  REQUIRE(::sigaction(restarting, &touching, nullptr) == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  {
    Sleeper sleeper([&] {
      ibv_cq* cq;
      void* context;
      return ibv_get_cq_event(channel.get(), &cq, &context);
    });
    sleeper.strike(restarting);
    sleeper.asleep(1);
    CHECK(sleeper.error() == 0);
  }
  REQUIRE(::sigaction(SIGSEGV, &before, nullptr) == 0);
  ::munmap(page, 4096);
}

TEST_CASE("A signal that the program blocks, and that is pending, keeps nobody awake") {
  Service service;
  service.start();
  Device device;
  const ChannelPtr channel(ibv_create_comp_channel(device.context));
  const Handlers handlers{restarting, interrupting};
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  Sleeper sleeper([&] {
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, restarting);
    pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
    pthread_kill(pthread_self(), restarting);
    ibv_cq* cq;
    void* context;
    return ibv_get_cq_event(channel.get(), &cq, &context);
  });
  sleeper.asleep(0);
  CHECK(handled == 0);
  sleeper.strike(interrupting);
  sleeper.asleep(1);
  CHECK(sleeper.error() == EINTR);
}
