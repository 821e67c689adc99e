// A virtual machine whose root means harm: it owns the BAR, the doorbells, all of its RAM and what it says of it; and one whose QEMU does.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "tests/hostile/raid.hpp"

namespace vrdma::hostile {

namespace {

using test::FakeMachine;

// Over the link's header, cursors and queues, while the service reads them.
void strike_at_bar(Raid& raid, FakeMachine& machine) {
  Dice& dice = raid.dice;
  std::byte noise[512];
  const std::size_t length = 1 + dice.below(sizeof(noise));
  dice.fill(std::span(noise, length));
  const std::uint64_t places[] = {0, offsetof(vm::LinkHeader, agent), vm::queues_offset, vm::queues_offset + 128,
                                  vm::queues_offset + dice.below(vm::queues.total_bytes()), dice.below(vm::bar_bytes)};
  const std::uint64_t at = places[dice.below(std::size(places))];
  std::memcpy(machine.bar() + at, noise, std::min<std::uint64_t>(length, vm::bar_bytes - at));
  machine.ring(dice.below(vm::fixed_vectors));
  ++raid.blows;
}

// Well-formed frames with anything in them.
void strike_with_frames(Raid& raid, FakeMachine& machine) {
  Dice& dice = raid.dice;
  std::vector<std::byte> body(dice.one_in(10) ? dice.below(vm::frame_bytes_max + 1) : dice.below(256));
  dice.fill(body);
  auto kind = static_cast<vm::Frame>(dice.one_in(20) ? dice.any() : 1 + dice.below(5));
  const std::uint32_t connection = dice.one_in(10) ? static_cast<std::uint32_t>(dice.nasty()) : dice.below(8);
  std::uint32_t item = dice.one_in(3) ? static_cast<std::uint32_t>(dice.nasty()) : vm::segment_first + dice.below(4);
  if (kind == vm::Frame::open) body.resize(sizeof(vm::Open));
  if (kind == vm::Frame::packet && body.size() >= sizeof(Head)) {
    Head head{};
    head.record.control = dice.below(static_cast<std::uint32_t>(Request::count) + 2);
    std::memcpy(body.data(), &head, sizeof(head));
    if (head.record.control == static_cast<std::uint32_t>(Request::attach) && body.size() >= sizeof(Head) + sizeof(AttachRequest)) {
      const AttachRequest request{magic, version_major, version_minor, 0, 1, "frames"};
      std::memcpy(body.data() + sizeof(Head), &request, sizeof(request));
    }
  }
  if (kind == vm::Frame::segment) {
    body.resize(body.size() / sizeof(vm::Run) * sizeof(vm::Run));
    const std::uint64_t pages = machine.ram_bytes() / vm::page_bytes;
    for (std::size_t at = 0; at < body.size(); at += sizeof(vm::Run)) {
      vm::Run run{dice.below(pages), 1 + dice.below(4)};
      if (dice.one_in(200)) run = {dice.nasty(), dice.nasty()};
      std::memcpy(body.data() + at, &run, sizeof(run));
    }
    if (dice.one_in(2)) item = 1 + dice.below(2);
  }
  machine.link().send(kind, connection, body, item, static_cast<std::uint16_t>(dice.any()));
  machine.wait([] { return true; }, 0);
  machine.beat();  // one that is silent is left alone
  ++raid.blows;
}

// What its QEMU holds besides: the eventfds of both sides, and a monitor, whose news it makes up.
class Monitor {
 public:
  explicit Monitor(std::string path) : path_(std::move(path)) { connect(); }
  void connect() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    vmci::UniqueFd next(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::connect(next.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) socket_ = std::move(next);
  }
  void hang_up() { socket_.reset(); }
  void say(std::string_view text) { [[maybe_unused]] const auto sent = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL); }

 private:
  std::string path_;
  vmci::UniqueFd socket_;
};

constexpr std::string_view resume = "{\"event\": \"RESUME\"}\n";

std::string news(Dice& dice) {
  constexpr const char* events[] = {"STOP", "RESUME", "RESET", "POWERDOWN"};
  constexpr const char* statuses[] = {"setup", "active", "completed", "failed", "cancelled", "x"};
  constexpr const char* states[] = {"inmigrate", "running", "paused", "postmigrate"};
  const std::string number = std::to_string(dice.one_in(2) ? dice.below(100) : dice.nasty());
  switch (dice.below(8)) {
    case 0:
      return "{\"event\": \"MIGRATION\", \"data\": {\"status\": \"" + std::string(statuses[dice.below(std::size(statuses))]) + "\"}, \"timestamp\": {\"seconds\": " +
             number + ", \"microseconds\": 0}}\n";
    case 1: return "{\"id\": \"vrdma-run-state\", \"return\": {\"status\": \"" + std::string(states[dice.below(std::size(states))]) + "\"}}\n";
    case 2: return "{\"id\": \"vrdma-asked-" + number + "\", \"return\": {}}\n";
    default: return "{\"event\": \"" + std::string(events[dice.below(dice.one_in(20) ? 4 : 2)]) + "\"}\n";
  }
}

void strike_at_bells(Raid& raid, FakeMachine& machine, Monitor& monitor) {
  Dice& dice = raid.dice;
  switch (dice.below(8)) {
    case 0: machine.clog(); break;
    case 1: machine.flood(dice.below(vm::fixed_vectors)); break;
    case 2: monitor.hang_up(); [[fallthrough]];
    case 3: monitor.connect(); break;
    case 4: {
      if (!dice.one_in(4)) break;
      std::string noise(dice.below(70'000), ' ');
      dice.fill(std::as_writable_bytes(std::span(noise)));
      monitor.say(noise);
      break;
    }
    case 5:
      for (int i = 0; i < 100; ++i) machine.ring(dice.below(vm::fixed_vectors));
      break;
    default: {
      std::string text;
      for (std::size_t lines = dice.below(500); lines > 0; --lines) text += news(dice);
      if (!dice.one_in(10)) text += resume;  // a machine that stands still strikes at nothing
      monitor.say(text);
    }
  }
  ++raid.blows;
}

// Begins sessions as an agent does; in each of them the machine does what it is there for.
template <class Act>
void raid_sessions(Raid& raid, const Act& act) {
  Dice& dice = raid.dice;
  const std::string folder = raid.path.substr(0, raid.path.rfind('/')) + "/vm/" + std::to_string(raid.number % 3);
  FakeMachine machine(folder + "/ivshmem.sock", folder + "/ram", dice.any(), dice.one_in(3) ? dice.below(16) << 20 : 0, /*vectors=*/4);
  if (!machine.connected()) {  // the service has yet to see the end of the last one
    ::usleep(1000);
    return;
  }
  Monitor monitor(folder + "/monitor.sock");
  if (dice.one_in(3)) machine.clog();
  for (int sessions = 0; sessions < 4 && !raid.over(); ++sessions) {
    monitor.hang_up();
    monitor.connect();
    monitor.say(resume);
    if (!machine.begin_session(2000) || machine.greet(dice.one_in(20) ? 8 : 0, 2000) != 0) continue;
    ++raid.attached;
    act(machine, monitor);
  }
}

}  // namespace

void raid_machine_bar(Raid& raid) {
  raid_sessions(raid, [&](FakeMachine& machine, Monitor&) {
    Intruder in(machine, "bar");
    Property own(in);
    if (raid.dice.one_in(2) && in.attached()) (void)own.make();
    for (int i = 0; i < 200 && !raid.over(); ++i) strike_at_bar(raid, machine);
  });
}

void raid_machine_frames(Raid& raid) {
  raid_sessions(raid, [&](FakeMachine& machine, Monitor&) {
    for (int i = 0; i < 500 && !raid.over(); ++i) strike_with_frames(raid, machine);
  });
}

// Without processes: they would wait for answers that a machine that stands still never gets.
void raid_machine_bells(Raid& raid) {
  raid_sessions(raid, [&](FakeMachine& machine, Monitor& monitor) {
    for (int i = 0; i < 100 && !raid.over(); ++i) strike_at_bells(raid, machine, monitor);
  });
}

// The rings of its processes, and what they ask for.
void raid_machine_rings(Raid& raid) {
  raid_sessions(raid, [&](FakeMachine& machine, Monitor&) {
    raid.machine = &machine;
    (raid.dice.one_in(3) ? raid_control : raid_rings)(raid);
    raid.machine = nullptr;
  });
}

}  // namespace vrdma::hostile
