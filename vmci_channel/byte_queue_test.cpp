#include "vmci_channel/byte_queue.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "vmci_channel/backoff.hpp"

using vmci::ByteCursor;
using vmci::ByteReader;
using vmci::ByteSide;
using vmci::ByteWriter;
using vmci::End;
using vmci::QueueKind;
using vmci::QueuePairGeometry;

namespace {
struct alignas(128) Line {
  std::byte bytes[128];
};
struct Pair {
  explicit Pair(std::uint32_t slots) : geometry{slots, slots * 2, QueueKind::bytes, 0}, memory(geometry.total_bytes() / 128 + 1) {}
  ByteSide side(End end) { return ByteSide::of(memory.front().bytes, geometry, end); }
  QueuePairGeometry geometry;
  std::vector<Line> memory;
};
}  // namespace

TEST_CASE("Each side's out is the other side's in, and nothing overlaps") {
  Pair pair(64);
  const ByteSide a = pair.side(End::creator), b = pair.side(End::attacher);
  CHECK(a.out == b.in);
  CHECK(a.in == b.out);
  CHECK(a.mine == b.theirs);
  CHECK(a.theirs == b.mine);
  CHECK(a.out_bytes == 4096);
  CHECK(a.in_bytes == 8192);
  CHECK(a.in == a.out + a.out_bytes);
  CHECK(reinterpret_cast<const std::byte*>(a.theirs + 1) == a.out);
}

TEST_CASE("Random reads and writes move a stream as a deque does") {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    Pair pair(1u << (random() % 5));
    ByteWriter writer(pair.side(End::creator));
    ByteReader reader(pair.side(End::attacher));
    const std::uint32_t capacity = pair.side(End::creator).out_bytes;
    std::deque<std::byte> model;
    std::vector<std::byte> buffer;
    for (int step = 0; step < 4000; ++step) {
      buffer.resize(random() % (capacity + capacity / 2));
      if (random() % 2 != 0) {
        for (auto& byte : buffer) byte = static_cast<std::byte>(random());
        const std::size_t expected = std::min<std::size_t>(buffer.size(), capacity - model.size());
        REQUIRE(writer.write(buffer) == expected);
        model.insert(model.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(expected));
        REQUIRE(writer.room() == (model.size() < capacity));
      } else {
        const std::size_t expected = std::min(buffer.size(), model.size());
        REQUIRE(reader.available() == model.size());
        REQUIRE(reader.read(buffer) == expected);
        REQUIRE(std::equal(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(expected), model.begin()));
        model.erase(model.begin(), model.begin() + static_cast<std::ptrdiff_t>(expected));
      }
      REQUIRE(!writer.broken());
      REQUIRE(!reader.broken());
    }
  }
}

TEST_CASE("A reader believes no produced position that is impossible") {
  for (const std::uint32_t lie : {4097u, 0x80000000u, 0xffffffffu, 99u}) {
    Pair pair(64);
    ByteWriter writer(pair.side(End::creator));
    ByteReader reader(pair.side(End::attacher));
    std::vector<std::byte> bytes(300), to(5000);
    REQUIRE(writer.write(bytes) == 300);
    REQUIRE(reader.read(std::span(to).first(100)) == 100);
    REQUIRE(reader.available() == 200);
    pair.side(End::creator).mine->produced = lie;  // 99: back before what was read; 4097+: beyond the queue
    if (lie == 4097u) pair.side(End::creator).mine->produced = 100 + 4097;
    CHECK(reader.read(to) == 0);
    CHECK(reader.broken());
  }
}

TEST_CASE("A writer believes no consumed position that is impossible") {
  for (const std::uint32_t lie : {99u, 301u, 0x80000000u, 0xffffffffu}) {
    Pair pair(64);
    ByteWriter writer(pair.side(End::creator));
    ByteReader reader(pair.side(End::attacher));
    std::vector<std::byte> bytes(300), to(100);
    REQUIRE(writer.write(bytes) == 300);
    REQUIRE(reader.read(to) == 100);
    REQUIRE(writer.write({}) == 0);  // has seen 100
    pair.side(End::attacher).mine->consumed = lie;
    CHECK(writer.write(bytes) == 0);
    CHECK(writer.broken());
  }
}

TEST_CASE("A writer rings once for each arming, and for the first byte of all") {
  Pair pair(64);
  ByteWriter writer(pair.side(End::creator));
  ByteReader reader(pair.side(End::attacher));
  const std::vector<std::byte> byte(1);
  std::uint32_t token = 77;
  writer.write(byte);
  CHECK(writer.wants_ring(token));
  CHECK(token == 0);
  writer.write(byte);
  CHECK(!writer.wants_ring(token));
  const std::uint32_t armed = reader.arm();
  CHECK(writer.wants_ring(token));
  CHECK(token == armed);
  CHECK(!writer.wants_ring(token));
}

TEST_CASE("Two threads move a stream without losing, repeating or tearing a byte") {
  Pair pair(16);
  constexpr std::uint32_t total = 8 << 20;
  std::thread producer([&] {
    ByteWriter writer(pair.side(End::creator));
    std::mt19937 random(1);
    std::vector<std::byte> chunk;
    vmci::Backoff backoff;
    for (std::uint32_t at = 0; at < total;) {
      chunk.resize(std::min(1 + static_cast<std::uint32_t>(random() % 1500), total - at));
      for (std::uint32_t i = 0; i < chunk.size(); ++i) chunk[i] = static_cast<std::byte>((at + i) * 2654435761u >> 24);
      for (std::size_t done = 0; done < chunk.size();) {
        const std::size_t bytes = writer.write(std::span(chunk).subspan(done));
        done += bytes;
        if (bytes == 0)
          backoff.idle();
        else
          backoff.reset();
      }
      at += static_cast<std::uint32_t>(chunk.size());
    }
  });
  ByteReader reader(pair.side(End::attacher));
  std::mt19937 random(2);
  std::vector<std::byte> chunk;
  std::uint64_t bad = 0;
  vmci::Backoff backoff;
  for (std::uint32_t at = 0; at < total;) {
    chunk.resize(1 + random() % 1500);
    const std::size_t bytes = reader.read(chunk);
    if (bytes == 0) {
      REQUIRE(!reader.broken());
      backoff.idle();
      continue;
    }
    backoff.reset();
    for (std::uint32_t i = 0; i < bytes; ++i) bad += chunk[i] != static_cast<std::byte>((at + i) * 2654435761u >> 24);
    at += static_cast<std::uint32_t>(bytes);
  }
  producer.join();
  CHECK(bad == 0);
}
