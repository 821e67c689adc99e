// Two queue pairs of one process that become direct.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "guest_lib/test/direct_fixture.hpp"

namespace vrdma::test {

enum class Channels { none, of_both_ends };  // of the completion queues

struct Pair {
  explicit Pair(Channels channels) : Pair(Patience{}, channels) {}
  explicit Pair(Patience patience = {}, Channels channels = Channels::none)
      : a_channel(channels == Channels::none ? nullptr : ibv_create_comp_channel(device.context)),
        b_channel(channels == Channels::none ? nullptr : ibv_create_comp_channel(device.context)) {
    connect(a.get(), b->qp_num, patience, all_access);
    connect(b.get(), a->qp_num, patience, all_access);
  }
  static constexpr unsigned all_access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  int send(std::uint64_t wr_id, std::size_t from, std::uint32_t length) const { return post(a.get(), IBV_WR_SEND, wr_id, near.sge(from, length), 0); }
  int receive(std::uint64_t wr_id, std::size_t to, std::uint32_t length) const {
    ibv_sge sge = far.sge(to, length);
    ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(b.get(), &wr, &bad);
  }
  int post(ibv_qp* qp, ibv_wr_opcode opcode, std::uint64_t wr_id, ibv_sge sge, std::size_t remote, std::uint64_t operand = 0, unsigned more_flags = 0) const {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED | more_flags;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
      wr.wr.atomic = {far.address(remote), operand, 0, far.mr->rkey};
    else
      wr.wr.rdma = {far.address(remote), far.mr->rkey};
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
  // Until the service has given the connection away, with the memory of both ends mapped: each of these posts, unless it finds the
  // service in charge, takes the offer up, or maps what it misses. False: nobody can be direct where this process runs, as is said aloud.
  bool become_direct() const {
    for (std::uint64_t i = 0; i < 4; ++i) {
      std::string because;
      eventually("the connection is direct, or may not be", [&] { return mode_of(a.get(), &because) == "direct" || is_apart(because); });
      if (is_apart(because)) {
        MESSAGE("SKIP: processes cannot be direct here: ", because);
        return false;
      }
      REQUIRE(post(a.get(), IBV_WR_RDMA_WRITE, i, near.sge(0, 8), 0) == 0);
      CHECK(collect(a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
    }
    eventually("the connection is direct", [this] { return mode_of(a.get()) == "direct"; });
    return true;
  }

  Device device;
  Pages near{device}, far{device};
  ChannelPtr a_channel, b_channel;
  CqPtr a_cq = make_cq(device, 256, a_channel.get()), b_cq = make_cq(device, 256, b_channel.get());
  QpPtr a = make_qp(device, a_cq.get()), b = make_qp(device, b_cq.get());
};

}  // namespace vrdma::test
