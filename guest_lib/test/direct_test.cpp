// Direct mode: what the posting thread does by itself, shown by a service that is stopped meanwhile.
#include <atomic>
#include <random>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

constexpr std::uint64_t queue_depth = 16;  // what make_qp() asks for

// What "vrdma direct" exits with.
int said(const std::string& words) { return ::system((std::string(VRDMA_PATH) + " direct " + words + " >/dev/null 2>&1").c_str()); }

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

// Requests of one buffer pass the ring by, others go through it, and some have to wait for the service.
TEST_CASE("requests of every shape in every mixture keep their order, and their queue its bounds") {
  Service service;
  service.start(with_direct);
  Pair pair;
  pair.become_direct();
  std::mt19937_64 random(1);
  std::uint64_t sends = 0, receives = 0;
  for (int round = 0; round < 600; ++round) {
    const auto count = 1 + random() % 8;
    ibv_send_wr wrs[8]{};
    ibv_sge sges[8][2];
    for (std::size_t i = 0; i < count; ++i) {
      ibv_send_wr& wr = wrs[i];
      const auto shape = random() % 5;
      const std::size_t at = i * 256;
      const auto bytes = static_cast<std::uint32_t>(shape == 0 ? 0 : 2 + random() % 60);
      std::memset(pair.near.at(at), static_cast<int>(sends + i), 64);
      sges[i][0] = pair.near.sge(at, bytes);
      wr.num_sge = 1;
      if (shape == 1) {
        sges[i][0].length = 1;
        sges[i][1] = pair.near.sge(at + 1, bytes - 1);
        wr.num_sge = 2;
      }
      if (shape == 2) wr.send_flags |= IBV_SEND_INLINE;
      wr.opcode = shape == 3 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND;
      if (shape == 3) wr.wr.rdma = {pair.far.address(8192 + at), pair.far.mr->rkey};
      wr.imm_data = static_cast<std::uint32_t>(sends + i);
      wr.wr_id = sends + i;
      wr.sg_list = sges[i];
      if (i + 1 == count || random() % 3 == 0) wr.send_flags |= IBV_SEND_SIGNALED;
      wr.next = i + 1 == count ? nullptr : &wrs[i + 1];
    }
    const bool late = round % 60 == 59;
    const auto post_receives = [&](std::uint64_t number) {
      for (; number-- != 0; ++receives) REQUIRE(pair.receive(receives, (receives % 16) * 256, 64) == 0);
    };
    post_receives(late ? count / 2 : count);
    ibv_send_wr* bad = nullptr;
    REQUIRE(ibv_post_send(pair.a.get(), wrs, &bad) == 0);
    if (late) post_receives(count - count / 2);
    const auto received = collect(pair.b_cq.get(), count);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(received[i].wr_id == receives - count + i);
      CHECK(received[i].status == IBV_WC_SUCCESS);
      const std::uint32_t bytes = wrs[i].num_sge == 2 ? 1 + sges[i][1].length : sges[i][0].length;
      CHECK(received[i].byte_len == bytes);
      const bool write = wrs[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
      CHECK(received[i].opcode == (write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV));
      if (write) CHECK(received[i].imm_data == sends + i);
      const std::size_t at = write ? 8192 + i * 256 : (received[i].wr_id % 16) * 256;
      for (std::uint32_t byte = 0; byte < bytes; ++byte) REQUIRE(pair.far.at(at)[byte] == static_cast<char>(sends + i));
    }
    std::uint64_t signalled = 0;
    for (std::size_t i = 0; i < count; ++i) signalled += (wrs[i].send_flags & IBV_SEND_SIGNALED) != 0;
    const auto sent = collect(pair.a_cq.get(), signalled);
    for (std::size_t i = 0, next = 0; i < count; ++i) {
      if ((wrs[i].send_flags & IBV_SEND_SIGNALED) == 0) continue;
      CHECK(sent[next].wr_id == sends + i);
      CHECK(sent[next++].status == IBV_WC_SUCCESS);
    }
    sends += count;
  }
  // A request is outstanding until a completion of it or of a later one is polled, also where it was carried out at once.
  eventually("it is direct again", [&] { return mode_of(pair.a.get()) == "direct"; });
  ibv_sge sge = pair.near.sge(0, 8);
  ibv_send_wr wr{}, *bad = nullptr;
  wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_RDMA_WRITE;
  wr.wr.rdma = {pair.far.address(), pair.far.mr->rkey};
  for (int lap = 0; lap < 20; ++lap) {
    int posted = 0;
    for (; posted < 1000; ++posted) {
      wr.send_flags = posted == 9 ? IBV_SEND_SIGNALED : 0;
      if (const int error = ibv_post_send(pair.a.get(), &wr, &bad); error != 0) {
        CHECK(error == ENOMEM);
        break;
      }
    }
    CHECK(posted == (lap % 2 == 0 ? 16 : 10));
    CHECK(collect(pair.a_cq.get(), 1).size() == 1);
  }
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
    const CqPtr cq = make_cq(device);
    const QpPtr alone = make_qp(device, cq.get());
    connect(alone.get(), alone->qp_num);
    std::string because;
    CHECK(mode_of(alone.get(), &because) == "mediated");
    CHECK(because == "connected to itself");
  }
  service.kill_now();
  service.start();
  Pair pair;
  REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(mode_of(pair.a.get()) == "mediated");
}

TEST_CASE("a completion queue that is resized to what its work queues hold leaves them direct, below that they say why not, above it they are again") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const auto message = [&] {
    REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
    CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  };
  REQUIRE(ibv_resize_cq(pair.a_cq.get(), 2 * queue_depth) == 0);
  CHECK(pair.a_cq->cqe >= static_cast<int>(2 * queue_depth));
  eventually("it is direct again", [&] { return message(), mode_of(pair.a.get()) == "direct"; });
  REQUIRE(ibv_resize_cq(pair.a_cq.get(), queue_depth / 2) == 0);
  for (const ibv_qp* const end : {pair.a.get(), pair.b.get()}) {
    std::string because;
    CHECK(mode_of(end, &because) == "mediated");
    CHECK(because == "a completion queue with less room than its work queues");
  }
  message();
  REQUIRE(ibv_resize_cq(pair.a_cq.get(), 4 * queue_depth) == 0);
  eventually("it is direct again", [&] { return message(), mode_of(pair.a.get()) == "direct"; });
}

TEST_CASE("A queue pair more, on a completion queue of several with room for all, takes no connection back") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const auto returned = [] { return show().at("counters").at("direct_returned").get<std::uint64_t>(); };
  const auto message = [&] {
    REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
    CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  };
  const QpPtr second = make_qp(pair.device, pair.a_cq.get());  // from here on its completions have an order
  eventually("it is direct again", [&] { return message(), mode_of(pair.a.get()) == "direct"; });
  const std::uint64_t before = returned();
  const QpPtr third = make_qp(pair.device, pair.a_cq.get());
  CHECK(returned() == before);
  {
    const Stopped stopped(service);
    message();
  }
  // Without room for it, the others are mediated.
  std::vector<QpPtr> many;
  while (many.size() < 64) many.push_back(make_qp(pair.device, pair.a_cq.get()));
  CHECK(mode_of(pair.a.get()) == "mediated");
  message();
  many.clear();
  eventually("it is direct again", [&] { return message(), mode_of(pair.a.get()) == "direct"; });
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

namespace {

// Messages with numbers from one end to the other, each checked where it arrives, until it is told to stop.
class Stream {
 public:
  explicit Stream(const Pair& pair) : thread_([this, &pair] { run(pair); }) {}
  ~Stream() {
    stopping_ = true;
    thread_.join();
  }
  std::uint64_t arrived() const { return arrived_.load(); }

 private:
  void run(const Pair& pair) {
    constexpr std::uint64_t ahead = 8;
    const auto slot = [](std::uint64_t number) { return number % 16 * 64; };
    std::uint64_t receives = 0, sends = 0, sent = 0;
    while (!stopping_ || sent < sends || arrived_.load() < sends) {
      for (; receives < arrived_.load() + 2 * ahead; ++receives)
        if (pair.receive(receives, slot(receives), 64) != 0) std::abort();
      for (; !stopping_ && sends < std::min(sent, arrived_.load()) + ahead; ++sends) {
        std::memcpy(pair.near.at(slot(sends)), &sends, sizeof(sends));
        if (pair.send(sends, slot(sends), 64) != 0) std::abort();
      }
      ibv_wc wc{};
      while (ibv_poll_cq(pair.b_cq.get(), 1, &wc) == 1) {
        const std::uint64_t number = arrived_.load();
        if (wc.status != IBV_WC_SUCCESS || wc.wr_id != number || std::memcmp(pair.far.at(slot(number)), &number, sizeof(number)) != 0) std::abort();
        arrived_.store(number + 1);
      }
      while (ibv_poll_cq(pair.a_cq.get(), 1, &wc) == 1)
        if (wc.status != IBV_WC_SUCCESS || wc.wr_id != sent++) std::abort();
    }
  }

  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> arrived_{0};
  std::thread thread_;
};

// `count` numbered WRITEs of so many bytes, the send queue as full as it can be all the time, each completion looked at.
void flood(const Pair& pair, std::uint32_t bytes, std::uint64_t count, const std::function<bool()>& enough = [] { return false; }) {
  std::uint64_t posted = 0, done = 0;
  const auto slot = [&](std::uint64_t number) { return number % (Pages::bytes / bytes) * bytes; };
  ibv_wc wc[16];
  while (done < posted || (posted < count && !enough())) {
    while (posted < count && posted - done < queue_depth) {
      std::memcpy(pair.near.at(slot(posted)), &posted, sizeof(posted));
      REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, posted, pair.near.sge(slot(posted), bytes), slot(posted)) == 0);
      ++posted;
    }
    const int got = ibv_poll_cq(pair.a_cq.get(), 16, wc);
    for (int i = 0; i < got; ++i, ++done) {
      REQUIRE(wc[i].status == IBV_WC_SUCCESS);
      REQUIRE(wc[i].wr_id == done);
      REQUIRE(std::memcmp(pair.far.at(slot(done)), &done, sizeof(done)) == 0);
    }
  }
}

}  // namespace

TEST_CASE("a send queue that is never empty is handed out in the middle") {
  Service service;
  service.start(with_direct);
  const Pair pair;
  std::atomic<bool> seen{false};
  std::string because;
  std::thread watcher([&] { eventually("it is direct, or may not be", [&] { return mode_of(pair.a.get(), &because) == "direct" || is_apart(because); }), seen = true; });
  flood(pair, 64 << 10, ~0ull, [&] { return seen.load(); });
  watcher.join();
}

TEST_CASE("who polls for the last of many messages takes up what is left of them") {
  Service service;
  service.start(with_direct);
  const Pair pair;
  std::atomic<bool> seen{false};
  std::string because;
  std::thread watcher([&] {
    int in_a_row = 0;  // between two looks it is taken back within 50 us, where nobody takes it up
    eventually("it stays direct, or may not be", [&] {
      in_a_row = mode_of(pair.a.get(), &because) == "direct" ? in_a_row + 1 : 0;
      return in_a_row == 20 || is_apart(because);
    });
    seen = true;
  });
  // Two chains, of which one is always under way; nothing is posted before the last of a chain is done, as by perftest.
  constexpr std::uint32_t chain = queue_depth / 2;
  const ibv_sge all = pair.near.sge(0, Pages::bytes);
  std::uint64_t posted = 0, done = 0;
  const auto post_chain = [&] {
    std::vector<ibv_send_wr> requests(chain);
    for (std::uint32_t i = 0; i < chain; ++i) {
      requests[i].wr_id = posted++;
      requests[i].next = i + 1 < chain ? &requests[i + 1] : nullptr;
      requests[i].sg_list = const_cast<ibv_sge*>(&all);
      requests[i].num_sge = 1;
      requests[i].opcode = IBV_WR_RDMA_WRITE;
      requests[i].send_flags = i + 1 < chain ? 0 : IBV_SEND_SIGNALED;
      requests[i].wr.rdma = {pair.far.address(0), pair.far.mr->rkey};
    }
    ibv_send_wr* bad = nullptr;
    REQUIRE(ibv_post_send(pair.a.get(), requests.data(), &bad) == 0);
  };
  while (!seen || done < posted) {
    while (!seen && posted - done < queue_depth) post_chain();
    for (const ibv_wc& completion : collect(pair.a_cq.get(), 1)) {
      REQUIRE(completion.status == IBV_WC_SUCCESS);
      REQUIRE(completion.wr_id == (done += chain) - 1);
    }
  }
  watcher.join();
}

TEST_CASE("what is in a send queue when it is handed out is carried out, whether its poster comes back or not") {
  Service service;
  service.start(with_direct);
  const Pair pair;
  if (!pair.become_direct()) return;
  std::atomic<bool> stopping{false};
  std::thread asker([&] {  // each answer takes the connection back
    while (!stopping) {
      ibv_qp_attr attributes{};
      ibv_qp_init_attr initial{};
      if (ibv_query_qp(pair.a.get(), &attributes, IBV_QP_STATE, &initial) != 0) std::abort();
      for (int i = 0; i < 50 && !stopping; ++i) std::this_thread::yield();
    }
  });
  std::mt19937 random(20261123);
  for (int round = 0; round < 4000; ++round) flood(pair, 64, random() % (8 * queue_depth));
  stopping = true;
  asker.join();
}

TEST_CASE("a connection changes over between direct and mediated while messages flow, by a command") {
  Service service;
  service.start(with_direct);
  Pair pair;
  const Stream stream(pair);
  eventually("it becomes direct by itself", [&] { return mode_of(pair.a.get()) == "direct" && stream.arrived() > 1000; });
  const auto guests = show().at("guests");
  REQUIRE(guests.size() == 1);
  const std::string one = " --guest " + std::to_string(guests.at(0).at("guest").get<int>());
  std::string because;
  for (int round = 0; round < 8; ++round) {
    const std::string whose = round % 2 != 0 ? one : "";
    REQUIRE(said("mediated" + whose) == 0);
    eventually("it is mediated", [&] { return mode_of(pair.a.get(), &because) == "mediated"; });
    std::uint64_t then = stream.arrived();
    eventually("messages flow", [&] { return stream.arrived() > then + 100; });
    CHECK(mode_of(pair.a.get(), &because) == "mediated");
    CHECK(because == "\"vrdma direct mediated\" was said");
    REQUIRE(said("auto" + whose) == 0);
    eventually("it is direct", [&] { return mode_of(pair.a.get()) == "direct"; });
    then = stream.arrived();
    eventually("messages flow", [&] { return stream.arrived() > then + 100; });
  }
  CHECK(said("mediated --guest 4000") != 0);
}

TEST_CASE("what was said of a guest's direct mode can be taken back once it is gone") {
  Service service;
  service.start(with_direct);
  const auto guests = [] { return show().at("guests").size(); };
  const pid_t passing = ::fork();
  if (passing == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const Device device;
    while (true) ::pause();
  }
  eventually("a guest is there", [&] { return guests() == 1; });
  CHECK(said("mediated") == 0);
  ::kill(passing, SIGKILL);
  ::waitpid(passing, nullptr, 0);
  eventually("the guest has left", [&] { return guests() == 0; });
  CHECK(said("auto") == 0);
  const Pair pair;
  pair.become_direct();
}

TEST_CASE("guests are mediated where that was said before they came") {
  Service service;
  service.start(with_direct);
  REQUIRE(said("mediated") == 0);
  const Pair pair;
  std::string because;
  CHECK(mode_of(pair.a.get(), &because) == "mediated");
  CHECK(because == "\"vrdma direct mediated\" was said");
  REQUIRE(said("auto") == 0);
  pair.become_direct();
}
