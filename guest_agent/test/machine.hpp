// A virtual machine of the test's own: a BAR of plain memory, the agent in a thread, and the test in the host service's place. What
// the machine's RAM is to the service is found by frame numbers in the mappings of this process, as the agent is in it.
#pragma once

#include <sys/eventfd.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "guest_agent/agent.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/vm_link.hpp"
#include "vrdma/control.hpp"

namespace vrdma::agent::test {

constexpr std::uint64_t epoch = 77;  // of the service, where it does not matter which

// False, and says so: the kernel here lets nobody pin memory or see frames.
bool can_pin();

struct FrameIn {
  vm::FrameHead head;
  std::vector<std::byte> body;

  template <class Body>
  Body as(std::size_t offset = 0) const {
    Body result{};
    if (offset + sizeof(result) <= body.size()) std::memcpy(&result, body.data() + offset, sizeof(result));
    return result;
  }
  control::Head request() const { return as<control::Head>(); }
};

// How long the agent waits for a heart that does not beat: whoever has no part in that must not fail because this process got no
// processor for a while.
constexpr std::uint64_t long_patience_ns = 60'000'000'000, short_patience_ns = 2'000'000'000;

struct MachineKind {
  bool has_interrupts = false;
  std::uint64_t patience_ns = long_patience_ns;
  std::uint64_t bar_bytes = 0;  // of the BAR, where the machine's RAM is its own; 0: it is not
};

class Machine {
 public:
  static constexpr std::uint64_t arena_bytes = 16 * vm::page_bytes;

  explicit Machine(const MachineKind& kind = {});
  ~Machine();

  // --- the host service
  void begin_service(std::uint64_t service_epoch);
  // From the agent's boot to its being open; the hello.
  vm::Hello open_session(std::int32_t status = 0);
  void accept_boot();
  // Until the agent has written another boot than the last that was accepted.
  void await_boot();
  bool begun() const;
  FrameIn await(vm::Frame kind);
  // The runs of a segment that have come since the last time, of the frame that awaits them last.
  Runs take_segment(std::uint32_t connection, std::uint32_t segment);
  template <class Body>
  void send(vm::Frame kind, std::uint32_t connection, const Body& body, std::uint32_t item = 0, std::uint16_t flags = 0) {
    link->send(kind, connection, std::as_bytes(std::span(&body, 1)), item, flags);
    pump();
  }
  void send(vm::Frame kind, std::uint32_t connection, std::span<const std::byte> body = {}, std::uint32_t item = 0) {
    link->send(kind, connection, body, item);
    pump();
  }
  // Replies to a packet; streams begin at item.
  void reply(const FrameIn& packet, int status, std::span<const std::byte> body = {}, std::uint16_t streams = 0, std::uint32_t item = 0);
  template <class Body>
  void reply_with(const FrameIn& packet, const Body& body, std::uint16_t streams = 0, std::uint32_t item = 0) {
    reply(packet, 0, std::as_bytes(std::span(&body, 1)), streams, item);
  }
  void pump();  // the heart beats, frames come in and go out
  // Pumps until the condition is true; a failure of the test after a minute.
  template <class Condition>
  void until(const char* what, Condition&& condition) {
    const std::uint64_t end_ns = vmci::monotonic_ns() + 60'000'000'000;
    while (!condition()) {
      if (vmci::monotonic_ns() > end_ns) fail(what);
      pump();
      ::sched_yield();
    }
  }
  std::byte* at_frame(std::uint64_t page);

  vm::LinkHeader& header() { return *reinterpret_cast<vm::LinkHeader*>(bar); }
  std::uint32_t last_rung() const { return std::atomic_ref(const_cast<std::uint32_t&>(registers[3])).load(); }

  // --- the agent
  void stop();                    // as SIGTERM; waits until it has left
  void stop_without_waiting();
  bool running() const { return !ended.load(); }
  std::string error() const { return error_; }  // once it has ended

  std::string socket;
  std::uint64_t in_file_bytes = ~std::uint64_t{0};  // of the machine's RAM; what lies beyond was plugged in
  std::byte* bar = nullptr;
  vmci::UniqueFd bar_file;  // where programs can map it
  std::uint32_t registers[4] = {};
  // With interrupts: that of each vector, whoever has it now; the service rings it.
  static constexpr std::uint32_t vectors = 4;
  vmci::UniqueFd interrupts[vectors];
  vmci::UniqueFd kernel_doorbell;  // by which processes ring without the agent, where the device has interrupts
  std::optional<vmci::VmLinkEnd> link;
  bool heart_beats = true;
  std::deque<FrameIn> frames;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Runs> segments;
  std::atomic<bool> ended{false};

 private:
  [[noreturn]] static void fail(const char* what);

  std::uint64_t bar_bytes_;
  std::filesystem::path folder_;
  vmci::UniqueFd stop_;
  std::uint64_t boot_ = 0;
  std::string error_;
  std::thread thread_;
};

// A process of the machine: this one, or whoever calls.
class Process {
 public:
  explicit Process(Machine& machine);

  void ask(control::Request request, std::span<const std::byte> body = {});
  template <class Body>
  void ask(control::Request request, const Body& body) {
    ask(request, std::as_bytes(std::span(&body, 1)));
  }
  // While the service is pumped.
  struct Reply {
    control::Head head{};
    std::vector<std::byte> body;
    std::vector<vmci::UniqueFd> descriptors;
  };
  Reply reply();
  bool answered() const;  // whether a reply is there
  bool closed();  // whether the agent has closed the connection; waits for it

  // The connection's number, from its open frame, and the four descriptors of attach.
  std::vector<vmci::UniqueFd> attach();

  Machine& machine;
  vmci::PacketSocket socket;
  std::uint32_t number = 0;
  std::uint32_t sequence = 0;
};

// One that the service has taken in.
struct ServedMachine : Machine {
  explicit ServedMachine(const MachineKind& kind = {}) : Machine(kind) {
    begin_service(epoch);
    open_session();
  }
};

struct AttachedProcess : Process {
  explicit AttachedProcess(Machine& of) : Process(of), descriptors(attach()) {}
  std::vector<vmci::UniqueFd> descriptors;
};

// Nothing of this kind comes, though a later packet has.
bool nothing_forwarded(Machine& machine, Process& process);

// How many rings this process has open.
std::size_t rings_open();

// Where this process's memory is in RAM.
Runs runs_at(const void* memory, std::size_t bytes);
bool same(const Runs& a, const Runs& b);

bool readable(int fd);

}  // namespace vrdma::agent::test
