// What this process has mapped of others for direct mode, by what the service has granted: rooms, arenas, keys, files. One per
// attachment; a room goes when the last queue pair that uses it does.
//
// Any thread; opening and mapping ask the service and may block for as long as it takes to answer.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "guest_lib/direct/connection.hpp"
#include "guest_lib/direct/datagrams.hpp"
#include "vmci_channel/segment.hpp"

namespace vrdma::guest {

class Attachment;
struct Qp;

struct DirectRoom {
  std::uint32_t peer;  // guest
  vmci::Mapping words, arena, own_keys, peer_keys;
  PeerMemory memory;   // the peer's, unless that is this process, …
  ReachedProcess process;  // … and where it is mapped nowhere else. DirectRooms locks its opening.
  // Pipes for the events of the peer's channels, by channel; a pipe is closed when nobody completes there any more. DirectRooms locks.
  std::unordered_map<std::uint32_t, std::weak_ptr<OwnFd>> channels;
  void abandon();
};

// What a queue pair has while its offer stands.
struct DirectEnd {
  DirectEnd(std::shared_ptr<DirectRoom> room, std::shared_ptr<OwnFd> channel_in, const DirectConnection::Ends& ends)
      : reach{std::move(room)}, channel(std::move(channel_in)), connection(ends) {}
  PeerReach reach;
  std::shared_ptr<OwnFd> channel;  // the peer's, if it has one
  DirectConnection connection;
};

class DirectRooms {
 public:
  // Takes an offer up: a connection's, or of a UD queue pair. ESTALE: it does not stand any more. ENOMEM and EPROTO: it cannot be used.
  Result<std::unique_ptr<DirectEnd>> open(Attachment& attachment, Qp& qp, std::uint32_t offer);
  Result<std::unique_ptr<DatagramSender>> open_datagrams(Attachment& attachment, Qp& qp, std::uint32_t offer);
  // Finds out how to reach an address, and tells `sender`, of the offer that `qp` has taken up.
  void open_path(Attachment& attachment, Qp& qp, DatagramSender& sender, const UdOperand& address);
  // Maps what a message needed and did not find.
  bool map(Attachment& attachment, PeerReach& peer, const DirectPorts::Unmapped& unmapped);
  // Of this guest's files one that no key names any more, as the service has confirmed.
  void forget_own(std::uint32_t backing) { own_memory_.forget(backing); }
  void abandon();  // in a fork's child

 private:
  struct Opened {
    std::shared_ptr<DirectRoom> room;
    std::shared_ptr<OwnFd> channel;
    DirectConnection::Ends ends;
  };
  Result<Opened> opened(Qp& qp, const control::OpenDirectReply& reply, std::span<vmci::UniqueFd> descriptors, std::uint32_t poster);
  Result<std::shared_ptr<DirectRoom>> room_of(const control::OpenDirectReply& reply, std::span<vmci::UniqueFd> descriptors);
  std::shared_ptr<OwnFd> channel_of(DirectRoom& room, std::uint32_t channel, vmci::UniqueFd&& pipe);
  bool reach(Attachment& attachment, DirectRoom& room);
  PeerMemory& memory_of(const Attachment& attachment, DirectRoom& room);

  std::mutex mutex_;
  std::unordered_map<std::uint32_t, std::weak_ptr<DirectRoom>> rooms_;
  PeerMemory own_memory_;
  ReachedProcess own_process_;
};

}  // namespace vrdma::guest
