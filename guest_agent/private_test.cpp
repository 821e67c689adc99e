// The agent in a machine whose RAM is its own: what it lends of the device's BAR, and to whom.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "guest_agent/test/machine.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::agent::test {
namespace {

using control::Request;

constexpr std::uint64_t bar_bytes = vm::lent_bar_bytes_min;

// Where a run lies in the BAR, which may lend that.
std::uint64_t lent_at(const Runs& runs, std::uint64_t bytes) {
  REQUIRE(runs.size() == 1);
  CHECK(runs.front().pages == bytes / vm::page_bytes);
  CHECK(runs.front().page >= vm::bar_bytes / vm::page_bytes);
  REQUIRE(runs.front().page + runs.front().pages <= bar_bytes / vm::page_bytes);
  return runs.front().page * vm::page_bytes;
}

// Attached, where its arena is of the BAR.
struct BarProcess : Process {
  explicit BarProcess(Machine& of) : Process(of) {
    control::AttachRequest request{};
    request.magic = control::magic;
    request.major = control::version_major;
    request.minor = control::version_minor;
    ask(Request::attach, request);
    const FrameIn packet = machine.await(vm::Frame::packet);
    arena = lent_at(machine.take_segment(number, vm::segment_arena), Machine::arena_bytes);
    control::AttachReply granted{};
    granted.arena_bytes = Machine::arena_bytes;
    machine.reply_with(packet, granted, 1, 1);
    auto got = reply();
    REQUIRE(got.head.status == 0);
    std::memcpy(&granted, got.body.data(), sizeof(granted));
    CHECK(granted.flags == (control::attach_in_machine | control::attach_in_bar));
    REQUIRE(got.descriptors.size() == 4);
    descriptors = std::move(got.descriptors);
    CHECK(::lseek(descriptors[0].get(), 0, SEEK_CUR) == static_cast<off_t>(arena));
  }
  std::uint64_t arena = 0;
  std::vector<vmci::UniqueFd> descriptors;
};

struct Lent {
  int status;
  std::uint64_t offset;
};
Lent borrow(Machine& machine, Process& process, std::uint64_t bytes, std::uint32_t backing) {
  process.ask(Request::add_pinned, control::AddPinnedRequest{0, bytes, control::lend_pages, 0});
  process.machine.until("an answer, or a question", [&] {
    return !machine.frames.empty() || process.answered();
  });
  if (machine.frames.empty()) return {process.reply().head.status, 0};
  const FrameIn packet = machine.await(vm::Frame::packet);
  const auto asked = packet.as<control::AddPinnedRequest>(sizeof(control::Head));
  CHECK(asked.address == 0);
  CHECK(asked.bytes == page_ceiling(bytes));
  const std::uint64_t at = lent_at(machine.take_segment(process.number, asked.segment), asked.bytes);
  machine.reply_with(packet, control::AddBackingReply{backing, 0});
  const auto got = process.reply();
  control::AddBackingReply reply{};
  REQUIRE(got.body.size() == sizeof(reply));
  std::memcpy(&reply, got.body.data(), sizeof(reply));
  CHECK(reply.backing == backing);
  CHECK(std::uint64_t{reply.page} * vm::page_bytes == at);
  return {got.head.status, at};
}

void withdraw(Machine& machine, Process& process, std::uint32_t backing) {
  process.ask(Request::remove_backing, control::RemoveBackingRequest{backing, 0});
  machine.reply(machine.await(vm::Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
}

}  // namespace

TEST_CASE("Where the RAM is the machine's own, the queues of a process, its memory and the service's page are of the BAR") {
  Machine machine({.bar_bytes = bar_bytes});
  machine.begin_service(epoch);
  const vm::Hello hello = machine.open_session();
  CHECK((hello.flags & vm::hello_bar) != 0);
  CHECK(hello.high_bytes == 0);
  const std::uint64_t page = lent_at({{hello.page, 1}}, vm::page_bytes);
  BarProcess process(machine);
  CHECK((process.arena >= page + vm::page_bytes || page >= process.arena + Machine::arena_bytes));
  machine.bar[page + 4000] = std::byte{9};
  auto seen = vmci::Mapping::map(process.descriptors[1].get(), static_cast<std::uint64_t>(::lseek(process.descriptors[1].get(), 0, SEEK_CUR)), vm::page_bytes, vmci::Writable::no);
  REQUIRE(seen.has_value());
  CHECK(seen->data()[4000] == std::byte{9});
  const auto alive = [&] { return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(machine.bar + page + offsetof(control::ServicePage, alive_mutex))).load(); };
  CHECK(alive() != owner_died);
  CHECK(!vmci::Mapping::map(process.descriptors[1].get(), page, vm::page_bytes, vmci::Writable::yes));
  CHECK(rings_open() == 0);

  const Lent one = borrow(machine, process, 3 * vm::page_bytes + 1, 5), two = borrow(machine, process, 4 << 20, 6);
  REQUIRE(one.status == 0);
  REQUIRE(two.status == 0);
  CHECK((one.offset + 4 * vm::page_bytes <= two.offset || two.offset + (4 << 20) <= one.offset));
  CHECK(borrow(machine, process, bar_bytes, 7).status == ENOMEM);
  CHECK(borrow(machine, process, 0, 7).status == EINVAL);
  CHECK(borrow(machine, process, ~std::uint64_t{0}, 7).status == ENOMEM);
  withdraw(machine, process, 6);
  for (int again = 0; again < 20; ++again) {  // 80 MiB, by and by
    CHECK(borrow(machine, process, 4 << 20, 8).status == 0);
    withdraw(machine, process, 8);
  }
  process.ask(Request::add_pinned, control::AddPinnedRequest{0x10000, 4096, 3, 0});  // there is nothing to pin
  CHECK(process.reply().head.status == EOPNOTSUPP);
  // Whatever programs write there, the agent follows none of it.
  std::memset(machine.bar + page, 0x5a, vm::page_bytes);
  machine.stop();
  CHECK(alive() == owner_died);
}

TEST_CASE("A copying thread sleeps on a word of the agent's, as nobody can on one of a BAR") {
  ServedMachine machine({.bar_bytes = bar_bytes});
  BarProcess process(machine);
  process.ask(Request::reach_process, control::ReachProcessRequest{});
  const FrameIn packet = machine.await(vm::Frame::packet);
  const std::uint64_t at = lent_at(machine.take_segment(process.number, vm::segment_copier), page_ceiling(copying::segment_bytes));
  machine.reply_with(packet, control::ReachProcessReply{control::reach_by_guest, 1}, 1, 40);
  const auto got = process.reply();
  REQUIRE(got.head.status == 0);
  REQUIRE(got.descriptors.size() == 2);
  CHECK(::lseek(got.descriptors[0].get(), 0, SEEK_CUR) == static_cast<off_t>(at));
  auto word = vmci::Mapping::map(got.descriptors[1].get(), 0, sizeof(std::uint32_t), vmci::Writable::yes);
  REQUIRE(word.has_value());
  auto& news = *reinterpret_cast<std::uint32_t*>(word->data());
  const std::uint32_t before = std::atomic_ref(news).load();
  const std::byte something[1]{};
  machine.send(vm::Frame::stream, process.number, something, 40);
  machine.until("the word changes", [&] { return std::atomic_ref(news).load() != before; });
}

TEST_CASE("A library that knows of no such machines is told the version that does") {
  ServedMachine machine({.bar_bytes = bar_bytes});
  Process process(machine);
  control::AttachRequest request{};
  request.magic = control::magic;
  request.major = control::version_major;
  request.minor = control::minor_of_bar - 1;
  process.ask(Request::attach, request);
  const auto got = process.reply();
  CHECK(got.head.status == EPROTONOSUPPORT);
  control::AttachReply mine{};
  REQUIRE(got.body.size() == sizeof(mine));
  std::memcpy(&mine, got.body.data(), sizeof(mine));
  CHECK(mine.minor == control::version_minor);
}

TEST_CASE("What a process has mapped is lent to nobody else after its connection, and its session, have ended") {
  ServedMachine machine({.bar_bytes = bar_bytes});
  constexpr std::uint64_t most = 20 << 20;
  vmci::Mapping mapped;
  {
    BarProcess process(machine);
    const Lent lent = borrow(machine, process, most, 5);
    REQUIRE(lent.status == 0);
    auto mapping = vmci::Mapping::map(process.descriptors[0].get(), lent.offset, most, vmci::Writable::yes);
    REQUIRE(mapping.has_value());
    mapped = std::move(*mapping);
    process.socket = {};
    machine.await(vm::Frame::close);
    machine.send(vm::Frame::closed, process.number);
  }
  machine.begin_service(epoch + 1);  // and everybody begins anew
  machine.open_session();
  BarProcess process(machine);
  CHECK(borrow(machine, process, most, 5).status == ENOMEM);
  CHECK(borrow(machine, process, 1 << 20, 6).status == 0);
  mapped = {};
  CHECK(borrow(machine, process, most, 7).status == 0);
}

TEST_CASE("An agent whose device has room for the link only, or that cannot be mapped by programs, ends and says why") {
  Machine machine;
  std::atomic_ref(machine.header().service.flags).store(vm::service_lends_bar);
  machine.begin_service(epoch);
  machine.await_boot();
  machine.accept_boot();
  machine.until("the agent ends", [&] { return !machine.running(); });
  machine.stop();
  CHECK(machine.error().find("this machine's RAM is its own") != std::string::npos);
}

}  // namespace vrdma::agent::test
