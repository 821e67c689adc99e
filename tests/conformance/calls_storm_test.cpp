// A storm of calls: datagram queue pairs of both processes that call each other, and themselves, all at once, drawn by the seed in every
// respect that a program can choose. Nobody sends more than there are receives for, so every request arrives, once and in the order of its
// sender, and so does every answer.
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t stride_alignment = 64;

// What every datagram begins with.
struct Head {
  std::uint32_t answer;   // 0: a request
  std::uint32_t from;     // which of all ends
  std::uint32_t number;   // of those of its kind from there to here
  std::uint32_t pattern;  // of the bytes behind it, and what the answer is to have behind it
};

struct CallsPlan {
  explicit CallsPlan(Rng& rng) {
    static constexpr std::array<std::size_t, 4> sizes{16, 200, 1500, 4096};
    max_bytes = sizes[rng.below(sizes.size())];
    ends_per_side = rng.between(1, 4);
    window = rng.between(1, 8);
    calls = rng.between(500, 20'000) / ends_per_side;
    shared_receives = rng.one_in(3);
    inlines = rng.one_in(2);
    pieces = rng.between(1, 3);
    unaligned = rng.one_in(2) ? rng.below(stride_alignment) : 0;
    global = rng.one_in(3);
    registers = rng.one_in(3);
    asks = rng.one_in(3);
    for (auto& side : sides) {
      side.sleeps = rng.one_in(3);
      side.threads = rng.one_in(2);
      side.pauses = rng.one_in(2);
    }
  }
  std::string describe() const {
    std::string out = text(ends_per_side, " ends a side, ", calls, " calls of up to ", max_bytes, " bytes each, ", window, " at a time, ", pieces, " pieces",
                           shared_receives ? ", shared receives" : "", inlines ? ", inline" : "", unaligned != 0 ? ", unaligned" : "", global ? ", global" : "",
                           registers ? ", registers" : "", asks ? ", asks" : "");
    for (const Side& side : sides) out += text(";", side.sleeps ? " sleeps" : " polls", side.threads ? ", a thread each" : "", side.pauses ? ", pauses" : "");
    return out;
  }
  std::size_t ends() const { return 2 * ends_per_side; }
  std::uint32_t receives() const { return static_cast<std::uint32_t>((ends() + 1) * window); }  // of one end: everybody's requests, and its answers
  struct Side {
    bool sleeps, threads, pauses;
  };
  std::array<Side, 2> sides{};
  std::size_t max_bytes, ends_per_side, window, calls, pieces, unaligned;
  bool shared_receives, inlines, global, registers, asks;
};

// Whom one end calls, and with what: known to everybody.
struct Call {
  std::uint32_t to;
  std::size_t bytes, answer_bytes;
};
class CallsScript {
 public:
  CallsScript(const CallsPlan& plan, std::uint64_t seed, std::size_t end) : plan_(plan), rng_(seed * 64 + end) {}
  Call next() {
    const auto bytes = [this] { return rng_.between(sizeof(Head), rng_.one_in(3) ? plan_.max_bytes : std::min<std::size_t>(plan_.max_bytes, 64)); };
    return {static_cast<std::uint32_t>(rng_.below(plan_.ends())), bytes(), bytes()};
  }

 private:
  const CallsPlan& plan_;
  Rng rng_;
};

class CallsStorm;

// A queue pair that calls and answers. One thread.
class End {
 public:
  End(CallsStorm& storm, std::size_t index);
  void post_receive(std::uint32_t place);
  bool turn();  // true once all is over
  Address address() const;
  std::string state() const { return text("[called ", called_, " answered ", answered_, " to hear ", to_hear_, " outstanding ", outstanding_.size(), "]"); }

 private:
  struct Sent {
    std::uint64_t id;
    bool signaled;
  };
  struct Answer {
    std::uint32_t to, pattern;
    std::size_t bytes;
  };
  std::size_t take(Cq& cq);
  void received(const ibv_wc& wc);
  void send(const Head& head, std::uint32_t to, std::size_t bytes);
  bool has_room() const { return outstanding_.size() < depth; }
  std::size_t sent_at(std::uint64_t id) const;
  void sleep();

  static constexpr std::uint32_t depth = 24;
  CallsStorm& storm_;
  std::size_t index_;
  Rng rng_;
  Channel channel_;
  Cq scq_, rcq_;
  Qp qp_;
  CallsScript script_;
  std::vector<CallsScript> theirs_;
  std::deque<Sent> outstanding_;
  std::deque<Answer> to_answer_;
  std::vector<std::deque<Call>> waits_;  // for answers, by end
  std::vector<std::uint32_t> requests_to_, requests_from_, answers_to_, answers_from_;  // by end: numbers
  std::size_t called_ = 0, answered_ = 0, to_hear_ = 0;
  std::uint64_t sends_ = 0;
  std::unique_ptr<Mr> other_mr_;
  bool armed_ = false;
};

class CallsStorm {
 public:
  explicit CallsStorm(Run& the_run)
      : run(the_run), plan(run.rng), mine(plan.sides[run.b()]), dev(run.settings), pd(dev), srq(pd, static_cast<std::uint32_t>(plan.ends_per_side) * plan.receives()),
        patterns(65536 + plan.max_bytes), mem(pd, memory_bytes()) {
    Rng(run.seed + 99).fill(patterns);
    for (std::size_t i = 0; i < plan.ends_per_side; ++i) ends.push_back(std::make_unique<End>(*this, first_of(run.a()) + i));
    if (plan.shared_receives)
      for (std::uint32_t i = 0; i < ends.size() * plan.receives(); ++i) ends[0]->post_receive(i);
    std::vector<Address> others;
    for (const auto& end : ends) others.push_back(run.peer.exchange(end->address()));
    for (std::size_t i = 0; i < plan.ends(); ++i) {
      const bool is_mine = (i < plan.ends_per_side) == run.a();
      const Address to = is_mine ? ends[i % plan.ends_per_side]->address() : others[i % plan.ends_per_side];
      ibv_ah_attr attr = ah_to(dev, to);
      if (plan.global && !attr.is_global) attr.is_global = 1, attr.grh.dgid = to.gid, attr.grh.sgid_index = 0, attr.grh.hop_limit = 7;
      addresses.push_back(to);
      handles.push_back(std::make_unique<Ah>(pd, attr));
    }
    run.peer.barrier();
  }
  std::size_t first_of(bool a) const { return a ? 0 : plan.ends_per_side; }

  void blow() {
    const Note note(plan.describe());
    if (mine.threads) {
      Threads threads;
      for (std::size_t i = 1; i < ends.size(); ++i) threads.start([this, i] { go_on({ends.data() + i, 1}); });
      go_on({ends.data(), 1});
      threads.join();
    } else {
      go_on(ends);
    }
    run.peer.barrier();
  }

  // Memory: places to receive in, those of a shared queue likewise, then places to send from.
  std::size_t stride() const { return (grh_bytes + plan.max_bytes + 2 * stride_alignment - 1) / stride_alignment * stride_alignment; }
  std::size_t memory_bytes() const { return plan.ends_per_side * (plan.receives() + 32) * stride() + stride_alignment; }

  Run& run;
  CallsPlan plan;
  const CallsPlan::Side& mine;
  Device dev;
  Pd pd;
  Srq srq;
  std::vector<std::byte> patterns;
  Region mem;
  std::vector<std::unique_ptr<End>> ends;
  std::vector<Address> addresses;               // of all ends
  std::vector<std::unique_ptr<Ah>> handles;     // likewise

 private:
  void go_on(std::span<std::unique_ptr<End>> some) {
    Rng pauses(run.seed + 5);
    wait_until("calls and answers", [&] {
      if (mine.pauses && pauses.one_in(500)) std::this_thread::sleep_for(std::chrono::microseconds(pauses.one_in(30) ? 20'000 : pauses.below(400)));
      bool over = true;
      for (auto& end : some) over &= end->turn();
      return over;
    }, 80);
  }
};

End::End(CallsStorm& storm, std::size_t index)
    : storm_(storm), index_(index), rng_(storm.run.seed * 128 + 77 + index), channel_(storm.dev),
      scq_(storm.dev, static_cast<int>(depth)), rcq_(storm.dev, static_cast<int>(storm.plan.receives() * (storm.plan.shared_receives ? storm.plan.ends_per_side : 1)), storm.mine.sleeps ? &channel_ : nullptr),
      qp_(storm.pd, scq_, rcq_,
          {.type = IBV_QPT_UD, .send_wr = depth, .recv_wr = storm.plan.receives(), .inline_bytes = storm.plan.inlines ? 64u : 0u,
           .srq = storm.plan.shared_receives ? storm.srq.p : nullptr}),
      script_(storm.plan, storm.run.seed, index), waits_(storm.plan.ends()), requests_to_(storm.plan.ends()), requests_from_(storm.plan.ends()),
      answers_to_(storm.plan.ends()), answers_from_(storm.plan.ends()) {
  for (std::size_t other = 0; other < storm.plan.ends(); ++other) {
    CallsScript theirs(storm.plan, storm.run.seed, other);
    for (std::size_t i = 0; i < storm.plan.calls; ++i) to_hear_ += theirs.next().to == index_;
  }
  bring_up(storm.dev, qp_, {});
  if (!storm.plan.shared_receives)
    for (std::uint32_t i = 0; i < storm.plan.receives(); ++i) post_receive(i);
}

Address End::address() const { return address_of(storm_.dev, qp_); }

// Places are the end's own, or, of a shared queue, everybody's.
void End::post_receive(std::uint32_t place) {
  const CallsPlan& plan = storm_.plan;
  const std::size_t of_all = (plan.shared_receives ? 0 : index_ % plan.ends_per_side * plan.receives()) + place;
  const Recv recv{place, {storm_.mem.sge(of_all * storm_.stride() + plan.unaligned, grh_bytes + plan.max_bytes)}};
  EXPECT_OK(plan.shared_receives ? post(storm_.srq, recv) : post(qp_, recv));
}

std::size_t End::sent_at(std::uint64_t id) const {
  const CallsPlan& plan = storm_.plan;
  return (plan.ends_per_side * plan.receives() + index_ % plan.ends_per_side * 32 + id % depth) * storm_.stride() + plan.unaligned;
}

void End::send(const Head& head, std::uint32_t to, std::size_t bytes) {
  const CallsPlan& plan = storm_.plan;
  if (plan.registers && outstanding_.empty() && rng_.one_in(8)) {
    other_mr_.reset();
    if (rng_.one_in(2)) other_mr_ = std::make_unique<Mr>(storm_.pd, storm_.mem.data(), storm_.mem.buffer.size());
  }
  const std::uint64_t id = sends_++;
  std::size_t at = sent_at(id);
  std::memcpy(storm_.mem.data(at), &head, sizeof(head));
  std::memcpy(storm_.mem.data(at) + sizeof(head), storm_.patterns.data() + head.pattern, bytes - sizeof(head));
  Send send{.opcode = rng_.one_in(2) ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, .id = id, .flags = 0, .imm = head.pattern, .ah = *storm_.handles[to], .qpn = storm_.addresses[to].qpn, .qkey = test_qkey};
  for (std::size_t left = rng_.between(1, plan.pieces); bytes != 0; --left) {
    const std::size_t piece = left <= 1 ? bytes : rng_.between(1, bytes);
    send.sges.push_back(storm_.mem.sge(at, piece));
    if (other_mr_ && rng_.one_in(2)) send.sges.back().lkey = other_mr_->p->lkey;
    at += piece, bytes -= piece;
  }
  std::size_t all = 0;
  for (const ibv_sge& sge : send.sges) all += sge.length;
  if (plan.inlines && all <= qp_.cap.max_inline_data && rng_.one_in(2)) send.flags |= IBV_SEND_INLINE;
  const bool signaled = outstanding_.size() + 1 == depth || rng_.one_in(3);
  if (signaled) send.flags |= IBV_SEND_SIGNALED;
  outstanding_.push_back({id, signaled});
  EXPECT_OK(post(qp_, send));
}

bool End::turn() {
  const CallsPlan& plan = storm_.plan;
  const std::size_t found = take(scq_) + take(rcq_);
  if (plan.asks && rng_.one_in(300)) EXPECT_EQ(qp_.state(), IBV_QPS_RTS);
  while (!to_answer_.empty() && has_room()) {
    const Answer answer = to_answer_.front();
    to_answer_.pop_front();
    send({1, static_cast<std::uint32_t>(index_), answers_to_[answer.to]++, answer.pattern}, answer.to, answer.bytes);
  }
  while (called_ < plan.calls && called_ - answered_ < plan.window && has_room() && !rng_.one_in(5)) {
    const Call call = script_.next();
    waits_[call.to].push_back(call);
    ++called_;
    send({0, static_cast<std::uint32_t>(index_), requests_to_[call.to]++, static_cast<std::uint32_t>(rng_.below(65536))}, call.to, call.bytes);
  }
  const bool over = answered_ == plan.calls && to_hear_ == 0 && to_answer_.empty();
  const bool may_call = called_ < plan.calls && called_ - answered_ < plan.window;
  if (!over && found == 0 && to_answer_.empty() && !may_call && storm_.mine.sleeps && has_room() && (storm_.mine.threads || plan.ends_per_side == 1)) sleep();
  return over;
}

std::size_t End::take(Cq& cq) {
  ibv_wc wc[16];
  const int n = ibv_poll_cq(cq, static_cast<int>(rng_.between(1, std::size(wc))), wc);
  EXPECT_GE(n, 0);
  for (int i = 0; i < n; ++i) {
    EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc[i].qp_num, qp_.p->qp_num);
    if (&cq == &rcq_) {
      received(wc[i]);
      continue;
    }
    while (!outstanding_.empty() && !outstanding_.front().signaled) outstanding_.pop_front();
    EXPECT(!outstanding_.empty());
    EXPECT_EQ(wc[i].wr_id, outstanding_.front().id);
    outstanding_.pop_front();
  }
  return static_cast<std::size_t>(n);
}

void End::received(const ibv_wc& wc) {
  const CallsPlan& plan = storm_.plan;
  const auto place = static_cast<std::uint32_t>(wc.wr_id);
  const std::size_t of_all = (plan.shared_receives ? 0 : index_ % plan.ends_per_side * plan.receives()) + place;
  const std::byte* const at = storm_.mem.data(of_all * storm_.stride() + plan.unaligned + grh_bytes);
  Head head;
  std::memcpy(&head, at, sizeof(head));
  const Note note("end ", index_, head.answer != 0 ? " answer " : " request ", head.number, " from ", head.from);
  EXPECT(head.from < plan.ends());
  EXPECT(head.pattern < 65536);
  EXPECT_EQ(wc.src_qp, storm_.addresses[head.from].qpn);
  EXPECT_EQ(head.number, (head.answer != 0 ? answers_from_ : requests_from_)[head.from]++);
  if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) EXPECT_EQ(wc.imm_data, head.pattern);
  EXPECT_EQ((wc.wc_flags & IBV_WC_GRH) != 0, plan.global || storm_.dev.ethernet());
  Call call{};
  if (head.answer != 0) {
    EXPECT(!waits_[head.from].empty());
    call = waits_[head.from].front();
    waits_[head.from].pop_front();
    ++answered_;
  } else {
    if (theirs_.empty())
      for (std::size_t i = 0; i < plan.ends(); ++i) theirs_.emplace_back(plan, storm_.run.seed, i);
    do call = theirs_[head.from].next();
    while (call.to != index_);
    EXPECT(to_hear_ != 0);
    --to_hear_;
    to_answer_.push_back({head.from, static_cast<std::uint32_t>(rng_.below(65536)), call.answer_bytes});
  }
  const std::size_t bytes = head.answer != 0 ? call.answer_bytes : call.bytes;
  EXPECT_EQ(wc.byte_len, grh_bytes + bytes);
  expect_bytes({at + sizeof(head), bytes - sizeof(head)}, {storm_.patterns.data() + head.pattern, bytes - sizeof(head)}, "behind the head");
  post_receive(place);  // before the answer, so that who asked finds room
}

// Arms, and where nothing has come since, waits for the event.
void End::sleep() {
  if (!armed_) return rcq_.arm(), void(armed_ = true);
  const Note note("asleep: ", state());
  ibv_ack_cq_events(channel_.wait(), 1);
  armed_ = false;
}

}  // namespace

CONFORMANCE(AStormOfCalls, "UD-04 WR-13", .timeout_s = 120) {
  CallsStorm storm(run);
  storm.blow();
}

}  // namespace vrdma::conformance
