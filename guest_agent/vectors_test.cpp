// Who gets an interrupt of the device or its doorbell, and who has none, against a service that the test plays.
#include "guest_agent/vectors.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "guest_agent/test/machine.hpp"

using namespace vrdma;
using namespace vrdma::agent;
using namespace vrdma::agent::test;
using control::Request;
using vm::Frame;
using vmci::UniqueFd;

namespace {

// A channel of a process, as libvrdma asks for one. ring: what the service answers; vector: which it was told, 0: none.
struct AskedChannel {
  AskedChannel(Machine& machine, Process& process, std::uint32_t stream_in, std::uint32_t wish = control::interrupt_wanted, std::uint32_t ring = 5)
      : stream(stream_in) {
    process.ask(Request::create_channel, control::CreateChannelRequest{3, wish});
    const auto packet = machine.await(Frame::packet);
    vector = packet.as<control::CreateChannelRequest>(sizeof(control::Head)).interrupt;
    machine.reply_with(packet, control::ChannelReply{stream, vector != 0 ? ring : 0}, 1, stream);
    descriptors = process.reply().descriptors;
  }
  std::uint32_t stream, vector = 0;
  std::vector<UniqueFd> descriptors;
};

void ring(const UniqueFd& event) {
  const std::uint64_t one = 1;
  REQUIRE(::write(event.get(), &one, sizeof(one)) == sizeof(one));
}

}  // namespace

TEST_CASE("Where the device has interrupts the agent says so, and looks when it is interrupted") {
  if (!can_pin()) return;
  Machine machine({.has_interrupts = true, .patience_ns = short_patience_ns});
  machine.begin_service(epoch);
  CHECK(machine.open_session().flags == vm::hello_interrupts);
  AttachedProcess process(machine);
  process.ask(Request::query_device);
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  for (int i = 0; i < 300; ++i) machine.send(Frame::stream, process.number, std::byte{1}, 1);  // more frames than it takes at a time
  process.ask(Request::query_device);
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  machine.heart_beats = false;
  CHECK(process.closed());
}

TEST_CASE("A channel gets an interrupt of its own while there are any, and gives it back with its pipe") {
  if (!can_pin()) return;
  ServedMachine machine({.has_interrupts = true});
  AttachedProcess process(machine), other(machine);
  AskedChannel first(machine, process, 11), second(machine, other, 11), third(machine, process, 12);
  CHECK(first.vector >= vm::fixed_vectors);
  CHECK(second.vector >= vm::fixed_vectors);
  CHECK(first.vector != second.vector);
  REQUIRE(first.descriptors.size() == 2);
  REQUIRE(second.descriptors.size() == 2);
  ring(machine.interrupts[first.vector]);
  CHECK(readable(first.descriptors[1].get()));
  CHECK(!readable(second.descriptors[1].get()));
  CHECK((::fcntl(first.descriptors[1].get(), F_GETFL) & O_NONBLOCK) != 0);
  CHECK(third.vector == 0);  // the machine of the test has two
  CHECK(third.descriptors.size() == 1);
  machine.send(Frame::stream, process.number, control::CompletionRecord{1, 2, 0}, 12);
  machine.until("the event of a channel without", [&] { return readable(third.descriptors[0].get()); });

  machine.send(Frame::stream_end, process.number, {}, 11);  // the channel is destroyed
  machine.until("its end", [&] { return readable(first.descriptors[0].get()); });
  AskedChannel fourth(machine, other, 13);
  CHECK(fourth.vector == first.vector);
  REQUIRE(fourth.descriptors.size() == 2);
  ring(machine.interrupts[fourth.vector]);
  CHECK(readable(fourth.descriptors[1].get()));  // whoever had it before holds another eventfd

  other.socket = {};  // it ends, and both are free; this process is still there
  machine.until("its departure", [&] { return std::any_of(machine.frames.begin(), machine.frames.end(), [](const FrameIn& frame) { return frame.head.kind == static_cast<std::uint16_t>(Frame::close); }); });
  machine.frames.clear();
  CHECK(AskedChannel(machine, process, 14).vector != 0);
  CHECK(AskedChannel(machine, process, 15).vector != 0);
  CHECK(AskedChannel(machine, process, 16).vector == 0);
}

TEST_CASE("A channel's interrupt is for who knows what to do with it: the library, the service, the device") {
  if (!can_pin()) return;
  ServedMachine machine({.has_interrupts = true});
  AttachedProcess process(machine);
  const AskedChannel older_library(machine, process, 11, 0);
  CHECK(older_library.vector == 0);
  CHECK(older_library.descriptors.size() == 1);
  for (std::uint32_t i = 0; i < 5; ++i) {  // a service that makes no ring, or refuses: none is used up
    const AskedChannel without(machine, process, 20 + i, control::interrupt_wanted, 0);
    CHECK(without.vector != 0);
    CHECK(without.descriptors.size() == 1);
    process.ask(Request::create_channel, control::CreateChannelRequest{3, control::interrupt_wanted});
    machine.reply(machine.await(Frame::packet), EDQUOT);
    CHECK(process.reply().head.status == EDQUOT);
  }
  std::atomic_ref(machine.header().service.vectors).store(vm::fixed_vectors);
  CHECK(AskedChannel(machine, process, 30).vector == 0);
  std::atomic_ref(machine.header().service.vectors).store(~std::uint64_t{0});
  const AskedChannel of_nonsense(machine, process, 31);
  CHECK(of_nonsense.vector >= vm::fixed_vectors);
  CHECK(of_nonsense.vector < Machine::vectors);

  ServedMachine polling;
  AttachedProcess there(polling);
  CHECK(AskedChannel(polling, there, 11).vector == 0);
}

TEST_CASE("Where the kernel rings the device, processes have its eventfd for their doorbell, unless the service only polls") {
  if (!can_pin()) return;
  ServedMachine machine({.has_interrupts = true});
  AttachedProcess process(machine);
  ring(process.descriptors[2]);
  CHECK(nothing_forwarded(machine, process));  // the agent has had its turn
  CHECK(readable(machine.kernel_doorbell.get()));
  std::atomic_ref(machine.header().service.flags).store(vm::service_polls);
  AttachedProcess later(machine);
  ring(later.descriptors[2]);
  machine.until("the agent counts it", [&] { return std::atomic_ref(machine.header().agent.doorbells).load() != 0; });
}
