// Direct mode into shared receive queues: several posters, and the service, take from one.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <thread>

#include "guest_lib/test/direct_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr std::uint32_t slots = 64;  // receive requests of the queue, and where they go

// Connections of one process: each sender has a completion queue of its own; the receivers share one, and the SRQ.
struct Shared {
  struct Connection {
    CqPtr cq;
    QpPtr sender, receiver;
  };
  // The last so many senders are mediated: their completion queue has less room than their work queues.
  explicit Shared(std::size_t count, std::size_t mediated = 0) {
    ibv_srq_init_attr init{};
    init.attr = {slots, 1, 0};
    srq.reset(ibv_create_srq(device.pd, &init));
    REQUIRE(srq != nullptr);
    for (std::size_t i = 0; i < count; ++i) {
      Connection one;
      one.cq = make_cq(device, i + mediated >= count ? 8 : 64);
      one.sender = make_qp(device, one.cq.get());
      one.receiver = make_qp(device, received.get(), 16, srq.get());
      connect(one.sender.get(), one.receiver->qp_num);
      connect(one.receiver.get(), one.sender->qp_num);
      connections.push_back(std::move(one));
    }
  }
  ~Shared() {
    connections.clear();
    srq.reset();
  }
  int receive(std::uint64_t wr_id) const {
    ibv_sge sge = far.sge(wr_id % slots * 64, 64);
    ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_srq_recv(srq.get(), &wr, &bad);
  }
  // One that is odd has two buffers, and goes another way than one that has one. from: 64 bytes of `near`.
  int send(std::size_t connection, std::uint64_t number, std::size_t from) const {
    ibv_sge sges[2] = {near.sge(from, 64), near.sge(from + 8, 56)};
    ibv_send_wr wr{};
    wr.wr_id = number;
    wr.sg_list = sges;
    wr.num_sge = 1;
    if (number % 2 == 1) wr.num_sge = 2, sges[0].length = 8;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = static_cast<std::uint32_t>(number);
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(connections[connection].sender.get(), &wr, &bad);
  }
  void write(std::size_t connection) const {
    REQUIRE(post_write(connections[connection].sender.get(), near.sge(0, 8), far.address(8192), far.mr->rkey) == 0);
    CHECK(collect(connections[connection].cq.get(), 1).front().status == IBV_WC_SUCCESS);
  }
  // Until that connection is direct, with its memory mapped; false: nobody can be direct here.
  bool become_direct(std::size_t connection) const {
    ibv_qp* const sender = connections[connection].sender.get();
    for (int i = 0; i < 4; ++i) {
      write(connection);  // the service had it when its completion queue got another queue pair, and gives it back after this
      std::string because;
      eventually("the connection is direct, or may not be", [&] { return mode_of(sender, &because) == "direct" || is_apart(because); });
      if (is_apart(because)) {
        MESSAGE("SKIP: processes cannot be direct here: ", because);
        return false;
      }
    }
    return true;
  }

  Device device;
  Pages near{device}, far{device};
  CqPtr received = make_cq(device, 256);
  std::unique_ptr<ibv_srq, SrqDeleter> srq;
  std::vector<Connection> connections;
};

}  // namespace

TEST_CASE("messages into a shared receive queue need no service") {
  Service service;
  service.start(with_direct);
  Shared shared(2);
  if (!shared.become_direct(0) || !shared.become_direct(1)) return;
  const Stopped stopped(service);
  for (std::uint64_t number = 0; number < 300; ++number) {
    REQUIRE(shared.receive(number) == 0);
    std::memset(shared.near.at(4096), static_cast<int>(number), 64);
    const std::size_t connection = number / 2 % 2;
    REQUIRE(shared.send(connection, number, 4096) == 0);
    const auto received = collect(shared.received.get(), 1).front(), sent = collect(shared.connections[connection].cq.get(), 1).front();
    CHECK(received.status == IBV_WC_SUCCESS);
    CHECK(received.wr_id == number);
    CHECK(received.imm_data == number);
    CHECK(received.qp_num == shared.connections[connection].receiver->qp_num);
    CHECK(sent.status == IBV_WC_SUCCESS);
    CHECK(sent.wr_id == number);
    REQUIRE(std::memcmp(shared.far.at(number % slots * 64), shared.near.at(4096), 64) == 0);
  }
}

// The engine needs no receive buffer for one, so that it could take the request before it finds that the buffer is out of the poster's reach.
TEST_CASE("a WRITE with immediate leaves a shared queue's request whose buffer is not mapped to the service, and none is lost") {
  Service service;
  service.start(with_direct);
  Shared shared(1);
  if (!shared.become_direct(0)) return;
  void* const unmapped = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // executable: not moved
  REQUIRE(unmapped != MAP_FAILED);
  ibv_mr* const mr = ibv_reg_mr(shared.device.pd, unmapped, 4096, int{IBV_ACCESS_LOCAL_WRITE});
  REQUIRE(mr != nullptr);
  constexpr std::uint64_t messages = 16;
  for (std::uint64_t number = 0; number < messages; ++number) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(unmapped), 64, mr->lkey};
    ibv_recv_wr wr{number, nullptr, &sge, 1}, *bad = nullptr;
    REQUIRE(ibv_post_srq_recv(shared.srq.get(), &wr, &bad) == 0);
  }
  const Shared::Connection& connection = shared.connections.front();
  for (std::uint64_t number = 0; number < messages; ++number) {
    ibv_sge sges[2] = {shared.near.sge(0, 8), shared.near.sge(64, 8)};  // two: by the engine
    ibv_send_wr wr{}, *bad = nullptr;
    wr.wr_id = number;
    wr.sg_list = sges;
    wr.num_sge = 2;
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.imm_data = static_cast<std::uint32_t>(number);
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = shared.far.address(8192);
    wr.wr.rdma.rkey = shared.far.mr->rkey;
    REQUIRE(ibv_post_send(connection.sender.get(), &wr, &bad) == 0);
    const auto received = collect(shared.received.get(), 1).front(), sent = collect(connection.cq.get(), 1).front();
    CHECK(received.status == IBV_WC_SUCCESS);
    CHECK(received.wr_id == number);
    CHECK(received.imm_data == number);
    CHECK(sent.status == IBV_WC_SUCCESS);
  }
  CHECK(ibv_dereg_mr(mr) == 0);
  ::munmap(unmapped, 4096);
}

// Four threads and the service take from one queue, which runs empty now and then.
TEST_CASE("each receive request of a shared queue is used once, whoever takes it, and each message arrives in its order") {
  Service service;
  service.start(with_direct);
  constexpr std::size_t senders = 4, mediated = 1;
  constexpr std::uint64_t each = 1000;
  const Shared shared(senders, mediated);
  for (std::size_t i = 0; i + mediated < senders; ++i)
    if (!shared.become_direct(i)) return;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (std::size_t i = 0; i < senders; ++i)
    threads.emplace_back([&, i] {
      const std::size_t from = 16384 + i * 64;
      for (std::uint64_t number = 0; number < each; ++number) {
        std::memset(shared.near.at(from), static_cast<int>(number * 7 + i), 64);
        if (shared.send(i, number, from) != 0) std::abort();
        ibv_wc wc{};
        for (int got = 0; got == 0;) got = ibv_poll_cq(shared.connections[i].cq.get(), 1, &wc);
        failures += wc.status != IBV_WC_SUCCESS || wc.wr_id != number;
      }
    });
  std::uint64_t next[senders] = {}, posted = 0, arrived = 0;
  std::set<std::uint64_t> outstanding;
  const auto refill = [&] {
    while (outstanding.size() < slots) {
      // Its slot is free only if no request that is still outstanding goes there.
      if (std::ranges::any_of(outstanding, [&](std::uint64_t one) { return one % slots == posted % slots; })) break;
      REQUIRE(shared.receive(posted) == 0);
      outstanding.insert(posted++);
    }
  };
  refill();
  eventually("all messages arrive", [&] {
    ibv_wc wc[16];
    const int got = ibv_poll_cq(shared.received.get(), 16, wc);
    for (int i = 0; i < got; ++i) {
      REQUIRE(wc[i].status == IBV_WC_SUCCESS);
      REQUIRE(outstanding.erase(wc[i].wr_id) == 1);
      std::size_t from = 0;
      while (from < senders && shared.connections[from].receiver->qp_num != wc[i].qp_num) ++from;
      REQUIRE(from < senders);
      REQUIRE(wc[i].imm_data == next[from]);
      for (int byte = 0; byte < 64; ++byte)
        REQUIRE(shared.far.at(wc[i].wr_id % slots * 64)[byte] == static_cast<char>(next[from] * 7 + from));
      ++next[from], ++arrived;
    }
    if (outstanding.empty() || arrived % 256 < 128) refill();
    return arrived == each * senders;
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

TEST_CASE("the limit of a shared queue is told once, although posters take from it by themselves") {
  Service service;
  service.start(with_direct);
  const Shared shared(1);
  if (!shared.become_direct(0)) return;
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 10; ++i) REQUIRE(shared.receive(i) == 0);
    ibv_srq_attr attributes{};
    attributes.srq_limit = 4;
    REQUIRE(ibv_modify_srq(shared.srq.get(), &attributes, IBV_SRQ_LIMIT) == 0);
    for (std::uint64_t i = 0; i < 10; ++i) {
      REQUIRE(shared.send(0, i, 4096) == 0);
      CHECK(collect(shared.received.get(), 1).front().wr_id == i);
      CHECK(collect(shared.connections[0].cq.get(), 1).front().status == IBV_WC_SUCCESS);
      REQUIRE(ibv_query_srq(shared.srq.get(), &attributes) == 0);
      CHECK(attributes.srq_limit == (i < 6 ? 4 : 0));
      const auto told = [&] { return readable(shared.device.context->async_fd); };
      if (i != 6) {
        CHECK_FALSE(told());
        continue;
      }
      eventually("it is told", told);
      ibv_async_event event;
      REQUIRE(ibv_get_async_event(shared.device.context, &event) == 0);
      CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED);
      CHECK(event.element.srq == shared.srq.get());
      ibv_ack_async_event(&event);
    }
    eventually("it is direct again", [&] { return mode_of(shared.connections[0].sender.get()) == "direct"; });
  }
}

TEST_CASE("a shared queue that is empty is waited for, and one connection of many can go at any time") {
  Service service;
  service.start(with_direct);
  Shared shared(3);
  for (std::size_t i = 0; i < 3; ++i)
    if (!shared.become_direct(i)) return;
  for (std::uint64_t round = 0; round < 5; ++round) {
    const std::size_t last = shared.connections.size();
    for (std::size_t i = 0; i < last; ++i) REQUIRE(shared.send(i, round, 4096) == 0);
    ibv_wc none;
    CHECK(ibv_poll_cq(shared.received.get(), 1, &none) == 0);
    for (std::uint64_t i = 0; i < last; ++i) REQUIRE(shared.receive(i) == 0);
    std::set<std::uint64_t> used;
    for (const ibv_wc& wc : collect(shared.received.get(), last)) {
      CHECK(wc.status == IBV_WC_SUCCESS);
      used.insert(wc.wr_id);
    }
    CHECK(used.size() == last);
    for (std::size_t i = 0; i < last; ++i) CHECK(collect(shared.connections[i].cq.get(), 1).front().status == IBV_WC_SUCCESS);
    if (last > 1) shared.connections.pop_back();
    eventually("it is direct again", [&] { return mode_of(shared.connections[0].sender.get()) == "direct"; });
  }
}

namespace {

// Sends into the peer's shared queue without end: messages so long that whoever kills it finds it in the middle of one.
constexpr std::uint32_t long_bytes = 1 << 19;
struct Address {
  std::uint32_t qpn;
  std::uint16_t lid;
};
Address address_of(const ibv_qp* qp) {
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(qp->context, 1, &port) == 0);
  return {qp->qp_num, port.lid};
}
[[noreturn]] void send_for_ever(int said, int heard) {
  const Device device;
  const Pages memory(device);
  const CqPtr cq = make_cq(device, 64);
  const QpPtr qp = make_qp(device, cq.get());
  Address mine = address_of(qp.get()), peer{};
  if (::write(said, &mine, sizeof(mine)) != sizeof(mine) || ::read(heard, &peer, sizeof(peer)) != sizeof(peer)) std::abort();
  connect(qp.get(), peer.qpn, {}, 0, peer.lid);
  for (std::uint64_t number = 0;; ++number) {
    ibv_sge sge = memory.sge(0, long_bytes);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_SEND, wr.send_flags = IBV_SEND_SIGNALED;
    if (ibv_post_send(qp.get(), &wr, &bad) != 0) std::abort();
    ibv_wc wc{};
    for (int got = 0; got == 0;) got = ibv_poll_cq(cq.get(), 1, &wc);
    if (wc.status != IBV_WC_SUCCESS) std::abort();
  }
}

}  // namespace

TEST_CASE("a receive request that a killed poster had taken is used by another one, once") {
  Service service;
  service.start(with_direct);
  constexpr std::uint64_t requests = 16;
  for (int round = 0; round < 6; ++round) {
    int to_child[2], from_child[2];
    REQUIRE((::pipe(to_child) == 0 && ::pipe(from_child) == 0));
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        send_for_ever(from_child[1], to_child[0]);
      } catch (...) {  // a check that failed: this is not the process to go on with the other tests
        ::_exit(1);
      }
    }
    struct Reaper {
      pid_t pid;
      ~Reaper() { end(); }
      void end() {
        if (pid <= 0) return;
        ::kill(pid, SIGKILL);
        ::waitpid(std::exchange(pid, 0), nullptr, 0);
      }
    } reaper{child};
    {
      Shared shared(1);
      QpPtr receiver = make_qp(shared.device, shared.received.get(), 16, shared.srq.get());
      const Address mine = address_of(receiver.get());
      Address peer{};
      REQUIRE(::read(from_child[0], &peer, sizeof(peer)) == sizeof(peer));
      std::set<std::uint64_t> outstanding;
      std::uint64_t posted = 0, arrived = 0;
      const auto post = [&] {
        for (; outstanding.size() < requests; outstanding.insert(posted++)) {
          ibv_sge sge = shared.far.sge(0, long_bytes);
          ibv_recv_wr wr{posted, nullptr, &sge, 1}, *bad = nullptr;
          REQUIRE(ibv_post_srq_recv(shared.srq.get(), &wr, &bad) == 0);
        }
      };
      const auto poll = [&] {
        ibv_wc wc[16];
        const int got = ibv_poll_cq(shared.received.get(), 16, wc);
        for (int i = 0; i < got; ++i) {
          REQUIRE(wc[i].status == IBV_WC_SUCCESS);
          REQUIRE(outstanding.erase(wc[i].wr_id) == 1);
        }
        arrived += static_cast<std::uint64_t>(got);
        return got != 0;
      };
      post();
      connect(receiver.get(), peer.qpn, {}, 0, peer.lid);
      REQUIRE(::write(to_child[1], &mine, sizeof(mine)) == sizeof(mine));
      eventually("messages arrive", [&] { return poll(), post(), arrived > 100 + 37 * static_cast<std::uint64_t>(round); });
      reaper.end();
      eventually("the service knows it, and its connection has ended", [&] {
        return show().at("guests").size() == 1 && mode_of(receiver.get()) == "mediated";
      });
      while (poll()) {
      }
      receiver.reset();  // where the service was at it, the request was for this queue pair's next message
      // All that is outstanding can be used, and no more: the one that comes last waits for a request.
      const std::uint64_t left = outstanding.size();
      for (std::uint64_t i = 0; i < left; ++i) REQUIRE(shared.send(0, i * 2, 4096) == 0);
      eventually("they arrive", [&] { return poll(), outstanding.empty(); });
      for (const ibv_wc& wc : collect(shared.connections[0].cq.get(), left)) CHECK(wc.status == IBV_WC_SUCCESS);
    }
    for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) ::close(fd);
  }
}
