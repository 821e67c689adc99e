// Data verbs of this library against a real vrdmad: what is accepted, what is refused, and that every completion is seen
// exactly once however many queue pairs share a completion queue.
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <map>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

TEST_CASE("without a service there is no device; with one there is, and its pointer stays the same") {
  Service service;
  int count = 1;
  ibv_device** list = ibv_get_device_list(&count);
  REQUIRE(list != nullptr);
  CHECK(count == 0);
  CHECK(list[0] == nullptr);
  ibv_free_device_list(list);
  service.start();
  list = ibv_get_device_list(&count);
  REQUIRE(count == 1);
  ibv_device* const first = list[0];
  ibv_free_device_list(list);
  list = ibv_get_device_list(nullptr);
  CHECK(list[0] == first);
  ibv_free_device_list(list);
}

TEST_CASE("work requests beyond the queues' capacity, with too many SGEs or in the wrong state are refused by name") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr qp = make_qp(device, cq.get(), 4);
  CHECK(post_recv(device, qp.get(), 1) == EINVAL);
  CHECK(post_send(device, qp.get(), 1) == EINVAL);
  QpPtr peer = make_qp(device, cq.get(), 4);
  connect(qp.get(), peer->qp_num);
  connect(peer.get(), qp->qp_num);

  ibv_sge sge[3] = {device.sge(), device.sge(), device.sge()};
  ibv_recv_wr too_many{7, nullptr, sge, 3};
  ibv_recv_wr fine{6, &too_many, sge, 2};
  ibv_recv_wr* bad = nullptr;
  CHECK(ibv_post_recv(qp.get(), &fine, &bad) == EINVAL);
  CHECK(bad == &too_many);  // the one before it was posted
  for (std::uint64_t i = 1; i < 4; ++i) CHECK(post_recv(device, qp.get(), i) == 0);
  CHECK(post_recv(device, qp.get(), 4) == ENOMEM);

  ibv_send_wr wr{};
  wr.sg_list = sge;
  wr.num_sge = 3;
  wr.opcode = IBV_WR_SEND;
  ibv_send_wr* bad_send = nullptr;
  CHECK(ibv_post_send(qp.get(), &wr, &bad_send) == EINVAL);
  CHECK(bad_send == &wr);
  wr.num_sge = 2;
  sge[0].length = 65;
  sge[1].length = 0;
  wr.send_flags = IBV_SEND_INLINE;
  CHECK(ibv_post_send(qp.get(), &wr, &bad_send) == EINVAL);  // 64 were asked for
  wr.send_flags = 0;
  wr.opcode = IBV_WR_TSO;
  CHECK(ibv_post_send(qp.get(), &wr, &bad_send) == EOPNOTSUPP);
}

TEST_CASE("unsignalled work requests are free again once a later signalled one was polled") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr sender = make_qp(device, cq.get(), 8), receiver = make_qp(device, cq.get(), 8);
  connect(sender.get(), receiver->qp_num);
  connect(receiver.get(), sender->qp_num);
  for (int round = 0; round < 200; ++round) {
    for (std::uint64_t i = 0; i < 8; ++i) REQUIRE(post_recv(device, receiver.get(), i) == 0);
    for (std::uint64_t i = 0; i < 8; ++i) REQUIRE(post_send(device, sender.get(), i, i == 7 ? IBV_SEND_SIGNALED : 0) == 0);
    if (round == 0) CHECK(post_send(device, sender.get(), 8) == ENOMEM);
    std::uint64_t next_receive = 0;
    int sends = 0;
    for (const ibv_wc& wc : collect(cq.get(), 9)) {
      REQUIRE(wc.status == IBV_WC_SUCCESS);
      if (wc.opcode == IBV_WC_RECV) {
        CHECK(wc.wr_id == next_receive++);
        CHECK(wc.qp_num == receiver->qp_num);
      } else {
        CHECK(wc.wr_id == 7);
        ++sends;
      }
    }
    CHECK(sends == 1);
    CHECK(next_receive == 8);
  }
}

TEST_CASE("forty queue pairs on one completion queue: every completion once, in order of its queue") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device, 4096);
  constexpr std::size_t pairs = 20;
  constexpr std::uint64_t messages = 300;
  std::vector<QpPtr> senders, receivers;
  std::map<std::uint32_t, std::uint64_t> next_wr_id;
  for (std::size_t i = 0; i < pairs; ++i) {
    senders.push_back(make_qp(device, cq.get()));
    receivers.push_back(make_qp(device, cq.get()));
    connect(senders.back().get(), receivers.back()->qp_num);
    connect(receivers.back().get(), senders.back()->qp_num);
    next_wr_id[senders.back()->qp_num] = next_wr_id[receivers.back()->qp_num] = 0;
  }
  std::uint64_t posted[pairs] = {}, completed = 0;
  std::uint32_t outstanding[pairs] = {};
  std::map<std::uint32_t, std::size_t> pair_of;
  for (std::size_t i = 0; i < pairs; ++i) pair_of[senders[i]->qp_num] = pair_of[receivers[i]->qp_num] = i;
  std::uint32_t random = 1;
  eventually("all messages complete", [&] {
    // Two of three messages are of a favourite that changes, so that hot lanes come and go.
    random = random * 1664525 + 1013904223;
    std::size_t i = (random >> 16) % 3 != 0 ? completed / 1000 % pairs : (random >> 8) % pairs;
    for (std::size_t tries = 0; tries < pairs && (posted[i] == messages || outstanding[i] > 14); ++tries) i = (i + 1) % pairs;
    if (posted[i] < messages && outstanding[i] <= 14) {
      REQUIRE(post_recv(device, receivers[i].get(), posted[i]) == 0);
      REQUIRE(post_send(device, senders[i].get(), posted[i]) == 0);
      ++posted[i];
      outstanding[i] += 2;
    }
    ibv_wc wc[3];
    const int got = ibv_poll_cq(cq.get(), 3, wc);
    REQUIRE(got >= 0);
    for (int n = 0; n < got; ++n) {
      REQUIRE(wc[n].status == IBV_WC_SUCCESS);
      REQUIRE(wc[n].wr_id == next_wr_id[wc[n].qp_num]++);
      --outstanding[pair_of[wc[n].qp_num]];
    }
    completed += static_cast<std::uint64_t>(got);
    return completed == 2 * pairs * messages;
  });
  ibv_wc wc;
  CHECK(ibv_poll_cq(cq.get(), 1, &wc) == 0);
}

TEST_CASE("RESET and destruction take a queue pair's completions out of its completion queue") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device), other_cq = make_cq(device);
  QpPtr sender = make_qp(device, cq.get()), receiver = make_qp(device, other_cq.get());
  for (int round = 0; round < 3; ++round) {
    connect(sender.get(), receiver->qp_num);
    connect(receiver.get(), sender->qp_num);
    for (std::uint64_t i = 0; i < 16; ++i) REQUIRE(post_recv(device, receiver.get(), i) == 0);
    for (std::uint64_t i = 0; i < 16; ++i) REQUIRE(post_send(device, sender.get(), i) == 0);
    collect(other_cq.get(), 16);  // so all sends have completed, unpolled
    if (round == 2) break;
    ibv_qp_attr reset{};
    reset.qp_state = IBV_QPS_RESET;
    REQUIRE(ibv_modify_qp(sender.get(), &reset, IBV_QP_STATE) == 0);
    REQUIRE(ibv_modify_qp(receiver.get(), &reset, IBV_QP_STATE) == 0);
    ibv_wc wc;
    CHECK(ibv_poll_cq(cq.get(), 1, &wc) == 0);
  }
  sender.reset();
  ibv_wc wc;
  CHECK(ibv_poll_cq(cq.get(), 1, &wc) == 0);
}

TEST_CASE("threads post, poll and make queue pairs on one completion queue at the same time") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device, 8192);
  constexpr int thread_count = 3;
  constexpr int messages = 150;
  std::atomic<int> completions{0}, errors{0};
  std::atomic<bool> stop{false};
  std::vector<QpPtr> senders, receivers;
  for (int i = 0; i < thread_count; ++i) {
    senders.push_back(make_qp(device, cq.get()));
    receivers.push_back(make_qp(device, cq.get()));
    connect(senders.back().get(), receivers.back()->qp_num);
    connect(receivers.back().get(), senders.back()->qp_num);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < thread_count; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < messages && !stop;) {
        if (post_recv(device, receivers[t].get(), 1) != 0) {
          std::this_thread::yield();
          continue;
        }
        while (post_send(device, senders[t].get(), 2) != 0 && !stop) std::this_thread::yield();
        ++i;
      }
    });
    threads.emplace_back([&] {
      while (!stop) {
        ibv_wc wc[4];
        const int got = ibv_poll_cq(cq.get(), 4, wc);
        for (int i = 0; i < got; ++i) errors += wc[i].status != IBV_WC_SUCCESS;
        if (got > 0) completions += got;
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 50 && !stop; ++i) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq.get();
      init.qp_type = IBV_QPT_RC;
      init.cap = {4, 4, 1, 1, 0};
      ibv_qp* qp = ibv_create_qp(device.pd, &init);
      errors += qp == nullptr || ibv_destroy_qp(qp) != 0;
    }
  });
  const auto deadline = Clock::now() + std::chrono::minutes(1);
  while (completions < 2 * thread_count * messages && errors == 0 && Clock::now() < deadline) std::this_thread::yield();
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(errors == 0);
  CHECK(completions == 2 * thread_count * messages);
}

TEST_CASE("atomics that reach memory through the process lose nothing while its pages move with another registration") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr a = make_qp(device, cq.get(), 64), b = make_qp(device, cq.get(), 64);
  connect(a.get(), b->qp_num, {}, IBV_ACCESS_REMOTE_ATOMIC);
  connect(b.get(), a->qp_num, {}, IBV_ACCESS_REMOTE_ATOMIC);
  const std::size_t bytes = 1024 * 4096;
  auto* const memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED);
  std::memset(memory, 0, bytes);
  auto* const counter = reinterpret_cast<std::atomic<std::uint64_t>*>(memory + 4096 + 64);
  ibv_mr* const small = ibv_reg_mr(device.pd, counter, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  REQUIRE(small != nullptr);
  std::uint64_t posted = 0, done = 0;
  const auto poll = [&] {
    ibv_wc wc[32];
    const int got = ibv_poll_cq(cq.get(), 32, wc);
    for (int i = 0; i < got; ++i) REQUIRE(wc[i].status == IBV_WC_SUCCESS);
    done += static_cast<std::uint64_t>(got);
  };
  for (int round = 0; round < 200; ++round) {
    for (; posted - done < 32; ++posted) {
      ibv_sge sge = device.sge();
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.atomic = {reinterpret_cast<std::uintptr_t>(counter), 1, 0, small->rkey};
      REQUIRE(ibv_post_send(a.get(), &wr, &bad) == 0);
    }
    ibv_mr* const all = ibv_reg_mr(device.pd, memory, bytes, static_cast<int>(IBV_ACCESS_LOCAL_WRITE));
    REQUIRE(all != nullptr);
    poll();
    REQUIRE(ibv_dereg_mr(all) == 0);
    poll();
  }
  eventually("all atomics are done", [&] { return poll(), done == posted; });
  CHECK(*counter == posted);
  CHECK(ibv_dereg_mr(small) == 0);
  ::munmap(memory, bytes);
}

TEST_CASE("a thread that is cancelled in the middle of verbs leaves them usable") {
  Service service;
  service.start();
  Device device;
  std::atomic<int> rounds{0};
  struct Work {
    Device& device;
    std::atomic<int>& rounds;
  } work{device, rounds};
  for (int thread = 0; thread < 20; ++thread) {
    rounds = 0;
    pthread_t id;
    REQUIRE(pthread_create(&id, nullptr, [](void* argument) -> void* {
              auto& [on, count] = *static_cast<Work*>(argument);
              for (;; ++count) {
                ibv_mr* const mr = ibv_reg_mr(on.pd, on.memory.data(), on.memory.size(), static_cast<int>(IBV_ACCESS_LOCAL_WRITE));
                if (mr == nullptr || ibv_dereg_mr(mr) != 0) ::abort();
                pthread_testcancel();
              }
            }, &work) == 0);
    eventually("the thread is at work", [&] { return rounds > thread; });
    REQUIRE(pthread_cancel(id) == 0);
    void* result = nullptr;
    REQUIRE(pthread_join(id, &result) == 0);
    CHECK(result == PTHREAD_CANCELED);
  }
}
