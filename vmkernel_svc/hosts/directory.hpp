// Which host has which LIDs, and how to reach it. Thread-safe: look-ups give values, or shared snapshots that do not change.
// Who knows: a subnet that is simply configured (remote/configured_subnet.hpp), or one with a manager. It lies here, so that this folder includes
// nothing of remote/, and has the namespace of who asks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace vrdma::remote {

using HostId = std::uint32_t;  // small, stable while this vrdmad runs; never reused

struct LidRange {
  std::uint16_t first, last;  // inclusive
  bool operator==(const LidRange&) const = default;
};

struct PeerHost {  // immutable; replaced when something changes
  HostId id;
  std::string name;                     // as configured or certified
  std::string address;                  // numeric IP of its fabric address
  std::uint16_t carrier_port;           // where its carrier listens
  std::array<std::byte, 32> tag_key;    // the key of the two hosts, by which a connection begins (handshake.hpp)
  bool reachable;                       // a session stands: connect to it and accept from it
  // Its certificate, or ours, is good no longer: as one that was removed, it keeps no connection that it had. One that is not reachable for
  // any other reason does.
  bool expired = false;
};

struct LidHolder {
  HostId host;
  LidRange lids;
};

class Directory {
 public:
  virtual ~Directory() = default;
  virtual LidRange ours() const = 0;                                             // what this host may give to guests
  virtual std::optional<HostId> host_of(std::uint16_t lid) const = 0;            // nullopt: nobody's, or ours
  virtual std::vector<LidHolder> holders() const = 0;                            // all other hosts that have LIDs, by these
  virtual std::shared_ptr<const PeerHost> host(HostId) const = 0;                // nullptr: unknown
  virtual std::shared_ptr<const PeerHost> host_named(std::string_view) const = 0;
  virtual void when_changed(std::function<void()>) = 0;                          // called from any thread
  // The LIDs of that host, where this host's own file says who has which: that one's must say the same.
  virtual std::optional<LidRange> written(HostId) const { return std::nullopt; }
};

}  // namespace vrdma::remote
