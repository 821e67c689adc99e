// Multicast: who is reached and how often, what attaching and detaching check, and what a group is on either link layer.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/conformance/datagrams.hpp"

namespace vrdma::conformance {
namespace {

ibv_gid group_gid(std::uint8_t last) {
  ibv_gid gid{};
  gid.raw[0] = 0xff;
  gid.raw[1] = 0x12;
  gid.raw[14] = 0x33;
  gid.raw[15] = last;
  return gid;
}
// ::ffff:first.1.2.last, which RoCE v2 has for IPv4 addresses.
ibv_gid ipv4_gid(std::uint8_t first, std::uint8_t last) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = first, gid.raw[13] = 1, gid.raw[14] = 2, gid.raw[15] = last;
  return gid;
}
// By which a port on Ethernet sends over IPv4, where it has an IPv4 address; else the one that it is addressed by.
std::uint8_t ipv4_index(const Device& dev) {
  const ibv_gid mapped = ipv4_gid(0, 0);
  for (int i = 0; dev.ethernet() && i < dev.port.gid_tbl_len; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(dev.ctx, dev.port_num, static_cast<std::uint32_t>(i), &entry, 0) != 0 || entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    if (std::memcmp(entry.gid.raw, mapped.raw, 12) == 0) return static_cast<std::uint8_t>(i);
  }
  return static_cast<std::uint8_t>(std::max(0, dev.gid_index));
}

}  // namespace

CONFORMANCE(MulticastReachesEveryAttachedQpOnce, "MC-02 MC-01") {
  Datagrams d(run);
  Qp second(d.pd, d.scq, d.rcq, {.type = IBV_QPT_UD});
  bring_up(d.dev, second, {});
  const ibv_gid group = group_gid(static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc011;
  ibv_ah_attr attr{};
  attr.port_num = d.dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = static_cast<std::uint8_t>(std::max(0, d.dev.gid_index));
  attr.grh.hop_limit = 1;
  if (const int rc = ibv_attach_mcast(d.qp, &group, mlid); rc != 0) {
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  }
  if (run.b()) EXPECT_OK(ibv_attach_mcast(second, &group, mlid));
  Ah to_group(d.pd, attr);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_OK(post(d.qp, Recv{i, {d.mem.sge(4096 * i, 2048)}}));
    EXPECT_OK(post(second, Recv{10 + i, {d.mem.sge(32768 + 4096 * i, 2048)}}));
  }
  run.peer.barrier();
  const auto announce = [&](const Qp& from, std::uint64_t id, std::size_t bytes) {
    EXPECT_OK(post(from, Send{.id = id, .sges = {d.mem.sge(65536, bytes)}, .ah = to_group, .qpn = 0xffffff, .qkey = test_qkey}));
    d.scq.expect(id);
  };
  // From a's attached QP: to a's first and both of b's, not to a's second.
  if (run.a()) announce(d.qp, 100, 50);
  std::uint64_t first = 0;
  std::uint64_t other = 0;
  const auto take = [&](std::size_t bytes) {
    const ibv_wc wc = d.rcq.next();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.byte_len, bytes + grh_bytes);
    EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
    (wc.qp_num == d.qp.p->qp_num ? first : other) += 1;
  };
  take(50);
  if (run.b()) take(50);
  EXPECT_EQ(first, 1u);
  EXPECT_EQ(other, run.b() ? 1u : 0u);
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();  // what the other side sends from here on is of the next step
  // From a QP that is not attached.
  if (run.a()) announce(second, 101, 51);
  take(51);
  if (run.b()) take(51);
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();
  // After detaching, only who is left gets it; a unicast message marks the end.
  if (run.b()) EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  run.peer.barrier();
  if (run.a()) {
    announce(d.qp, 102, 52);
    d.send(d.datagram(103, 0, 53));
    take(52);
  } else {
    first = other = 0;
    for (int i = 0; i < 2; ++i) {
      const ibv_wc wc = d.rcq.next();
      EXPECT_EQ(wc.byte_len, (wc.qp_num == d.qp.p->qp_num ? 53 : 52) + grh_bytes);
    }
    EXPECT_OK(ibv_detach_mcast(second, &group, mlid));
    EXPECT_ERRNO(ibv_detach_mcast(second, &group, mlid), EINVAL);
  }
  if (run.a()) EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();
}

CONFORMANCE(WhoStaysInAGroupMissesNothingWhileOthersLeave, "MC-02", .solo = true) {
  constexpr int rounds = 8;
  constexpr std::size_t leavers = 16, stayers = 2;
  constexpr std::chrono::milliseconds patience(100);  // longer than that for somebody's memory a sender need not wait
  Device dev(run.settings);
  Pd pd(dev);
  Cq scq(dev, 16);
  Region mem(pd, 4096);
  Qp sender(pd, scq, scq, {.type = IBV_QPT_UD});
  bring_up(dev, sender, {});
  std::vector<std::unique_ptr<Qp>> leaving;
  for (std::size_t i = 0; i < leavers; ++i) {
    leaving.push_back(std::make_unique<Qp>(pd, scq, scq, QpSpec{.type = IBV_QPT_UD}));
    bring_up(dev, *leaving.back(), {});
  }
  struct Stayer {
    Stayer(Device& dev, Pd& pd) : cq(dev, 16), qp(pd, cq, cq, {.type = IBV_QPT_UD}) { bring_up(dev, qp, {}); }
    Cq cq;
    Qp qp;
  };
  std::vector<std::unique_ptr<Stayer>> staying;
  for (std::size_t i = 0; i < stayers; ++i) staying.push_back(std::make_unique<Stayer>(dev, pd));
  // On the stack, which is no memory that a service could have mapped: each delivery waits for somebody to copy it.
  std::byte here[stayers][256];
  const Mr room(pd, here, sizeof(here), local_write);
  const auto receive = [&](std::size_t i) {
    EXPECT_OK(post(staying[i]->qp, Recv{1, {{reinterpret_cast<std::uint64_t>(here[i]), sizeof(here[i]), room.p->lkey}}}));
  };
  for (std::size_t i = 0; i < stayers; ++i) receive(i);

  const ibv_gid group = group_gid(static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc014;
  ibv_ah_attr attr{};
  attr.port_num = dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = static_cast<std::uint8_t>(std::max(0, dev.gid_index));
  attr.grh.hop_limit = 1;
  const Ah to_group(pd, attr);
  const auto attach = [&](ibv_qp* qp) {
    const int rc = ibv_attach_mcast(qp, &group, mlid);
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  };

  std::atomic<std::uint32_t> sent{0};
  for (int round = 0; round < rounds; ++round) {
    const Note note("round ", round);
    for (const auto& qp : leaving) attach(*qp);
    for (const auto& member : staying) attach(member->qp);
    std::atomic<bool> all_left{false};
    Threads threads;
    threads.start([&] {
      for (const auto& qp : leaving) {
        const std::uint32_t before = sent;
        wait_until("another datagram has been sent", [&] { return sent != before; }, 40.0);
        EXPECT_OK(ibv_detach_mcast(*qp, &group, mlid));  // while the next one is
      }
      all_left = true;
    });
    while (!all_left) {
      const auto begin = std::chrono::steady_clock::now();
      const std::uint32_t number = sent + 1;
      EXPECT_OK(post(sender, Send{.opcode = IBV_WR_SEND_WITH_IMM, .id = number, .sges = {mem.sge(0, 100)}, .imm = number, .ah = to_group, .qpn = 0xffffff, .qkey = test_qkey}));
      scq.expect(number);
      const bool in_time = std::chrono::steady_clock::now() - begin < patience;
      for (std::size_t i = 0; i < stayers; ++i) {
        const Note who("member ", i);
        ibv_wc wc{};
        if (in_time) wc = staying[i]->cq.next();
        else if (ibv_poll_cq(staying[i]->cq, 1, &wc) != 1) skip("a datagram may have been dropped because its receiver's memory took too long to come");
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.imm_data, number);
        receive(i);
      }
      sent = number;
    }
    threads.join();
    for (const auto& member : staying) EXPECT_OK(ibv_detach_mcast(member->qp, &group, mlid));
  }
}

CONFORMANCE(AnIpv4GroupIsAGroupOnBothLinkLayers, "MC-02 MC-01 UD-02") {
  Datagrams d(run);
  const ibv_gid group = ipv4_gid(239, static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc013;
  if (const int rc = ibv_attach_mcast(d.qp, &group, mlid); rc != 0) {
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  }
  ibv_ah_attr attr{};
  attr.port_num = d.dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = ipv4_index(d.dev);
  attr.grh.hop_limit = some_hop_limit;
  const Ah to_group(d.pd, attr);
  EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(4096, 4096)}}));
  run.peer.barrier();
  Send message = d.datagram(3, 16384, 50);
  message.ah = to_group;
  message.qpn = 0xffffff;
  if (run.a()) d.send(message);
  // The sender is a member, too.
  ibv_wc wc = d.rcq.expect(1);
  EXPECT_EQ(wc.byte_len, 50 + grh_bytes);
  EXPECT_EQ(wc.src_qp, run.a() ? d.qp.p->qp_num : d.theirs.qpn);
  EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
  ibv_grh grh{};
  std::memcpy(&grh, d.mem.data(), sizeof(grh));
  const bool ipv4 = d.dev.ethernet() && std::to_integer<int>(*d.mem.data(20)) >> 4 == 4;
  if (ipv4) EXPECT(std::memcmp(d.mem.data(36), group.raw + 12, 4) == 0);
  else EXPECT(std::memcmp(&grh.dgid, &group, sizeof(group)) == 0);
  // A library that makes an address of it (rdma-core's does not: no GID of the receiver's is named) makes one that leads back.
  run.peer.barrier();
  if (run.b()) {
    ibv_ah* const back = ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num);
    const std::unique_ptr<Ah> owner(back != nullptr ? new Ah(back) : nullptr);
    Send answer = d.datagram(4, 16384, 48);
    if (back != nullptr) answer.ah = back;
    d.send(answer);
  } else {
    wc = d.rcq.expect(2);
    EXPECT_EQ(wc.byte_len, 48 + grh_bytes);
    EXPECT_EQ(wc.src_qp, d.theirs.qpn);
  }
  run.peer.barrier();
  EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  EXPECT_ERRNO(ibv_detach_mcast(d.qp, &group, mlid), EINVAL);
}

CONFORMANCE(MulticastAttachChecksItsArguments, "MC-01", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp ud(pd, cq, cq, {.type = IBV_QPT_UD});
  Qp rc(pd, cq, cq);
  to_init(dev, ud);
  to_init(dev, rc);
  ibv_gid group = group_gid(9);
  if (ibv_attach_mcast(ud, &group, 0xc012) == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
  EXPECT_ERRNO(ibv_attach_mcast(rc, &group, 0xc012), EINVAL);
  ibv_gid unicast = group;
  unicast.raw[0] = 0xfe;
  EXPECT_ERRNO(ibv_attach_mcast(ud, &unicast, 0xc012), EINVAL);
  EXPECT_ERRNO(ibv_detach_mcast(ud, &unicast, 0xc012), EINVAL);
  unicast = ipv4_gid(198, 9);
  EXPECT_ERRNO(ibv_attach_mcast(ud, &unicast, 0xc012), EINVAL);
  // Attaching again changes nothing: one detach ends it, and the QP can be destroyed.
  EXPECT_OK(ibv_attach_mcast(ud, &group, 0xc012));
  EXPECT_ERRNO(ibv_destroy_qp(ud), EBUSY);
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc012));
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc012), EINVAL);
  EXPECT_OK(ibv_destroy_qp(std::exchange(ud.p, nullptr)));
}

CONFORMANCE(MulticastCountsPairsOfGidAndLid, "MC-01 MC-03", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp ud(pd, cq, cq, {.type = IBV_QPT_UD});
  to_init(dev, ud);
  const ibv_gid group = group_gid(10);
  if (ibv_attach_mcast(ud, &group, 0xc014) == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc015), EINVAL);
  EXPECT_OK(ibv_attach_mcast(ud, &group, 0xc015));
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc014));
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc014), EINVAL);
  EXPECT_ERRNO(ibv_destroy_qp(ud), EBUSY);
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc015));
  // No LID of a group's on InfiniBand; any will do on Ethernet.
  for (const std::uint16_t lid : std::to_array<std::uint16_t>({0, 1, 0xbfff, 0xffff})) {
    EXPECT_ERRNO(ibv_attach_mcast(ud, &group, lid), dev.ethernet() ? 0 : EINVAL);
    EXPECT_ERRNO(ibv_detach_mcast(ud, &group, lid), dev.ethernet() ? 0 : EINVAL);
  }
  EXPECT_OK(ibv_destroy_qp(std::exchange(ud.p, nullptr)));
}

}  // namespace vrdma::conformance
