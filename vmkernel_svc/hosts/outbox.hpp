// What the state machines of this folder want done. They have no socket, clock, thread or file: events go in with the time
// they happened, this comes out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/messages.hpp"

namespace vrdma::hosts {

// Who sent something, by certificate, and on which of its connections.
struct Peer {
  std::string name, serial;
  std::uint64_t route = 0;  // 0: any
};

struct Outbox {
  struct Letter {
    Peer to;
    Message message;
  };
  // First, what has to be on disk is written; only then may anybody hear of it.
  bool save = false;
  std::vector<Letter> letters;  // may be lost
  std::vector<std::string> log, warnings;

  void send(Peer to, Message message) { letters.push_back({std::move(to), std::move(message)}); }
  void send(const std::string& to, Message message) { letters.push_back({{to, "", 0}, std::move(message)}); }
};

struct Timing {
  std::uint64_t heartbeat_ms = 500;  // of the leader, to the other managers
  std::uint64_t election_ms = 3000;  // without them for so long, and up to twice that, another is elected
  std::uint64_t lease_ms = 30'000;
  std::uint64_t refresh_ms = 2000;   // a member asks so often for news
};

}  // namespace vrdma::hosts
