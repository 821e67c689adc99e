// One process of the machine, from its connection to the agent's socket until the service is through with it: passes its packets
// on to the service and the replies back, makes and pins the memory that a guest shares with the service, and takes over the
// rings by which the process has pinned memory of its own.
//
// Where memory is of the BAR (bar_pages.hpp), that is lent instead, and nothing is pinned.
//
// The service writes to all that memory whenever it likes until it says `closed`, or until another session is accepted. So it
// outlives the process: leave() frees what only the process needs, the destructor the rest. One thread; never blocks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "guest_agent/bar_pages.hpp"
#include "guest_agent/pinned.hpp"
#include "guest_agent/poller.hpp"
#include "guest_agent/session.hpp"
#include "guest_agent/stream.hpp"
#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vrdma/control.hpp"

namespace vrdma::agent {

// Where processes are waited for. Their packets are apart, so that nobody is read from while the link has no room.
struct Watch {
  Poller events;
  Poller packets;
  vmci::UniqueFd spare = {};  // given up for a moment where there is no other descriptor left for what a packet brings
};

class Connection {
 public:
  static constexpr std::size_t outstanding_max = 64;  // requests without a reply
  static constexpr std::size_t closing_max = 256;     // of a user, that are not closed yet: then his connections end that bring more, and there are no others
  enum : std::uint32_t { item_socket = 0, item_exit = 1, item_doorbell = 2, item_streams = 1u << 31 };  // Source::item

  // Takes over a process that has just connected and tells the service. ESRCH: it is gone already. closer: of its user.
  static Result<std::unique_ptr<Connection>> open(std::uint32_t number, vmci::PacketSocket socket, std::shared_ptr<vmci::Closer> closer, Session& session, Watch& watch);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  uid_t uid() const { return credentials_.uid; }
  bool connected() const { return static_cast<bool>(socket_); }
  // The process is not served any more.
  void leave();

  // What a Poller said. False: the process has gone or breaks the protocol; leave().
  bool take_event(std::uint32_t item);
  // What the service said. False: the service breaks the protocol. After leave() nothing happens.
  bool take_reply(const vm::FrameHead& head, std::span<const std::byte> packet);
  bool take_stream(std::uint32_t item, std::span<const std::byte> bytes);
  bool take_stream_end(std::uint32_t item);

 private:
  struct Outstanding {
    control::Request request = control::Request::none;
    std::uint32_t backing = 0;  // of remove_backing
    vmci::UniqueFd ring;        // of add_pinned, or …
    BarPages::Slice lent;       // … this
    Vectors::Lease vector;      // of create_channel, and …
    vmci::UniqueFd interrupt;   // … the eventfd that it rings
  };
  Connection(std::uint32_t number, vmci::PacketSocket socket, std::shared_ptr<vmci::Closer> closer, Session& session, Watch& watch)
      : number_(number), closer_(std::move(closer)), socket_(std::move(socket)), session_(session), watch_(watch) {}

  bool take_packet();
  bool answer(const control::Head& request, int status, std::span<const std::byte> body = {});  // in the service's place
  void send_segment(std::uint32_t segment, const Runs& runs);
  // The next three: 0, or why the request is refused without asking the service.
  int prepare_attach(std::span<const std::byte> body);
  int prepare_reach();
  int prepare_pinned(control::AddPinnedRequest& body, pid_t sender, vmci::UniqueFd& ring);
  int prepare_lent(control::AddPinnedRequest& body, BarPages::Slice& lent);
  Result<BarPages::Slice> lend(std::uint64_t bytes);
  void prepare_channel(control::CreateChannelRequest& body, Outstanding& asked);
  bool attach_reply(std::span<std::byte> body, std::vector<int>& descriptors, std::vector<vmci::UniqueFd>& made);
  bool copier_reply(std::vector<int>& descriptors, std::vector<vmci::UniqueFd>& made);
  Result<vmci::UniqueFd> open_stream(std::uint32_t item, Stream::Use use);
  void watch(std::uint32_t item, Stream& stream);
  void close_stream(std::map<std::uint32_t, Stream>::iterator stream);
  void ring_doorbell();

  const std::uint32_t number_;
  const std::shared_ptr<vmci::Closer> closer_;
  vmci::PacketSocket socket_;
  Session& session_;
  Watch& watch_;
  vmci::Credentials credentials_{};
  vmci::UniqueFd exited_;  // pidfd
  vmci::UniqueFd folder_;  // its own in /proc
  Pagemap pagemap_;        // of the program that the process ran when it was accepted; none of one with more rights than it connected with
  bool asked_to_attach_ = false, attached_ = false;
  vmci::UniqueFd doorbell_;
  std::map<std::uint32_t, Stream> streams_;
  std::map<std::uint32_t, Vectors::Lease> vectors_;  // of channels, by stream: that ends with the channel
  struct Document {
    std::vector<std::byte> reply;
    vmci::UniqueFd file;
  };
  std::map<std::uint32_t, Document> documents_;  // by stream: replies that go out when the file that belongs to them is whole
  std::set<std::uint32_t> copier_streams_;  // what comes by these wakes the process's copying thread
  std::map<std::uint32_t, Outstanding> outstanding_;  // by sequence number
  PinnedSegment arena_, copier_;
  BarPages::Slice lent_arena_, lent_copier_;  // in their place
  vmci::Segment copier_word_;                 // what the copying thread sleeps on then: nobody can sleep on a BAR
  std::map<std::uint32_t, BarPages::Slice> lent_;  // by backing
  bool said_full_ = false;
  std::map<std::uint32_t, vmci::UniqueFd> rings_;  // by backing
  bool said_crowded_ = false;
  std::uint32_t next_segment_ = vm::segment_first;
};

}  // namespace vrdma::agent
