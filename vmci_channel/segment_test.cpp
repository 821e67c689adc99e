#include "vmci_channel/segment.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

using vmci::HandedOut;
using vmci::Mapping;
using vmci::Segment;
using vmci::UniqueFd;
using vmci::Writable;

namespace {
UniqueFd memfd(std::uint64_t bytes, int seals) {
  UniqueFd fd(::memfd_create("segment-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd);
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}
UniqueFd copy_of(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }
}  // namespace

TEST_CASE("A created segment is zero, writable, and can change its size no more") {
  auto segment = Segment::create("t", 3 * 4096);
  REQUIRE(segment.has_value());
  CHECK(segment->bytes() == 3 * 4096);
  for (std::uint64_t i = 0; i < segment->bytes(); ++i) REQUIRE(segment->data()[i] == std::byte{0});
  segment->data()[3 * 4096 - 1] = std::byte{1};
  CHECK(::ftruncate(segment->fd(), 4096) != 0);
  CHECK(errno == EPERM);
  CHECK(::ftruncate(segment->fd(), 4 * 4096) != 0);
  CHECK(::fcntl(segment->fd(), F_ADD_SEALS, F_SEAL_WRITE) != 0);  // nobody takes the writers' right away either
}

TEST_CASE("A segment of the service page's kind can only be read by those who get its descriptor") {
  auto segment = Segment::create("t", 4096, HandedOut::read_only);
  REQUIRE(segment.has_value());
  CHECK(!Mapping::map(segment->fd(), 0, 4096, Writable::yes).has_value());
  auto reader = Mapping::map(segment->fd(), 0, 4096, Writable::no);
  REQUIRE(reader.has_value());
  segment->data()[7] = std::byte{42};
  CHECK(reader->data()[7] == std::byte{42});
}

TEST_CASE("A peer's segment shows the same memory, whole") {
  auto ours = Segment::create("t", 8192);
  REQUIRE(ours.has_value());
  auto theirs = vmci::map_sealed(copy_of(ours->fd()), 5000, Writable::yes);
  REQUIRE(theirs.has_value());
  CHECK(theirs->bytes() == 8192);
  theirs->data()[5000] = std::byte{9};
  CHECK(ours->data()[5000] == std::byte{9});
}

TEST_CASE("Memory that its owner could make smaller is refused") {
  CHECK(value(vmci::map_sealed(memfd(8192, 0), 8192, Writable::yes).error()) == EPERM);
  CHECK(value(vmci::map_sealed(memfd(8192, F_SEAL_GROW), 8192, Writable::yes).error()) == EPERM);
  CHECK(vmci::map_sealed(memfd(8192, F_SEAL_SHRINK), 8192, Writable::yes).has_value());
}

TEST_CASE("Memory that is smaller than it is said to be is refused") {
  CHECK(value(vmci::map_sealed(memfd(4096, F_SEAL_SHRINK), 4097, Writable::yes).error()) == EPROTO);
  CHECK(value(vmci::map_sealed(memfd(0, F_SEAL_SHRINK), 1, Writable::yes).error()) == EPROTO);
  CHECK(value(vmci::map_sealed(memfd(4096, F_SEAL_SHRINK), ~std::uint64_t{0}, Writable::yes).error()) == EPROTO);
}

TEST_CASE("What is no memory at all is refused") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  CHECK(!vmci::map_sealed(read_end, 4096, Writable::yes).has_value());
  CHECK(!vmci::map_sealed(UniqueFd(::open("/dev/null", O_RDWR)), 4096, Writable::yes).has_value());
  CHECK(!vmci::map_sealed(UniqueFd(), 4096, Writable::yes).has_value());
}

TEST_CASE("at and range refuse what does not lie wholly inside, without overflow") {
  auto segment = Segment::create("t", 4096);
  REQUIRE(segment.has_value());
  CHECK(segment->at<std::uint64_t>(4088) != nullptr);
  CHECK(segment->at<std::uint64_t>(4089) == nullptr);
  CHECK(segment->at<std::uint64_t>(4092) == nullptr);
  CHECK(segment->at<std::uint64_t>(4) == nullptr);  // misaligned
  CHECK(segment->at<std::uint64_t>(~std::uint64_t{7}) == nullptr);
  CHECK(segment->range(0, 4096) == segment->data());
  CHECK(segment->range(4096, 0) != nullptr);
  CHECK(segment->range(1, 4096) == nullptr);
  CHECK(segment->range(4096, ~std::uint64_t{0}) == nullptr);
  CHECK(segment->range(~std::uint64_t{0}, 2) == nullptr);
}

TEST_CASE("A descriptor has one owner: moving and resetting close exactly once") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  UniqueFd a(ends[0]), other(ends[1]);
  UniqueFd b(std::move(a));
  CHECK(!a);
  CHECK(b.get() == ends[0]);
  b = std::move(other);
  CHECK(::fcntl(ends[0], F_GETFD) == -1);
  CHECK(::fcntl(ends[1], F_GETFD) != -1);
  b.reset();
  CHECK(::fcntl(ends[1], F_GETFD) == -1);
}
