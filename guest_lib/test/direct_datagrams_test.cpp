// Datagrams in direct mode, shown by a service that is stopped meanwhile.
#include <fstream>
#include <sstream>

#include "guest_lib/test/direct_fixture.hpp"
#include "vrdma/direct.hpp"

using namespace vrdma::test;

namespace {

constexpr std::uint32_t qkey = 0x1111, depth = 32, grh_bytes = 40, slot_bytes = 8192;

struct AhDeleter {
  void operator()(ibv_ah* ah) const { CHECK(ibv_destroy_ah(ah) == 0); }
};
// Queue pairs of one process that send to one receiver; each has a completion queue of its own.
struct Letters {
  explicit Letters(bool shared_receives = false) {
    ibv_srq_init_attr init{};
    init.attr = {depth, 1, 0};
    if (shared_receives) srq.reset(ibv_create_srq(device.pd, &init));
    receiver = make(received.get(), srq.get());
    for (std::size_t i = 0; i < 2; ++i) {
      cqs.push_back(make_cq(device, depth));
      senders.push_back(make(cqs.back().get(), nullptr));
    }
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
    ibv_ah_attr attributes{};
    attributes.dlid = port.lid;
    attributes.port_num = 1;
    ah.reset(ibv_create_ah(device.pd, &attributes));
    REQUIRE(ah != nullptr);
  }
  QpPtr make(ibv_cq* cq, ibv_srq* shared) const {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.srq = shared;
    init.qp_type = IBV_QPT_UD;
    init.cap = {depth / 2, depth / 2, 2, 2, 64};
    QpPtr qp(ibv_create_qp(device.pd, &init));
    REQUIRE(qp != nullptr);
    bring_up(qp.get());
    return qp;
  }
  static void bring_up(ibv_qp* qp) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qkey = qkey;
    REQUIRE(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
    a.qp_state = IBV_QPS_RTR;
    REQUIRE(ibv_modify_qp(qp, &a, IBV_QP_STATE) == 0);
    a.qp_state = IBV_QPS_RTS;
    REQUIRE(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
  }
  int receive(std::uint64_t number) const {
    ibv_sge sge = far.sge(number % depth * slot_bytes, slot_bytes);
    ibv_recv_wr wr{number, nullptr, &sge, 1}, *bad = nullptr;
    return srq ? ibv_post_srq_recv(srq.get(), &wr, &bad) : ibv_post_recv(receiver.get(), &wr, &bad);
  }
  // bytes of `near` whose first ones say which number it is. Every third in two pieces, every fourth inline where it fits.
  int send(std::size_t sender, std::uint64_t number, std::uint32_t bytes, std::uint32_t key = qkey) const {
    std::memset(near.at(0), static_cast<int>(number), bytes);
    ibv_sge sges[2] = {near.sge(0, bytes), near.sge(bytes / 2, bytes - bytes / 2)};
    ibv_send_wr wr{}, *bad = nullptr;
    wr.wr_id = number;
    wr.sg_list = sges;
    wr.num_sge = 1;
    if (number % 3 == 0) wr.num_sge = 2, sges[0].length = bytes / 2;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.imm_data = static_cast<std::uint32_t>(number);
    wr.send_flags = IBV_SEND_SIGNALED;
    if (number % 4 == 0 && bytes <= 64) wr.send_flags |= IBV_SEND_INLINE;
    wr.wr.ud = {ah.get(), receiver->qp_num, key};
    return ibv_post_send(senders[sender].get(), &wr, &bad);
  }
  void check_sent(std::size_t sender, std::uint64_t number) const {
    const auto sent = collect(cqs[sender].get(), 1).front();
    CHECK(sent.status == IBV_WC_SUCCESS);
    CHECK(sent.wr_id == number);
  }
  void exchange(std::size_t sender, std::uint64_t number, std::uint32_t bytes) const {
    REQUIRE(receive(number) == 0);
    REQUIRE(send(sender, number, bytes) == 0);
    const auto got = collect(received.get(), 1).front();
    check_sent(sender, number);
    CHECK(got.status == IBV_WC_SUCCESS);
    CHECK(got.wr_id == number);
    CHECK(got.byte_len == grh_bytes + bytes);
    CHECK(got.imm_data == number);
    CHECK(got.src_qp == senders[sender]->qp_num);
    REQUIRE(std::memcmp(far.at(number % depth * slot_bytes + grh_bytes), near.at(0), bytes) == 0);
  }
  // Until senders go past the service, with all memory mapped. False: nobody can be direct here, as is said aloud.
  bool become_direct() const {
    const auto returned = [] { return show().at("counters").at("direct_returned").get<std::uint64_t>(); };
    std::uint64_t number = 0, alone = 0;  // exchanges of late that went past the service
    const auto deadline = Clock::now() + std::chrono::minutes(1);
    for (; alone < 8; ++number) {
      std::string because;
      eventually("the sender is direct, or may not be", [&] { return mode_of(senders[number % 2].get(), &because) == "direct" || is_apart(because); });
      if (is_apart(because)) {
        MESSAGE("SKIP: processes cannot be direct here: ", because);
        return false;
      }
      const std::uint64_t before = returned();
      exchange(number % 2, number, 64);
      alone = returned() == before ? alone + 1 : 0;
      if (Clock::now() > deadline) FAIL("datagrams go by the service for good");
    }
    return true;
  }

  Device device;
  Pages near{device}, far{device};
  CqPtr received = make_cq(device, 4 * depth);
  std::unique_ptr<ibv_srq, SrqDeleter> srq;
  std::vector<CqPtr> cqs;
  std::vector<QpPtr> senders;
  std::unique_ptr<ibv_ah, AhDeleter> ah;
  QpPtr receiver;  // gone before its SRQ
};

void exchange_without(const Service& service, const Letters& letters) {
  const Stopped stopped(service);
  for (std::uint64_t number = 0; number < 60; ++number)
    letters.exchange(number % 2, number, std::array<std::uint32_t, 5>{1, 0, 64, 1000, 4096}[number % 5]);
}

// The words of all directions of this process with itself.
vrdma::direct::Room* own_room() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("vrdma-direct") == std::string::npos || line.find("rw-s") == std::string::npos) continue;
    std::uintptr_t begin = 0;
    std::istringstream(line) >> std::hex >> begin;
    return reinterpret_cast<vrdma::direct::Room*>(begin);
  }
  FAIL("no room is mapped");
  return nullptr;
}

}  // namespace

TEST_CASE("datagrams need no service, of whatever size and in whatever pieces") {
  Service service;
  service.start(with_direct);
  for (const bool shared : {false, true}) {
    CAPTURE(shared);
    Letters letters(shared);
    if (!letters.become_direct()) return;
    exchange_without(service, letters);
  }
}

TEST_CASE("a receiver of datagrams that is changed, taken down and made anew gets what is meant for it as it is then") {
  Service service;
  service.start(with_direct);
  Letters letters;
  if (!letters.become_direct()) return;
  ibv_qp_attr a{};
  a.qkey = 0x2222;
  REQUIRE(ibv_modify_qp(letters.receiver.get(), &a, IBV_QP_QKEY) == 0);
  REQUIRE(letters.receive(100) == 0);
  for (std::uint64_t number = 100; number < 104; ++number) {
    REQUIRE(letters.send(0, number, 8) == 0);  // with the Q_Key that it had
    letters.check_sent(0, number);
  }
  REQUIRE(letters.send(0, 104, 8, 0x2222) == 0);
  letters.check_sent(0, 104);
  CHECK(collect(letters.received.get(), 1).front().imm_data == 104);

  REQUIRE(letters.receive(105) == 0);
  a = {};
  a.qp_state = IBV_QPS_ERR;
  REQUIRE(ibv_modify_qp(letters.receiver.get(), &a, IBV_QP_STATE) == 0);
  CHECK(collect(letters.received.get(), 1).front().status == IBV_WC_WR_FLUSH_ERR);
  REQUIRE(letters.send(0, 106, 8) == 0);
  letters.check_sent(0, 106);  // to nobody
  a.qp_state = IBV_QPS_RESET;
  REQUIRE(ibv_modify_qp(letters.receiver.get(), &a, IBV_QP_STATE) == 0);
  Letters::bring_up(letters.receiver.get());
  if (letters.become_direct()) exchange_without(service, letters);

  letters.receiver = letters.make(letters.received.get(), nullptr);
  if (letters.become_direct()) exchange_without(service, letters);
}

TEST_CASE("a receiver whose completion queue gets another queue pair is delivered to directly again") {
  Service service;
  service.start(with_direct);
  Letters letters;
  if (!letters.become_direct()) return;
  const QpPtr other = make_qp(letters.device, letters.received.get());
  if (letters.become_direct()) exchange_without(service, letters);
}

TEST_CASE("nonsense in the claim of an inbox holds nobody up") {
  Service service;
  service.start(with_direct);
  Letters letters;
  if (!letters.become_direct()) return;
  for (const std::uint32_t holder : {2u, 3u, 4u, 5u, 77u}) {
    CAPTURE(holder);
    int spoilt = 0;
    for (std::uint32_t i = 1; i < 64; i += 2) {
      std::atomic_ref claim(own_room()->directions[i].claim);
      const std::uint64_t found = claim.load();
      if (vrdma::direct::holder_of(found) != vrdma::direct::held_by_nobody) continue;
      claim.store((found & ~std::uint64_t{0xffffffff}) | 0xabcdef00u | holder);
      ++spoilt;
    }
    CHECK(spoilt >= 1);
    letters.exchange(0, 200 + holder, 64);
    const std::uint32_t before = letters.receiver->qp_num;
    letters.receiver = letters.make(letters.received.get(), nullptr);
    CHECK(letters.receiver->qp_num != before);
    if (!letters.become_direct()) return;
  }
  exchange_without(service, letters);
}
