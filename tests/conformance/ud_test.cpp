// UC and UD: what is dropped and what is not, Q_Keys, GRH, address handles.
#include <arpa/inet.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "tests/conformance/datagrams.hpp"

namespace vrdma::conformance {

CONFORMANCE(UdPayloadsArriveWhole, "UD-04 UD-02 WC-05 WC-03 WC-01") {
  Datagrams d(run);
  const std::size_t mtu = d.dev.mtu_bytes();
  std::uint64_t id = 0;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{31}, std::size_t{64},
                                  std::size_t{255}, std::size_t{1000}, mtu - 1, mtu}) {
    for (const bool with_imm : {false, true}) {
      const Note note("bytes ", bytes, with_imm ? " with immediate" : "");
      ++id;
      std::vector<std::byte> wanted(bytes);
      fill_pattern(wanted, run.seed + id);
      if (run.b()) {
        std::memset(d.mem.data(), 0x77, 16384);
        EXPECT_OK(post(d.qp, Recv{id, {d.mem.sge(0, grh_bytes + mtu)}}));
      }
      run.peer.barrier();
      if (run.a()) {
        std::memcpy(d.mem.data(), wanted.data(), bytes);
        Send s = d.datagram(id, 0, bytes);
        if (with_imm) s.opcode = IBV_WR_SEND_WITH_IMM;
        s.imm = static_cast<std::uint32_t>(id * 0x01030507u);
        if (bytes <= 32 && with_imm) s.flags |= IBV_SEND_INLINE;
        d.send(s);
      } else {
        const ibv_wc wc = d.rcq.expect(id);
        EXPECT_EQ(wc.opcode, IBV_WC_RECV);
        EXPECT_EQ(wc.byte_len, bytes + grh_bytes);
        EXPECT_EQ(wc.src_qp, d.theirs.qpn);
        EXPECT_EQ(wc.qp_num, d.qp.p->qp_num);
        EXPECT_EQ((wc.wc_flags & IBV_WC_WITH_IMM) != 0, with_imm);
        if (with_imm) EXPECT_EQ(wc.imm_data, static_cast<std::uint32_t>(id * 0x01030507u));
        if (!d.dev.ethernet()) EXPECT_EQ(wc.slid, d.theirs.lid);
        expect_bytes({d.mem.data(grh_bytes), bytes}, wanted, "payload");
        for (std::size_t i = grh_bytes + bytes; i < 16384; ++i) EXPECT(*d.mem.data(i) == std::byte{0x77});
      }
      run.peer.barrier();
    }
  }
}

CONFORMANCE(UdBeyondTheMtuIsALocalError, "ERR-07 UD-04 UD-07") {
  Datagrams d(run);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 16384)}}));
  run.peer.barrier();
  if (run.a()) {
    const int rc = post(d.qp, d.datagram(1, 0, d.dev.mtu_bytes() + 1));
    if (rc == 0) {
      d.scq.expect(1, IBV_WC_LOC_LEN_ERR);
    } else {
      EXPECT_ERRNO(rc, EINVAL);
    }
    run.peer.barrier();
  } else {
    run.peer.barrier();
    d.rcq.expect_empty();
  }
  run.peer.barrier();
}

CONFORMANCE(UdDropsInSilence, "ERR-14 ERR-13") {
  Datagrams d(run);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send wrong_qkey = d.datagram(1, 0, 32);
    wrong_qkey.qkey = test_qkey ^ 1;
    d.send(wrong_qkey);
    Send unknown = d.datagram(2, 0, 32);
    unknown.qpn = (d.theirs.qpn + 0x4321) & 0xffffff;
    d.send(unknown);
    // Behind them a good one, along the same path: what is dropped did not take its receive.
    d.send(d.datagram(3, 0, 33));
    run.peer.barrier();
  } else {
    EXPECT_EQ(d.rcq.expect(1).byte_len, 33 + grh_bytes);
    run.peer.barrier();
    d.rcq.expect_empty();
    EXPECT_EQ(d.qp.state(), IBV_QPS_RTS);
  }
  // No receive at all: dropped; the next one with a receive arrives.
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(4, 0, 34));
    run.peer.barrier();
    run.peer.barrier();
    d.send(d.datagram(5, 0, 35));
  } else {
    run.peer.barrier();
    // The message of 34 bytes may still be under way on a slow path: only 35 must come, 34 must not come twice.
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(0, 4096)}}));
    EXPECT_OK(post(d.qp, Recv{3, {d.mem.sge(0, 4096)}}));
    run.peer.barrier();
    const ibv_wc wc = d.rcq.expect(2);
    EXPECT(wc.byte_len == 35 + grh_bytes || wc.byte_len == 34 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(AUdReceiveTooSmallIsDropped, "ERR-14 UD-02") {
  Datagrams d(run);
  if (run.b()) {
    std::memset(d.mem.data(), 0x66, 8192);
    EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, grh_bytes + 31)}}));
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(4096, grh_bytes + 16)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(1, 0, 32));
    d.send(d.datagram(2, 0, 16));
  } else {
    // Devices differ in whether the small receive was used up in an error; the message itself must not appear as good,
    // and nothing may be written beyond the room given.
    ibv_wc wc = d.rcq.next();
    if (wc.status != IBV_WC_SUCCESS) EXPECT_EQ(wc.status, IBV_WC_LOC_LEN_ERR);
    if (wc.status == IBV_WC_SUCCESS) EXPECT_EQ(wc.byte_len, 16 + grh_bytes);
    for (std::size_t i = grh_bytes + 31; i < 4096; ++i) EXPECT(*d.mem.data(i) == std::byte{0x66});
    EXPECT_NE(d.qp.state(), IBV_QPS_RESET);
  }
  run.peer.barrier();
}

CONFORMANCE(ABadReceiveSgeEndsAUdQpToo, "ERR-05 ERR-12") {
  Datagrams d(run);
  if (run.b()) {
    EXPECT_OK(post(d.qp, Recv{1, {{d.mem.buffer.address(), 4096, d.mem.mr.p->lkey ^ 0x3300}}}));
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(0, 4096)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(1, 0, 16));
  } else {
    d.rcq.expect(1, IBV_WC_LOC_PROT_ERR);
    d.rcq.expect(2, IBV_WC_WR_FLUSH_ERR);
    d.qp.wait_state(IBV_QPS_ERR);
  }
  run.peer.barrier();
}

CONFORMANCE(AQkeyWithItsTopBitMeansTheQpsOwn, "UD-01 ERR-14") {
  // Both QPs have a controlled Q_Key; the request names another one with the top bit set.
  Datagrams d(run, false, 0x80010000);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send plain = d.datagram(1, 0, 20);
    plain.qkey = 0x00010000;  // without the bit it is taken as it is, and does not match
    d.send(plain);
    Send own = d.datagram(2, 0, 21);
    own.qkey = 0xffffffff;
    d.send(own);
  } else {
    EXPECT_EQ(d.rcq.expect(1).byte_len, 21 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(TheGrhIsThereWhenFlagged, "UD-02 UD-03") {
  Datagrams d(run, true);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send asked = d.datagram(1, 0, 22);
    asked.opcode = IBV_WR_SEND_WITH_IMM;
    d.send(asked);
    // The answer comes back to this QP.
    EXPECT_OK(post(d.qp, Recv{5, {d.mem.sge(8192, 4096)}}));
    run.peer.barrier();
    const ibv_wc wc = d.rcq.expect(5);
    EXPECT_EQ(wc.byte_len, 48 + grh_bytes);
    EXPECT_EQ(wc.src_qp, d.theirs.qpn);
  } else {
    ibv_wc wc = d.rcq.expect(1);
    EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
    constexpr int carried = 12 + 8 + 4 + 22 + 2 + 4;  // BTH, DETH, immediate, the payload, to whole words, ICRC
    ibv_grh grh{};
    std::memcpy(&grh, d.mem.data(), sizeof(grh));
    const bool ipv4 = d.dev.ethernet() && std::to_integer<int>(*d.mem.data(20)) >> 4 == 4;
    // RoCE has no SL: bit 3 says that it came over UDP, the others over what that went (mlx5; UCX takes datagrams by it).
    const int over_udp = ipv4 ? 8 | 2 : grh.next_hdr == IPPROTO_UDP ? 8 | 1 : 0;
    EXPECT_EQ(int{wc.sl}, d.dev.ethernet() ? over_udp : int{some_sl});
    if (ipv4) {
      // RoCE v2 over IPv4: the header lies in the last 20 bytes.
      std::uint32_t sum = 0;
      for (std::size_t i = 20; i < 40; i += 2) {
        std::uint16_t word = 0;
        std::memcpy(&word, d.mem.data(i), 2);
        sum += ntohs(word);
      }
      sum = (sum & 0xffff) + (sum >> 16);
      sum = (sum & 0xffff) + (sum >> 16);
      EXPECT_EQ(sum, 0xffffu);
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(29)), 17);  // UDP
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(21)), int{some_traffic_class});
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(23)), 20 + 8 + carried);
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(28)), int{some_hop_limit});
    } else {
      EXPECT_EQ(ntohl(grh.version_tclass_flow) >> 28, 6u);
      EXPECT_EQ(ntohl(grh.version_tclass_flow) >> 20 & 0xff, std::uint32_t{some_traffic_class});
      EXPECT(grh.next_hdr == 0x1b || grh.next_hdr == 17);
      if (grh.next_hdr == 0x1b) EXPECT_EQ(ntohl(grh.version_tclass_flow) & 0xfffff, some_flow_label);  // over UDP devices may choose one (rdma_rxe: 0)
      EXPECT_EQ(ntohs(grh.paylen), (grh.next_hdr == 17 ? 8 : 0) + carried);
      EXPECT_EQ(int{grh.hop_limit}, int{some_hop_limit});
      EXPECT(std::memcmp(&grh.sgid, &d.theirs.gid, 16) == 0);
      EXPECT(std::memcmp(&grh.dgid, &d.dev.gid, 16) == 0);
    }
    // Both makers of an address from a completion lead back to the sender.
    ibv_ah_attr attr{};
    EXPECT_OK(ibv_init_ah_from_wc(d.dev.ctx, d.dev.port_num, &wc, &grh, &attr));
    EXPECT_EQ(attr.port_num, d.dev.port_num);
    EXPECT_EQ(attr.is_global, 1);
    EXPECT(std::memcmp(&attr.grh.dgid, &d.theirs.gid, 16) == 0);
    if (!ipv4 && grh.next_hdr == 0x1b) EXPECT_EQ(attr.grh.flow_label, some_flow_label);
    if (!d.dev.ethernet()) EXPECT_EQ(attr.dlid, d.theirs.lid);
    ibv_ah* back = ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num);
    EXPECT(back != nullptr);
    const Ah owner(back);
    run.peer.barrier();
    Send answer = d.datagram(2, 0, 48);
    answer.ah = back;
    answer.qpn = wc.src_qp;
    d.send(answer);
  }
  run.peer.barrier();
}

CONFORMANCE(AnAddressFromAMessageWithoutGrhLeadsBack, "UD-03 UD-02") {
  Datagrams d(run);
  if (d.dev.by_gid()) skip("addressed by GID: every message has a GRH");
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(d.qp, Recv{5, {d.mem.sge(8192, 4096)}}));
    d.send(d.datagram(1, 0, 24));
    EXPECT_EQ(d.rcq.expect(5).byte_len, 9 + grh_bytes);
  } else {
    ibv_wc wc = d.rcq.expect(1);
    EXPECT_EQ(wc.wc_flags & IBV_WC_GRH, 0u);
    ibv_grh grh{};
    const Ah back(ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num));
    EXPECT(back.p != nullptr);
    Send answer = d.datagram(2, 0, 9);
    answer.ah = back;
    answer.qpn = wc.src_qp;
    d.send(answer);
  }
  run.peer.barrier();
}

CONFORMANCE(CreateAhChecksItsAttributes, "UD-06 OBJ-03", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Address self{};
  self.gid = dev.gid;
  self.lid = dev.port.lid;
  const ibv_ah_attr good = ah_to(dev, self);
  { Ah ah(pd, good); }
  ibv_ah_attr bad = good;
  bad.port_num = 0;
  EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  bad.port_num = 200;
  EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  bad = good;
  bad.is_global = 1;
  bad.grh.dgid = dev.gid;
  bad.grh.sgid_index = 255;
  EXPECT(ibv_create_ah(pd, &bad) == nullptr);
  EXPECT(errno == EINVAL || errno == ENODATA);  // no such entry, or an empty one
  if (dev.ethernet()) {
    bad = good;
    bad.is_global = 0;
    EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  }
}

CONFORMANCE(ADatagramsBufferMayEndBeyondItsRegion, "UD-07 ERR-05") {
  constexpr std::uint64_t datagrams = 40;
  Datagrams d(run);
  Region small(d.pd, 1024);
  for (std::uint64_t id = 1; id <= datagrams; ++id) {
    if (run.b()) EXPECT_OK(post(d.qp, Recv{id, {{small.buffer.address(1024 - grh_bytes - 16), 4096, small.mr.p->lkey}}}));
    run.peer.barrier();
    if (run.a()) d.send(d.datagram(id, 0, 16));
    else EXPECT_EQ(d.rcq.expect(id).byte_len, 16 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(AUdQpInSqeStillReceives, "UD-07 QP-06 ERR-06") {
  Datagrams d(run);
  if (run.a()) {
    EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(8192, 4096)}}));
    Send bad = d.datagram(2, 0, 16);
    bad.sges[0].lkey ^= 0x4400;
    EXPECT_OK(post(d.qp, bad));
    EXPECT_OK(post(d.qp, d.datagram(3, 0, 16)));
    d.scq.expect(2, IBV_WC_LOC_PROT_ERR);
    d.scq.expect(3, IBV_WC_WR_FLUSH_ERR);
    d.qp.wait_state(IBV_QPS_SQE);
    run.peer.barrier();
    EXPECT_EQ(d.rcq.expect(1).byte_len, 16 + grh_bytes);
    d.qp.set_state(IBV_QPS_RTS);
    run.peer.barrier();
    d.send(d.datagram(4, 0, 17));
  } else {
    EXPECT_OK(post(d.qp, Recv{9, {d.mem.sge(0, 4096)}}));
    run.peer.barrier();
    d.send(d.datagram(8, 0, 16));
    run.peer.barrier();
    EXPECT_EQ(d.rcq.expect(9).byte_len, 17 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(UcDropsInSilenceAndGoesOn, "UC-03 ERR-13 UC-01") {
  LinkSpec spec;
  spec.qp.type = IBV_QPT_UC;
  Link link(run, spec);
  fill_pattern(link.mem.buffer.span(), 3);
  std::vector<std::byte> wanted(link.mem.buffer.size());
  fill_pattern(wanted, 3);
  run.peer.barrier();
  // Each of these is lost, and reported as a success.
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(1, 0, 100)));  // no receive there
    link.scq.expect(1);
    Send wrong_key = link.write(2, 0, 4096, 100);
    wrong_key.rkey ^= 0x5500;
    EXPECT_OK(post(link.qp, wrong_key));
    link.scq.expect(2);
    Send outside = link.write(3, 0, 64 * 1024, 100);
    EXPECT_OK(post(link.qp, outside));
    link.scq.expect(3);
    run.peer.barrier();
    run.peer.barrier();
    EXPECT_OK(post(link.qp, link.send(4, 0, 8)));
    link.scq.expect(4);
  } else {
    run.peer.barrier();
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
    link.rcq.expect_empty();
    expect_bytes(link.mem.buffer.span(), wanted, "memory after refused writes");
    EXPECT_OK(post(link.qp, link.recv(7, 32768, 64)));
    run.peer.barrier();
    EXPECT_EQ(link.rcq.expect(7).byte_len, 8u);
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
    link.dev.expect_no_event();
  }
  run.peer.barrier();
  // To a QP that is gone: still a success here.
  if (run.b()) link.qp.set_state(IBV_QPS_RESET);
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(5, 0, 8)));
    link.scq.expect(5);
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
