// Takes guests in and out: accepts their sockets, reads what they ask one packet at a time, has the shard answer, and notices when they
// have ended. Boost.Asio on the main thread, as all of it is.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmkernel_svc/machines/port.hpp"
#include "vmkernel_svc/packet_desk.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc {

class Reception {
 public:
  struct Limits {
    std::uint64_t open_files = 0;        // how many we may have
    std::uint64_t for_root = 0;          // the last of them, which nobody else gets: quotas are of a uid, and a user may have many (/etc/subuid)
    std::uint32_t of_one_user = 2048;    // connections, and descriptors of his whose closing waits
  };
  // shard: the first one, for which packets answers. before_show is called before it is asked to show something.
  Reception(boost::asio::io_context& io, Shard& shard, PacketDesk& packets, Limits limits, std::uint64_t machine_arena_bytes,
            std::function<void()> before_show)
      : io_(io), shard_(shard), packets_(packets), limits_(limits), machine_arena_bytes_(machine_arena_bytes), before_show_(std::move(before_show)) {}

  ~Reception();

  void open(vmci::UniqueFd listener);  // from now on who connects there is taken in
  // A process's socket. machine: whose process it is; nullptr: a process of this host.
  void admit(vmci::PacketSocket socket, uid_t uid, std::shared_ptr<MachineProcess> machine);
  bool is_empty() const { return connections_.empty(); }
  bool somebody_knocks();  // whose connection has not been accepted

  // LIDs are leased to this host, and have not been yet: who attaches is kept for a while. Until lease_is_known(): they are, or are refused.
  void await_first_lease() { lease_is_known_ = false; }
  void lease_is_known();

 private:
  // One guest's socket (or one that has not attached, or a tool's).
  struct Connection : std::enable_shared_from_this<Connection> {
    Connection(boost::asio::io_context& io, vmci::PacketSocket socket_in, std::shared_ptr<vmci::Closer> closer_in)
        : closer(std::move(closer_in)), socket(std::move(socket_in)), readable(io), exited(io), patience(io) {}
    ~Connection();
    const std::shared_ptr<vmci::Closer> closer;
    vmci::PacketSocket socket;
    boost::asio::posix::stream_descriptor readable;  // a duplicate of the socket
    boost::asio::posix::stream_descriptor exited;    // the guest's pidfd
    boost::asio::steady_timer patience;              // with which it waits for this host's first lease of LIDs, or for room for what it gives
    std::atomic<std::uint32_t> guest{0};             // VMCI context id once attached; set by the shard
    uid_t uid = 0;
    std::shared_ptr<MachineProcess> machine;
    bool asked_to_attach = false;  // once is all: its pidfd is being waited for
    bool has_waited = false;       // for that lease
    bool closed = false;
  };
  using ConnectionPtr = std::shared_ptr<Connection>;
  static constexpr std::size_t descriptors_unread = 8;  // in one of them, or so
  struct User {
    std::uint32_t connections = 0;
    std::shared_ptr<vmci::Closer> closer = std::make_shared<vmci::Closer>();  // of what he gives, and of his sockets
    std::vector<vmci::GivenFd> unread;  // sockets of connections that have ended with answers that somebody may still read, each with descriptors
    bool has_room(const Limits& limits) const { return connections + unread.size() * descriptors_unread < limits.of_one_user; }
    void forget_read();
  };

  void accept_next();
  void take_spare();
  bool refuse_one();
  bool is_for_root(int fd, uid_t uid) const;
  bool is_full_for(const Connection& connection) const;
  void read_next(const ConnectionPtr& connection);
  void read_later(const ConnectionPtr& connection);
  Status take_packet(const ConnectionPtr& connection);  // EAGAIN: there is none; EBUSY: it is to be tried again later; anything else: the connection is to end
  void handle_packet(const ConnectionPtr& connection, std::vector<std::byte> packet, std::vector<vmci::GivenFd> descriptors);
  Status refuse_for_descriptors(const Connection& connection, std::span<std::byte> packet);
  bool has_to_wait(const Connection& connection) const;
  void await_lease(const ConnectionPtr& connection);
  void attach(const ConnectionPtr& connection, const control::Head& head, const std::vector<std::byte>& packet);
  void attach_from_machine(const ConnectionPtr& connection, const control::Head& head, const control::AttachRequest& request);
  static std::optional<PinnedPages> memory_of(const Connection& connection, control::Request request, const std::vector<std::byte>& packet);
  void lost(const ConnectionPtr& connection);
  void await_exit(const ConnectionPtr& connection);

  boost::asio::io_context& io_;
  Shard& shard_;
  PacketDesk& packets_;  // used on the shard's thread
  const Limits limits_;
  const std::uint64_t machine_arena_bytes_;
  const std::function<void()> before_show_;
  boost::asio::posix::stream_descriptor listener_{io_};
  boost::asio::steady_timer accept_timer_{io_};  // between two tries when descriptors have run out
  std::map<Connection*, ConnectionPtr> connections_;
  std::map<uid_t, User> users_;
  bool none_given_ = false;  // nobody can give us a descriptor before he is let in (Linux 6.16)
  vmci::UniqueFd spare_;  // a descriptor that is given up for a moment where there is no other left, for who is then refused
  bool lease_is_known_ = true;
};

}  // namespace vrdma::svc
