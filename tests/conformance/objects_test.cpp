// Life of objects: identity, busy, blocking destruction, answers of each family of verbs.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(DevicePointersOutliveTheList, "OBJ-01", .solo = true) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  EXPECT(list != nullptr && count > 0);
  EXPECT(list[count] == nullptr);
  const std::vector<ibv_device*> first(list, list + count);
  const std::string name = list[0]->name;
  ibv_context* context = ibv_open_device(list[0]);
  EXPECT(context != nullptr);
  ibv_free_device_list(list);
  for (int round = 0; round < 20; ++round) {
    int again_count = 0;
    ibv_device** again = ibv_get_device_list(&again_count);
    EXPECT_EQ(again_count, count);
    for (int i = 0; i < count; ++i) EXPECT(again[i] == first[static_cast<std::size_t>(i)]);
    ibv_free_device_list(again);
    EXPECT_EQ(std::string(context->device->name), name);
    EXPECT_EQ(std::string(ibv_get_device_name(context->device)), name);
  }
  EXPECT_NE(ibv_get_device_guid(context->device), 0u);
  EXPECT_OK(ibv_close_device(context));
}

CONFORMANCE(ManyContextsShareNoKeysOrQpNumbers, "OBJ-02") {
  constexpr std::size_t contexts = 8;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Pd>> pds;
  std::vector<std::unique_ptr<Cq>> cqs;
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<std::unique_ptr<Qp>> qps;
  struct Ids {
    __be64 guid;  // a number is a port's: on another host it may be somebody else's
    std::uint32_t qpn[contexts];
    std::uint32_t rkey[contexts];
  } mine{};
  for (std::size_t i = 0; i < contexts; ++i) {
    devices.push_back(std::make_unique<Device>(run.settings));
    pds.push_back(std::make_unique<Pd>(*devices[i]));
    cqs.push_back(std::make_unique<Cq>(*devices[i], 8));
    regions.push_back(std::make_unique<Region>(*pds[i], 4096));
    qps.push_back(std::make_unique<Qp>(*pds[i], *cqs[i], *cqs[i]));
    mine.qpn[i] = qps[i]->p->qp_num;
    mine.rkey[i] = regions[i]->mr.p->rkey;
    for (std::size_t k = 0; k < i; ++k) EXPECT(devices[k]->ctx != devices[i]->ctx);
  }
  mine.guid = ibv_get_device_guid(devices[0]->ctx->device);
  const Ids theirs = run.peer.exchange(mine);
  std::set<std::pair<std::uint64_t, std::uint32_t>> qpns;
  std::set<std::uint32_t> rkeys(mine.rkey, mine.rkey + contexts);
  for (const Ids& ids : {mine, theirs}) {
    for (const std::uint32_t qpn : ids.qpn) EXPECT(qpns.insert({ids.guid, qpn}).second);
  }
  EXPECT_EQ(rkeys.size(), contexts);
  run.peer.barrier();
  while (!qps.empty()) {
    qps.pop_back();
    regions.pop_back();
    cqs.pop_back();
    pds.pop_back();
    devices.pop_back();
  }
}

CONFORMANCE(EachFamilyOfVerbsReportsErrorsInItsWay, "OBJ-03 OBJ-04 OBJ-05", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  EXPECT_NULL(ibv_create_cq(dev.ctx, 0, nullptr, nullptr, 0), EINVAL);
  EXPECT_NULL(ibv_reg_mr(pd, &dev, 0, 0), EINVAL);
  ibv_port_attr port{};
  EXPECT_ERRNO(ibv_query_port(dev.ctx, 200, &port), EINVAL);

  ibv_gid gid{};
  EXPECT_EQ(ibv_query_gid(dev.ctx, dev.port_num, dev.port.gid_tbl_len + 1000, &gid), -1);
  EXPECT_EQ(ibv_query_gid(dev.ctx, 200, 0, &gid), -1);
  __be16 pkey = 0;
  EXPECT_EQ(ibv_query_pkey(dev.ctx, dev.port_num, dev.port.pkey_tbl_len + 1000, &pkey), -1);
  EXPECT_EQ(ibv_get_pkey_index(dev.ctx, dev.port_num, 0x1234), -1);
  ibv_gid_entry entry{};
  EXPECT(ibv_query_gid_table(dev.ctx, &entry, 0, 0) < 0);

  ibv_async_event event{};
  while (dev.take_event(event)) ibv_ack_async_event(&event);
  EXPECT_MINUS_ONE(ibv_get_async_event(dev.ctx, &event), EAGAIN);
  Channel channel(dev);
  EXPECT_EQ(::fcntl(channel.p->fd, F_SETFL, ::fcntl(channel.p->fd, F_GETFL) | O_NONBLOCK), 0);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  EXPECT_MINUS_ONE(ibv_get_cq_event(channel.p, &cq, &context), EAGAIN);
}

CONFORMANCE(APdInUseIsBusy, "OBJ-07", .solo = true) {
  Device dev(run.settings);
  Cq cq(dev, 8);
  Pd pd(dev);
  {
    Region region(pd, 4096);
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
  }
  {
    Qp qp(pd, cq, cq);
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
  }
  {
    Srq srq(pd, 8);
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
  }
  {
    Address self{};
    self.gid = dev.gid;
    self.lid = dev.port.lid;
    Ah ah(pd, ah_to(dev, self));
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
  }
}

CONFORMANCE(QueuesInUseAreBusy, "OBJ-08 OBJ-09 OBJ-10", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Channel channel(dev);
  Cq send_cq(dev, 8, &channel);
  Cq recv_cq(dev, 8, &channel);
  EXPECT_ERRNO(ibv_destroy_comp_channel(channel.p), EBUSY);
  Srq srq(pd, 8);
  Qp qp(pd, send_cq, recv_cq, {.srq = srq});
  EXPECT_ERRNO(ibv_destroy_cq(send_cq), EBUSY);
  EXPECT_ERRNO(ibv_destroy_cq(recv_cq), EBUSY);
  EXPECT_ERRNO(ibv_destroy_srq(srq), EBUSY);
  // Refused destruction left everything working.
  to_init(dev, qp);
  EXPECT_EQ(qp.state(), IBV_QPS_INIT);
}

CONFORMANCE(AQpInAMulticastGroupIsBusy, "OBJ-11", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  Qp qp(pd, cq, cq, {.type = IBV_QPT_UD});
  to_init(dev, qp);
  ibv_gid group{};
  group.raw[0] = 0xff;
  group.raw[1] = 0x12;
  group.raw[15] = 0x77;
  if (const int rc = ibv_attach_mcast(qp, &group, 0xc077); rc != 0) {
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  }
  EXPECT_ERRNO(ibv_destroy_qp(qp), EBUSY);
  EXPECT_OK(ibv_detach_mcast(qp, &group, 0xc077));
}

CONFORMANCE(CloseDeviceFreesLiveObjects, "OBJ-12", .solo = true) {
  for (int round = 0; round < 10; ++round) {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    ibv_context* context = nullptr;
    for (int i = 0; i < count && !context; ++i) {
      if (run.settings.device.empty() || run.settings.device == list[i]->name) context = ibv_open_device(list[i]);
    }
    ibv_free_device_list(list);
    EXPECT(context != nullptr);
    ibv_pd* pd = ibv_alloc_pd(context);
    ibv_cq* cq = ibv_create_cq(context, 16, nullptr, nullptr, 0);
    EXPECT(pd && cq);
    Buffer buffer(8192);
    EXPECT(ibv_reg_mr(pd, buffer.data(), buffer.size(), local_write) != nullptr);
    ibv_qp_init_attr init = init_attr(cq, cq, {});
    EXPECT(ibv_create_qp(pd, &init) != nullptr);
    EXPECT_OK(ibv_close_device(context));
    fill_pattern(buffer.span(), static_cast<std::uint64_t>(round));  // the application's memory is its own again
  }
}

CONFORMANCE(DestroyingACqWaitsForAcknowledgement, "OBJ-13", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Channel channel(dev);
  ibv_cq* raw = ibv_create_cq(dev.ctx, 8, nullptr, channel.p, 0);
  EXPECT(raw != nullptr);
  {
    Cq other(dev, 8);
    Qp qp(pd, raw, raw);
    to_init(dev, qp);
    Region region(pd, 4096);
    EXPECT_OK(post(qp, Recv{1, {region.sge(0, 16)}}));
    EXPECT_OK(ibv_req_notify_cq(raw, 0));
    qp.set_state(IBV_QPS_ERR);  // the flushed receive is an event
    EXPECT(channel.wait() == raw);
  }
  std::atomic<bool> acknowledged{false};
  std::atomic<bool> entered{false};
  std::atomic<bool> returned{false};
  Threads threads;
  threads.start([&] {
    entered = true;
    EXPECT_OK(ibv_destroy_cq(raw));
    returned = true;
    EXPECT(acknowledged.load());
  });
  wait_until("the destroying thread to start", [&] { return entered.load(); });
  holds_for(0.05, "destroy_cq has not returned", [&] { return !returned.load(); });
  acknowledged = true;
  ibv_ack_cq_events(raw, 1);
  threads.join();
}

namespace {
// Makes a QP with an SRQ whose async event LAST_WQE_REACHED is pending.
void raise_last_wqe(Device& dev, Qp& qp) {
  to_init(dev, qp);
  bring_up(dev, qp, address_of(dev, qp));
  qp.set_state(IBV_QPS_ERR);
}
}  // namespace

CONFORMANCE(DestroyingAQpWaitsForItsAsyncEvents, "OBJ-13 ASY-01 SRQ-04", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  Srq srq(pd, 8);
  Qp qp(pd, cq, cq, {.srq = srq});
  raise_last_wqe(dev, qp);
  ibv_async_event event{};
  wait_until("LAST_WQE_REACHED", [&] {
    if (!dev.take_event(event)) return false;
    if (event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED) return true;
    ibv_ack_async_event(&event);
    return false;
  });
  EXPECT(event.element.qp == qp.p);
  std::atomic<bool> acknowledged{false};
  std::atomic<bool> entered{false};
  std::atomic<bool> returned{false};
  Threads threads;
  threads.start([&] {
    entered = true;
    qp.destroy();
    returned = true;
    EXPECT(acknowledged.load());
  });
  wait_until("the destroying thread to start", [&] { return entered.load(); });
  holds_for(0.05, "destroy_qp has not returned", [&] { return !returned.load(); });
  acknowledged = true;
  ibv_ack_async_event(&event);
  threads.join();
}

CONFORMANCE(DestroyingAnSrqWaitsForItsAsyncEvents, "OBJ-13 SRQ-01", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 32);
  ibv_srq_init_attr init{};
  init.attr.max_wr = 8;
  init.attr.max_sge = 1;
  ibv_srq* srq = ibv_create_srq(pd, &init);
  EXPECT(srq != nullptr);
  Region region(pd, 4096);
  ibv_async_event event{};
  {
    Qp receiver(pd, cq, cq, {.srq = srq});
    Qp sender(pd, cq, cq);
    to_init(dev, receiver);
    to_init(dev, sender);
    bring_up(dev, receiver, address_of(dev, sender));
    bring_up(dev, sender, address_of(dev, receiver));
    for (std::uint64_t i = 0; i < 4; ++i) EXPECT_OK(post(srq, Recv{i, {region.sge(0, 16)}}));
    ibv_srq_attr attr{};
    attr.srq_limit = 4;
    EXPECT_OK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
    EXPECT_OK(post(sender, Send{.id = 100, .sges = {region.sge(64, 8)}}));
    wait_until("SRQ_LIMIT_REACHED", [&] {
      if (!dev.take_event(event)) return false;
      if (event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED) return true;
      ibv_ack_async_event(&event);
      return false;
    });
    EXPECT(event.element.srq == srq);
    (void)cq.next();
    (void)cq.next();
  }
  std::atomic<bool> acknowledged{false};
  std::atomic<bool> entered{false};
  std::atomic<bool> returned{false};
  Threads threads;
  threads.start([&] {
    entered = true;
    EXPECT_OK(ibv_destroy_srq(srq));
    returned = true;
    EXPECT(acknowledged.load());
  });
  wait_until("the destroying thread to start", [&] { return entered.load(); });
  holds_for(0.05, "destroy_srq has not returned", [&] { return !returned.load(); });
  acknowledged = true;
  ibv_ack_async_event(&event);
  threads.join();
}

CONFORMANCE(UnreadEventsDieWithTheirObject, "OBJ-14", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Channel channel(dev);
  Cq survivor(dev, 8, &channel);
  for (int round = 0; round < 20; ++round) {
    {
      Cq doomed(dev, 8, &channel);
      Srq srq(pd, 8);
      Qp qp(pd, doomed, doomed);
      Qp with_srq(pd, survivor, survivor, {.srq = srq});
      to_init(dev, qp);
      Region region(pd, 4096);
      EXPECT_OK(post(qp, Recv{1, {region.sge(0, 16)}}));
      doomed.arm();
      qp.set_state(IBV_QPS_ERR);
      EXPECT(channel.readable(20'000));
      raise_last_wqe(dev, with_srq);
    }
    EXPECT(!channel.readable());
    dev.expect_no_event();
  }
}

CONFORMANCE(CmdFdCanBeDuplicated, "OBJ-16", .solo = true) {
  Device dev(run.settings);
  EXPECT_GE(dev.ctx->cmd_fd, 0);
  EXPECT_NE(::fcntl(dev.ctx->cmd_fd, F_GETFD), -1);
  const int copy = ::dup(dev.ctx->cmd_fd);
  EXPECT_GE(copy, 0);
  EXPECT_EQ(::close(copy), 0);
  Pd pd(dev);  // closing the copy harmed nothing
}

}  // namespace vrdma::conformance
