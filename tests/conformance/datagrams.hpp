// Two UD QPs that send each other datagrams, as the tests of UD and of multicast want them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

// What an address with a GRH asks for, and the receiver finds.
inline constexpr std::uint8_t some_hop_limit = 9, some_traffic_class = 0xb4, some_sl = 3;
inline constexpr std::uint32_t some_flow_label = 0xa5c3e;

// One UD QP on each side, and an address handle to the other.
struct Datagrams {
  explicit Datagrams(Run& the_run, bool global = false, std::uint32_t qkey = test_qkey)
      : run(the_run), dev(run.settings), pd(dev), scq(dev, 256), rcq(dev, 256), mem(pd, 128 * 1024),
        qp(pd, scq, rcq, {.type = IBV_QPT_UD, .inline_bytes = 32}) {
    Path path;
    path.qkey = qkey;
    bring_up(dev, qp, {}, path);
    theirs = run.peer.exchange(address_of(dev, qp));
    ibv_ah_attr attr = ah_to(dev, theirs);
    if (global && !attr.is_global) {
      attr.is_global = 1;
      attr.grh.dgid = theirs.gid;
      attr.grh.sgid_index = 0;
    }
    if (global) {
      attr.grh.hop_limit = some_hop_limit;
      attr.grh.traffic_class = some_traffic_class;
      attr.grh.flow_label = some_flow_label;
      attr.sl = some_sl;
    }
    ah = std::make_unique<Ah>(pd, attr);
    run.peer.barrier();
  }
  Send datagram(std::uint64_t id, std::size_t offset, std::size_t bytes) const {
    return {.id = id, .sges = {mem.sge(offset, bytes)}, .ah = *ah, .qpn = theirs.qpn, .qkey = test_qkey};
  }
  // A request that is sent on its way and completes here, whatever becomes of it there.
  void send(const Send& s) {
    EXPECT_OK(post(qp, s));
    scq.expect(s.id);
  }
  Run& run;
  Device dev;
  Pd pd;
  Cq scq;
  Cq rcq;
  Region mem;
  Qp qp;
  Address theirs{};
  std::unique_ptr<Ah> ah;
};

}  // namespace vrdma::conformance
