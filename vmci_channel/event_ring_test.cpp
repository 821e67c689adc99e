// Both ends of the ring of completion events, with an eventfd for the interrupt.
#include "vmci_channel/event_ring.hpp"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/unique_fd.hpp"

using vmci::EventRingReader;
using vmci::EventRingWriter;
using vrdma::control::CompletionRecord;
using vrdma::control::event_position_mask;
using vrdma::control::event_records;
using vrdma::control::EventRing;
using Put = EventRingWriter::Put;

namespace {

struct Ends {
  std::unique_ptr<EventRing> ring = std::make_unique<EventRing>();
  EventRingWriter writer{ring.get()};
  EventRingReader reader{ring.get()};

  Put put(std::uint32_t number) { return writer.put({number, ~number, 0}); }
  std::vector<std::uint32_t> take() {
    std::vector<std::uint32_t> found;
    reader.take([&](const CompletionRecord& record) {
      CHECK(record.arm_sequence == ~record.cq);
      found.push_back(record.cq);
    });
    return found;
  }
};

}  // namespace

TEST_CASE("One interrupt stands for all that comes until the reader looks") {
  Ends ends;
  CHECK(!ends.reader.interrupt_due());
  CHECK(ends.put(1) == Put::interrupt);
  CHECK(ends.put(2) == Put::done);
  CHECK(ends.reader.interrupt_due());
  CHECK(ends.take() == std::vector<std::uint32_t>{1, 2});
  CHECK(!ends.reader.interrupt_due());
  CHECK(ends.take().empty());
  CHECK(ends.put(3) == Put::interrupt);
}

TEST_CASE("What comes while the reader takes is not taken, and has an interrupt of its own") {
  Ends ends;
  CHECK(ends.put(1) == Put::interrupt);
  std::uint32_t taken = 0;
  ends.reader.take([&](const CompletionRecord& record) {
    ++taken;
    CHECK(record.cq == 1);
    CHECK(ends.put(2) == Put::interrupt);
  });
  CHECK(taken == 1);
  CHECK(ends.take() == std::vector<std::uint32_t>{2});
}

TEST_CASE("A ring that is full takes no more until the reader has taken something, however often it has gone round") {
  Ends ends;
  std::uint32_t next = 0, expected = 0;
  for (int rounds = 0; rounds < 1000; ++rounds) {
    for (std::uint32_t i = 0; i < event_records; ++i) REQUIRE(ends.put(next++) != Put::full);
    REQUIRE(ends.put(next) == Put::full);
    for (const std::uint32_t number : ends.take()) REQUIRE(number == expected++);
    REQUIRE(expected == next);
  }
}

TEST_CASE("What the other side has written over its own words costs itself, and nobody else") {
  Ends ends;
  for (const std::uint32_t consumed : {event_position_mask, 0x80000001u, 5u, 0xffffffffu}) {
    std::atomic_ref(ends.ring->consumed).store(consumed);
    while (ends.put(7) != Put::full) {
    }
  }
  for (const std::uint32_t news : {0xffffffffu, 0x40000001u, 0u}) {
    std::atomic_ref(ends.ring->news).store(news);
    std::uint32_t count = 0;
    ends.reader.take([&](const CompletionRecord&) { ++count; });
    CHECK(count <= event_records);
  }
}

TEST_CASE("Nothing is left behind by who sleeps until the next interrupt, and no interrupt comes for nothing") {
  constexpr std::uint32_t total = 40'000;
  Ends ends;
  const vmci::UniqueFd interrupt(::eventfd(0, EFD_CLOEXEC));
  std::atomic<std::uint32_t> taken{0};
  std::thread service([&] {
    std::uint32_t pause_at = 1;
    for (std::uint32_t next = 0; next < total;) {
      // Whatever is left behind must not be taken along with what comes later.
      if (next >= pause_at) {
        for (int spins = 0; taken.load(std::memory_order_relaxed) != next; ++spins)
          if (spins < 1000) vmci::cpu_relax();
          else std::this_thread::yield();  // the reader may be behind us on this processor
        pause_at = next + 1 + next % 7;
      }
      // … and may come at any moment of the reader's awakening.
      for (const std::uint64_t until = vmci::cycles() + next * 2654435761u % 16384; vmci::cycles() < until;) vmci::cpu_relax();
      const Put put = ends.put(next);
      if (put == Put::full) {
        std::this_thread::yield();
        continue;
      }
      ++next;
      const std::uint64_t one = 1;
      if (put == Put::interrupt) [[maybe_unused]] const auto written = ::write(interrupt.get(), &one, sizeof(one));
    }
  });
  std::uint32_t expected = 0, for_nothing = 0;
  while (expected < total) {
    pollfd waiting{interrupt.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 20'000) != 1) break;  // lost
    std::uint64_t count = 0;
    if (::read(interrupt.get(), &count, sizeof(count)) != sizeof(count)) break;
    CHECK(count == 1);
    const std::uint32_t before = expected;
    for (const std::uint32_t number : ends.take()) CHECK(number == expected++);
    taken.store(expected, std::memory_order_relaxed);
    for_nothing += before == expected;
  }
  CHECK(expected == total);
  CHECK(for_nothing == 0);
  if (expected != total) std::_Exit(1);  // the other thread waits for ever
  service.join();
}
