// A program short of descriptors is refused with EMFILE, and leaves nothing behind in the service, which would charge it until it exits.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include <filesystem>
#include <iterator>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr int attempts = 50;

std::size_t files_of(const Service& service) {
  const std::filesystem::directory_iterator files("/proc/" + std::to_string(service.pid()) + "/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

// While it is there, this process may open so many descriptors more.
class Shortage {
 public:
  explicit Shortage(int free) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit low{300, before_.rlim_max};  // filled up soon
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) filling_.push_back(fd);
    for (; free > 0 && !filling_.empty(); --free) ::close(filling_.back()), filling_.pop_back();
  }
  ~Shortage() {
    for (const int fd : filling_) ::close(fd);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

 private:
  rlimit before_{};
  std::vector<int> filling_;
};

// How many of the attempts to open something failed with EMFILE, and how many files the service has more after them.
struct Outcome {
  int refused = 0;
  long left_behind = 0;
};
template <class Fails>
Outcome try_often(const Service& service, int free, const Fails& fails) {
  const auto before = static_cast<long>(files_of(service));
  Outcome outcome;
  {
    const Shortage shortage(free);
    for (int i = 0; i < attempts; ++i) {
      errno = 0;
      outcome.refused += fails() && errno == EMFILE;
    }
  }
  outcome.left_behind = static_cast<long>(files_of(service)) - before;
  return outcome;
}

}  // namespace

// One comes with the service's answer; an epoll descriptor and one for applications to duplicate are made for it.
TEST_CASE("A device that cannot be opened for want of descriptors leaves no context in the service") {
  Service service;
  service.start();
  const Device device;
  for (const int free : {0, 1, 2}) {
    CAPTURE(free);
    const Outcome outcome = try_often(service, free, [&] { return ibv_open_device(device.context->device) == nullptr; });
    CHECK(outcome.refused == attempts);
    CHECK(outcome.left_behind < attempts);  // each would have left a pipe
  }
  ibv_context* const another = ibv_open_device(device.context->device);
  REQUIRE(another != nullptr);
  CHECK(ibv_close_device(another) == 0);
}

// The same, and one by which the channel is readable while something is kept for it.
TEST_CASE("A completion channel that cannot be made for want of descriptors leaves none in the service") {
  Service service;
  service.start();
  const Device device;
  for (const int free : {0, 1, 2}) {
    CAPTURE(free);
    const Outcome outcome = try_often(service, free, [&] { return ibv_create_comp_channel(device.context) == nullptr; });
    CHECK(outcome.refused == attempts);
    CHECK(outcome.left_behind < attempts);
  }
  const ChannelPtr channel(ibv_create_comp_channel(device.context));
  CHECK(channel != nullptr);
}

TEST_CASE("An event that arming raises, and one that is read as another completion queue is destroyed, wake who sleeps by poll(2) without descriptors") {
  Service service;
  service.start(R"({"direct": "mediated"})");
  const Device device;
  const ChannelPtr channel(ibv_create_comp_channel(device.context));
  const CqPtr cq = make_cq(device, 16, channel.get());
  CqPtr other = make_cq(device, 16, channel.get());
  const QpPtr qp = make_qp(device, cq.get());
  connect(qp.get(), qp->qp_num);
  const auto loop = [&](std::uint64_t number) {
    REQUIRE(post_recv(device, qp.get(), number) == 0);
    REQUIRE(post_send(device, qp.get(), number) == 0);
  };
  const auto told = [&] {
    pollfd waiting{channel->fd, POLLIN, 0};
    return ::poll(&waiting, 1, 10'000) == 1;
  };
  const auto read = [&] {
    ibv_cq* of = nullptr;
    void* context = nullptr;
    REQUIRE(ibv_get_cq_event(channel.get(), &of, &context) == 0);
    ibv_ack_cq_events(of, 1);
  };
  loop(1);
  CHECK(collect(cq.get(), 2).size() == 2);
  ibv_wc wc{};
  REQUIRE(ibv_poll_cq(cq.get(), 1, &wc) == 0);  // to nothing; the next two are found by arming
  loop(2);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // else they raise an event of the service's: the test says less then, and passes
  const Shortage shortage(0);
  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);
  REQUIRE(told());
  read();
  CHECK(collect(cq.get(), 2).size() == 2);

  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);
  loop(3);
  CHECK(told());
  other.reset();
  CHECK(told());
  read();
  CHECK(collect(cq.get(), 2).size() == 2);
}

TEST_CASE("A connection manager's channel that cannot be opened for want of descriptors leaves none in the service") {
  Service service;
  service.start();
  const Device device;
  const Outcome outcome = try_often(service, 0, [] { return ::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC) < 0; });
  CHECK(outcome.refused == attempts);
  CHECK(outcome.left_behind < attempts);
}

// Memory of less than a page, which a thread of this process is to copy: the segment for that comes with the service's answer.
TEST_CASE("A registration that was refused for want of descriptors is made when there are some, and is reached") {
  Service service;
  service.start(R"({"process_memory": "guest"})");
  int count = 0;
  ibv_device** const list = ibv_get_device_list(&count);
  REQUIRE(count == 1);
  ibv_context* const context = ibv_open_device(list[0]);
  ibv_free_device_list(list);
  REQUIRE(context != nullptr);
  ibv_pd* const pd = ibv_alloc_pd(context);
  REQUIRE(pd != nullptr);
  alignas(64) static char memory[64];
  const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const auto fails = [&] {
    ibv_mr* const mr = ibv_reg_mr(pd, memory, sizeof(memory), rights);
    return mr == nullptr || (ibv_dereg_mr(mr), false);
  };
  const Outcome outcome = try_often(service, 0, fails);
  CHECK(outcome.refused == attempts);
  CHECK(outcome.left_behind < attempts);
  {
    Device device;  // its ends lie in pages with other memory
    std::strcpy(memory, "before");
    ibv_mr* const mr = ibv_reg_mr(device.pd, memory, sizeof(memory), rights);
    REQUIRE(mr != nullptr);
    {
      const CqPtr cq = make_cq(device);
      const QpPtr a = make_qp(device, cq.get()), b = make_qp(device, cq.get());
      connect(a.get(), b->qp_num);
      connect(b.get(), a->qp_num);
      std::memcpy(device.memory.data(), "after!", sizeof("after!"));
      REQUIRE(post_write(a.get(), device.sge(8), reinterpret_cast<std::uintptr_t>(memory), mr->rkey) == 0);
      CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
    }
    CHECK(std::string(memory) == "after!");
    CHECK(ibv_dereg_mr(mr) == 0);
  }
  CHECK(ibv_dealloc_pd(pd) == 0);
  CHECK(ibv_close_device(context) == 0);
}
