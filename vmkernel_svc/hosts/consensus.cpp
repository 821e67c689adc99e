#include "vmkernel_svc/hosts/consensus.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace vrdma::hosts {

Consensus::Consensus(std::string me, std::vector<std::string> managers, Timing timing, std::uint64_t seed, Memory memory)
    : me_(std::move(me)), managers_(std::move(managers)), timing_(timing), random_(seed), number_(random_() | 1), memory_(std::move(memory)) {
  voter_ = std::find(managers_.begin(), managers_.end(), me_) != managers_.end();
}

void Consensus::wait_again(std::uint64_t now_ms) { stand_at_ms_ = now_ms + timing_.election_ms + random_() % timing_.election_ms; }

void Consensus::tick(std::uint64_t now_ms, Outbox& out) {
  if (!voter_) return;
  if (silent_until_ms_ == 0) silent_until_ms_ = now_ms + 2 * timing_.election_ms;
  if (stance_ == Stance::leader) {
    for (auto& [name, follower] : followers_)
      if (now_ms - follower.sent_ms >= timing_.heartbeat_ms) send_append(now_ms, name, out);
    if (!heard_of_majority(now_ms)) {
      out.log.push_back("no majority of the managers answers: this host leads the subnet no more");
      return follow(memory_.term, "", now_ms, out);
    }
    return give_origin(now_ms, out);
  }
  if (managers_.size() == 1) return stand(false, now_ms, out);
  if (stand_at_ms_ == 0) return wait_again(now_ms);
  if (now_ms >= stand_at_ms_) stand(true, now_ms, out);
}

void Consensus::receive(std::uint64_t now_ms, const Peer& from, const Message& message, Outbox& out) {
  if (!voter_ || from.name == me_ || std::find(managers_.begin(), managers_.end(), from.name) == managers_.end()) return;
  std::visit(
      [&](const auto& m) {
        using M = std::decay_t<decltype(m)>;
        if constexpr (std::is_same_v<M, VoteRequest> || std::is_same_v<M, VoteReply> || std::is_same_v<M, Append> || std::is_same_v<M, AppendReply>) {
          std::uint64_t origin = 0;
          if constexpr (std::is_same_v<M, AppendReply>) origin = m.origin.value_or(0);
          else origin = m.origin;
          if (!is_apart(now_ms, from.name, origin, out)) on(now_ms, from, m, out);
        }
      },
      message);
}

bool Consensus::is_apart(std::uint64_t now_ms, const std::string& from, std::uint64_t origin, Outbox& out) {
  if (origin == 0 || memory_.origin == 0 || origin == memory_.origin) {
    apart_.erase(from);
    return false;
  }
  if (apart_.insert_or_assign(from, now_ms).second)
    out.warnings.push_back(fmt::format("manager \"{}\" belongs to a subnet that began apart from this manager's: what it says is not heard. Subnets cannot be merged (docs/subnet.md)", from));
  return true;
}

std::vector<std::string> Consensus::apart(std::uint64_t now_ms) const {
  std::vector<std::string> names;
  for (const auto& [name, said_ms] : apart_)
    if (now_ms - said_ms < 4 * timing_.election_ms) names.push_back(name);
  return names;
}

void Consensus::believe(std::uint64_t origin, Outbox& out) {
  if (memory_.origin != 0 || origin == 0) return;
  memory_.origin = origin;
  out.save = true;
}

// When all say in which they believe: none of them is of a version that would lose it, and one that is known to any of them is not given anew.
void Consensus::give_origin(std::uint64_t now_ms, Outbox& out) {
  if (memory_.state.origin() != 0 || !can_propose(now_ms)) return;
  std::uint64_t origin = memory_.origin;
  for (const auto& [name, follower] : followers_) {
    if (!follower.origin) return;
    if (origin != 0 && *follower.origin != 0 && *follower.origin != origin) return;  // which of the two, who knows of none cannot tell
    if (origin == 0) origin = *follower.origin;
  }
  State next = committed_;
  next.begin(memory_.term);
  next.set_origin(origin != 0 ? origin : random_() | 1);
  propose(now_ms, std::move(next), out);
}

void Consensus::follow(std::uint64_t term, const std::string& leader, std::uint64_t now_ms, Outbox& out) {
  if (term > memory_.term) {
    memory_.term = term;
    memory_.voted_for.clear();
    out.save = true;
  }
  stance_ = Stance::follower;
  leader_ = leader;
  followers_.clear();
  wait_again(now_ms);
}

void Consensus::stand(bool trial, std::uint64_t now_ms, Outbox& out) {
  if (!trial) {
    ++memory_.term;
    memory_.voted_for = me_;
    out.save = true;
  }
  stance_ = trial ? Stance::trying : Stance::candidate;
  leader_.clear();
  votes_for_us_ = {{me_, number()}};
  wait_again(now_ms);
  if (elected()) return lead(now_ms, out);
  for (const auto& name : managers_)
    if (name != me_) out.send(name, VoteRequest{memory_.term + (trial ? 1 : 0), memory_.state.id(), trial, memory_.origin});
}

void Consensus::on(std::uint64_t now_ms, const Peer& from, const VoteRequest& m, Outbox& out) {
  if (is_silent(now_ms) && m.last != StateId{}) return;
  // A leader that is well keeps its place.
  const bool led = stance_ == Stance::leader || (!leader_.empty() && now_ms - heard_ms_ < timing_.election_ms);
  if (m.trial) {
    const bool would = !led && m.term > memory_.term && m.last >= memory_.state.id();
    return out.send(from, VoteReply{would ? m.term : memory_.term, would, true, number(), memory_.origin});
  }
  if (m.term > memory_.term) {
    if (led) return;  // it will hear of the leader, or ask again
    follow(m.term, "", now_ms, out);
  }
  const bool granted = m.term == memory_.term && (memory_.voted_for.empty() || memory_.voted_for == from.name) && m.last >= memory_.state.id();
  if (granted) {
    if (memory_.voted_for.empty()) out.save = true;
    memory_.voted_for = from.name;
    wait_again(now_ms);
  }
  out.send(from, VoteReply{memory_.term, granted, false, number(), memory_.origin});
}

void Consensus::on(std::uint64_t now_ms, const Peer& from, const VoteReply& m, Outbox& out) {
  if (!m.granted) {
    if (m.term > memory_.term) follow(m.term, "", now_ms, out);
    return;
  }
  const bool counts = m.trial ? stance_ == Stance::trying && m.term == memory_.term + 1 : stance_ == Stance::candidate && m.term == memory_.term;
  if (!counts || now_ms >= stand_at_ms_) return;  // later than that, who has lost its file does not fear its old vote
  votes_for_us_[from.name] = m.blank;
  if (!elected()) return;
  if (m.trial) return stand(false, now_ms, out);
  lead(now_ms, out);
}

bool Consensus::elected() const {
  std::size_t good = 0;
  for (const auto& [name, blank] : votes_for_us_) good += blank == 0;
  return good >= majority() || votes_for_us_.size() == managers_.size();
}

void Consensus::lead(std::uint64_t now_ms, Outbox& out) {
  stance_ = Stance::leader;
  leader_ = me_;
  led_from_ = memory_.state.id();
  out.log.push_back(fmt::format("this host leads the subnet (term {})", memory_.term));
  const bool by_all = votes_for_us_.size() == managers_.size();
  for (const auto& name : managers_) {
    if (name == me_) continue;
    Follower& follower = followers_[name];
    follower.heard_of_ms = now_ms;
    if (const auto vote = votes_for_us_.find(name); vote != votes_for_us_.end() && vote->second != 0) {
      follower.blank = vote->second;
      follower.blank_since_ms = now_ms;
      follower.elected_us = by_all;
    }
  }
  committed_ = State{};  // nothing yet: see leads()
  memory_.state.begin(memory_.term);
  changed_ms_ = now_ms;
  out.save = true;
  for (const auto& [name, follower] : followers_) send_append(now_ms, name, out);
  see_commit(out);
}

void Consensus::propose(std::uint64_t now_ms, State changed, Outbox& out) {
  memory_.state = std::move(changed);
  changed_ms_ = now_ms;
  out.save = true;
  for (const auto& [name, follower] : followers_) send_append(now_ms, name, out);
  see_commit(out);
}

void Consensus::send_append(std::uint64_t now_ms, const std::string& to, Outbox& out) {
  Follower& follower = followers_[to];
  Append append{memory_.term, ++sequence_, std::nullopt, 0, memory_.origin};
  // A heartbeat first shows what it has; then it is sent what it lacks, or all.
  const bool first = follower.sent_ms == 0;
  if (!first && follower.blank) {
    if (may_learn(follower)) append.delta = memory_.state.since({}), append.blank = *follower.blank;
  } else if (!first && !(follower.in_our_history && follower.has == memory_.state.id()))
    append.delta = memory_.state.since(follower.in_our_history ? follower.has : StateId{});
  follower.sent_ms = now_ms;
  follower.sent_at[sequence_] = now_ms;
  while (follower.sent_at.size() > 64) follower.sent_at.erase(follower.sent_at.begin());
  out.send(to, std::move(append));
}

bool Consensus::may_learn(const Follower& blank) const {
  std::size_t heard = 1;
  for (const auto& [name, follower] : followers_) heard += !follower.blank && follower.heard_of_ms > blank.blank_since_ms;
  return blank.elected_us || heard >= majority();
}

void Consensus::on(std::uint64_t now_ms, const Peer& from, const Append& m, Outbox& out) {
  if (m.term < memory_.term) return out.send(from, AppendReply{memory_.term, m.sequence, memory_.state.id(), number(), memory_.origin});
  if (m.term > memory_.term || stance_ != Stance::follower || leader_ != from.name) {
    if (leader_ != from.name) out.log.push_back(fmt::format("\"{}\" leads the subnet (term {})", from.name, m.term));
    follow(m.term, from.name, now_ms, out);
  }
  heard_ms_ = now_ms;
  wait_again(now_ms);
  if (is_silent(now_ms) && memory_.voted_for != from.name) return;
  if (m.delta && (!blank() || m.blank == number_)) {
    // From nothing, or exactly from what we have; and never backwards within a term, where messages may overtake.
    const StateId ours = memory_.state.id();
    const bool fits = m.delta->from == StateId{} || m.delta->from == ours;
    const bool forward = ours.term != m.term || m.delta->to > ours;
    if (m.delta->to.term == m.term && fits && forward && memory_.state.apply(*m.delta)) out.save = true;
  }
  if (m.origin == memory_.state.origin()) believe(m.origin, out);
  out.send(from, AppendReply{memory_.term, m.sequence, memory_.state.id(), number(), memory_.origin});
}

void Consensus::on(std::uint64_t now_ms, const Peer& from, const AppendReply& m, Outbox& out) {
  if (m.term > memory_.term) return follow(m.term, "", now_ms, out);
  if (stance_ != Stance::leader || m.term != memory_.term) return;
  Follower& follower = followers_[from.name];
  if (const auto sent = follower.sent_at.find(m.sequence); sent != follower.sent_at.end()) {
    follower.heard_of_ms = std::max(follower.heard_of_ms, sent->second);
    follower.sent_at.erase(follower.sent_at.begin(), std::next(sent));
  }
  if (m.sequence <= follower.answered) return;  // it said this before what we know of it
  const bool first = std::exchange(follower.answered, m.sequence) == 0;
  // It has what we had when the term began, or what we made since: then it has our history up to there.
  const bool ours = m.at == led_from_ || m.at.term == memory_.term;
  // It may have less than before: its file is lost, or an old one.
  const bool news = first || follower.in_our_history != ours || m.at != follower.has;
  follower.in_our_history = ours;
  follower.has = m.at;
  follower.origin = m.origin;
  if (m.at != StateId{} || m.blank == 0) {  // 0: of an older version, which counts as it always did
    follower.blank.reset();
  } else if (follower.blank != m.blank) {
    follower.blank = m.blank;
    follower.blank_since_ms = now_ms;
    follower.elected_us = false;
  }
  if (m.at != memory_.state.id() && news) send_append(now_ms, from.name, out);
  see_commit(out);
}

void Consensus::see_commit(Outbox& out) {
  const StateId id = memory_.state.id();
  if (committed_.id() == id) return;
  std::size_t have = 1;
  for (const auto& [name, follower] : followers_) have += follower.in_our_history && follower.has == id;
  if (have < majority()) return;
  const bool first = committed_.id() == StateId{};
  committed_ = memory_.state;
  believe(committed_.origin(), out);
  if (first) out.log.push_back(fmt::format("the subnet has {} hosts", committed_.hosts().size()));
}

bool Consensus::heard_of_majority(std::uint64_t now_ms) const {
  std::size_t heard = 1;
  for (const auto& [name, follower] : followers_) heard += (!follower.blank || follower.elected_us) && now_ms - follower.heard_of_ms < timing_.election_ms;
  return heard >= majority();
}

bool Consensus::leads(std::uint64_t now_ms) const {
  return stance_ == Stance::leader && committed_.id().term == memory_.term && heard_of_majority(now_ms);
}

}  // namespace vrdma::hosts
