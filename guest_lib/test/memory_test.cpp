// Registered memory as the application has it: its pages live in the window while registered, and are its own again afterwards;
// and what one service was told about files is not taken for what the next one knows.
#include <sys/mman.h>

#include <sstream>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr std::size_t bytes = 1 << 20;
constexpr int access_rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

// The line of /proc/self/maps that describes `address`.
std::string mapping_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    char dash;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (begin <= at && at < end) return line;
  }
  return {};
}

}  // namespace

TEST_CASE("pages move when they are registered, and back with their contents when the last registration goes") {
  Service service;
  service.start();
  Device device;
  auto* const memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED);
  std::memset(memory, 7, bytes);
  for (int round = 0; round < 3; ++round) {
    ibv_mr* const first = ibv_reg_mr(device.pd, memory, bytes, access_rights);
    ibv_mr* const second = ibv_reg_mr(device.pd, memory + bytes / 2, bytes / 4, access_rights);
    REQUIRE(first != nullptr);
    REQUIRE(second != nullptr);
    const bool moved = mapping_at(memory).find("vrdma-window") != std::string::npos;
    if (!moved) MESSAGE("this process's memory does not move: " << mapping_at(memory));
    memory[round] = 1;
    CHECK(ibv_dereg_mr(first) == 0);
    if (moved) CHECK(mapping_at(memory + bytes / 2).find("vrdma-window") != std::string::npos);
    CHECK(mapping_at(memory).find("vrdma-window") == std::string::npos);
    CHECK(ibv_dereg_mr(second) == 0);
    CHECK(mapping_at(memory + bytes / 2).find("vrdma-window") == std::string::npos);
    for (std::size_t i = 0; i < bytes; ++i) REQUIRE(memory[i] == (i <= static_cast<std::size_t>(round) ? 1 : 7));
  }
  ::munmap(memory, bytes);
}

TEST_CASE("a file that the last service knew is announced to the next one") {
  Service service;
  service.start();
  const int fd = ::memfd_create("shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(fd >= 0);
  REQUIRE(::ftruncate(fd, bytes) == 0);
  auto* const memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  REQUIRE(memory != MAP_FAILED);
  Device before;
  ibv_mr* const old = ibv_reg_mr(before.pd, memory, bytes, access_rights);
  REQUIRE(old != nullptr);
  service.kill_now();
  service.start();

  Device after;  // while what was registered with the dead service still is
  CqPtr cq = make_cq(after);
  QpPtr requester = make_qp(after, cq.get()), responder = make_qp(after, cq.get());
  connect(requester.get(), responder->qp_num);
  connect(responder.get(), requester->qp_num);
  ibv_mr* mr = ibv_reg_mr(after.pd, memory, bytes, access_rights);
  REQUIRE(mr != nullptr);
  CHECK(ibv_dereg_mr(old) == 0);
  after.memory[0] = 'x';
  REQUIRE(post_write(requester.get(), after.sge(), reinterpret_cast<std::uintptr_t>(memory), mr->rkey) == 0);
  CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(memory[0] == 'x');
  CHECK(ibv_dereg_mr(mr) == 0);
  ::munmap(memory, bytes);
  ::close(fd);
}
