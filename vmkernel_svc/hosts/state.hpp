// What the hosts of a subnet agree on: who is a member, at which address, with which block of LIDs; who was removed; and who is in
// which partition. A value
// without clock, file or socket.
//
// Every change of it has a version; each entry remembers the version that changed it last, so that what somebody lacks can be
// cut out (`since`) and added (`apply`).
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/directory.hpp"
#include "vmkernel_svc/hosts/partitions.hpp"

namespace vrdma::hosts {

using remote::LidRange;
constexpr std::uint16_t lid_max = 0xbffe;  // of unicast LIDs (IBA 4.1.3) the last one, 0xbfff, is the subnet manager's (addresses.hpp)
constexpr LidRange no_lids{0, 0};

inline bool overlap(LidRange a, LidRange b) { return a.first <= b.last && b.first <= a.last; }

struct StateId {  // of a leader's term, and the how-manieth change
  std::uint64_t term = 0, version = 0;
  auto operator<=>(const StateId&) const = default;
};

struct Host {
  std::string name, address;  // the address is a numeric IP
  std::uint16_t port = 0, carrier_port = 0;
  std::uint32_t id = 0;       // never given again
  LidRange lids = no_lids;
  std::string serial;         // of its certificate
  std::uint64_t changed = 0;
  bool operator==(const Host&) const = default;
};

struct Removed {  // by its certificate: the name may come back with another one
  std::string serial, name;
  LidRange resting = no_lids;  // given to nobody until no lease of its holder can be left
  std::uint64_t changed = 0;
  bool operator==(const Removed&) const = default;
};

// The way from one state to another; `from` {0, 0} is the empty one.
struct Delta {
  StateId from, to;
  std::uint32_t next_host_id = 1;
  std::uint16_t next_lid = 1;
  std::vector<Host> hosts;
  std::vector<Removed> removed;
  std::optional<Partitions> partitions = {};  // all of them, where any has changed
  std::uint64_t origin = 0;                   // of `to`
  bool operator==(const Delta&) const = default;
};

class State {
 public:
  StateId id() const { return id_; }
  const std::map<std::string, Host>& hosts() const { return hosts_; }
  const std::map<std::string, Removed>& removed() const { return removed_; }
  const Partitions& partitions() const { return partitions_; }
  // A random number of the subnet, given to it once (consensus.hpp). 0: not yet, or by a version that knew of none.
  std::uint64_t origin() const { return origin_; }
  const Host* find(const std::string& name) const;
  const Host* holder(std::uint16_t lid) const;
  bool is_free(LidRange lids) const;

  // Changes are made between begin() and the next begin(): they bear its version.
  void begin(std::uint64_t term) { id_ = {term, id_.version + 1}; }
  // Goes round the LIDs, so that those given back rest as long as possible. nullopt: there are not so many in one piece.
  std::optional<LidRange> allocate(std::uint16_t count);
  const Host& put(Host host);  // id 0 gives it a new one
  void remove(const std::string& name);
  void revoke(const std::string& serial, const std::string& name);  // the certificate of a host that was never there
  void end_rest(const std::string& serial);
  void set(Partitions partitions);
  void set_origin(std::uint64_t origin) { origin_ = origin; }

  Delta since(StateId from) const;
  // False, and nothing done, where it does not start here, is of another subnet's state, or would give a LID to two.
  bool apply(const Delta& delta);

 private:
  void forget(const std::string& name);

  StateId id_;
  std::uint64_t origin_ = 0;
  std::uint32_t next_host_id_ = 1;
  std::uint16_t next_lid_ = 1;
  std::map<std::string, Host> hosts_;
  std::map<std::string, Removed> removed_;                                  // by serial
  Partitions partitions_;
  std::uint64_t partitions_changed_ = 0;
  std::map<std::uint16_t, std::pair<std::uint16_t, std::string>> blocks_;  // first → last and whose (a serial's: resting)
};

}  // namespace vrdma::hosts
