#include "vmci_channel/record_ring.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "vmci_channel/backoff.hpp"

using vmci::RecordReader;
using vmci::RecordWriter;
using vrdma::RecordHead;
using vrdma::slot_bytes;
using Peek = RecordReader::Peek;

namespace {

struct alignas(64) Slot {
  std::byte bytes[slot_bytes];
};

struct Ring {
  // At another position than 0 the ring is as a writer before this one left it: with the mark of the end.
  explicit Ring(std::uint32_t slot_count, std::uint32_t position = 0)
      : memory(slot_count), writer(data(), slot_count, position), reader(data(), slot_count, position) {
    vmci::detail::control_at(data(), position & (slot_count - 1))
        .store(vmci::detail::phase_at(position, slot_count) ^ vrdma::control_phase_bit);
  }
  std::byte* data() { return memory.front().bytes; }

  std::vector<Slot> memory;
  RecordWriter writer;
  RecordReader reader;
};

using Record = std::vector<std::byte>;  // whole slots; the first 16 bytes are the head's

// Slots that are not the head's are filled with `fill`, so that they can look like heads of any phase.
std::uint32_t put(RecordWriter& writer, std::uint64_t tag, std::uint32_t word, std::uint32_t user, std::uint32_t slots, std::byte fill) {
  const Record body(slots * slot_bytes - sizeof(RecordHead), fill);
  writer.write(sizeof(RecordHead), body);
  writer.publish(tag, word, user, slots);
  return slots;
}

RecordHead head_of(const std::byte* record) {
  RecordHead head;
  std::memcpy(&head, record, sizeof(head));
  return head;
}

}  // namespace

TEST_CASE("A fresh ring is empty and a published record is read back whole") {
  Ring ring(8);
  Slot to[64];
  std::uint32_t slots = 77;
  CHECK(ring.reader.empty());
  CHECK(ring.reader.peek(to[0].bytes, 64, slots) == Peek::empty);
  CHECK(slots == 77);

  put(ring.writer, 0x1122334455667788, 42, 0x1abcdef, 3, std::byte{0x5a});
  CHECK(!ring.reader.empty());
  REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
  CHECK(slots == 3);
  const RecordHead head = head_of(to[0].bytes);
  CHECK(head.tag == 0x1122334455667788);
  CHECK(head.word == 42);
  CHECK((head.control & vrdma::control_user_mask) == 0x1abcdef);
  for (std::size_t i = sizeof(RecordHead); i < 3 * slot_bytes; ++i) REQUIRE(to[i / slot_bytes].bytes[i % slot_bytes] == std::byte{0x5a});
  ring.reader.advance(slots);
  CHECK(ring.reader.empty());
}

TEST_CASE("A writer never fills the last slot, which holds the mark of the end") {
  for (const std::uint32_t slot_count : {2u, 4u, 64u, 256u}) {
    Ring ring(slot_count);
    for (std::uint32_t i = 0; i + 1 < slot_count; ++i) {
      REQUIRE(ring.writer.has_room(1));
      put(ring.writer, i, 0, 0, 1, std::byte{0xff});
    }
    CHECK(!ring.writer.has_room(1));
    Slot to[64];
    for (std::uint32_t i = 0; i + 1 < slot_count; ++i) {
      std::uint32_t slots = 0;
      REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
      CHECK(head_of(to[0].bytes).tag == i);
      ring.reader.advance(slots);
    }
    CHECK(ring.reader.empty());
  }
}

TEST_CASE("Old bytes that look like a head of the next lap are not read") {
  // Both phases: all ones looks ready on odd laps, all zeros on even ones.
  for (const std::byte fill : {std::byte{0xff}, std::byte{0x00}}) {
    Ring ring(8);
    Slot to[64];
    for (int lap = 0; lap < 40; ++lap) {
      const std::uint32_t slots_put = 1 + static_cast<std::uint32_t>(lap) % 7;
      put(ring.writer, static_cast<std::uint64_t>(lap), 0, 0, slots_put, fill);
      std::uint32_t slots = 0;
      REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
      REQUIRE(slots == slots_put);
      ring.reader.advance(slots);
      ring.writer.set_freed(ring.reader.position());
      CHECK(ring.reader.empty());
      CHECK(ring.reader.peek(to[0].bytes, 64, slots) == Peek::empty);
    }
  }
}

TEST_CASE("A record wraps round the end of the ring") {
  Ring ring(8, 6);
  // Positions that do not start at zero: as after a reset of a used queue.
  ring.writer = RecordWriter(ring.data(), 8, 6);
  Record body(5 * slot_bytes - sizeof(RecordHead));
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<std::byte>(i * 7);
  ring.writer.write(sizeof(RecordHead), body);
  ring.writer.publish(9, 1, 2, 5);
  Slot to[64];
  std::uint32_t slots = 0;
  REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
  REQUIRE(slots == 5);
  CHECK(std::memcmp(to[0].bytes + sizeof(RecordHead), body.data(), body.size()) == 0);
}

TEST_CASE("Positions may pass 2^32") {
  Ring ring(16, 0xfffffff8u);
  Slot to[64];
  for (std::uint64_t i = 0; i < 64; ++i) {
    REQUIRE(ring.writer.has_room(3));
    put(ring.writer, i, 0, 0, 3, std::byte{0xee});
    std::uint32_t slots = 0;
    REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
    CHECK(head_of(to[0].bytes).tag == i);
    ring.reader.advance(slots);
    ring.writer.set_freed(ring.reader.position());
  }
}

TEST_CASE("A record that claims more slots than the reader takes, or than the ring has, is malformed and not copied") {
  Ring ring(8);
  Slot to[64];
  std::memset(to, 0x11, sizeof(to));
  auto* const head = reinterpret_cast<RecordHead*>(ring.data());
  std::uint32_t slots = 0;
  for (std::uint32_t claimed = 1; claimed <= 64; ++claimed) {
    head->control = vrdma::control_phase_bit | ((claimed - 1) << vrdma::control_slots_shift);
    for (const std::uint32_t limit : {1u, 4u, 8u, 64u}) {
      std::memset(to, 0x11, sizeof(to));
      const Peek peek = ring.reader.peek(to[0].bytes, limit, slots);
      if (claimed > limit || claimed > 8) {
        REQUIRE(peek == Peek::malformed);
        REQUIRE(to[0].bytes[0] == std::byte{0x11});
      } else {
        REQUIRE(peek == Peek::ready);
        REQUIRE(slots == claimed);
        if (claimed < 64) REQUIRE(to[claimed].bytes[0] == std::byte{0x11});
      }
    }
  }
}

TEST_CASE("The copy's control word is the one that was checked") {
  Ring ring(8);
  put(ring.writer, 1, 2, 3, 2, std::byte{0});
  Slot to[64];
  std::uint32_t slots = 0;
  REQUIRE(ring.reader.peek(to[0].bytes, 64, slots) == Peek::ready);
  const std::uint32_t control = head_of(to[0].bytes).control;
  CHECK(((control >> vrdma::control_slots_shift) & vrdma::control_slots_mask) + 1 == slots);
}

TEST_CASE("Random records come out as they went in: a ring against a deque") {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    const std::uint32_t slot_count = 2u << (random() % 9);
    Ring ring(slot_count, static_cast<std::uint32_t>(random()));
    struct Expected {
      std::uint64_t tag;
      std::uint32_t word, user;
      Record body;
    };
    std::deque<Expected> model;
    alignas(64) std::byte to[vrdma::record_slots_max * slot_bytes];
    for (int step = 0; step < 3000; ++step) {
      if (random() % 2 != 0) {
        // For whole laps single slots only: then the writer stops marking the slot after a record.
        const std::uint32_t longest = step / 1000 % 2 != 0 && random() % 800 != 0 ? 1 : std::min(slot_count, vrdma::record_slots_max);
        const std::uint32_t slots = 1 + static_cast<std::uint32_t>(random()) % longest;
        if (!ring.writer.has_room(slots)) {
          if (random() % 2 != 0) ring.writer.set_freed(ring.reader.position());
          continue;
        }
        Expected record{random(), static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random()) & vrdma::control_user_mask,
                        Record(slots * slot_bytes - sizeof(RecordHead))};
        const bool ones = random() % 2 != 0;
        for (auto& byte : record.body) byte = ones ? std::byte{0xff} : static_cast<std::byte>(random());
        // In two pieces, as a caller with a head and a body writes.
        const std::size_t cut = random() % (record.body.size() + 1);
        ring.writer.write(sizeof(RecordHead), std::span(record.body).first(cut));
        ring.writer.write(sizeof(RecordHead) + cut, std::span(record.body).subspan(cut));
        ring.writer.publish(record.tag, record.word, record.user, slots);
        model.push_back(std::move(record));
      } else {
        std::uint32_t slots = 0;
        const Peek peek = ring.reader.peek(to, vrdma::record_slots_max, slots);
        REQUIRE_MESSAGE((peek == Peek::ready) == !model.empty(), "seed " << seed);
        if (peek != Peek::ready) continue;
        const Expected& expected = model.front();
        const RecordHead head = head_of(to);
        REQUIRE(head.tag == expected.tag);
        REQUIRE(head.word == expected.word);
        REQUIRE((head.control & vrdma::control_user_mask) == expected.user);
        REQUIRE(slots * slot_bytes - sizeof(RecordHead) == expected.body.size());
        REQUIRE(std::memcmp(to + sizeof(RecordHead), expected.body.data(), expected.body.size()) == 0);
        ring.reader.advance(slots);
        model.pop_front();
      }
    }
  }
}

TEST_CASE("A writer and a reader in two threads lose, repeat and tear nothing") {
  constexpr std::uint32_t slot_count = 64;
  constexpr std::uint64_t records = 100'000;
  Ring ring(slot_count);
  std::atomic<std::uint32_t> freed{0};
  std::thread producer([&] {
    std::mt19937 random(7);
    vmci::Backoff backoff;
    for (std::uint64_t i = 0; i < records; ++i) {
      const std::uint32_t slots = 1 + static_cast<std::uint32_t>(random()) % 5;
      while (!ring.writer.has_room(slots)) {
        ring.writer.set_freed(freed.load(std::memory_order_acquire));
        backoff.idle();
      }
      backoff.reset();
      put(ring.writer, i, static_cast<std::uint32_t>(i * 3), static_cast<std::uint32_t>(i) & 0xffff, slots, static_cast<std::byte>(i));
    }
  });
  alignas(64) std::byte to[vrdma::record_slots_max * slot_bytes];
  std::uint64_t bad = 0;
  vmci::Backoff backoff;
  for (std::uint64_t i = 0; i < records;) {
    std::uint32_t slots = 0;
    const Peek peek = ring.reader.peek(to, vrdma::record_slots_max, slots);
    if (peek == Peek::empty) {
      backoff.idle();
      continue;
    }
    backoff.reset();
    if (peek != Peek::ready) std::abort();
    const RecordHead head = head_of(to);
    bad += head.tag != i || head.word != static_cast<std::uint32_t>(i * 3);
    for (std::size_t at = sizeof(RecordHead); at < slots * slot_bytes; ++at) bad += to[at] != static_cast<std::byte>(i);
    ring.reader.advance(slots);
    freed.store(ring.reader.position(), std::memory_order_release);
    ++i;
  }
  producer.join();
  CHECK(bad == 0);
  CHECK(ring.reader.empty());
}
