// A thread that is cancelled before it does something that is no cancellation point.
#pragma once

#include <pthread.h>

#include <cstdlib>
#include <functional>
#include <utility>

#include "doctest/doctest.h"

namespace vrdma::test {

struct CancelledThread {
  std::function<void()> body;
  bool came_back = false;

  static void* run(void* argument) {
    auto& thread = *static_cast<CancelledThread*>(argument);
    ::pthread_cancel(::pthread_self());  // deferred: pending from here on
    thread.body();
    thread.came_back = true;
    ::pthread_testcancel();
    return nullptr;
  }
};

// `body` makes no other calls, and no assertions, whose output is written.
inline void comes_back_though_cancelled(std::function<void()> body) {
  CancelledThread thread{std::move(body)};
  pthread_t id{};
  REQUIRE(::pthread_create(&id, nullptr, &CancelledThread::run, &thread) == 0);
  void* result = nullptr;
  REQUIRE(::pthread_join(id, &result) == 0);
  CHECK(thread.came_back);
  if (!thread.came_back) std::abort();  // it may hold locks for ever
  CHECK(result == PTHREAD_CANCELED);
}

}  // namespace vrdma::test
