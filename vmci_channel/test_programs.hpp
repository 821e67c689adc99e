// For tests: processes of an ordinary user that have become another program since, one of more rights, as a hostile one does that has connected and
// left its socket to a child. Root only.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vmci::test {

constexpr uid_t somebody = 65533;  // not the overflow uid, which may be several users in a container
constexpr gid_t privileged_group = 65532;

enum class Gives { nothing, group, capability };  // what the program gives to whoever runs it

// Runs a copy of cat(1), which waits for its input.
class ProgramOf {
 public:
  explicit ProgramOf(Gives gives) {
    char name[] = "/tmp/vrdma-rights-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    folder_ = name;
    const std::string program = folder_ / "cat";
    std::filesystem::copy_file("/bin/cat", program);
    REQUIRE(::chmod(name, 0755) == 0);
    REQUIRE(::chown(program.c_str(), 0, gives == Gives::group ? privileged_group : 0) == 0);
    REQUIRE(::chmod(program.c_str(), gives == Gives::group ? 02755 : 0755) == 0);
    vfs_cap_data rights{};
    rights.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE;
    rights.data[0].permitted = 1u << CAP_NET_BIND_SERVICE;
    if (gives == Gives::capability) REQUIRE(::setxattr(program.c_str(), "security.capability", &rights, sizeof(rights), 0) == 0);
    int in[2], out[2];
    REQUIRE(::pipe2(in, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(out, O_CLOEXEC) == 0);
    input_.reset(in[1]);
    const UniqueFd to_it(in[0]), output(out[0]);
    UniqueFd from_it(out[1]);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::dup2(to_it.get(), STDIN_FILENO);
      ::dup2(from_it.get(), STDOUT_FILENO);
      if (::syscall(SYS_setgroups, 0, nullptr) == 0 && ::setresgid(somebody, somebody, somebody) == 0 && ::setresuid(somebody, somebody, somebody) == 0)
        ::execl(program.c_str(), "cat", nullptr);
      ::_exit(1);
    }
    from_it.reset();
    pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    char byte = 1;  // what comes back is of the program: it has what it is given
    REQUIRE(::write(input_.get(), &byte, 1) == 1);
    REQUIRE(::read(output.get(), &byte, 1) == 1);
  }
  ~ProgramOf() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    std::error_code gone;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, gone);
  }
  ProgramOf(const ProgramOf&) = delete;

  Credentials connected() const { return {pid_, somebody, somebody}; }
  const UniqueFd& pidfd() const { return pidfd_; }

 private:
  std::filesystem::path folder_;
  UniqueFd input_, pidfd_;
  pid_t pid_ = -1;
};

// Whether programs give rights here. Says so if not.
inline bool programs_give_rights() {
  struct statvfs mounted {};
  const char* why = nullptr;
  if (::geteuid() != 0) why = "only root can make such programs";
  else if (::statvfs("/tmp", &mounted) != 0 || (mounted.f_flag & (ST_NOSUID | ST_NOEXEC)) != 0) why = "/tmp is mounted nosuid or noexec";
  else if (::prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 0) why = "no_new_privs";
  else if (::prctl(PR_CAPBSET_READ, CAP_NET_BIND_SERVICE) != 1 || ::prctl(PR_CAPBSET_READ, CAP_SETFCAP) != 1) why = "rights that this container lacks";
  else if (::access("/bin/cat", X_OK) != 0) why = "no /bin/cat";
  if (why != nullptr) MESSAGE("SKIPPED: programs that give rights to whoever runs them: ", why);
  return why == nullptr;
}

}  // namespace vmci::test
