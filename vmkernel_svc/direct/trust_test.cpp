// Real processes in real states: who may be direct with whom.
#include "vmkernel_svc/direct/trust.hpp"

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "doctest/doctest.h"

namespace vrdma::svc {
namespace {

// A child that has done what `prepare` says, and then waits for its end.
class Child {
 public:
  template <class Prepare>
  explicit Child(Prepare&& prepare) {
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const bool done = prepare();
      const Prepared told{done, ::geteuid(), ::getegid()};
      [[maybe_unused]] const auto written = ::write(ready[1], &told, sizeof(told));
      for (;;) ::pause();
    }
    ::close(ready[1]);
    REQUIRE(::read(ready[0], &told_, sizeof(told_)) == sizeof(told_));
    ::close(ready[0]);
    pidfd_ = vmci::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    REQUIRE(pidfd_);
  }
  Child() : Child([] { return true; }) {}
  ~Child() { end(); }
  Child(const Child&) = delete;
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  bool prepared() const { return told_.done; }
  vmci::Credentials credentials() const { return {pid_, told_.uid, told_.gid}; }
  TrustFacts facts() const { return TrustFacts::of(credentials(), pidfd_); }
  pid_t pid() const { return pid_; }
  const vmci::UniqueFd& pidfd() const { return pidfd_; }

 private:
  struct Prepared {
    bool done;
    uid_t uid;
    gid_t gid;
  };
  pid_t pid_ = 0;
  Prepared told_{};
  vmci::UniqueFd pidfd_;
};

constexpr uid_t somebody = 65533;  // not the overflow uid, which may be several users in a container
bool become_somebody() {
  return ::geteuid() != 0 || (::setresgid(somebody, somebody, somebody) == 0 && ::setresuid(somebody, somebody, somebody) == 0);
}
bool become_dumpable(bool on) { return become_somebody() && ::prctl(PR_SET_DUMPABLE, on ? 1 : 0) == 0; }
std::optional<__user_cap_data_struct> low_capabilities(bool write, __user_cap_data_struct wanted = {}) {
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &head, data) != 0) return std::nullopt;
  if (write) data[0] = wanted;
  if (write && ::syscall(SYS_capset, &head, data) != 0) return std::nullopt;
  return data[0];
}
constexpr std::uint32_t trace_bit = 1u << CAP_SYS_PTRACE;
bool traces_all() {
  const auto now = low_capabilities(false);
  return now && (now->effective & trace_bit) != 0;
}
// A change of capabilities makes a process undumpable, as a set-user-id program is.
bool may_not_trace() {
  auto now = low_capabilities(false);
  if (!now) return false;
  now->effective &= ~trace_bit, now->permitted &= ~trace_bit;
  return low_capabilities(true, *now) && ::prctl(PR_SET_DUMPABLE, 1) == 0;
}
bool take_filter() {
  sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{1, allow};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// What a service that may not trace all processes learns of one that it could not trace.
constexpr const char* not_to_be_read = "the user namespace of a process cannot be read (Permission denied)";

TEST_CASE("Two processes that nothing sets apart could reach each other") {
  const Child one, other;
  CHECK(why_apart(one.facts(), other.facts()) == "");
  const Child plain([] { return become_dumpable(true); }), plain_too([] { return become_dumpable(true); });
  REQUIRE(plain.prepared());
  CHECK(why_apart(plain.facts(), plain_too.facts()) == (traces_all() || ::geteuid() != 0 ? "" : not_to_be_read));
}

TEST_CASE("A process that is not dumpable is nobody's peer") {
  const Child plain([] { return become_dumpable(true); }), closed([] { return become_dumpable(false); });
  REQUIRE(closed.prepared());
  for (const auto& why : {why_apart(plain.facts(), closed.facts()), why_apart(closed.facts(), closed.facts())})
    CHECK(why == (traces_all() ? "a process is not dumpable" : not_to_be_read));
}

TEST_CASE("Root that may not trace all processes, as in most containers, is a peer where it is dumpable, whether this service may or not") {
  if (::geteuid() != 0) {
    MESSAGE("SKIP: only root is such a root");
    return;
  }
  const Child root([] { return may_not_trace(); }), closed([] { return may_not_trace() && ::prctl(PR_SET_DUMPABLE, 0) == 0; });
  REQUIRE(root.prepared());
  REQUIRE(closed.prepared());
  enum Answer { peers = 0, apart = 1, closed_is_peer = 2, not_prepared = 3 };
  const pid_t service = ::fork();
  REQUIRE(service >= 0);
  if (service == 0) {
    if (!may_not_trace()) ::_exit(not_prepared);
    if (why_apart(closed.facts(), closed.facts()).empty()) ::_exit(closed_is_peer);
    ::_exit(why_apart(root.facts(), root.facts()).empty() ? peers : apart);
  }
  int status = 0;
  REQUIRE(::waitpid(service, &status, 0) == service);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == peers);
  if (!traces_all()) return;
  CHECK(why_apart(root.facts(), root.facts()) == "");
  CHECK(why_apart(closed.facts(), closed.facts()) == "a process is not dumpable");
  CHECK(traces_all());  // still
}

TEST_CASE("Another user, other capabilities and other namespaces keep processes apart") {
  if (::geteuid() != 0) {
    MESSAGE("SKIP: only root can become somebody else");
    return;
  }
  const Child root, other([] { return become_dumpable(true); });
  const std::string why = why_apart(root.facts(), other.facts());
  CHECK((traces_all() ? why.starts_with("the processes differ in ") : why == not_to_be_read));
  const Child bounded([] {
    int one = 0;
    while (one < 64 && ::prctl(PR_CAPBSET_READ, one) != 1) ++one;
    return ::prctl(PR_CAPBSET_DROP, one) == 0;
  });
  if (bounded.prepared()) CHECK(why_apart(root.facts(), bounded.facts()) == "the processes differ in CapBnd");
  else MESSAGE("SKIP: this root may not give up capabilities for its children");
  const Child away([] { return ::unshare(CLONE_NEWUTS) == 0; });
  if (away.prepared()) CHECK(why_apart(root.facts(), away.facts()) == "the processes differ in uts namespace");
  else MESSAGE("SKIP: this root may not make namespaces");
}

constexpr const char* given_up = "a process has given up new privileges by itself, as those do that Landlock restricts";

TEST_CASE("A seccomp filter of one's own keeps apart, and so do no_new_privs of one") {
  const Child plain, filtered(take_filter), filtered_too(take_filter);
  REQUIRE(filtered.prepared());
  CHECK(why_apart(plain.facts(), filtered.facts()) == "a process has seccomp filters of its own");
  // Two filters may forbid different things, though they are as many.
  CHECK(why_apart(filtered.facts(), filtered_too.facts()) == "a process has seccomp filters of its own");
  const Child modest([] { return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0; });
  CHECK(why_apart(modest.facts(), modest.facts()) == given_up);
}

TEST_CASE("Filters that the first process of a container has as well are the container's") {
  if (::geteuid() != 0) {
    MESSAGE("SKIP: only root makes a pid namespace");
    return;
  }
  int told[2];
  REQUIRE(::pipe(told) == 0);
  const auto stay = [] {
    for (;;) ::pause();
  };
  // Two that the first process has started, of which one has one filter more; and two that were put beside it from outside.
  const Child outside([&] {
    if (!take_filter() || ::unshare(CLONE_NEWPID) != 0) return false;
    pid_t pids[3];
    for (auto& pid : pids) {
      int ready[2];
      if (::pipe(ready) != 0 || (pid = ::fork()) < 0) return false;
      if (pid != 0) {
        char done;
        if (::read(ready[0], &done, 1) != 1) return false;
        continue;
      }
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (&pid == &pids[0])
        for (int i = 0; i < 2; ++i)
          if (::fork() == 0) {
            if (i == 1) take_filter();
            [[maybe_unused]] const auto said = ::write(ready[1], "", 1);
            stay();
          }
      [[maybe_unused]] const auto said = ::write(ready[1], "", 1);
      stay();
    }
    return ::write(told[1], pids, sizeof(pids)) == sizeof(pids);
  });
  if (!outside.prepared()) {
    MESSAGE("SKIP: this root may not make a pid namespace");
    return;
  }
  pid_t pids[3];
  REQUIRE(::read(told[0], pids, sizeof(pids)) == sizeof(pids));
  const auto facts_of = [](pid_t pid) { return TrustFacts::of({pid, ::geteuid(), ::getegid()}, vmci::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)))); };
  const TrustFacts first = facts_of(pids[0]), beside = facts_of(pids[1]), beside_too = facts_of(pids[2]);
  CHECK(why_apart(first, beside) == "");
  CHECK(why_apart(beside, beside_too) == "");
  CHECK(beside_too.own_pid > 1);
  std::vector<pid_t> children;
  const std::string number = std::to_string(pids[0]);
  for (int tries = 0; children.size() < 2 && tries < 1000; ++tries, ::usleep(1000)) {
    std::ifstream list("/proc/" + number + "/task/" + number + "/children");
    children.assign(std::istream_iterator<pid_t>(list), {});
  }
  if (children.empty()) {
    MESSAGE("SKIP: this kernel does not list children");
    return;
  }
  REQUIRE(children.size() == 2);
  CHECK(why_apart(facts_of(children[0]), beside) == "");
  std::string of_two;
  for (int tries = 0; of_two.empty() && tries < 1000; ++tries, ::usleep(1000)) of_two = why_apart(first, facts_of(children[1]));  // it is about to take its filter
  CHECK(of_two == "a process has seccomp filters of its own");
}

TEST_CASE("A process that has ended, or that the service does not see, is nobody's peer") {
  Child ended;
  const Child other;
  const vmci::Credentials credentials = ended.credentials();
  ended.end();
  CHECK(TrustFacts::of(credentials, ended.pidfd()).problem == "a process that has ended");
  // Its number may be another's by now: what is at the number is not asked.
  CHECK(TrustFacts::of(other.credentials(), ended.pidfd()).problem == "a process that has ended");
  CHECK(!TrustFacts::of({0, ::geteuid(), ::getegid()}, other.pidfd()).problem.empty());
  CHECK(!TrustFacts::of(other.credentials(), vmci::UniqueFd()).problem.empty());
}

TEST_CASE("A process that has become somebody else since it connected is nobody's peer") {
  if (::geteuid() != 0) {
    MESSAGE("SKIP: only root can become somebody else");
    return;
  }
  constexpr const char* others = "a process has other ids than when it connected, or several";
  const Child root;
  // Somebody's process that connected, and executed a program of root's.
  CHECK(TrustFacts::of({root.pid(), somebody, somebody}, root.pidfd()).problem == others);
  CHECK(TrustFacts::of({root.pid(), 0, somebody}, root.pidfd()).problem == others);
  const Child half([] { return ::seteuid(somebody) == 0; });
  REQUIRE(half.prepared());
  CHECK(half.facts().problem == others);
}

}  // namespace
}  // namespace vrdma::svc
