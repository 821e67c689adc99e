// A program without memory, as the library finds it: malloc fails in the midst of a data verb, at its first call, its second, and so on. Verbs that carry
// messages are carried out all the same, and no event is lost.
#include <cerrno>
#include <cstddef>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

// How many calls of this thread's succeed until one fails (0: none does); for_ever: all of them fail.
constexpr int for_ever = -1;
thread_local constinit int until_failure = 0;

bool fails() {
  if (until_failure == 0) return false;
  if (until_failure == for_ever || --until_failure == 0) return errno = ENOMEM, true;
  return false;
}

}  // namespace

extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
// In the program's own symbols, which the library finds first: its operator new comes here, too.
void* malloc(std::size_t bytes) noexcept { return fails() ? nullptr : __libc_malloc(bytes); }
void* calloc(std::size_t count, std::size_t bytes) noexcept { return fails() ? nullptr : __libc_calloc(count, bytes); }
void* realloc(void* memory, std::size_t bytes) noexcept { return fails() ? nullptr : __libc_realloc(memory, bytes); }
}

namespace {

constexpr int done = 0, never_failed = 1, wrong = 2;  // of a child; never_failed: it made fewer calls, or may not be direct here

// A completion, polled for where memory may be short.
bool completes(ibv_cq* cq) {
  ibv_wc wc{};
  int got = 0;
  for (const auto deadline = Clock::now() + std::chrono::seconds(30); got == 0 && Clock::now() < deadline;) got = ibv_poll_cq(cq, 1, &wc);
  return got == 1 && wc.status == IBV_WC_SUCCESS;
}

// What `use` says in a process of its own where the nth call fails, until there are not so many.
template <class Use>
void each_failing_once(const Use& use) {
  int n = 1;
  for (; n < 200; ++n) {
    CAPTURE(n);
    const int said = in_child([&] {
      ::alarm(120);
      return use(n);
    });
    if (said == never_failed) break;
    REQUIRE(said == done);
  }
  CHECK(n < 200);
  MESSAGE("calls: ", n - 1);
}

// Waits for the service's offer before each; without memory for it the service carries the message out.
template <class Message>
int exchange(int n, const ibv_qp* sender, const Message& message) {
  int left = n;
  for (std::size_t number = 0; number < 6; ++number) {
    std::string because;
    eventually("it is offered, or may not be", [&] { return mode_of(sender, &because) == "direct" || is_apart(because) || left == 0; });
    if (is_apart(because)) return never_failed;
    until_failure = left;
    const bool carried_out = message(number);
    left = std::exchange(until_failure, 0);
    if (!carried_out) return wrong;
  }
  return left == 0 ? done : never_failed;
}

}  // namespace

TEST_CASE("A connection that becomes direct without memory carries out what is posted") {
  Service service;
  service.start(with_direct);
  each_failing_once([](int n) {
    Pair pair;
    return exchange(n, pair.a.get(), [&](std::size_t number) {
      const std::size_t at = number * 4096;
      std::memset(pair.near.at(at), 'a' + static_cast<int>(number), 64);
      return pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, number, pair.near.sge(at, 64), at) == 0 && completes(pair.a_cq.get()) &&
             std::memcmp(pair.near.at(at), pair.far.at(at), 64) == 0;
    });
  });
}

TEST_CASE("Datagrams that become direct without memory arrive") {
  Service service;
  service.start(with_direct);
  each_failing_once([](int n) {
    const Device device;
    const Pages near(device), far(device);
    const CqPtr sent = make_cq(device), received = make_cq(device);
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
    constexpr std::uint32_t qkey = 0x1111, grh_bytes = 40;
    const auto make = [&](ibv_cq* cq) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq;
      init.qp_type = IBV_QPT_UD;
      init.cap = {16, 16, 1, 1, 64};
      QpPtr qp(ibv_create_qp(device.pd, &init));
      REQUIRE(qp != nullptr);
      ibv_qp_attr a{};
      a.qp_state = IBV_QPS_INIT;
      a.port_num = 1;
      a.qkey = qkey;
      REQUIRE(ibv_modify_qp(qp.get(), &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
      a.qp_state = IBV_QPS_RTR;
      REQUIRE(ibv_modify_qp(qp.get(), &a, IBV_QP_STATE) == 0);
      a.qp_state = IBV_QPS_RTS;
      REQUIRE(ibv_modify_qp(qp.get(), &a, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
      return qp;
    };
    const QpPtr sender = make(sent.get()), receiver = make(received.get());
    ibv_ah_attr attributes{};
    attributes.dlid = port.lid;
    attributes.port_num = 1;
    ibv_ah* const ah = ibv_create_ah(device.pd, &attributes);
    REQUIRE(ah != nullptr);
    const int said = exchange(n, sender.get(), [&](std::size_t number) {
      ibv_sge into = far.sge(number * 4096, 4096);
      ibv_recv_wr recv{number, nullptr, &into, 1}, *bad_recv = nullptr;
      std::memset(near.at(0), 'a' + static_cast<int>(number), 64);
      ibv_sge from = near.sge(0, 64);
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &from;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_SEND;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.ud = {ah, receiver->qp_num, qkey};
      return ibv_post_recv(receiver.get(), &recv, &bad_recv) == 0 && ibv_post_send(sender.get(), &wr, &bad) == 0 && completes(sent.get()) &&
             completes(received.get()) && std::memcmp(far.at(number * 4096 + grh_bytes), near.at(0), 64) == 0;
    });
    CHECK(ibv_destroy_ah(ah) == 0);
    return said;
  });
}

TEST_CASE("Every event of a channel is read without memory, whether the service, a peer or the arming itself has raised it") {
  for (const char* config : {with_direct, R"({"direct": "mediated"})"}) {
    CAPTURE(config);
    Service service;
    service.start(config);
    CHECK(in_child([] {
            ::alarm(120);
            const Device device;
            const ChannelPtr channel(ibv_create_comp_channel(device.context));
            constexpr std::size_t count = 100;
            std::vector<CqPtr> cqs;
            std::vector<QpPtr> qps;
            for (std::size_t i = 0; i < count; ++i) {
              cqs.push_back(make_cq(device, 16, channel.get()));
              qps.push_back(make_qp(device, cqs.back().get()));
              connect(qps.back().get(), qps.back()->qp_num);
            }
            const auto send_all = [&] {
              for (std::size_t i = 0; i < count; ++i) {
                if (post_recv(device, qps[i].get(), 1) != 0 || post_send(device, qps[i].get(), 2) != 0) return false;
              }
              return true;
            };
            const auto read_all = [&] {
              std::size_t read = 0;
              for (; read < count; ++read) {
                ibv_cq* cq = nullptr;
                void* context = nullptr;
                pollfd ready{channel->fd, POLLIN, 0};
                if (::poll(&ready, 1, 10'000) != 1 || ibv_get_cq_event(channel.get(), &cq, &context) != 0) break;
                ibv_ack_cq_events(cq, 1);
              }
              return read;
            };
            const auto poll_all = [&] {
              for (const CqPtr& cq : cqs)
                if (!completes(cq.get()) || !completes(cq.get())) return false;
              return true;
            };

            for (const CqPtr& cq : cqs)
              if (ibv_req_notify_cq(cq.get(), 0) != 0) return 1;
            if (!send_all()) return 2;
            until_failure = for_ever;
            const std::size_t read = read_all();
            until_failure = 0;
            if (read != count || !poll_all()) return 3;

            // Polled to nothing; then completions come, and are not polled: who arms now is told at once.
            ibv_wc none{};
            for (const CqPtr& cq : cqs)
              if (ibv_poll_cq(cq.get(), 1, &none) != 0) return 4;
            if (!send_all()) return 5;
            std::this_thread::sleep_for(std::chrono::milliseconds(200));  // they have completed by then, or raise events of their own
            until_failure = for_ever;
            bool armed = true;
            for (const CqPtr& cq : cqs) armed &= ibv_req_notify_cq(cq.get(), 0) == 0;
            const std::size_t missed = armed ? read_all() : 0;
            until_failure = 0;
            return missed == count && poll_all() ? 0 : 6;
          }) == 0);
  }
}
