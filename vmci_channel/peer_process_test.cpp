#include "vmci_channel/peer_process.hpp"

#include <doctest/doctest.h>

#include "vmci_channel/test_programs.hpp"

using namespace vmci;
using namespace vmci::test;

namespace {

bool is_as_it_connected(const Credentials& connected) {
  const UniqueFd folder = process_folder(connected.pid);
  return folder && vmci::is_as_it_connected(folder.get(), connected);
}

// What a child of somebody's that is dumpable, or not, is taken for.
bool child_is_as_it_connected(bool is_dumpable) {
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const UniqueFd done(ready[0]);
  UniqueFd says(ready[1]);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const bool other = ::geteuid() != 0 || (::setresgid(somebody, somebody, somebody) == 0 && ::setresuid(somebody, somebody, somebody) == 0);
    const bool set = ::prctl(PR_SET_DUMPABLE, is_dumpable ? 1 : 0) == 0;
    if (!other || !set || ::write(says.get(), "", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  says.reset();
  char byte;
  const bool is_ready = ::read(done.get(), &byte, 1) == 1;
  const bool root = ::geteuid() == 0;
  const bool result = is_as_it_connected({child, root ? somebody : ::geteuid(), root ? somebody : ::getegid()});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  REQUIRE(is_ready);
  return result;
}

}  // namespace

TEST_CASE("A process is as it connected while it has all the ids that it had") {
  const Credentials self{::getpid(), ::geteuid(), ::getegid()};
  if (::prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1) CHECK(is_as_it_connected(self));
  CHECK_FALSE(is_as_it_connected({self.pid, self.uid + 1, self.gid}));
  CHECK_FALSE(is_as_it_connected({self.pid, self.uid, self.gid + 1}));
  CHECK_FALSE(is_as_it_connected({0, self.uid, self.gid}));
}

TEST_CASE("Four ids are all, and each of them must be the one") {
  CHECK(are_all("7\t7\t7\t7", 7));
  CHECK_FALSE(are_all("7\t8\t7\t7", 7));
  CHECK_FALSE(are_all("7\t7\t8\t7", 7));
  CHECK_FALSE(are_all("7\t7\t7\t8", 7));
  CHECK_FALSE(are_all("7\t7\t7", 7));
  CHECK_FALSE(are_all("", 7));
}

TEST_CASE("A process that is not dumpable, as after it has given up rights, is not taken for what it connected as") {
  CHECK(child_is_as_it_connected(true));
  CHECK_FALSE(child_is_as_it_connected(false));
}

TEST_CASE("A process that runs a program of a group's or of capabilities is not what connected, and one of any other program is") {
  if (!programs_give_rights()) return;
  CHECK(is_as_it_connected(ProgramOf(Gives::nothing).connected()));
  CHECK_FALSE(is_as_it_connected(ProgramOf(Gives::group).connected()));
  CHECK_FALSE(is_as_it_connected(ProgramOf(Gives::capability).connected()));
}
