#include "vmci_channel/found_once.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

using vmci::found_once;

namespace {
std::atomic<int> looking{0};
std::atomic<bool> may_find{false};

std::uint64_t find_in_turn() {
  const int place = ++looking;
  while (!may_find.load()) std::this_thread::yield();
  return static_cast<std::uint64_t>(place);
}

std::uint64_t find_for_child() {
  const bool is_first = ++looking == 1;
  while (is_first && !may_find.load()) std::this_thread::yield();
  return 7;
}
}  // namespace

TEST_CASE("Threads that look for a number at once all have the same one, and nobody looks again") {
  looking = 0;
  may_find = false;
  std::uint64_t one = 0, other = 0;
  std::thread first([&] { one = found_once<find_in_turn>(); }), second([&] { other = found_once<find_in_turn>(); });
  while (looking != 2) std::this_thread::yield();  // a guard would let in one of them
  may_find = true;
  first.join();
  second.join();
  CHECK(one != 0);
  CHECK(one == other);
  CHECK(found_once<find_in_turn>() == one);
  CHECK(looking == 2);
}

TEST_CASE("A fork's child finds a number that another thread was about to find at the fork") {
  looking = 0;
  may_find = false;
  std::thread finder([] { (void)found_once<find_for_child>(); });
  while (looking != 1) std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // with a guard it waits for ever
    ::_exit(found_once<find_for_child>() == 7 ? 0 : 1);
  }
  may_find = true;
  finder.join();
  REQUIRE(child > 0);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
