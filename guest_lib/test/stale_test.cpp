// What the service and this library remember (DESIGN.md D9) is never older than what the application did: repeated queries cost
// no request, and in seeded interleavings of look-ups with ibv_dereg_mr, ibv_rereg_mr, ibv_destroy_qp and re-creation
// nothing reaches memory or a queue pair that is not meant any more.
#include <nlohmann/json.hpp>

#include <cstdio>
#include <map>
#include <random>

#include "guest_lib/test/service_fixture.hpp"
#include "guest_lib/test/shown.hpp"

using namespace vrdma::test;

namespace {

std::uint64_t requests_served() {
  std::uint64_t sum = 0;
  for (const auto& guest : show("guests")) sum += guest["requests"].get<std::uint64_t>();
  return sum;
}

constexpr unsigned every_right = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

// Two ends of a connection within one process; rebuilt after every error.
struct Connection {
  CqPtr cq;
  QpPtr requester, responder;

  explicit Connection(const Device& device) : cq(make_cq(device)), requester(make_qp(device, cq.get())), responder(make_qp(device, cq.get())) {
    connect(requester.get(), responder->qp_num, {.timeout = 1, .retry_cnt = 0});
    connect(responder.get(), requester->qp_num);
  }

  ibv_wc_status write(ibv_sge from, std::uint64_t address, std::uint32_t rkey) {
    REQUIRE(post_write(requester.get(), from, address, rkey) == 0);
    return collect(cq.get(), 1)[0].status;
  }
};

struct Target {
  std::vector<std::uint64_t> memory = std::vector<std::uint64_t>(1024);
  ibv_mr* mr = nullptr;
  bool writable = false;
  std::uint64_t* word() { return memory.data() + 512; }
};

}  // namespace

TEST_CASE("a repeated query sends no request") {
  Service service;
  service.start();
  Device device;
  const auto ask_everything = [&] {
    ibv_device_attr attributes{};
    ibv_port_attr port{};
    ibv_gid gid{};
    __be16 pkey = 0;
    REQUIRE(ibv_query_device(device.context, &attributes) == 0);
    REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
    REQUIRE(ibv_query_gid(device.context, 1, 0, &gid) == 0);
    REQUIRE(ibv_query_pkey(device.context, 1, 0, &pkey) == 0);
  };
  ask_everything();
  const std::uint64_t before = requests_served();
  CHECK(before > 0);
  for (int i = 0; i < 1000; ++i) ask_everything();
  CHECK(requests_served() == before);
}

TEST_CASE("a key that was taken back, or that means less now, opens nothing, whoever used it a moment ago") {
  Service service;
  service.start();
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Device device;
    auto connection = std::make_unique<Connection>(device);
    std::vector<Target> targets(6);
    std::vector<std::uint32_t> dead_keys;
    std::uint64_t value = 0;
    const auto expect = [&](Target& target, std::uint32_t rkey, bool allowed) {
      const std::uint64_t old = *target.word();
      *reinterpret_cast<std::uint64_t*>(device.memory.data()) = ++value;
      const ibv_wc_status status = connection->write(device.sge(), reinterpret_cast<std::uintptr_t>(target.word()), rkey);
      REQUIRE(status == (allowed ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR));
      REQUIRE(*target.word() == (allowed ? value : old));
      if (!allowed) connection = std::make_unique<Connection>(device);
    };
    for (int step = 0; step < 250; ++step) {
      Target& target = targets[random() % targets.size()];
      const auto choice = random() % 10;
      if (target.mr == nullptr) {
        target.writable = true;
        target.mr = ibv_reg_mr(device.pd, target.memory.data(), target.memory.size() * 8, every_right);
        REQUIRE(target.mr != nullptr);
      } else if (choice == 0) {
        dead_keys.push_back(target.mr->rkey);
        REQUIRE(ibv_dereg_mr(std::exchange(target.mr, nullptr)) == 0);
        expect(target, dead_keys.back(), false);
      } else if (choice == 1) {
        target.writable = !target.writable;
        REQUIRE(ibv_rereg_mr(target.mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0,
                             target.writable ? static_cast<int>(every_right) : static_cast<int>(IBV_ACCESS_LOCAL_WRITE)) == 0);
      } else if (choice == 2 && !dead_keys.empty()) {
        const std::uint32_t key = dead_keys[random() % dead_keys.size()];
        const bool alive_again = std::ranges::any_of(targets, [&](const Target& t) { return t.mr != nullptr && t.mr->rkey == key; });
        if (!alive_again) expect(target, key, false);
      } else {
        expect(target, target.mr->rkey, target.writable);
      }
    }
    connection.reset();
    for (Target& target : targets)
      if (target.mr != nullptr) CHECK(ibv_dereg_mr(target.mr) == 0);
  }
  CHECK(show("cache")["keys"]["hits"].get<std::uint64_t>() > 0);
}

TEST_CASE("a queue pair that was destroyed is not there any more, and the next one is not mistaken for it") {
  Service service;
  service.start();
  std::uint64_t value = 0;
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Device device;
    auto connection = std::make_unique<Connection>(device);
    auto* const word = reinterpret_cast<std::uint64_t*>(device.memory.data()) + 64;
    for (int step = 0; step < 150; ++step) {
      if (random() % 8 == 0) {
        connection->responder.reset();
        if (random() % 2 == 0) {  // somebody else comes: under the old number or not, it is not connected to us
          connection->responder = make_qp(device, connection->cq.get());
        }
        REQUIRE(connection->write(device.sge(), reinterpret_cast<std::uintptr_t>(word), device.mr->rkey) == IBV_WC_RETRY_EXC_ERR);
        REQUIRE(*word == value);
        connection = std::make_unique<Connection>(device);
      } else {
        *reinterpret_cast<std::uint64_t*>(device.memory.data()) = ++value;
        REQUIRE(connection->write(device.sge(), reinterpret_cast<std::uintptr_t>(word), device.mr->rkey) == IBV_WC_SUCCESS);
        REQUIRE(*word == value);
      }
    }
    value = 0;
  }
}
