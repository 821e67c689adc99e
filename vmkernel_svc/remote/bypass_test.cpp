// Records that go by two ways in turn, the connection's and a bypass's, either of which may end at any time.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <utility>

#include "vmkernel_svc/remote/test_ends.hpp"

using namespace vrdma;
using namespace vrdma::remote;

namespace {

// In place of an HCA's queue pairs: what either end sends waits to be taken at the other, in order, as long as both stand.
class Pipe {
 public:
  static constexpr std::size_t depth = 16;

  struct Half final : Bypass {
    struct Carried {
      std::uint64_t number, acknowledged;
      FarFramePtr frame;
    };
    std::deque<Carried> carried;
    bool is_open = false, was_full = false;
    std::uint64_t taken = 0;

    bool open() const override { return is_open; }
    bool send(std::uint64_t number, std::uint64_t acknowledged, FarFrame& frame) override {
      if (!is_open || carried.size() == depth) return was_full = true, false;
      auto copy = FarFrame::make(frame.record().payload_bytes);
      std::memcpy(&copy->record(), &frame.record(), sizeof(frame.record()) + frame.record().payload_bytes);
      carried.push_back({number, acknowledged, std::move(copy)});
      ++taken;
      return true;
    }
    void flush() override {}
  };

  Pipe(End& one, End& other) : ends_{&one, &other} {
    for (int i = 0; i < 2; ++i) ends_[i]->carrier->set_bypass(0, &halves_[i]);
  }
  ~Pipe() {
    for (int i = 0; i < 2; ++i)
      if (ends_[i] != nullptr) ends_[i]->carrier->set_bypass(0, nullptr);
  }
  void open(int end) { halves_[end].is_open = true; }
  // At one end; the other one hears of it later.
  void end(int end) {
    halves_[end].is_open = false;
    std::exchange(ends_[end], nullptr)->carrier->set_bypass(0, nullptr);
  }
  bool ended(int end) const { return ends_[end] == nullptr; }
  std::uint64_t taken() const { return halves_[0].taken + halves_[1].taken; }
  // Some of what was sent comes out.
  void turn(std::size_t at_most) {
    for (int i = 0; i < 2; ++i) {
      for (std::size_t left = at_most; left > 0 && !halves_[i].carried.empty() && ends_[1 - i] != nullptr && ends_[1 - i]->carrier->takes_more(); --left) {
        Half::Carried next = std::move(halves_[i].carried.front());
        halves_[i].carried.pop_front();
        ends_[1 - i]->carrier->bypassed(0, halves_[1 - i], next.number, next.acknowledged, std::move(next.frame));
      }
      if (halves_[i].carried.size() < depth && std::exchange(halves_[i].was_full, false) && ends_[i] != nullptr) ends_[i]->carrier->bypass_has_room(0);
    }
  }

 private:
  std::array<End*, 2> ends_;
  std::array<Half, 2> halves_;
};

}  // namespace

TEST_CASE("RecordsLeaveTheConnectionForTheBypass") {
  const Subnet subnet;
  End one(subnet, 0), other(subnet, 1);
  one.await_session(other);
  other.await_session(one);
  for (std::uint32_t i = 0; i < 50; ++i) one.send(i, 3000, one.session);
  one.carrier->turn();  // under way by the connection
  Pipe pipe(one, other);
  pipe.open(0);
  for (std::uint32_t i = 50; i < 200; ++i) one.send(i, 3000, one.session);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::uint32_t next = 0;
  while (next < 200 && std::chrono::steady_clock::now() < until) {
    one.carrier->turn();
    pipe.turn(4);  // sooner than what the connection has
    other.carrier->turn();
    while (auto frame = other.carrier->receive()) REQUIRE(frame->record().message == next++);
  }
  CHECK(next == 200);
  CHECK(one.carrier->gauge(0)->bypassed_records.load() == pipe.taken());
  CHECK(pipe.taken() == 150);
  CHECK(one.carrier->gauge(0)->resent.load() == 0);
  while (one.carrier->gauge(0)->queued_bytes.load() != 0 && std::chrono::steady_clock::now() < until) one.carrier->turn(), other.carrier->turn();
  CHECK(one.carrier->gauge(0)->queued_bytes.load() == 0);
}

TEST_CASE("WhatABypassHadIsSentAgainWhenItEnds") {
  const Subnet subnet;
  End one(subnet, 0), other(subnet, 1);
  one.await_session(other);
  other.await_session(one);
  auto pipe = std::make_unique<Pipe>(one, other);
  pipe->open(0);
  for (std::uint32_t i = 0; i < 10; ++i) one.send(i, 3000, one.session);
  one.carrier->turn();
  REQUIRE(pipe->taken() == 10);
  pipe->turn(4);
  pipe->end(0);
  pipe->turn(2);  // they come now, and a second time by the connection
  pipe.reset();
  for (std::uint32_t i = 0; i < 10; ++i) other.expect(i, one);
  CHECK(one.carrier->gauge(0)->resent.load() == 10);  // nothing was acknowledged
}

TEST_CASE("RecordsKeepTheirOrderWhileBypassAndConnectionsComeAndGo") {
  constexpr std::uint32_t records = 6000;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  Middle& middle = pair.middle;
  middle.when_full([&] { one.carrier->turn(), other.carrier->turn(); });
  std::mt19937 random(23);
  std::uint32_t sent[2] = {}, came[2] = {}, lost = 0, cut = 0;
  std::uint64_t bypassed = 0;
  End* const ends[2] = {&one, &other};
  std::unique_ptr<Pipe> pipe;
  while ((came[0] < records || came[1] < records) && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 2; ++i)
      if (ends[i]->session != 0 && sent[i] < records && sent[i] - came[1 - i] < 64)
        ends[i]->send(sent[i]++, static_cast<std::uint32_t>(random() % (i == 0 ? 9000 : 500)), ends[i]->session);
    const auto chance = random() % 2000;
    if (!pipe && one.session != 0 && other.session != 0 && chance < 200) pipe = std::make_unique<Pipe>(one, other);
    if (pipe && chance < 100) pipe->open(static_cast<int>(random() % 2));
    if (pipe && chance >= 1990) {
      if (const int end = static_cast<int>(random() % 2); !pipe->ended(end)) pipe->end(end);
      if (pipe->ended(0) && pipe->ended(1)) {
        bypassed += pipe->taken(), ++lost;
        pipe.reset();
      }
    }
    if (chance == 1000) middle.cut(), ++cut;
    middle.turn();
    if (pipe) pipe->turn(random() % 6);
    for (int i = 0; i < 2; ++i) {
      ends[i]->carrier->turn();
      while (auto frame = ends[i]->carrier->receive()) {
        if (frame->record().kind == FarKind::news) {
          ends[i]->session = frame->session;
          continue;
        }
        REQUIRE(frame->record().message == came[i]);
        for (std::uint32_t byte = 0; byte < frame->record().payload_bytes; ++byte)
          if (frame->payload()[byte] != static_cast<std::byte>(came[i] * 31 + byte)) FAIL("byte ", byte, " of record ", came[i]);
        ++came[i];
      }
    }
  }
  CHECK(came[0] == records);
  CHECK(came[1] == records);
  CHECK(one.session == 1);
  CHECK(other.session == 1);
  CHECK(lost >= 3);
  CHECK(cut >= 2);
  CHECK(bypassed >= 100);  // how many depends on how quick the connection is beside it
}

// An end that has heard the other's hello on a new connection may not take the bypass before its own was heard: what came there sooner would
// be dropped, and not be sent again.
TEST_CASE("NothingGoesByTheBypassBeforeBothEndsKnowOfANewConnection") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  Middle& middle = pair.middle;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto turn = [&] {
    middle.turn();
    one.carrier->turn();
    other.carrier->turn();
  };
  while ((one.session == 0 || other.session == 0) && std::chrono::steady_clock::now() < until) {
    turn();
    for (End* const end : {&one, &other})
      while (auto frame = end->carrier->receive()) end->session = frame->session;
  }
  REQUIRE(one.session == 1);
  Pipe pipe(one, other);
  pipe.open(0), pipe.open(1);
  middle.cut();
  while (other.carrier->gauge(0)->connected.load() && std::chrono::steady_clock::now() < until) turn();
  constexpr std::uint32_t records = 20;
  for (std::uint32_t i = 0; i < records; ++i) other.send(i, 100, other.session);
  std::uint32_t next = 0;
  while (next < records && std::chrono::steady_clock::now() < until) {
    turn();
    pipe.turn(Pipe::depth);
    while (auto frame = one.carrier->receive()) REQUIRE(frame->record().message == next++);
  }
  CHECK(next == records);
}

// Its records' numbers begin anew: what comes out of the old one's bypass is of no session.
TEST_CASE("ABypassEndsWithTheRunThatItLedTo") {
  const Subnet subnet;
  End one(subnet, 0);
  Pipe::Half here;
  here.is_open = true;
  std::uint64_t number = 0;
  {
    End other(subnet, 1);
    one.await_session(other);
    other.await_session(one);
    one.carrier->set_bypass(0, &here);
    one.send(1, 100, one.session);
    while (here.carried.empty()) one.carrier->turn();
    number = here.carried.front().number;
    REQUIRE(number == 1);
  }
  End other(subnet, 1);
  other.await_session(one);
  one.await_session(other);
  one.carrier->bypassed(0, here, number, 0, std::move(here.carried.front().frame));  // as the old run might have sent one with that number
  CHECK(one.carrier->receive() == nullptr);
  one.send(2, 100, one.session);
  other.send(3, 100, other.session);
  other.expect(2, one);
  one.expect(3, other);
  CHECK(here.taken == 1);
}
