// Direct mode, the service's part (docs/direct.md): which connections their guests may run by themselves, and who runs them now.
//
// A link is made when both queue pairs of a connection are in RTS and all rules allow it. From then on each of its two directions is
// handed out, which makes it the posting guest's, or owned: the service has its positions and runs it as any other. Whatever reads
// or changes a queue pair of a link owns it before. A UD queue pair has a link of its own (datagrams.cpp). Used by the shard's thread only.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "vmci_channel/claim.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc {

class Shard;
struct Viewer;
struct DirectLink;
struct DirectRoom;

class DirectDesk {
 public:
  explicit DirectDesk(Shard& shard);
  ~DirectDesk();

  // After `qp` was modified, both directions of its link owned: makes a link, or ends one that is none any more, and hands it out.
  void consider(QueuePair& qp);
  // Owns both directions, or of the one that the peer posts to the end that is `qp`'s, should the peer stand still in the middle of a
  // post. False: a poster is inside one of them; it has been asked to leave. True without a link.
  bool take_back(QueuePair& qp);
  bool take_back(CompletionQueue& cq);  // of all queue pairs that complete there
  bool take_back(Guest& guest);         // of all its queue pairs
  // Gives back what take_back() took and nobody needs now.
  void hand_out(Guest& guest);

  // Whether the shard may run this queue pair, which has a link, now. False: it is out of its list, and comes back when it may.
  bool may_run(QueuePair& qp);
  // After a turn; the queue pair has found nothing to do for so many looks: time to hand its link out? Both its queue pairs are then out of their
  // lists.
  bool rest(QueuePair& qp, std::uint32_t idle_turns);
  bool hand_out(QueuePair& qp) { return hand_out(qp, false); }
  // Before a turn of a queue pair that has a link: whether it has been kept busy for so long that it will not rest, and its link is handed
  // out in the middle.
  enum class Flood {
    none,
    to_boundary,  // of one message: its end is where the link can be handed out, now or as soon as another one has been taken up
    waits,        // there, for the other end to come to its own: no turn now
    handed_out    // it is out of its list
  };
  Flood flood(QueuePair& qp);

  // The receive queue of a UD queue pair that has a link, for the service to deliver to until give_inboxes(), or until it waits for nothing
  // there. False: a poster is at it.
  bool take_inbox(QueuePair& qp);
  void give_inboxes();

  // Before the queue pair goes, which cannot wait: its peer's poster may still be inside.
  void forget(QueuePair& qp);
  void forget(Guest& guest);

  // Tries again what had to wait. True: something could go on.
  bool settle();
  bool in_doubt() const { return !doubtful_.empty(); }  // settle() is then for who is alone (turnstile.hpp)
  bool waiting() const { return !held_back_.empty() || !orphans_.empty() || !doubtful_.empty() || !haunted_.empty(); }
  // Receivers of directions that are handed out may sleep on a channel: look() wants to be called every look_interval_ns, which takes
  // their ends from posters that stand still. True: it took one.
  bool watching() const { return watched_ != 0; }
  bool look(std::uint64_t now_ns);
  static constexpr std::uint64_t look_interval_ns = 100'000'000;
  // Whether queue pairs reach each other may have changed: every connection is considered anew.
  void look_again();
  // Of the guests that the viewer sees; moves their connections at a message boundary.
  Result<control::SetDirectReply> set(const control::SetDirectRequest& request, const Viewer& viewer);

  // Whether a peer, or the guest itself, may have mapped a backing of that number, be it there or not.
  bool is_lent(const Guest& guest, std::uint32_t backing) const;
  bool has_lent_all(const Guest& guest) const;  // or so many that it is not known which
  void registered(Guest& guest, const Region& region);
  void deregistering(Guest& guest, const Region& region);
  // Of `pieces`, which a region had until now, those that no other has are for peers to unmap. All directions of the guest are owned.
  void released(Guest& guest, const std::vector<Piece>& pieces);

  Result<control::OpenDirectReply> open(Guest& guest, const control::OpenDirectRequest& request, std::vector<vmci::UniqueFd>& give);
  Result<control::OpenSharedReceivesReply> open_shared_receives(Guest& guest, const control::OpenDirectRequest& request);
  Result<control::OpenPathReply> open(Guest& guest, const control::OpenPathRequest& request, std::vector<vmci::UniqueFd>& give);
  Result<control::OpenBackingReply> open(Guest& guest, const control::OpenBackingRequest& request, std::vector<vmci::UniqueFd>& give);
  Result<control::OpenProcessReply> open(Guest& guest, const control::OpenProcessRequest& request);

  // "direct", or "mediated" and why.
  std::string mode(const QueuePair& qp) const;
  // With what has been done directly since the service last had the positions.
  engine::QpCounters counters(const QueuePair& qp) const;
  std::uint32_t produced(const CompletionQueue& cq) const;
  struct Counters {
    std::uint64_t links = 0;       // connections that could be direct
    std::uint64_t paths = 0;       // to inboxes, given to posters
    std::uint64_t handed_out = 0;  // directions of them, …
    std::uint64_t returned = 0;    // … and those that came back because the poster could not do what it was asked to
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Poster {  // to inboxes of other guests
    pid_t pid;
    std::shared_ptr<const vmci::UniqueFd> pidfd;
  };

  std::string why_mediated(QueuePair& qp, QueuePair*& peer);
  std::string why_mediated_datagrams(const QueuePair& qp) const;
  void consider_datagrams(QueuePair& qp);
  void make_link(QueuePair& qp, QueuePair* peer, const std::shared_ptr<DirectRoom>& room);
  bool is_mediated(const Guest& guest) const { return mediated_ || guest.mediated || mediated_tenants_.contains(guest.tenant->uid); }
  bool trusts(const Guest& a, const Guest& b, std::string& why_not);
  Result<std::shared_ptr<DirectRoom>> room_of(Guest& a, Guest& b, std::string& why_not);
  bool own(DirectLink& link, int i);
  bool own_end(DirectLink& link, int i, const QueuePair& qp);
  bool cut_off(DirectLink& link, int i);
  void import(DirectLink& link, int i);
  void import_receiver(DirectLink& link, int i, const direct::Positions& at);
  void report(const DirectLink& link, int i, const QueuePair& to);
  void watch(DirectLink& link, int i, bool on);
  direct::Positions receiver_at(DirectLink& link, int i);
  void settle_turn(DirectLink& link, int i, const direct::Positions& at);
  Result<DirectLink*> offered_link(Guest& guest, const control::OpenDirectRequest& request);
  Result<control::OpenDirectReply> describe(const QueuePair& from, const QueuePair& peer, const DirectLink& link, int i, std::vector<vmci::UniqueFd>& give);
  static control::OpenSharedReceivesReply describe(const SharedReceiveQueue& srq);
  void forget_poster(const Guest& guest);
  const Poster* poster_of(std::uint64_t claim) const;
  bool take_from_ended(DirectLink& link, int i);
  void give(DirectLink& link, int i);
  void give_work(QueuePair& qp, bool with_work);
  bool give_datagrams(DirectLink& link, bool with_work);
  static bool sends_may_be_given(const DirectLink& link);
  bool give_inbox(DirectLink& link);
  bool settle_inbox(DirectLink& link);
  void recover(DirectLink& link, int i);
  void note_poster(std::uint32_t number, const Guest& guest);
  void leave(DirectLink& link, QueuePair& qp);
  void dissolve(DirectLink& link);
  void part_from(QueuePair& qp);
  bool never_rests(const QueuePair& qp) const;
  bool at_rest(const QueuePair& from, const QueuePair& to) const;
  bool hand_out(QueuePair& qp, bool with_work);
  bool was_taken_up(DirectLink& link, int i);
  void forget_left_work(DirectLink& link, int i);

  Shard& shard_;
  Fabric& fabric_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::shared_ptr<DirectRoom>> rooms_;  // by guests, the lower first
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::array<pid_t, 2>> together_;       // guests that may be direct: their pids, as they see them
  struct Lent {
    std::unordered_set<std::uint32_t> backings;
    bool all = false;  // too many to know which
  };
  std::map<std::uint32_t, Lent> lent_;  // numbers of backings that somebody has got, by whose they are
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::string> apart_;                  // guests that may not, and why
  std::unordered_map<const DirectLink*, std::unique_ptr<DirectLink>> links_;
  std::vector<DirectLink*> orphans_;  // one end is gone, and a poster may be inside
  std::unordered_map<std::uint32_t, Poster> posters_;  // by number, once they had a path
  std::vector<DirectLink*> taken_inboxes_;             // each once: for this turn, or because a datagram is half delivered there
  std::set<DirectLink*> haunted_;                      // inboxes that a poster was inside of whose guest is gone
  std::set<std::uint32_t> held_back_;                 // QPNs that wait to be run
  std::set<std::uint32_t> doubtful_;                  // QPNs to be considered once both directions are owned
  Counters counters_;
  // Nobody may be direct, or no guest of these users, whether they have any now or not.
  bool mediated_ = false;
  std::set<uid_t> mediated_tenants_;
  std::uint32_t watched_ = 0;  // directions
  std::uint64_t looked_ns_ = 0;
  std::uint32_t next_room_ = 1, next_epoch_ = 1;
};

}  // namespace vrdma::svc
