#include "tests/conformance/role.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "tests/conformance/runner.hpp"

namespace vrdma::conformance {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

void system_failure(const char* what) {
  throw std::runtime_error(text("the runner cannot go on: ", what, ": ", errno_name(errno)));
}

PacketPair::PacketPair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) system_failure("socketpair");
  one.reset(ends[0]);
  other.reset(ends[1]);
}

RoleProcess::RoleProcess(bool is_a, int peer_fd, const Settings& settings) {
  PacketPair pair;
  orders_ = std::move(pair.one);
  const Fd theirs = std::move(pair.other);
  const Fd place_file(static_cast<int>(::syscall(SYS_memfd_create, "conformance-place", 1u /* MFD_CLOEXEC */)));
  if (place_file.get() < 0 || ::ftruncate(place_file.get(), sizeof(Place)) != 0) system_failure("memfd_create");
  void* page = ::mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE, MAP_SHARED, place_file.get(), 0);
  if (page == MAP_FAILED) system_failure("mmap");
  place_ = static_cast<Place*>(page);

  const std::array<int, 3> inherited{theirs.get(), peer_fd, place_file.get()};
  const std::array<std::string, 9> words{"vrdma-conformance", child_word, is_a ? "a" : "b",
                                         text(inherited[0], ",", inherited[1], ",", inherited[2]),
                                         settings.device, std::to_string(settings.port),
                                         std::to_string(settings.gid_index), std::to_string(settings.timeout_scale), ""};
  std::array<char*, 9> argv{};
  for (std::size_t i = 0; i + 1 < words.size(); ++i) argv[i] = const_cast<char*>(words[i].c_str());
  pid_ = ::fork();
  if (pid_ < 0) system_failure("fork");
  if (pid_ == 0) {
    for (const int fd : inherited) {
      if (fd >= 0) ::fcntl(fd, F_SETFD, 0);
    }
    ::execv("/proc/self/exe", argv.data());
    ::_exit(127);
  }
  pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
}

RoleProcess::~RoleProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    reap(true);
  }
  ::munmap(place_, sizeof(Place));
}

void RoleProcess::order(std::uint32_t test_index, std::uint64_t seed) {
  reported_ = false;
  report_ = Report{};
  const Order order{test_index, 0, seed};
  (void)::send(orders_.get(), &order, sizeof(order), MSG_NOSIGNAL);
}

void RoleProcess::look() {
  if (!reported_ && orders_.get() >= 0) {
    Report packet{};
    if (::recv(orders_.get(), &packet, sizeof(packet), MSG_DONTWAIT) >= static_cast<ssize_t>(sizeof(Verdict))) {
      packet.text[sizeof(packet.text) - 1] = '\0';
      report_ = packet;
      reported_ = true;
    }
  }
  reap(false);
}

void RoleProcess::add_to(std::vector<pollfd>& descriptors) const {
  if (!reported_ && orders_.get() >= 0) descriptors.push_back({orders_.get(), POLLIN, 0});
  if (!gone() && pidfd_.get() >= 0) descriptors.push_back({pidfd_.get(), POLLIN, 0});
}

void RoleProcess::reap(bool block) {
  if (pid_ <= 0) return;
  int status = 0;
  if (::waitpid(pid_, &status, block ? 0 : WNOHANG) != pid_) return;
  pid_ = -1;
  gone_ = true;
  if (WIFSIGNALED(status))
    death_ = text("killed by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  else if (WEXITSTATUS(status) != 0)
    death_ = text("left with exit code ", WEXITSTATUS(status));
}

}  // namespace vrdma::conformance
