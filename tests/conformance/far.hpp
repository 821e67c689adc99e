// The two roles of a test on two machines: role b is played by another vrdma-conformance, which serve_roles() runs there.
//
//     runner ── orders, reports ──┐                        ┌── role b (a process of that machine)
//     role a ── its packets ──────┴──── one TCP stream ────┴── its packets
//
// The roles themselves know nothing of it: each has a socket pair for the other one, whose packets the two runners pass on.
// Both runners must be the same program, as they name tests by number. One thread each; makes no verbs call.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "tests/conformance/role.hpp"

namespace vrdma::conformance {

// Frames on a TCP stream. What is sent waits for the other side, under a deadline; what comes is taken without waiting.
class Stream {
 public:
  enum class Kind : std::uint32_t {
    hello = 1,    // both: what tests there are
    start,        // → b: a process for the role; ends the one before
    order,        // → b
    packet,       // both: what a role sends to the other
    peer_left,    // both: … and nothing more
    dismiss,      // → b
    where,        // → b: asks for `place`
    report,       // b →
    place,        // b →
    gone,         // b →: how it ended; empty for well
  };
  explicit Stream(Fd socket);

  // Throws std::runtime_error: the other side has gone, or takes nothing.
  void send(Kind kind, std::span<const std::byte> body = {});
  void send(Kind kind, const std::string& text) { send(kind, std::as_bytes(std::span(text))); }
  // Throws as send(), also for bytes that are no frames.
  void receive(const std::function<void(Kind, std::span<const std::byte>)>& take);
  int fd() const { return socket_.get(); }

 private:
  Fd socket_;
  std::vector<std::byte> in_;
};

// One end of a role's packets, passed on over the stream: both ways, in order, without waiting for the role.
class Passage {
 public:
  Passage(Fd end, Stream& stream);
  void take(std::span<const std::byte> packet);  // from the other machine
  void close_after_rest();                       // the other role has gone
  void look();
  void add_to(std::vector<pollfd>& descriptors) const;

 private:
  void push();
  Fd end_;
  Stream& stream_;
  std::deque<std::vector<std::byte>> waiting_;
  bool closing_ = false;
};

// Role b on another machine.
class FarRole : public Role {
 public:
  // near_end: role a's other end.
  FarRole(Stream& stream, Fd near_end);
  void order(std::uint32_t test_index, std::uint64_t seed) override;
  void dismiss() override { stream_.send(Stream::Kind::dismiss); }
  void look() override;
  void add_to(std::vector<pollfd>& descriptors) const override;
  std::string place() override;

 private:
  void take(Stream::Kind kind, std::span<const std::byte> body);
  Stream& stream_;
  Passage passage_;
  std::string place_;
  bool placed_ = false;
};

// The stream to the one who serves at "HOST:PORT". Throws std::runtime_error with a message for a person.
std::unique_ptr<Stream> connect_to(const std::string& where);
// A listening socket on all addresses; port 0: `port` says which one it is.
Fd listen_on(std::uint16_t& port);
// Plays role b for the first one who connects, until that one has gone: 0, or 1 after a message on stderr. `settings` are this
// side's: the other one has its own device and time limits.
int serve_roles(const Fd& listener, const Settings& settings);

}  // namespace vrdma::conformance
