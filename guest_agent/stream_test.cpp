#include "guest_agent/stream.hpp"

#include <doctest/doctest.h>
#include <poll.h>

#include <csignal>
#include <cstring>
#include <vector>

using vrdma::agent::Stream;

namespace {
using Record = std::uint64_t[2];
std::vector<std::byte> records(std::uint64_t first, std::size_t count) {
  std::vector<std::byte> bytes(count * sizeof(Record));
  for (std::size_t i = 0; i < count; ++i) {
    const Record record = {first + i, ~(first + i)};
    std::memcpy(bytes.data() + i * sizeof(record), record, sizeof(record));
  }
  return bytes;
}
bool ends_now(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1 && (waiting.revents & POLLIN) == 0 && (waiting.revents & POLLHUP) != 0;
}
}  // namespace

TEST_CASE("Events that a full pipe does not take come later, each whole and in order, and then the end") {
  vmci::UniqueFd read_end;
  auto stream = Stream::make(Stream::Use::events, read_end);
  REQUIRE(stream.has_value());
  constexpr std::size_t count = 20000;  // a pipe takes 4096
  for (std::size_t sent = 0; sent < count; sent += 100) stream->put(records(sent, 100));
  CHECK(stream->holds());
  stream->end();
  CHECK(!stream->over());
  for (std::uint64_t next = 0; next < count; ++next) {
    Record record;
    REQUIRE(::read(read_end.get(), record, sizeof(record)) == sizeof(record));
    REQUIRE(record[0] == next);
    REQUIRE(record[1] == ~next);
    stream->flush();
  }
  CHECK(stream->over());
  CHECK(!ends_now(read_end.get()));
  *stream = {};
  CHECK(ends_now(read_end.get()));
}

TEST_CASE("What nobody reads takes no more memory than its bound") {
  vmci::UniqueFd read_end;
  auto stream = Stream::make(Stream::Use::events, read_end);
  REQUIRE(stream.has_value());
  constexpr std::size_t more_than_all = Stream::held_bytes_max / sizeof(Record) + 3 * 4096;
  for (std::size_t sent = 0; sent < more_than_all; sent += 512) stream->put(records(sent, 512));
  std::size_t read = 0;
  for (Record record; stream->holds(); stream->flush())
    for (pollfd waiting{read_end.get(), POLLIN, 0}; ::poll(&waiting, 1, 0) == 1; ++read) {
      REQUIRE(::read(read_end.get(), record, sizeof(record)) == sizeof(record));
      REQUIRE(record[0] == read);
    }
  CHECK(read * sizeof(Record) <= Stream::held_bytes_max + 65536);
  CHECK(read * sizeof(Record) >= Stream::held_bytes_max);
}

TEST_CASE("A wake that finds its pipe full of wakes is not kept") {
  vmci::UniqueFd read_end;
  auto stream = Stream::make(Stream::Use::wake, read_end);
  REQUIRE(stream.has_value());
  const std::byte wake[1] = {};
  for (int i = 0; i < 70000; ++i) stream->put(wake);
  CHECK(!stream->holds());
}

TEST_CASE("A pipe that the process has closed is written to in vain, and never waited for") {
  std::signal(SIGPIPE, SIG_IGN);
  vmci::UniqueFd read_end;
  auto stream = Stream::make(Stream::Use::events, read_end);
  REQUIRE(stream.has_value());
  for (int i = 0; i < 100; ++i) stream->put(records(0, 100));
  CHECK(stream->holds());
  read_end.reset();
  stream->flush();
  CHECK(!stream->holds());
  stream->put(records(0, 1));
  CHECK(!stream->holds());
}
