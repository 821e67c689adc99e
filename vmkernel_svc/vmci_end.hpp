// What the switch keeps of one guest: its bound ports, its queue pairs, the notices that its ring did not take yet.
// Used by the shard's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>

#include "vrdma/control.hpp"

namespace vrdma::svc {

struct VmciPort {
  std::uint32_t offers_max;   // 0: takes no queue pairs
  std::uint32_t offers = 0;   // that wait to be attached
};

struct VmciNotice {
  std::uint32_t port;
  control::Notice kind;
  control::QueuePairNotice body;
};

struct VmciCounters {
  std::uint64_t datagrams_sent = 0;      // by this guest, that were delivered
  std::uint64_t datagrams_refused = 0;   // by this guest: no such context or port, not allowed, too long
  std::uint64_t datagrams_received = 0;
  std::uint64_t datagrams_dropped = 0;   // for this guest, because it did not read what it had
  std::uint64_t stream_pairs = 0;        // queue pairs it created or attached, ever
};

struct VmciEnd {
  std::map<std::uint32_t, VmciPort> ports;
  std::set<std::uint64_t> queue_pairs;  // keys (context << 32 | resource) in which this guest has a side, offers to it included
  std::deque<VmciNotice> held;          // bounded by its queue pairs and ports' offers
  std::uint32_t next_resource = 1;
  std::uint32_t next_port = control::dynamic_port_first;
  VmciCounters counters;
};

}  // namespace vrdma::svc
