// A thread with the smallest stack there is (pthread_attr_setstacksize(3)): what it calls that has nothing to do with verbs works beside registered memory.
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

struct SmallStack {
  static constexpr std::size_t bytes = 1 << 20, part = bytes / 4;
  char* memory = nullptr;
  int advised = -1;
  pid_t child = -1;
  void* moved = MAP_FAILED;

  static void* run(void* argument) {
    auto& all = *static_cast<SmallStack*>(argument);
    all.advised = ::madvise(all.memory, part, MADV_DONTNEED);
    all.child = ::fork();
    if (all.child == 0) ::_exit(all.memory[part - 1] == 0 && all.memory[part] == 1 ? 0 : 1);
    all.moved = ::mremap(all.memory + part, part, 2 * part, MREMAP_MAYMOVE);
    return nullptr;
  }
};

}  // namespace

TEST_CASE("A thread with the smallest stack there is gives memory back, forks and moves mappings beside registered memory") {
  Service service;
  service.start();
  const Device device;
  SmallStack all;
  void* const memory = ::mmap(nullptr, SmallStack::bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  all.memory = static_cast<char*>(memory);
  std::memset(all.memory, 1, SmallStack::bytes);
  ibv_mr* const mr = ibv_reg_mr(device.pd, memory, SmallStack::bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  REQUIRE(mr != nullptr);

  pthread_attr_t attributes;
  REQUIRE(::pthread_attr_init(&attributes) == 0);
  REQUIRE(::pthread_attr_setstacksize(&attributes, static_cast<std::size_t>(PTHREAD_STACK_MIN)) == 0);
  pthread_t thread{};
  REQUIRE(::pthread_create(&thread, &attributes, &SmallStack::run, &all) == 0);
  CHECK(::pthread_join(thread, nullptr) == 0);
  CHECK(::pthread_attr_destroy(&attributes) == 0);
  CHECK(all.advised == 0);
  CHECK(all.memory[0] == 0);
  int status = -1;
  CHECK(::waitpid(all.child, &status, 0) == all.child);
  CHECK(status == 0);
  REQUIRE(all.moved != MAP_FAILED);
  CHECK(static_cast<char*>(all.moved)[0] == 1);

  CHECK(ibv_dereg_mr(mr) == 0);
  CHECK(::munmap(all.moved, 2 * SmallStack::part) == 0);
  CHECK(::munmap(memory, SmallStack::bytes) == 0);
}
