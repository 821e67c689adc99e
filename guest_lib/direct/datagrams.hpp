// A UD queue pair whose posts this process may carry out itself: its own send queue, and a path to each address that it sends to, which
// ends at the inbox of a receiver. Each has a claim; that of an inbox is held for a few datagrams at most, others wait for it.
//
// Under the queue pair's send lock, but for construction.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "guest_lib/direct/connection.hpp"

namespace vrdma::guest {

// The way to one address.
class DatagramPath {
 public:
  DatagramPath(std::shared_ptr<DirectRoom> room_in, std::shared_ptr<OwnFd> channel_in, const DirectConnection::Ends& ends, const DatagramSource& source);
  DatagramPath(const DatagramPath&) = delete;
  DatagramPath& operator=(const DatagramPath&) = delete;

  // Takes the inbox's claim, which leave() gives back. own_keys: changes when keys of this process may mean something else. False: somebody
  // else has it, and does not leave soon; or the path is over().
  bool enter(std::uint32_t own_keys);
  void leave();
  // Inside: whether it is to be left before the next datagram. The service wants it, or is to give a receive request back.
  bool stop() const { return claim_.stop() || ports_.owes_turn(); }
  bool over() const { return claim_.over(); }  // the receiver is gone, or not any more what it was

  // One datagram of one buffer. False: it has not been begun, or is given up. qkey: of the receiver, as the request means it.
  bool deliver(DirectPorts::Qp& near, const ibv_send_wr& wr, std::uint8_t flags, const UdOperand& address, std::uint32_t qkey);
  // The one at the head of the send queue, whatever it is like. False: likewise, and `near` is to step back; turn_lost(): it may be tried again.
  bool run(DirectPorts::Qp& near);
  // Of a delivered one, at its sender.
  void complete(DirectPorts::Qp& near, Cqe& cqe, const CqeState& state) { ports_.complete(near, engine::Direction::send, cqe, state); }
  bool turn_lost() const { return ports_.turn_lost(); }
  bool take_sent() { return ports_.take_sent(); }
  bool has_unmapped() const { return ports_.has_unmapped(); }
  std::optional<DirectPorts::Unmapped> take_unmapped() { return ports_.take_unmapped(); }

  PeerReach reach;

 private:
  void take_over();
  void step_back();
  void record();

  std::shared_ptr<OwnFd> channel_;
  vmci::PosterClaim claim_;
  PeerChannel peer_channel_;
  DirectPorts::Qp far_;
  DirectPorts ports_;
  engine::Engine<DirectPorts> engine_;
  std::uint32_t handouts_seen_ = 0, own_keys_seen_ = 0;
  std::uint32_t receive_head_ = 0;  // of a shared receive queue, as Positions has it
};

class DatagramSender {
 public:
  DatagramSender(std::shared_ptr<DirectRoom> room, const DirectConnection::Ends& own);

  // As DirectConnection.
  template <class Alive>
  bool enter(Alive&& alive) {
    if (!claim_.enter()) return false;
    VRDMA_CRASH_POINT("direct.guest.claimed");
    if (claim_.direction().handouts != handouts_seen_) take_over();
    if (alive()) return true;
    claim_.leave();
    return false;
  }
  bool carry_out(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags);
  bool has_run(const SendQueue& queue) const { return near_.send_ring.position() == queue.position(); }
  bool run_queue();
  bool leave();
  bool take_own_event_due() { return std::exchange(own_event_due_, false); }

  // What was missing when a datagram needed it; to be had while no claim is held. The path of memory that is not mapped, or nullptr.
  DatagramPath* take_unmapped_path() { return std::exchange(unmapped_, nullptr); }
  // An address that nothing is known of, …
  std::optional<UdOperand> take_wanted() { return wanted_count_ != 0 ? std::optional(wanted_[--wanted_count_]) : std::nullopt; }
  // … and what is: nullptr, datagrams to there are the service's for now.
  void add(const UdOperand& address, std::unique_ptr<DatagramPath> path);
  bool wants() const { return unmapped_ != nullptr || wanted_count_ != 0; }
  // Of requests that the service carries out: their addresses are asked for all the same.
  void look_at(const ibv_send_wr& wr);

 private:
  using Address = std::array<std::uint64_t, 4>;  // a UdOperand without its Q_Key
  struct AddressHash {
    std::size_t operator()(const Address& address) const;
  };
  struct Known {
    std::unique_ptr<DatagramPath> path;
    std::uint64_t ask_again_ns = 0, patience_ns = 0;  // where there is none
  };
  static Address address_of(const UdOperand& operand);
  DatagramPath* path_to(const UdOperand& operand);
  void want(const UdOperand& operand);
  bool inside(DatagramPath& path);  // of which it may be already
  void leave_inbox();
  void note_failure(DatagramPath& path);
  std::uint32_t qkey_of(const UdOperand& operand) const;
  void take_over();
  void step_back();
  void record();

  std::shared_ptr<DirectRoom> room_;
  vmci::PosterClaim claim_;
  Told sent_;
  bool own_channel_, own_event_due_ = false, any_sent_ = false;
  DirectPorts::Qp near_;
  std::uint32_t handouts_seen_ = 0;
  std::unordered_map<Address, Known, AddressHash> paths_;
  Address last_address_{};
  Known* last_ = nullptr;  // of paths_
  DatagramPath* inside_ = nullptr;
  std::uint32_t inside_for_ = 0;  // datagrams
  bool any_over_ = false;         // of paths_
  DatagramPath* unmapped_ = nullptr;
  std::array<UdOperand, 8> wanted_;  // nothing is allocated while a claim is held
  std::size_t wanted_count_ = 0;
};

}  // namespace vrdma::guest
