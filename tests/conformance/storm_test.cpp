// A storm: several queue pairs at once, drawn by the seed in every respect that a program can choose, both ends sending all they can.
// Each message's bytes, each completion's order and each value read back are known beforehand. What single tests do not meet is met here:
// queues that run full and dry, ends that sleep, work that is left while a connection changes its mode.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t slots = 8;  // that the peer writes to, of each queue pair
constexpr std::size_t message_alignment = 64;

struct Plan {
  explicit Plan(Rng& rng) {
    static constexpr std::array<std::size_t, 5> sizes{16, 256, 5000, 70'000, 600'000};
    max_bytes = sizes[rng.below(sizes.size())];
    queue_pairs = rng.between(1, max_bytes > 100'000 ? 3 : 6);
    depth = static_cast<std::uint32_t>(rng.one_in(4) ? rng.between(2, 5) : rng.between(8, 64));
    receives = static_cast<std::uint32_t>(rng.one_in(4) ? rng.between(1, 4) : rng.between(8, 64));
    shared_receives = rng.one_in(3);
    one_cq = rng.one_in(3);
    signal_all = rng.one_in(3);
    inlines = rng.one_in(2);
    pieces = rng.between(1, 3);
    chain = rng.between(1, 5);
    unaligned = rng.one_in(2) ? rng.below(message_alignment) : 0;
    writes_only = rng.one_in(4);
    registers = rng.one_in(2);
    messages = std::clamp<std::size_t>(100'000'000 / max_bytes, 150, 8000) / queue_pairs;
    for (auto& side : sides) {
      side.sleeps = rng.one_in(3);
      side.two_threads = !one_cq && !side.sleeps && rng.one_in(3);
      side.sends = true;
      side.pauses = rng.one_in(2);
      side.holds_back = rng.one_in(3);
    }
    if (rng.one_in(3)) sides[rng.below(2)].sends = false;
  }
  std::string describe() const {
    std::string out = text(queue_pairs, " queue pairs, depth ", depth, ", ", receives, shared_receives ? " shared" : "", " receives, up to ", max_bytes, " bytes, ", messages,
                           " messages in chains of ", chain, one_cq ? ", one CQ" : "", signal_all ? ", all signaled" : "", writes_only ? ", writes only" : "", unaligned != 0 ? ", unaligned" : "",
                           registers ? ", registers" : "");
    for (const Side& side : sides)
      out += text("; ", side.sends ? "sends" : "only receives", side.sleeps ? ", sleeps" : side.two_threads ? ", two threads" : "", side.pauses ? ", pauses" : "", side.holds_back ? ", holds back" : "");
    return out;
  }
  struct Side {
    bool sleeps, two_threads, sends, pauses, holds_back;
  };
  std::array<Side, 2> sides{};
  std::size_t max_bytes, queue_pairs, pieces, chain, unaligned, messages;
  std::uint32_t depth, receives;
  bool shared_receives, one_cq, signal_all, inlines, writes_only, registers;
};

// What one side sends by one queue pair: the same in both processes.
struct Message {
  ibv_wr_opcode opcode;
  std::size_t bytes, slot, pattern;
  bool takes_receive() const { return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
  bool writes() const { return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
  bool fetches() const { return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD; }
};
class Script {
 public:
  Script(const Plan& plan, std::uint64_t seed, bool of_a, std::size_t qp) : plan_(plan), rng_(seed * 64 + qp * 2 + of_a) {}
  Message next() {
    static constexpr std::array opcodes{IBV_WR_SEND,       IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                        IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,     IBV_WR_ATOMIC_FETCH_AND_ADD};
    Message m{opcodes[rng_.below(opcodes.size())], 0, rng_.below(slots), rng_.below(4096)};
    const std::size_t wide = rng_.one_in(3) ? plan_.max_bytes : std::min<std::size_t>(plan_.max_bytes, 64);
    m.bytes = rng_.between(1, wide);
    if (plan_.writes_only) m.opcode = IBV_WR_RDMA_WRITE;
    if (m.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) m.bytes = 8;
    return m;
  }

 private:
  const Plan& plan_;
  Rng rng_;
};

class Storm {
 public:
  explicit Storm(Run& run)
      : run_(run), plan_(run.rng), mine_(plan_.sides[run.b()]), theirs_(plan_.sides[run.a()]), rng_(run.seed + 17 + run.a()), dev_(run.settings), pd_(dev_),
        channel_(dev_), scq_(dev_, cq_depth(), mine_.sleeps ? &channel_ : nullptr), rcq_(dev_, cq_depth(), mine_.sleeps ? &channel_ : nullptr),
        srq_(pd_, std::max<std::uint32_t>(plan_.receives, 1)), patterns_(4096 + plan_.max_bytes), mem_(pd_, memory_bytes()),
        expected_(plan_.queue_pairs * slots, std::vector<std::byte>(plan_.max_bytes)) {
    Rng(run.seed + 99).fill(patterns_);
    const Path path{.min_rnr_timer = static_cast<std::uint8_t>(plan_.sides[0].holds_back ? 1 : 12)};
    for (std::size_t i = 0; i < plan_.queue_pairs; ++i)
      ends_.push_back(std::make_unique<End>(*this, i));
    remote_ = run.peer.exchange(Remote{mem_.buffer.address(), mem_.buffer.size(), mem_.mr.p->rkey, 0});
    if (plan_.shared_receives)
      for (std::uint32_t i = 0; i < plan_.receives; ++i) post_receive(nullptr, i);
    for (auto& end : ends_) {
      const Address remote = run.peer.exchange(address_of(dev_, end->qp));
      to_init(dev_, end->qp, path);
      if (!plan_.shared_receives)
        for (std::uint32_t i = 0; i < plan_.receives; ++i) post_receive(end.get(), i);
      bring_up(dev_, end->qp, remote, path);
    }
    run.peer.barrier();
  }

  void blow() {
    const Note note(plan_.describe());
    if (mine_.two_threads) {
      Threads threads;
      threads.start([&] { go_on("receives", [&] { return take(rcq_), post_again(), received_all(); }); });
      go_on("sends", [&] { return post_all(), take(scq_), sends_over(); });
      threads.join();
    } else {
      go_on("sends and receives", [&] {
        post_all();
        const bool any = (take(scq_) + (plan_.one_cq ? 0 : take(rcq_))) != 0;
        post_again();
        if (sends_over() && received_all()) return true;
        if (mine_.sleeps && !any) sleep();
        return false;
      });
    }
    run_.peer.barrier();
    for (const auto& end : ends_) {  // what the peer wrote is what its script wrote last
      std::vector<Message> last(slots);
      for (std::size_t i = 0; theirs_.sends && i < plan_.messages; ++i) {
        const Message m = end->their_script_again.next();
        if (m.writes()) remember(*end, m);
      }
      for (std::size_t slot = 0; slot < slots; ++slot)
        expect_bytes({mem_.data(written_at(end->index, slot)), plan_.max_bytes}, expected_[end->index * slots + slot], "written by the peer");
    }
    run_.peer.barrier();
  }

 private:
  struct Sent {
    Message message;
    std::uint64_t id;
    std::size_t place;
    bool signaled;
    std::vector<std::byte> read;  // what a READ must bring
    std::uint64_t value;          // what a FETCH_ADD must
  };
  struct End {
    End(Storm& storm, std::size_t index_value)
        : index(index_value),
          qp(storm.pd_, storm.scq_, storm.plan_.one_cq ? storm.scq_ : storm.rcq_,
             {.send_wr = storm.plan_.depth, .recv_wr = storm.plan_.receives, .inline_bytes = storm.plan_.inlines ? 64u : 0u, .sig_all = storm.plan_.signal_all,
              .srq = storm.plan_.shared_receives ? storm.srq_.p : nullptr}),
          script(storm.plan_, storm.run_.seed, storm.run_.a(), index), their_script(storm.plan_, storm.run_.seed, storm.run_.b(), index),
          their_script_again(their_script) {
      Script all = their_script;
      for (std::size_t i = 0; i < storm.plan_.messages; ++i) to_hear += all.next().takes_receive();
    }
    std::size_t index;
    Qp qp;
    Script script, their_script, their_script_again;
    std::size_t posted = 0, completed = 0, heard = 0;  // of mine, of mine, of theirs
    std::size_t to_hear = 0;  // completions of receives
    std::unique_ptr<Mr> other_mr;  // of the same memory
    std::uint64_t counter = 0;
    std::deque<Sent> outstanding;
    std::vector<std::uint32_t> held_back;  // receive places that are not posted again yet
  };

  int cq_depth() const { return static_cast<int>(plan_.queue_pairs * (plan_.depth + plan_.receives) + 8); }
  // Memory: per queue pair its slots, its places to send from and to read into, its counter; and places to receive in.
  std::size_t stride() const { return (plan_.max_bytes + message_alignment - 1) / message_alignment * message_alignment + message_alignment; }
  std::size_t of_end() const { return (slots + plan_.depth) * stride() + message_alignment; }
  std::size_t written_at(std::size_t end, std::size_t slot) const { return end * of_end() + slot * stride() + plan_.unaligned; }
  std::size_t sent_at(std::size_t end, std::size_t place) const { return end * of_end() + (slots + place) * stride() + plan_.unaligned; }
  std::size_t counter_at(std::size_t end) const { return end * of_end() + (slots + plan_.depth) * stride(); }
  std::size_t received_at(const End* end, std::uint32_t place) const {
    return plan_.queue_pairs * of_end() + ((end == nullptr ? 0 : end->index) * plan_.receives + place) * stride() + plan_.unaligned;
  }
  std::size_t memory_bytes() const { return plan_.queue_pairs * of_end() + plan_.queue_pairs * plan_.receives * stride() + message_alignment; }
  std::span<const std::byte> pattern(const Message& m) const { return {patterns_.data() + m.pattern, m.bytes}; }
  void remember(const End& end, const Message& m) { std::memcpy(expected_[end.index * slots + m.slot].data(), patterns_.data() + m.pattern, m.bytes); }

  std::vector<ibv_sge> in_pieces(const End& end, std::size_t at, std::size_t bytes) {
    std::vector<ibv_sge> sges;
    for (std::size_t left = rng_.between(1, plan_.pieces); bytes != 0; --left) {
      const std::size_t piece = left <= 1 ? bytes : rng_.between(1, bytes);
      sges.push_back(mem_.sge(at, piece));
      if (end.other_mr && rng_.one_in(2)) sges.back().lkey = end.other_mr->p->lkey;
      at += piece, bytes -= piece;
    }
    return sges;
  }

  void post_receive(End* end, std::uint32_t place) {
    const Recv recv{(end == nullptr ? 0 : end->index) * 1000 + place, {mem_.sge(received_at(end, place), plan_.max_bytes)}};
    EXPECT_OK(plan_.shared_receives ? post(srq_, recv) : post(end->qp, recv));
  }

  // As many as there is room for, in one chain. Each has a place to send from, or to read into, until it is known to be over.
  void post_some(End& end) {
    // The same memory under another key, as long as nothing uses it.
    if (plan_.registers && end.outstanding.empty() && rng_.one_in(4)) {
      end.other_mr.reset();
      if (rng_.one_in(2)) end.other_mr = std::make_unique<Mr>(pd_, mem_.data(end.index * of_end()), of_end());
    }
    std::vector<Send> sends;
    const std::size_t room = plan_.depth - end.outstanding.size(), left = plan_.messages - end.posted;
    if (!rng_.one_in(4) && room < std::min<std::size_t>(left, plan_.chain)) return;
    for (std::size_t n = std::min({room, left, plan_.chain}); n > 0; --n) {
      Sent sent{end.script.next(), end.posted, end.posted % plan_.depth, false, {}, 0};
      const Message& m = sent.message;
      const std::size_t at = m.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? counter_landing(end, sent.place) : sent_at(end.index, sent.place);
      Send send{.opcode = m.opcode, .id = sent.id, .sges = m.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? std::vector{mem_.sge(at, 8)} : in_pieces(end, at, m.bytes), .flags = 0};
      if (m.takes_receive()) send.imm = static_cast<std::uint32_t>(m.pattern);
      send.rkey = remote_.rkey;
      send.remote_address = remote_.address + (m.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? counter_at(end.index) : written_at(end.index, m.slot));
      if (m.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) sent.value = end.counter, send.compare_add = m.pattern, end.counter += m.pattern;
      if (m.opcode == IBV_WR_RDMA_READ) sent.read.assign(written_[slot_of(end, m)].begin(), written_[slot_of(end, m)].begin() + static_cast<std::ptrdiff_t>(m.bytes));
      if (m.writes()) std::memcpy(written_[slot_of(end, m)].data(), pattern(m).data(), m.bytes);
      if (!m.fetches()) std::memcpy(mem_.data(at), pattern(m).data(), m.bytes);
      // What is read must not be overtaken by what is written behind it.
      if (m.writes() || rng_.one_in(8)) send.flags |= IBV_SEND_FENCE;
      if (!m.fetches() && plan_.inlines && m.bytes <= end.qp.cap.max_inline_data && rng_.one_in(2)) send.flags |= IBV_SEND_INLINE;
      if (rng_.one_in(6)) send.flags |= IBV_SEND_SOLICITED;
      const bool last = end.posted + 1 == plan_.messages || end.outstanding.size() + 1 == plan_.depth;
      if (last || rng_.one_in(4)) send.flags |= IBV_SEND_SIGNALED;
      sent.signaled = plan_.signal_all || (send.flags & IBV_SEND_SIGNALED) != 0;
      sends.push_back(std::move(send));
      end.outstanding.push_back(std::move(sent));
      ++end.posted;
    }
    if (sends.empty()) return;
    std::vector<ibv_send_wr> chain;
    for (const Send& send : sends) chain.push_back(to_wr(send));
    for (std::size_t i = 0; i + 1 < chain.size(); ++i) chain[i].next = &chain[i + 1];
    ibv_send_wr* bad = nullptr;
    EXPECT_OK(ibv_post_send(end.qp, chain.data(), &bad));
  }
  std::size_t slot_of(const End& end, const Message& m) const { return end.index * slots + m.slot; }
  std::size_t counter_landing(const End& end, std::size_t place) const { return sent_at(end.index, place) - plan_.unaligned; }

  void over(const ibv_wc& wc) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    End& end = end_of(wc);
    if (wc.opcode & IBV_WC_RECV) return received(end, wc);
    while (!end.outstanding.empty() && !end.outstanding.front().signaled) check_sent(end);
    EXPECT(!end.outstanding.empty());
    EXPECT_EQ(wc.wr_id, end.outstanding.front().id);
    check_sent(end);
  }
  void check_sent(End& end) {
    const Sent& sent = end.outstanding.front();
    const Note note("queue pair ", end.index, " message ", sent.id, " bytes ", sent.message.bytes);
    if (sent.message.opcode == IBV_WR_RDMA_READ) expect_bytes({mem_.data(sent_at(end.index, sent.place)), sent.message.bytes}, sent.read, "read");
    if (sent.message.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      std::uint64_t value;
      std::memcpy(&value, mem_.data(counter_landing(end, sent.place)), sizeof(value));
      EXPECT_EQ(value, sent.value);
    }
    end.outstanding.pop_front();
    ++end.completed;
  }
  End& end_of(const ibv_wc& wc) {
    const auto found = std::find_if(ends_.begin(), ends_.end(), [&](const auto& end) { return end->qp.p->qp_num == wc.qp_num; });
    EXPECT(found != ends_.end());
    return **found;
  }
  void received(End& end, const ibv_wc& wc) {
    Message m = end.their_script.next();
    for (++end.heard; !m.takes_receive(); ++end.heard) {
      EXPECT(end.heard < plan_.messages);
      m = end.their_script.next();
    }
    --end.to_hear;
    const Note note("queue pair ", end.index, " their message ", end.heard - 1, " bytes ", m.bytes);
    EXPECT_EQ(wc.byte_len, m.bytes);
    EXPECT_EQ((wc.wc_flags & IBV_WC_WITH_IMM) != 0, m.opcode != IBV_WR_SEND);
    if (m.opcode != IBV_WR_SEND) EXPECT_EQ(wc.imm_data, m.pattern);
    const auto place = static_cast<std::uint32_t>(wc.wr_id % 1000);
    End* const owner = plan_.shared_receives ? nullptr : &end;
    if (!m.writes()) expect_bytes({mem_.data(received_at(owner, place)), m.bytes}, pattern(m), "received");
    (plan_.shared_receives ? held_back_ : end.held_back).push_back(place);
  }
  void post_again() {
    if (mine_.holds_back && !receive_rng_.one_in(64)) return;
    for (auto& end : ends_)
      while (!end->held_back.empty()) post_receive(end.get(), end->held_back.back()), end->held_back.pop_back();
    while (!held_back_.empty()) post_receive(nullptr, held_back_.back()), held_back_.pop_back();
  }

  std::size_t take(Cq& cq) {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(cq, static_cast<int>((&cq == &rcq_ ? receive_rng_ : rng_).between(1, std::size(wc))), wc);
    EXPECT_GE(n, 0);
    for (int i = 0; i < n; ++i) over(wc[i]);
    return static_cast<std::size_t>(n);
  }
  // Nothing was found: arms, and once that is done, and nothing has come since, waits for the event, if there is nothing else to do.
  void sleep() {
    if (!armed_[0]) return scq_.arm(), void(armed_[0] = true);
    if (!plan_.one_cq && !armed_[1]) return rcq_.arm(), void(armed_[1] = true);
    const bool could_post = mine_.sends && std::any_of(ends_.begin(), ends_.end(), [&](const auto& end) {
      return end->posted < plan_.messages && end->outstanding.size() < plan_.depth;
    });
    if (could_post || anything_held_back()) return;
    std::string state;
    for (const auto& end : ends_) state += text(" [posted ", end->posted, " completed ", end->completed, " to hear ", end->to_hear, "]");
    const Note note("asleep:", state);
    ibv_cq* const rang = channel_.wait();
    armed_[rang == scq_.p ? 0 : 1] = false;
    ibv_ack_cq_events(rang, 1);
  }
  bool anything_held_back() const {
    return !held_back_.empty() || std::any_of(ends_.begin(), ends_.end(), [](const auto& end) { return !end->held_back.empty(); });
  }
  bool sends_over() const {
    return !mine_.sends || std::all_of(ends_.begin(), ends_.end(), [&](const auto& end) { return end->completed == plan_.messages; });
  }
  void post_all() {
    if (!mine_.sends) return;
    for (auto& end : ends_)
      if (end->posted < plan_.messages) post_some(*end);
  }
  bool received_all() const {
    return !theirs_.sends || std::all_of(ends_.begin(), ends_.end(), [](const auto& end) { return end->to_hear == 0; });
  }
  template <class Turn>
  void go_on(const char* what, Turn&& turn) {
    Rng pauses(run_.seed + 5);
    wait_until(what, [&] {
      if (mine_.pauses && pauses.one_in(500)) std::this_thread::sleep_for(std::chrono::microseconds(pauses.one_in(30) ? 20'000 : pauses.below(400)));
      return turn();
    }, 80);
  }

  Run& run_;
  Plan plan_;
  const Plan::Side &mine_, &theirs_;
  Rng rng_, receive_rng_{rng_.next()};
  Device dev_;
  Pd pd_;
  Channel channel_;
  Cq scq_, rcq_;
  Srq srq_;
  std::vector<std::byte> patterns_;
  Region mem_;
  std::vector<std::vector<std::byte>> expected_;            // in my slots, at the end
  std::vector<std::vector<std::byte>> written_ = expected_;  // in theirs, now
  std::vector<std::unique_ptr<End>> ends_;
  std::vector<std::uint32_t> held_back_;
  bool armed_[2] = {false, false};
  Remote remote_{};
};

}  // namespace

CONFORMANCE(AStormOfEverything, "WR-13 WR-15 WR-16", .timeout_s = 120) {
  Storm storm(run);
  storm.blow();
}

}  // namespace vrdma::conformance
