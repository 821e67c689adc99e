// Who is in which partition: P_Keys (IBA 10.9) of tenants, by host and uid. A value without clock, file or socket.
//
// A P_Key is a partition's number, 15 bits, and a bit that says whether its holder is a full member; two limited members of a
// partition do not reach each other. A tenant that no membership names is a full member of the default partition, as on a
// subnet that knows none; one that is named has what it is given and nothing else.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "vrdma/limits.hpp"

namespace vrdma::hosts {

constexpr std::uint16_t pkey_full = 0x8000, pkey_default = 0xffff;
constexpr std::size_t memberships_max = 16384;  // of a subnet

constexpr std::uint16_t partition_of(std::uint16_t pkey) { return pkey & 0x7fff; }
// IBA 10.9.3: a packet is taken where the partitions are the same and one of the two is a full member. Partition 0 is none.
constexpr bool pkeys_match(std::uint16_t a, std::uint16_t b) {
  return partition_of(a) == partition_of(b) && partition_of(a) != 0 && ((a | b) & pkey_full) != 0;
}

std::optional<std::uint16_t> pkey_of(std::string_view text);  // "0x8001"; nullopt: not a P_Key of a partition
std::string pkey_text(std::uint16_t pkey);

// The table that a port shows; 0: nothing there.
using PkeyTable = std::array<std::uint16_t, limits::pkey_table>;

struct Membership {
  std::uint16_t pkey = 0;
  std::string host;       // empty: on every host
  std::int64_t uid = -1;  // -1: of every user
  auto operator<=>(const Membership&) const = default;

  bool names(std::string_view on, std::int64_t of) const { return (host.empty() || host == on) && (uid < 0 || uid == of); }
  // "HOST/UID", of which either may be "*"; "UID" alone is that user on every host, "*" everybody.
  std::string member() const;
};
std::optional<Membership> membership_of(std::uint16_t pkey, std::string_view member);

class Partitions {
 public:
  const std::set<Membership>& memberships() const { return memberships_; }
  bool empty() const { return memberships_.empty(); }
  // False: it was so before, or there is no room for more.
  bool add(const Membership& one) { return memberships_.size() < memberships_max && memberships_.insert(one).second; }
  bool remove(const Membership& one) { return memberships_.erase(one) != 0; }
  std::size_t remove_partition(std::uint16_t partition);

  // What a tenant has: one P_Key of each of its partitions, the default partition's first, then by number.
  std::vector<std::uint16_t> keys_of(std::string_view host, std::int64_t uid) const;
  // That as a table. What is in `before` and stays keeps its place, for a queue pair's pkey_index names a place. False: not all of
  // it has room.
  bool fill(PkeyTable& table, std::string_view host, std::int64_t uid) const;
  // Whether some tenant of that host may have that key: what another host can know of it.
  bool may_be_of(std::string_view host, std::uint16_t pkey) const;

  bool operator==(const Partitions&) const = default;

 private:
  std::set<Membership> memberships_;
};

}  // namespace vrdma::hosts
