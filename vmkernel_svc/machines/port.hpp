// One virtual machine on this host: the service's end of the link to its agent (vrdma/vm_link.hpp), over what its QEMU has connected.
// Every process of the machine becomes a connection of the server, as if it were a process of this host: packets go through a pair of
// sockets, what it would read from pipes goes over the link, and its queues lie in the machine's RAM.
//
//   QEMU ── monitor.sock ──► what becomes of the machine (monitor.hpp, run_state.hpp)
//   QEMU ── ivshmem.sock ──► BAR, eventfds          agent ◄── link ──► MachinePort ◄── socket pair ──► Server ──► shard
//
// A machine that stands still or is being saved is frozen: nothing of the service touches its memory or the link, and to the peers of
// its queue pairs it is silent. One that was saved is kept for a while when its QEMU has ended; if it comes back as it was, which a
// number in its RAM tells that only the service writes, its session goes on. That number is taken out of the RAM file when QEMU has
// ended: a machine that boots has none, one that was loaded brings it along, even if nobody heard it being loaded.
//
// Where nobody tells what becomes of a machine (QEMU without the monitor; ivshmem-plain, which is another device, machines/plain.hpp), one
// whose agent is silent is frozen, too: it may be reset, and another kernel has its memory.
//
// What a monitor says is taken in at once, and acted upon one change at a time (`changing_`): a machine that is stopped and goes on a
// thousand times a second has the shard do no more than one that does it a hundred times.
//
// The server's thread. Nothing of the machine is believed; a machine that breaks the protocol loses its session.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/segment.hpp"
#include "vmci_channel/vm_link.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/machines/device.hpp"
#include "vmkernel_svc/machines/run_state.hpp"
#include "vmkernel_svc/machines/wall_clock.hpp"
#include "vmkernel_svc/memory/machine_ram.hpp"

namespace vrdma::svc {

struct MonitorNews;
class Shard;

struct MachineSpec {
  std::string name;
  std::string folder;  // where ivshmem.sock and monitor.sock stand, or link.bar
  std::string ram;     // the file that is its RAM; empty: its launcher brings it, or nobody
  uid_t tenant;
  bool plain = false;  // machines/plain.hpp
  std::uint32_t vectors = vm::fixed_vectors;  // of its device
  std::uint64_t bar_bytes = 0;  // of a machine whose RAM is its own: memory is lent of the BAR, which is so big; 0: of its RAM
  std::uint64_t device_bar_bytes() const { return bar_bytes != 0 ? bar_bytes : vm::bar_bytes; }
  bool operator==(const MachineSpec&) const = default;
};

// A process of a machine, as the server sees it.
struct MachineProcess {
  std::string machine;
  uid_t tenant;
  std::uint32_t uid, gid, pid;                     // in the machine
  std::map<std::uint32_t, PinnedPages> segments;   // lent, until a packet uses them
  std::function<void()> detached = {};             // the service touches nothing of it any more
  bool frozen = false;                             // what it asks waits …
  std::function<void()> thawed = {};               // … for this
  bool ended = false;                              // what it has asked last is nobody's any more
  std::shared_ptr<const Interrupts> interrupts = nullptr;  // of its machine
  bool in_bar = false;                             // what is lent is of the BAR

  std::optional<PinnedPages> take_segment(std::uint32_t number) {
    auto node = segments.extract(number);
    return node ? std::optional(std::move(node.mapped())) : std::nullopt;
  }
};

class MachinePort {
 public:
  struct Service {
    boost::asio::io_context& io;
    Shard& shard;
    std::uint64_t arena_bytes;  // of each process
    std::chrono::seconds keep;  // how long a machine that was saved may be away
    std::function<void(vmci::PacketSocket, std::shared_ptr<MachineProcess>)> admit;
    std::function<void()> changed;  // status() says something else
  };
  // Throws std::runtime_error with a message for a person.
  MachinePort(MachineSpec spec, Service service);
  ~MachinePort();

  const MachineSpec& spec() const { return spec_; }
  MachineStatus status() const;
  bool running() const { return device_->connected() || kept_; }

  MachinePort(const MachinePort&) = delete;
  MachinePort& operator=(const MachinePort&) = delete;

 private:
  struct Process;
  struct Stream;
  struct Session;

  std::unique_ptr<MachineDevice> make_device();
  void came();
  void went();
  void take_news(const MonitorNews& news);
  void settle();
  void freeze();
  void thaw();
  void changed_over();
  void keep_for_a_while();
  bool restored() const;
  void end_unheard();
  void look_at_heart();
  bool renew_generation();
  void write_line();
  void forget() { forget(boot_of_agent()); }
  void forget(std::uint64_t boot);
  void drop_kept();
  void look_at_clock();
  std::uint64_t boot_of_agent() const;
  void await_link();
  void beat();
  LinkActivity look();
  void begin_session(std::uint64_t boot);
  void end_session();
  void take(const vm::FrameHead& head, std::span<const std::byte> body);
  void greet(std::span<const std::byte> body);
  Result<std::shared_ptr<MachineRam>> map_ram(const vm::Hello& hello);
  // The machine's copy of the service's page is at `at`, in its RAM, from now on.
  void begin_page(const std::shared_ptr<MachineRam>& ram, std::byte* at);
  void open(std::uint32_t connection, std::span<const std::byte> body);
  void forward(Process& process, std::span<const std::byte> packet);
  void append(Process& process, std::uint32_t segment, std::span<const std::byte> body);
  void refuse(const char* why);  // ends the session

  void await_replies(const std::shared_ptr<Process>& process);
  void await_stream(const std::shared_ptr<Process>& process, const std::shared_ptr<Stream>& stream);
  void send_document(Process& process, const vmci::UniqueFd& document);
  void push();  // what waits for the agent goes out

  MachineSpec spec_;
  Service service_;
  std::unique_ptr<MachineDevice> device_;
  boost::asio::posix::stream_descriptor link_event_;
  boost::asio::steady_timer heartbeat_;
  boost::asio::steady_timer keeping_, resting_;
  std::uint64_t epoch_ = 0, heartbeats_ = 0;
  std::uint64_t forgotten_boot_ = 0;
  RunState run_state_;
  WallClock clock_;
  bool frozen_ = false;
  bool changing_ = false;    // the shard freezes or thaws it
  std::chrono::steady_clock::time_point thaw_again_{};  // not before
  std::uint64_t asked_ = 0;  // of the monitor
  std::uint64_t heart_ = 0;  // the agent's, …
  std::chrono::steady_clock::time_point heard_at_{};  // … which has beaten last then
  bool silent_ = false;  // for too long, and nobody tells why
  std::uint64_t heart_seen_ = 0;  // the agent's, …
  std::uint32_t beats_unheard_ = 0;  // … that has been seen to beat so often, though the machine is said to stand still
  bool kept_ = false;  // the session's machine was saved, and did not come back yet
  std::unique_ptr<Session> session_;
  bool ring_owed_ = false;  // the machine could not be interrupted yet
  std::size_t leaving_ = 0;  // processes and pages of sessions that have ended, that the service may still touch
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this port look here first
};

}  // namespace vrdma::svc
