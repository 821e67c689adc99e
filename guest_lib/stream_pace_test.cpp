// Streams of receives and what only looks like them, on a clock of the test's own. A cycle is a nanosecond.
#include "guest_lib/stream_pace.hpp"

#include <doctest/doctest.h>

#include <deque>

using vrdma::guest::sends_posted;
using vrdma::guest::StreamPace;

namespace {

struct TestClock {
  static inline std::uint64_t time = 0;
  static std::uint64_t now() { return time += 8; }
  static std::uint64_t per_us() { return 1000; }
  static void relax() { time += 13; }
};
constexpr std::uint64_t poll_ns = 60, many_receives = 4096;

// Who polls, up to 32 completions at a time, out of those that have come by now.
struct Reader {
  StreamPace<TestClock> pace;
  std::deque<std::uint64_t> arrivals;  // their times
  std::uint64_t found = 0, polls = 0, waited_ns = 0, receives = many_receives;

  std::uint64_t wait() {
    const std::uint64_t before = TestClock::time;
    pace.wait();
    waited_ns += TestClock::time - before;
    return TestClock::time - before;
  }
  std::uint32_t poll() {
    wait();
    TestClock::time += poll_ns;
    std::uint32_t got = 0;
    for (; got < 32 && !arrivals.empty() && arrivals.front() <= TestClock::time; ++got) arrivals.pop_front();
    ++polls, found += got;
    if (got == 0) pace.found_nothing();
    else pace.found(got, got < 32, [this] { return receives; });
    return got;
  }
};

// A writer that has always something to send, and takes longer for it where the reader has just been at its heels.
struct Stream {
  std::uint64_t last_ns = TestClock::time, disturbed_ns, undisturbed_ns;
  void write(Reader& reader, std::uint64_t until_ns, std::uint64_t each_ns) {
    for (; last_ns + each_ns <= until_ns; last_ns += each_ns) reader.arrivals.push_back(last_ns + each_ns);
  }
  void run(Reader& reader, std::uint64_t messages) {
    for (const std::uint64_t end = reader.found + messages; reader.found < end;) {
      if (reader.wait() > 200) write(reader, TestClock::time, undisturbed_ns);
      write(reader, TestClock::time + poll_ns, disturbed_ns);
      reader.poll();
    }
  }
};

}  // namespace

TEST_CASE("A stream that is faster where it is left alone for a while gets its distance, and many messages are found at a time") {
  Reader reader;
  Stream stream{.disturbed_ns = 55, .undisturbed_ns = 25};
  stream.run(reader, 100'000);
  const std::uint64_t polls = reader.polls, begun_ns = TestClock::time;
  stream.run(reader, 100'000);
  CHECK(reader.polls - polls < 100'000 / 12);
  CHECK(TestClock::time - begun_ns < 100'000 * 35);
}

TEST_CASE("One that gains nothing is left as it was, and asked rarely and more rarely") {
  Reader reader;
  Stream stream{.disturbed_ns = 55, .undisturbed_ns = 55};
  stream.run(reader, 100'000);
  const std::uint64_t first_ns = reader.waited_ns;
  CHECK(first_ns > 0);  // it was tried
  stream.run(reader, 1'000'000);
  CHECK(reader.waited_ns - first_ns < 10 * first_ns);
}

TEST_CASE("Requests whose senders wait for an answer, which others give, are not late for long") {
  Reader reader;
  for (int senders = 0; senders < 3; ++senders) reader.arrivals.push_back(TestClock::time);
  const auto run = [&](std::uint64_t requests) {
    const std::uint64_t before = reader.waited_ns;
    for (const std::uint64_t end = reader.found + requests; reader.found < end;) {
      TestClock::time += 300;  // what it does with them
      for (std::uint32_t answered = reader.poll(); answered != 0; --answered) reader.arrivals.push_back(TestClock::time + 350);
    }
    return reader.waited_ns - before;
  };
  run(200'000);
  CHECK(run(200'000) < 200'000 * 5);
}

TEST_CASE("Who answers, has few receive requests, or finds nothing now and then, waits for nothing") {
  Reader reader;
  Stream stream{.disturbed_ns = 55, .undisturbed_ns = 25};
  SUBCASE("a thread that posts sends") {
    for (int i = 0; i < 50'000; ++i) ++sends_posted, stream.run(reader, 1);
  }
  SUBCASE("few receive requests") {
    reader.receives = 100;
    stream.run(reader, 50'000);
  }
  SUBCASE("a slow writer") {
    stream = {.disturbed_ns = 150, .undisturbed_ns = 100};
    stream.run(reader, 50'000);
  }
  CHECK(reader.waited_ns == 0);
}

TEST_CASE("A stream that ends is not waited for again, and a clock that is set back holds nobody") {
  Reader reader;
  Stream stream{.disturbed_ns = 55, .undisturbed_ns = 25};
  stream.run(reader, 50'000);
  while (reader.wait() < 100) stream.run(reader, 100);
  SUBCASE("it ends") {
    while (reader.poll() != 0) {
    }
    const std::uint64_t before = reader.waited_ns;
    for (int i = 0; i < 1000; ++i) reader.poll();
    CHECK(reader.waited_ns == before);
  }
  SUBCASE("the clock is set back") {
    TestClock::time = 1'000'000;
    reader.pace.wait();
    CHECK(TestClock::time < 1'001'000);
  }
}
