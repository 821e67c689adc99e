#include "guest_lib/direct/peer_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>

#include "doctest/doctest.h"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::guest {

namespace {

constexpr std::uint64_t file_bytes = 1 << 16;

int mapped(const char* name) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(name) != std::string::npos;
  return count;
}

struct Peer {
  Peer() { REQUIRE(::ftruncate(file.get(), file_bytes) == 0); }
  bool add(std::uint32_t backing) { return memory.add(backing, file.get(), 0, memory.changes()).has_value(); }
  bool has(std::uint32_t backing) const { return memory.has(backing, 0, file_bytes); }
  // As the service does it.
  void let_go(std::uint32_t backing) {
    all.backings[all.count % direct::let_go_kept] = backing;
    ++all.count;
  }
  const vmci::UniqueFd file{::memfd_create("a-peer's", MFD_CLOEXEC)};
  PeerMemory memory;
  direct::LetGo all{};
};

}  // namespace

TEST_CASE("what no key names any more is unmapped, and nothing else, when it is caught up with") {
  Peer peer;
  for (const std::uint32_t backing : {1u, 2u, 65u, 129u}) REQUIRE(peer.add(backing));  // three of them in one place
  CHECK(mapped("memfd:a-peer's") == 4);
  peer.let_go(65);
  peer.let_go(7);
  CHECK(peer.has(65));
  peer.memory.catch_up(peer.all);
  CHECK_FALSE(peer.has(65));
  for (const std::uint32_t backing : {1u, 2u, 129u}) CHECK(peer.has(backing));
  CHECK(mapped("memfd:a-peer's") == 3);
  REQUIRE(peer.add(65));  // registered again: that it was let go is old news
  peer.memory.catch_up(peer.all);
  CHECK(peer.has(65));
  peer.memory.forget(1);
  CHECK_FALSE(peer.has(1));
  CHECK(mapped("memfd:a-peer's") == 3);
}

TEST_CASE("who has missed some lets go of everything") {
  Peer peer;
  for (const std::uint32_t backing : {1u, 2u}) REQUIRE(peer.add(backing));
  for (std::uint32_t i = 0; i <= direct::let_go_kept; ++i) peer.let_go(i == 0 ? 1 : 100 + i);
  peer.memory.catch_up(peer.all);
  CHECK(mapped("memfd:a-peer's") == 0);
  REQUIRE(peer.add(2));
  peer.memory.catch_up(peer.all);
  CHECK(peer.has(2));
}

TEST_CASE("a file that was let go while it was asked for is not mapped") {
  Peer peer;
  const std::uint32_t changes = peer.memory.changes();
  peer.memory.forget(3);
  CHECK(peer.memory.add(3, peer.file.get(), 0, changes).error() == Errno{EAGAIN});
  CHECK(mapped("memfd:a-peer's") == 0);
  CHECK(peer.add(3));
}

TEST_CASE("who stood still in the midst of a file that was let go reads zeroes, and the next file of that size lies there") {
  Peer peer;
  REQUIRE(peer.add(1));
  std::byte* const data = peer.memory.around(1, 0, file_bytes).data;
  data[100] = std::byte{1};
  peer.let_go(1);
  peer.memory.catch_up(peer.all);
  CHECK(mapped("memfd:a-peer's") == 0);
  CHECK(std::atomic_ref(data[100]).load() == std::byte{0});
  for (std::uint32_t backing = 65; backing < 65 + 64 * 20; backing += 64) {  // of the same place
    REQUIRE(peer.add(backing));
    CHECK(peer.memory.around(backing, 0, file_bytes).data == data);
    CHECK(data[100] == std::byte{1});
    peer.let_go(backing);
    peer.memory.catch_up(peer.all);
  }
  CHECK(std::atomic_ref(data[100]).load() == std::byte{0});
}

}  // namespace vrdma::guest
