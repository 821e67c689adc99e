// What the service keeps of an rdma_cm identifier and of an event channel. Used by the shard's thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "vmkernel_svc/announced.hpp"
#include "vmkernel_svc/cm/event_queue.hpp"
#include "vmkernel_svc/cm/message.hpp"
#include "vmkernel_svc/engine/types.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc {

struct Guest;

struct CmChannel {
  std::uint32_t handle;
  Guest* guest;
  Announced pipe;
  CmEventQueue events;
  std::set<std::uint32_t> identifiers{};
};

// A network namespace: of this host, or of one of its virtual machines.
struct CmNetwork {
  std::string machine;
  std::uint64_t number = 0;
  auto operator<=>(const CmNetwork&) const = default;
};

enum class CmState {
  idle,
  bound,         // has an address and a port
  resolving,     // other hosts are asked
  resolved,      // knows where its destination is
  routed,
  listening,
  connecting,    // req, sidr_req was sent
  replied,       // rep has come
  requested,     // made for a req or sidr_req: to be accepted or rejected
  accepted,      // rep was sent
  established,
  disconnecting, // dreq was sent
  ended,         // disconnected, rejected, or lost
};

// Another one's identifier.
struct CmPeer {
  std::uint32_t host = 0;  // 0: this one
  std::uint32_t id = 0;
  auto operator<=>(const CmPeer&) const = default;
};

// What an identifier has of its port, in the table of ports (ports.hpp).
enum class CmClaim : std::uint8_t {
  shared,   // with others that share it, too
  alone,
  listens,  // alone, too
};
struct CmHolding {
  CmClaim claim;
  bool also_ipv4;          // any of IPv6 that is any of IPv4, too
  control::CmAddress at;   // of AF_IB never any: ports of an HCA's GID are neither another HCA's nor those of IP addresses
};

struct CmIdentifier {
  std::uint32_t id;
  Guest* guest;
  CmChannel* channel;
  std::uint64_t uid;
  std::uint32_t port_space;
  // Among whose ports its own is: an address of AF_IB may name another one.
  std::uint32_t space_of_port() const { return source.family == AF_IB ? source.port_space() : port_space; }
  engine::QpType type;                  // UD: nothing is connected
  CmState state = CmState::idle;

  CmNetwork network;            // where its port is
  control::CmAddress source{}, destination{};
  std::optional<CmHolding> holding;  // source.port is in the table of ports, as that
  bool has_device = false;      // its address is one of a device, not any
  bool reuse_address = false, only_ipv6 = false;
  std::optional<std::uint8_t> ack_timeout;  // that its program has set; 0: it waits for ever
  std::uint8_t tos = 0;         // that its program has set
  std::uint8_t traffic_class = 0;  // of its path: where it calls, what it had set when it found the route; where it was called, the caller's
  bool is_local = false;        // the destination
  std::uint32_t host = 0;       // of the destination
  std::set<std::uint32_t> asked;  // resolving: hosts that have not answered yet
  std::uint32_t unread = 0;     // events, a listener's requests among them

  CmPeer peer;
  CmPort peer_port{};
  std::uint16_t pkey = 0;            // of the connection; 0: the port's first
  std::uint32_t psn, peer_psn = 0;
  std::uint32_t peer_qpn = 0;
  std::uint8_t responder_resources = 0, initiator_depth = 0, retry_count = 0, rnr_retry_count = 0, peer_ack_timeout = 0;

  bool was_left = false;             // ended by its peer, and its owner has not said anything to that
  std::uint64_t deadline_ns = 0;     // 0: none
  std::uint64_t answer_until_ns = 0;  // connecting, accepted: whoever is to answer has until then, if it lives
  std::set<std::uint32_t> memberships;  // of multicast groups: their handles
};

}  // namespace vrdma::svc
