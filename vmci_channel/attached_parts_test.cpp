#include "vmci_channel/attached_parts.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <vector>

using namespace vrdma::control;
using vmci::AttachedParts;
using vmci::Segment;
using vmci::UniqueFd;

namespace {

// What a service answers.
struct Answer {
  Answer() : arena(*Segment::create("arena", 1 << 20)), page(*Segment::create("page", sizeof(ServicePage), vmci::HandedOut::read_only)) {
    reply.major = version_major;
    reply.arena_bytes = arena.bytes();
    reply.control_geometry = {64, 32, vmci::QueueKind::records, 0};
    reply.control_offset = 4096;
    reply.doorbell_offset = reply.arena_bytes - doorbell_bytes;
    for (const Segment* segment : {&arena, &page}) descriptors.emplace_back(::fcntl(segment->fd(), F_DUPFD_CLOEXEC, 0));
    for (int i = 0; i < 2; ++i) descriptors.emplace_back(::eventfd(0, EFD_CLOEXEC));
  }
  vrdma::Result<AttachedParts> mapped() { return AttachedParts::map(reply, descriptors, vmci::map_sealed); }

  static constexpr std::uint64_t doorbell_bytes = (sizeof(vmci::ReadyWords) + 127) / 128 * 128;
  Segment arena, page;
  AttachReply reply{};
  std::vector<UniqueFd> descriptors;
};

int error_after(const std::function<void(Answer&)>& spoil) {
  Answer answer;
  spoil(answer);
  const auto parts = answer.mapped();
  REQUIRE(!parts);
  for (const UniqueFd& fd : answer.descriptors) CHECK(fd);  // nothing was taken
  return value(parts.error());
}

}  // namespace

static_assert(vmci::lies_inside(4096, 0, 4096) && vmci::lies_inside(4096, 3968, 128) && vmci::lies_inside(4096, 4096, 0));
static_assert(!vmci::lies_inside(4096, 128, 4096) && !vmci::lies_inside(4096, 64, 128) && !vmci::lies_inside(4096, 4224, 0));
static_assert(!vmci::lies_inside(4096, ~std::uint64_t{127}, 256) && !vmci::lies_inside(4096, 128, ~std::uint64_t{0}));  // without overflow

TEST_CASE("What the answer to attach brings is where it says, in the service's memory") {
  Answer answer;
  const int doorbell = answer.descriptors[2].get(), wake = answer.descriptors[3].get();
  const auto parts = answer.mapped();
  REQUIRE(parts.has_value());
  CHECK(parts->arena.bytes() >= answer.reply.arena_bytes);
  CHECK(reinterpret_cast<std::byte*>(&parts->rings.header()) == parts->arena.data() + answer.reply.control_offset);
  CHECK(reinterpret_cast<std::byte*>(parts->ready_words) == parts->arena.data() + answer.reply.doorbell_offset);
  parts->ready_words->words[255] = 42;
  CHECK(reinterpret_cast<vmci::ReadyWords*>(answer.arena.data() + answer.reply.doorbell_offset)->words[255] == 42);
  reinterpret_cast<ServicePage*>(answer.page.data())->minor = 7;
  CHECK(reinterpret_cast<const ServicePage*>(parts->page.data())->minor == 7);
  CHECK(parts->doorbell.get() == doorbell);
  CHECK(parts->wake.get() == wake);
  CHECK(answer.descriptors[0]);  // the caller's, who may lend of it
}

TEST_CASE("An answer is refused that would lead out of the arena, or to no control queue pair") {
  const std::function<void(Answer&)> spoils[] = {
      [](Answer& a) { a.reply.control_offset = a.reply.arena_bytes; },
      [](Answer& a) { a.reply.control_offset = ~std::uint64_t{127}; },
      [](Answer& a) { a.reply.control_offset += 64; },
      [](Answer& a) { a.reply.doorbell_offset += 128; },
      [](Answer& a) { a.reply.doorbell_offset -= 64; },
      [](Answer& a) { a.reply.arena_bytes = 0; },
      [](Answer& a) { a.reply.arena_bytes *= 2; },  // the memory is smaller
      [](Answer& a) { a.reply.control_geometry.produce_slots = 63; },
      [](Answer& a) { a.reply.control_geometry.produce_slots = 1; },
      [](Answer& a) { a.reply.control_geometry.produce_slots = 1u << 31; },
      [](Answer& a) { a.reply.control_geometry.consume_entries = 0; },
      [](Answer& a) { a.reply.control_geometry.consume_entries = 1; },
      [](Answer& a) { a.reply.control_geometry.consume_kind = vmci::QueueKind::completions; },
      [](Answer& a) { a.reply.shard = std::size(ServicePage{}.shards); },
      [](Answer& a) { a.descriptors.pop_back(); },
  };
  for (std::size_t i = 0; i < std::size(spoils); ++i) {
    CAPTURE(i);
    CHECK(error_after(spoils[i]) == EPROTO);
  }
}

TEST_CASE("Descriptors that this process could not receive are told from an answer that brings others") {
  CHECK(error_after([](Answer& a) { a.descriptors.clear(); }) == EMFILE);
}

TEST_CASE("An arena that the service could make smaller is refused") {
  CHECK(error_after([](Answer& a) {
    a.descriptors[0].reset(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(a.descriptors[0].get(), static_cast<off_t>(a.reply.arena_bytes)) == 0);
  }) == EPERM);
}
