// One virtual machine on this host: the service's end of the link to its agent (vrdma/vm_link.hpp), over what its QEMU has connected.
// Every process of the machine becomes a connection of the server, as if it were a process of this host: packets go through a pair of
// sockets, what it would read from pipes goes over the link, and its queues lie in the machine's RAM.
//
//   QEMU ── monitor.sock ──► resets (QMP)
//   QEMU ── ivshmem.sock ──► BAR, eventfds          agent ◄── link ──► MachinePort ◄── socket pair ──► Server ──► shard
//
// (One that can interrupt nobody has other devices: machines/plain.hpp.)
// The server's thread. Nothing of the machine is believed; a machine that breaks the protocol loses its session.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
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
#include "vmkernel_svc/memory/machine_ram.hpp"

namespace vrdma::svc {

class Shard;

struct MachineSpec {
  std::string name;
  std::string folder;  // where ivshmem.sock and monitor.sock stand, or link.bar
  std::string ram;     // the file that is its RAM; empty: its launcher brings it
  uid_t tenant;
  bool plain = false;  // machines/plain.hpp
  bool operator==(const MachineSpec&) const = default;
};

// A process of a machine, as the server sees it.
struct MachineProcess {
  std::string machine;
  uid_t tenant;
  std::uint32_t uid, gid, pid;                     // in the machine
  std::map<std::uint32_t, PinnedPages> segments;   // lent, until a packet uses them
  std::function<void()> detached = {};             // the service touches nothing of it any more

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
    std::function<void(vmci::PacketSocket, std::shared_ptr<MachineProcess>)> admit;
    std::function<void()> changed;  // status() says something else
  };
  // Throws std::runtime_error with a message for a person.
  MachinePort(MachineSpec spec, Service service);
  ~MachinePort();

  const MachineSpec& spec() const { return spec_; }
  MachineStatus status() const;
  bool running() const { return device_->connected(); }

  MachinePort(const MachinePort&) = delete;
  MachinePort& operator=(const MachinePort&) = delete;

 private:
  struct Process;
  struct Stream;
  struct Session;

  std::unique_ptr<MachineDevice> make_device();
  void forget();
  void await_link();
  void beat();
  LinkActivity look();
  void begin_session(std::uint64_t boot);
  void end_session();
  void take(const vm::FrameHead& head, std::span<const std::byte> body);
  void greet(std::span<const std::byte> body);
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
  std::uint64_t forgotten_boot_ = 0;
  std::unique_ptr<Session> session_;
  std::size_t leaving_ = 0;  // processes and pages of sessions that have ended, that the service may still touch
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this port look here first
};

}  // namespace vrdma::svc
