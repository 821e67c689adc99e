// A descriptor of /dev/infiniband/umad0 answers as the kernel's does, also where something is wrong.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/ib_user_mad.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "doctest/doctest.h"
#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr std::size_t mad_bytes = 256;

struct Datagram {
  ib_user_mad_hdr head{};
  std::array<std::uint8_t, mad_bytes> mad{};
};

// Get(NodeInfo) of the switch, by its LID (IBA 14.2.5.3).
Datagram node_info(std::uint32_t agent) {
  Datagram out;
  out.head.id = agent;
  out.head.lid = htons(0xbfff);
  out.head.timeout_ms = 10'000;
  out.mad[0] = out.mad[1] = out.mad[2] = out.mad[3] = 1;
  out.mad[15] = 7;
  out.mad[17] = 0x11;
  return out;
}

}  // namespace

TEST_CASE("What is written by nobody, or read with too little room, is the kernel's error, and the answer stays") {
  Service service;
  service.start();
  const int fd = ::open("/dev/infiniband/umad0", O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  REQUIRE(::ioctl(fd, IB_USER_MAD_ENABLE_PKEY) == 0);
  for (const auto& [agent, error] : {std::pair{3u, EIO}, {31u, EIO}, {32u, EINVAL}}) {
    const Datagram stray = node_info(agent);
    CHECK(::write(fd, &stray, sizeof(stray)) == -1);
    CHECK(errno == error);
  }

  ib_user_mad_reg_req wanted{};
  wanted.mgmt_class = wanted.mgmt_class_version = 1;
  REQUIRE(::ioctl(fd, IB_USER_MAD_REGISTER_AGENT, &wanted) == 0);
  const Datagram request = node_info(wanted.id);
  REQUIRE(::write(fd, &request, sizeof(request)) == sizeof(request));
  pollfd readable{fd, POLLIN, 0};
  REQUIRE(::poll(&readable, 1, 60'000) == 1);
  Datagram answer;
  answer.head.id = 77;
  for (const std::size_t room : {sizeof(answer.head) - 1, sizeof(answer.head), sizeof(answer) - 1}) {
    CHECK(::read(fd, &answer, room) == -1);
    CHECK(errno == EINVAL);
    CHECK(answer.head.id == 77);  // nothing of it was given
  }
  REQUIRE(::read(fd, &answer, sizeof(answer)) == sizeof(answer));
  CHECK(answer.head.id == wanted.id);
  CHECK(answer.head.status == 0);
  CHECK(answer.mad[3] == 0x81);
  CHECK(answer.mad[17] == 0x11);
  ::close(fd);
}

// linux/drivers/infiniband/core/user_mad.c: ib_umad_reg_agent2, ib_umad_enable_pkey.
TEST_CASE("Whose first registration is the newer one need not say that it knows of the index of P_Keys; afterwards it is too late to") {
  Service service;
  service.start();
  ib_user_mad_reg_req2 newer{};
  newer.mgmt_class = newer.mgmt_class_version = 1;
  ib_user_mad_reg_req older{};
  older.mgmt_class = older.mgmt_class_version = 1;
  const int knows = ::open("/dev/infiniband/umad0", O_RDWR | O_CLOEXEC), does_not = ::open("/dev/infiniband/umad0", O_RDWR | O_CLOEXEC);
  REQUIRE(::ioctl(knows, IB_USER_MAD_REGISTER_AGENT2, &newer) == 0);
  REQUIRE(::ioctl(does_not, IB_USER_MAD_REGISTER_AGENT, &older) == 0);
  for (const int fd : {knows, does_not}) {
    CHECK(::ioctl(fd, IB_USER_MAD_ENABLE_PKEY) == -1);
    CHECK(errno == EINVAL);
  }
  const Datagram request = node_info(newer.id);
  REQUIRE(::write(knows, &request, sizeof(request)) == sizeof(request));
  Datagram answer;
  REQUIRE(::read(knows, &answer, sizeof(answer)) == sizeof(answer));
  CHECK(answer.head.status == 0);
  CHECK(answer.mad[3] == 0x81);
  ::close(knows);
  ::close(does_not);
}
