// Direct mode: what the posting thread does by itself, shown by a service that is stopped meanwhile.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "guest_lib/test/service_fixture.hpp"
#include "guest_lib/test/shown.hpp"

using namespace vrdma::test;

namespace {

constexpr const char* with_direct = R"({"direct": "auto"})";

std::string mode_of(const ibv_qp* qp, std::string* because = nullptr) {
  const auto shown = show();
  for (const auto& guest : shown.at("guests"))
    for (const auto& one : guest.at("qps")) {
      if (one.at("qpn") != qp->qp_num) continue;
      if (because != nullptr && one.at("mediated_because").is_string()) *because = one.at("mediated_because");
      return one.at("mode");
    }
  return "none";
}

// Whole pages, which move to the memory window.
class Pages {
 public:
  static constexpr std::size_t bytes = 1 << 20;
  explicit Pages(const Device& device) {
    memory_ = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    mr = ibv_reg_mr(device.pd, memory_, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    REQUIRE(mr != nullptr);
  }
  ~Pages() {
    if (mr != nullptr) CHECK(ibv_dereg_mr(mr) == 0);
    ::munmap(memory_, bytes);
  }
  Pages(const Pages&) = delete;
  char* at(std::size_t offset) const { return memory_ + offset; }
  std::uint64_t address(std::size_t offset = 0) const { return reinterpret_cast<std::uintptr_t>(memory_ + offset); }
  ibv_sge sge(std::size_t offset, std::uint32_t length) const { return {address(offset), length, mr->lkey}; }

  ibv_mr* mr = nullptr;

 private:
  char* memory_;
};

struct Pair {
  explicit Pair(Patience patience = {}) {
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
  int post(ibv_qp* qp, ibv_wr_opcode opcode, std::uint64_t wr_id, ibv_sge sge, std::size_t remote, std::uint64_t operand = 0) const {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
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
  static bool is_apart(const std::string& because) {  // vmkernel_svc/direct/trust.cpp
    for (const char* start : {"a process ", "the processes ", "the user namespace "})
      if (because.starts_with(start)) return true;
    return false;
  }

  Device device;
  Pages near{device}, far{device};
  CqPtr a_cq = make_cq(device), b_cq = make_cq(device);
  QpPtr a = make_qp(device, a_cq.get()), b = make_qp(device, b_cq.get());
};

// The service does nothing for as long as this lives.
class Stopped {
 public:
  explicit Stopped(const Service& service) : pid_(service.pid()) {
    REQUIRE(::kill(pid_, SIGSTOP) == 0);
    int status = 0;
    REQUIRE(::waitpid(pid_, &status, WUNTRACED) == pid_);
    REQUIRE(WIFSTOPPED(status));
  }
  ~Stopped() { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_;
};

}  // namespace

TEST_CASE("direct queue pairs need no service for messages, writes, reads and atomics") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const Stopped stopped(service);
  for (std::uint64_t i = 0; i < 40; ++i) {
    std::snprintf(pair.near.at(4096), 64, "message %d", static_cast<int>(i));
    REQUIRE(pair.receive(100 + i, 8192, 64) == 0);
    REQUIRE(pair.send(i, 4096, 64) == 0);
    const auto received = collect(pair.b_cq.get(), 1).front(), sent = collect(pair.a_cq.get(), 1).front();
    CHECK(received.wr_id == 100 + i);
    CHECK(received.status == IBV_WC_SUCCESS);
    CHECK(received.byte_len == 64);
    CHECK(sent.wr_id == i);
    CHECK(sent.status == IBV_WC_SUCCESS);
    CHECK(std::strcmp(pair.near.at(4096), pair.far.at(8192)) == 0);
  }
  std::memset(pair.near.at(0), 0x5a, 200'000);
  REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 200'000), 100) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(pair.far.at(100), pair.near.at(0), 200'000) == 0);
  std::strcpy(pair.far.at(500'000), "to be read");
  REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_READ, 2, pair.near.sge(300'000, 16), 500'000) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(std::strcmp(pair.near.at(300'000), "to be read") == 0);
  std::uint64_t counter = 40;
  std::memcpy(pair.far.at(512), &counter, sizeof(counter));
  REQUIRE(pair.post(pair.a.get(), IBV_WR_ATOMIC_FETCH_AND_ADD, 3, pair.near.sge(1024, 8), 512, 2) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().opcode == IBV_WC_FETCH_ADD);
  std::memcpy(&counter, pair.near.at(1024), sizeof(counter));
  CHECK(counter == 40);
  std::memcpy(&counter, pair.far.at(512), sizeof(counter));
  CHECK(counter == 42);
}

TEST_CASE("what the posting thread cannot do the service does, and gives the connection back") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  for (std::uint64_t round = 0; round < 3; ++round) {
    // No receive WQE: the service waits for one.
    for (std::uint64_t i = 0; i < 5; ++i) REQUIRE(pair.send(round * 10 + i, 0, 32) == 0);
    ibv_wc none;
    CHECK(ibv_poll_cq(pair.b_cq.get(), 1, &none) == 0);
    for (std::uint64_t i = 0; i < 5; ++i) REQUIRE(pair.receive(i, 0, 32) == 0);
    const auto received = collect(pair.b_cq.get(), 5), sent = collect(pair.a_cq.get(), 5);
    for (std::uint64_t i = 0; i < 5; ++i) {
      CHECK(received[i].wr_id == i);
      CHECK(received[i].status == IBV_WC_SUCCESS);
      CHECK(sent[i].wr_id == round * 10 + i);
      CHECK(sent[i].status == IBV_WC_SUCCESS);
    }
    eventually("it is direct again", [&] { return mode_of(pair.a.get()) == "direct"; });
  }
}

TEST_CASE("after a deregistration nothing is written through its key, by whoever posts") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const std::uint32_t rkey = pair.far.mr->rkey;
  pair.far.at(0)[0] = 7;
  REQUIRE(ibv_dereg_mr(std::exchange(pair.far.mr, nullptr)) == 0);
  std::memset(pair.near.at(0), 1, 8);
  REQUIRE(post_write(pair.a.get(), pair.near.sge(0, 8), pair.far.address(), rkey) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_REM_ACCESS_ERR);
  CHECK(pair.far.at(0)[0] == 7);
  CHECK(mode_of(pair.a.get()) == "mediated");
}

TEST_CASE("a direct connection is taken back by RESET, ERR and the service's death") {
  Service service;
  service.start(with_direct);
  {
    Pair pair;
    if (!pair.become_direct()) return;
    REQUIRE(pair.receive(5, 0, 8) == 0);
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    REQUIRE(ibv_modify_qp(pair.b.get(), &error, IBV_QP_STATE) == 0);
    const auto flushed = collect(pair.b_cq.get(), 1).front();
    CHECK(flushed.wr_id == 5);
    CHECK(flushed.status == IBV_WC_WR_FLUSH_ERR);
    CHECK(mode_of(pair.a.get()) == "mediated");
  }
  Pair pair;
  if (!pair.become_direct()) return;
  REQUIRE(pair.receive(6, 0, 8) == 0);
  service.kill_now();
  REQUIRE(pair.send(7, 0, 8) == 0);
  const auto sent = collect(pair.a_cq.get(), 1).front(), received = collect(pair.b_cq.get(), 1).front();
  CHECK(sent.status == IBV_WC_WR_FLUSH_ERR);
  CHECK(received.status == IBV_WC_WR_FLUSH_ERR);
}

TEST_CASE("what is not for direct mode stays mediated, and says why") {
  Service service;
  service.start(with_direct);
  {
    Device device;
    const ChannelPtr channel(ibv_create_comp_channel(device.context));
    const CqPtr cq = make_cq(device, 64, channel.get());
    const QpPtr a = make_qp(device, cq.get()), b = make_qp(device, cq.get());
    connect(a.get(), b->qp_num);
    connect(b.get(), a->qp_num);
    std::string because;
    CHECK(mode_of(a.get(), &because) == "mediated");
    CHECK(because == "a completion channel");
  }
  service.kill_now();
  service.start();
  Pair pair;
  REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(mode_of(pair.a.get()) == "mediated");
}

namespace {

// Writes a number that grows to the far end's first bytes, one WRITE after another, until one fails.
class Writer {
 public:
  explicit Writer(const Pair& pair) : address_(pair.far.address()), rkey_(pair.far.mr->rkey), thread_([this, &pair] { run(pair); }) {
    eventually("it writes", [this] { return written_.load() > 1000; });
  }
  ibv_wc_status end() {
    thread_.join();
    return status_;
  }

 private:
  void run(const Pair& pair) {
    const auto number = reinterpret_cast<std::uint64_t*>(pair.near.at(0));
    ibv_sge sge = pair.near.sge(0, 8);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma = {address_, rkey_};
    while (status_ == IBV_WC_SUCCESS) {
      ++*number;
      if (ibv_post_send(pair.a.get(), &wr, &bad) != 0) std::abort();
      ibv_wc wc{};
      for (int got = 0; got == 0;) got = ibv_poll_cq(pair.a_cq.get(), 1, &wc);
      status_ = wc.status;
      written_.fetch_add(1);
    }
  }

  std::uint64_t address_;
  std::uint32_t rkey_;
  std::atomic<std::uint64_t> written_{0};
  ibv_wc_status status_ = IBV_WC_SUCCESS;
  std::thread thread_;
};

constexpr Patience short_patience{12, 2, 7};

}  // namespace

TEST_CASE("after ibv_dereg_mr has returned, a peer that posts without end writes nothing more") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  Writer writer(pair);
  REQUIRE(ibv_dereg_mr(std::exchange(pair.far.mr, nullptr)) == 0);
  std::uint64_t then = 0, later = 0;
  std::memcpy(&then, pair.far.at(0), sizeof(then));
  CHECK(writer.end() == IBV_WC_REM_ACCESS_ERR);
  std::memcpy(&later, pair.far.at(0), sizeof(later));
  CHECK(later == then);
  CHECK(then > 1000);
}

TEST_CASE("a queue pair is reset and destroyed while its peer posts without end") {
  Service service;
  service.start(with_direct);
  for (const bool destroy : {false, true}) {
    Pair pair(short_patience);
    if (!pair.become_direct()) return;
    Writer writer(pair);
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RESET;
    if (destroy) pair.b.reset();
    else REQUIRE(ibv_modify_qp(pair.b.get(), &attributes, IBV_QP_STATE) == 0);
    std::uint64_t then = 0, later = 0;
    std::memcpy(&then, pair.far.at(0), sizeof(then));
    CHECK(writer.end() == IBV_WC_RETRY_EXC_ERR);
    std::memcpy(&later, pair.far.at(0), sizeof(later));
    CHECK(later == then);
  }
}
