// How many of its events were read, as whoever ends an identifier or a membership is told: librdmacm frees it when so many were acknowledged.
#include <poll.h>

#include <array>
#include <vector>

#include "guest_lib/test/cm_channel.hpp"
#include "guest_lib/test/service_fixture.hpp"
#include "vmci_channel/arch.hpp"

using namespace vrdma::test;

namespace {

constexpr std::uint64_t rounds = 4000;

// Threads that read a channel's events, as fast as they come.
class Readers {
 public:
  explicit Readers(const CmChannel& channel) {
    for (auto& one : threads_)
      one = std::thread([this, &channel] {
        while (!leave_) {
          pollfd ready{channel.fd, POLLIN, 0};
          rdma_ucm_event_resp event{};
          if (::poll(&ready, 1, 100) == 1 && channel.next_event(event) > 0 && event.uid < rounds) ++read_[event.uid];
        }
      });
  }
  ~Readers() { join(); }
  void join() {
    leave_ = true;
    for (auto& one : threads_)
      if (one.joinable()) one.join();
  }
  // Until that event was read, or for a while.
  void give_time(std::uint64_t round, std::uint64_t looks) const {
    for (std::uint64_t i = 0; i < looks && read_[round] == 0; ++i) vmci::cpu_relax();
  }
  // Of how many more were read than whoever ended them was told.
  std::uint64_t wrong(const std::vector<std::uint32_t>& told) const {
    std::uint64_t count = 0;
    for (std::uint64_t i = 0; i < rounds; ++i) count += read_[i] > told[i];
    return count;
  }

 private:
  std::vector<std::atomic<std::uint32_t>> read_ = std::vector<std::atomic<std::uint32_t>>(rounds);
  std::atomic<bool> leave_ = false;
  std::array<std::thread, 3> threads_;
};

}  // namespace

TEST_CASE("Who destroys an identifier while others read its events is told of each that was read") {
  Service service;
  service.start();
  const CmChannel channel(O_NONBLOCK);
  Readers readers(channel);
  std::vector<std::uint32_t> told(rounds);
  for (std::uint64_t i = 1; i < rounds; ++i) {
    const std::uint32_t id = channel.create(i);
    channel.resolve(id);
    readers.give_time(i, i % 8 * 100);
    told[i] = channel.end(RDMA_USER_CM_CMD_DESTROY_ID, id);
  }
  readers.join();
  CHECK(readers.wrong(told) == 0);
  ::close(channel.fd);
}

TEST_CASE("In no time no route is found, and the identifier may ask again") {
  Service service;
  service.start();
  const CmChannel channel;
  const std::uint32_t id = channel.create(1);
  channel.resolve(id);
  CHECK(channel.next_event() > 0);
  rdma_ucm_resolve_route command{};
  command.id = id;
  CHECK(say(channel.fd, RDMA_USER_CM_CMD_RESOLVE_ROUTE, command) == -1);
  CHECK(errno == EINVAL);
  command.timeout_ms = 1;
  CHECK(say(channel.fd, RDMA_USER_CM_CMD_RESOLVE_ROUTE, command) > 0);
  ::close(channel.fd);
}

TEST_CASE("Options of identifiers are refused as by the kernel") {
  Service service;
  service.start();
  const CmChannel channel;
  const std::uint32_t id = channel.create(1);
  std::int32_t value = 1;
  const auto set = [&](std::uint32_t level, std::uint32_t name, std::uint32_t bytes, const void* at) {
    rdma_ucm_set_option command{};
    command.optval = reinterpret_cast<std::uintptr_t>(at);
    command.id = id;
    command.level = level;
    command.optname = name;
    command.optlen = bytes;
    return say(channel.fd, RDMA_USER_CM_CMD_SET_OPTION, command) > 0 ? 0 : errno;
  };
  for (const std::uint32_t name : {RDMA_OPTION_ID_TOS, RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_ACK_TIMEOUT}) {
    CAPTURE(name);
    const std::uint32_t bytes = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT ? 1 : 4;
    CHECK(set(RDMA_OPTION_ID, name, bytes, &value) == 0);
    CHECK(set(RDMA_OPTION_ID, name, 5 - bytes, &value) == EINVAL);
    CHECK(set(RDMA_OPTION_ID, name, bytes, nullptr) == EFAULT);
    CHECK(set(RDMA_OPTION_ID, name, 0, nullptr) == EINVAL);
  }
  for (const std::uint32_t bytes : {1u, 2u, 4u}) CHECK(set(RDMA_OPTION_ID, 77, bytes, &value) == ENOSYS);
  CHECK(set(77, RDMA_OPTION_ID_TOS, 1, &value) == ENOSYS);
  CHECK(set(RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, 4, nullptr) == EFAULT);
  ::close(channel.fd);
}

TEST_CASE("Who closes a channel whose last event another thread is taking waits for nobody") {
  Service service;
  service.start();
  for (int round = 0; round < 500; ++round) {
    const CmChannel channel(O_NONBLOCK);
    channel.resolve(channel.create(1));
    std::atomic<bool> begun = false;
    std::thread reader([&] {
      begun = true;
      while (channel.next_event() < 0 && errno == EAGAIN) {  // who has read one and asks for more, of a channel that is closed, waits for ever
      }
    });
    while (!begun) {
    }
    for (int i = 0; i < round % 60 * 20; ++i) vmci::cpu_relax();
    ::close(channel.fd);
    reader.join();
  }
}

TEST_CASE("Who leaves a multicast group while others read the event of joining is told of it, and so is who destroys the identifier") {
  Service service;
  service.start();
  const CmChannel channel(O_NONBLOCK);
  const std::uint32_t id = channel.create(rounds, RDMA_PS_UDP);
  channel.bind(id);
  std::vector<std::uint32_t> told(rounds);
  std::uint64_t all = 0;
  {
    Readers readers(channel);
    for (std::uint64_t i = 1; i < rounds; ++i) {
      const std::uint32_t membership = channel.join(id, i, 0xe0000105);
      readers.give_time(i, 20'000);
      all += told[i] = channel.end(RDMA_USER_CM_CMD_LEAVE_MCAST, membership);
    }
    readers.join();
    CHECK(readers.wrong(told) == 0);
  }
  CHECK(channel.end(RDMA_USER_CM_CMD_DESTROY_ID, id) >= all);
  ::close(channel.fd);
}
