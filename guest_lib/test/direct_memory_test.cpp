// What direct mode maps of registered memory beside the program, and that it lets go of it.
#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

constexpr std::size_t buffer_bytes = 1 << 20;
constexpr int all_rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// What the memory window holds, in bytes. 0: this process has none.
std::uint64_t window_bytes() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find("vrdma-window") == std::string::npos) continue;
    struct stat file {};
    REQUIRE(::stat(entry.path().c_str(), &file) == 0);
    return static_cast<std::uint64_t>(file.st_blocks) * 512;
  }
  return 0;
}

// A few messages from there, each of which may have it mapped for the next.
void write_from(const Pair& pair, const void* memory, const ibv_mr* mr) {
  for (int i = 0; i < 3; ++i) {
    eventually("the connection is direct", [&] { return mode_of(pair.a.get()) == "direct"; });
    REQUIRE(post_write(pair.a.get(), {reinterpret_cast<std::uintptr_t>(memory), 64, mr->lkey}, pair.far.address(), pair.far.mr->rkey) == 0);
    CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  }
}

}  // namespace

// As registration caches do, and programs that free() first.
TEST_CASE("memory that is unmapped before it is deregistered is given up with its registration") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const std::uint64_t before = window_bytes();
  REQUIRE(before != 0);
  for (int i = 0; i < 4; ++i) {
    void* const memory = ::mmap(nullptr, buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    std::memset(memory, 1, buffer_bytes);
    ibv_mr* const mr = ibv_reg_mr(pair.device.pd, memory, buffer_bytes, all_rights);
    REQUIRE(mr != nullptr);
    write_from(pair, memory, mr);
    REQUIRE(window_bytes() >= before + buffer_bytes);
    ::munmap(memory, buffer_bytes);
    CHECK(ibv_dereg_mr(mr) == 0);
  }
  CHECK(window_bytes() == before);
}
