// The keeper of what a machine's QEMU is given once, and a service short of descriptors.
#include "vmkernel_svc/machines/keeper.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

using namespace vrdma;
using namespace vrdma::svc;

namespace {

// Its process ends by itself when it has nothing to keep.
struct RunningKeeper {
  RunningKeeper() {
    char pattern[] = "/tmp/vrdma-keeper-test-XXXXXX";
    REQUIRE(::mkdtemp(pattern) != nullptr);
    folder = pattern;
    const pid_t pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      const int nothing = ::open("/dev/null", O_RDWR);
      for (const int standard : {0, 1, 2}) ::dup2(nothing, standard);
      ::_exit(Keeper::serve(folder + "/keeper.sock"));
    }
    int status = -1;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    REQUIRE(status == 0);
  }
  ~RunningKeeper() {
    ::unlink((folder + "/keeper.sock").c_str());
    ::rmdir(folder.c_str());
  }
  RunningKeeper(const RunningKeeper&) = delete;
  std::string folder;
};

}  // namespace

TEST_CASE("A service that may not open what was kept is told so, and has it when it may") {
  RunningKeeper running;
  const Keeper keeper(running.folder);
  int link[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link) == 0);
  const vmci::UniqueFd machines_end(link[0]), kept(link[1]);
  const int given[] = {kept.get(), kept.get(), kept.get()};
  REQUIRE(keeper.keep("one", given).has_value());

  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit low{100, before.rlim_max};  // filled up soon
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<vmci::UniqueFd> filling;
  while (vmci::UniqueFd fd{::open("/dev/null", O_RDONLY | O_CLOEXEC)}) filling.push_back(std::move(fd));
  if (!filling.empty()) filling.pop_back();  // for the way to the keeper
  const auto refused = keeper.take("one");
  filling.clear();
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(!refused.has_value());
  CHECK(value(refused.error()) == EMFILE);

  const auto taken = keeper.take("one");
  REQUIRE(taken.has_value());
  CHECK(taken->size() == 3);
}
