// Management datagrams of this host's guests (IBA 13): who has opened umad0, for which agents, and who answers.
//
//     a guest's agent ── request ──▶ this service, as subnet manager and administrator, and for each node as its own agents
//                     ◀── answer ──  (subnet_management, administration, performance)
//                     ── anything else, by LID ──▶ the agents of the guests that have that LID: ibping and its like
//                     ◀── its answer, by the number that the service has put into the transaction's
//                     ── to a LID of another host, if it is not the subnet manager's ──▶ that host's management, which does the same
//
// A request that nobody answers comes back, with ETIMEDOUT, when its sender's patience is over. Members that take a guest are answers to
// its requests (vrdma/mad.hpp); errors as the kernel's. Used by the shard's thread only.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/mad/administration.hpp"
#include "vmkernel_svc/mad/far_message.hpp"
#include "vmkernel_svc/mad/performance.hpp"

namespace vrdma::svc {

class Management {
 public:
  // Other hosts.
  class Post {
   public:
    // Who has that LID, and can be told something now.
    virtual std::optional<std::uint32_t> host_of(std::uint16_t lid) = 0;
    virtual void tell(std::uint32_t host, const MadMessage& head, std::span<const std::uint8_t> mad) = 0;

   protected:
    ~Post() = default;
  };

  explicit Management(Fabric& fabric);
  ~Management();
  // `at` is called when expire() is to be called earlier than was known.
  void use(Post* post) { post_ = post; }
  void set_alarm(std::function<void(std::uint64_t at_ns)> at) { alarm_ = std::move(at); }
  void expire(std::uint64_t now_ns);
  void use_traffic(std::function<control::CountersReply(const Guest&)> traffic) { performance_.use_traffic(std::move(traffic)); }

  Result<control::MadOpenReply> open(Guest& guest, vmci::UniqueFd pipe);
  Status close(Guest& guest, std::uint32_t channel);
  Result<control::MadAgent> add_agent(Guest& guest, const control::MadRegisterRequest& request);
  Status remove_agent(Guest& guest, const control::MadAgent& agent);
  Status send(Guest& guest, const control::MadSendRequest& request);
  Result<control::MadTakeReply> take(Guest& guest, const control::MadTakeRequest& request);
  void leave(Guest& guest);  // all that it has
  // Of another host, which is trusted as far as its own guests go: the head's P_Keys are those that its sender can have.
  void arrived(std::uint32_t host, const MadMessage& head, mad::Mad mad);

  // For those who ask: tests.
  std::vector<std::uint32_t> channels_of(const Guest& guest) const;
  std::size_t channel_count() const { return channels_.size(); }
  std::size_t waiting_answers() const { return deadlines_.size(); }
  const mad::Groups& groups() const { return administration_.groups(); }

 private:
  struct Channel;
  struct Agent;
  struct Arrived;
  // Who waits for an answer: the agent's number, and what the agent has called the transaction.
  using Transaction = std::pair<std::uint32_t, std::uint32_t>;

  Channel* channel_of(Guest& guest, std::uint32_t handle);
  void forget(Agent& agent);
  void route(Guest& from, const control::MadAddress& to, mad::Mad& mad);
  bool answered_here(Guest& from, const control::MadAddress& to, mad::Mad& mad);
  void deliver(Channel& channel, Arrived arrived);
  // `from` as its port's address; `sender` sees whom it reaches.
  // False: it is a request that whoever is there cannot answer.
  bool deliver_here(const mad::Viewer& sender, std::uint16_t to, const control::MadAddress& from, const mad::Mad& mad);
  void deliver_answer(const control::MadAddress& from, mad::Mad mad);
  bool deliver_request(Guest& to, const control::MadAddress& from, const mad::Mad& mad);
  bool is_here(std::uint16_t lid) const;

  Fabric& fabric_;
  mad::Subnet subnet_;
  mad::Performance performance_;
  mad::Administration administration_;
  Post* post_ = nullptr;
  std::function<void(std::uint64_t)> alarm_;
  std::uint32_t last_channel_ = 0, last_agent_ = 0;
  std::map<std::uint32_t, std::unique_ptr<Channel>> channels_;
  std::map<std::uint32_t, Agent*> agents_;  // by number
  struct Waiting {
    std::uint64_t deadline_ns;
    control::MadAddress to;
    std::array<std::uint8_t, control::mad_head_bytes> head;
  };
  std::map<Transaction, Waiting> waiting_;
  std::set<std::pair<std::uint64_t, Transaction>> deadlines_;
};

}  // namespace vrdma::svc
