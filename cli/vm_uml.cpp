#include "cli/vm_uml.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "cli/fail.hpp"
#include "cli/installed.hpp"
#include "vmci_channel/descriptor_passing.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;
using vmci::UniqueFd;

constexpr int look_ms = 10;       // for what nobody announces: the RAM
constexpr int reconnect_ms = 200;  // to a service that starts anew

// What mends the kernel's use of the host: see uml_preload.cpp.
std::string preload_library() {
  const fs::path library = fs::path(library_path()).parent_path() / "libvrdma-uml.so";
  if (!fs::exists(library)) fail(fmt::format("there is no {}, which User Mode Linux needs: install it", library.string()));
  return preloadable(library);
}

const char* kernel_remedy(const char* program, int error) {
  if (error == EACCES) return "it is not executable, or no file";
  if (error != ENOENT) return "is it a kernel of User Mode Linux for this processor?";
  const bool packaged = std::strcmp(program, "linux.uml") == 0;  // Debian's name, which "vrdma vm show" prints
  return packaged ? "install user-mode-linux, or name the kernel" : "check its name";
}

[[noreturn]] void become(const std::vector<std::string>& command, const std::string& bar, const std::string& library, pid_t launcher) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(1);  // it is dead already
  // A machine that reboots would begin anew with other memory, unheard of: it ends instead.
  std::vector<std::string> words = command;
  words.insert(words.begin() + 1, {"iomem=mmapper," + bar, "noreboot"});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::setenv("LD_PRELOAD", library.c_str(), 1);
  ::execvp(arguments[0], arguments.data());
  const int error = errno;
  std::fprintf(stderr, "vrdma: cannot start %s (%s): %s\n", arguments[0], std::strerror(error), kernel_remedy(arguments[0], error));
  ::_exit(error == ENOENT ? 127 : 126);
}

// The kernel's RAM, once it has made it: the largest file without a name that it has open. Its size is given at once.
UniqueFd find_ram(pid_t kernel) {
  UniqueFd largest;
  off_t largest_bytes = 16 << 20;  // less runs no kernel
  std::error_code error;
  for (fs::directory_iterator at(fmt::format("/proc/{}/fd", kernel), error), end; !error && at != end; at.increment(error)) {
    struct stat status;
    if (::stat(at->path().c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 0 || status.st_size <= largest_bytes) continue;
    UniqueFd fd(::open(at->path().c_str(), O_RDWR | O_CLOEXEC));
    if (fd) largest = std::move(fd), largest_bytes = status.st_size;
  }
  return largest;
}

// A connection to the service, over which the RAM has gone; none where none answers.
UniqueFd introduce(const std::string& path, int ram) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) fail(fmt::format("{} is too long for a socket's path", path));
  std::memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return {};
  const std::byte word{1};
  if (!vmci::send_with_descriptors(fd.get(), std::span(&word, 1), std::span(&ram, 1))) return {};
  return fd;
}

// The kernel's children are ours when it has gone; theirs are.
void kill_the_rest() {
  for (;;) {
    std::ifstream children(fmt::format("/proc/self/task/{}/children", ::getpid()));
    for (pid_t child; children >> child;) ::kill(child, SIGKILL);
    if (::waitpid(-1, nullptr, 0) < 0 && errno != EINTR) return;
  }
}

}  // namespace

int run_uml(const std::string& bar, const std::string& launcher, const std::vector<std::string>& command) {
  if (struct stat status; ::stat(bar.c_str(), &status) != 0)
    fail(fmt::format("there is no {} ({}): start vrdmad, which makes it", bar, std::strerror(errno)));
  const std::string library = preload_library();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  // Who ends this ends the machine: its kernel gets the same signal, and we stay until it has gone.
  sigset_t ending;
  sigemptyset(&ending);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&ending, number);
  const pid_t self = ::getpid();
  const pid_t kernel = ::fork();
  if (kernel < 0) fail(fmt::format("cannot start a process ({})", std::strerror(errno)));
  if (kernel == 0) become(command, bar, library, self);
  ::sigprocmask(SIG_BLOCK, &ending, nullptr);
  const UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, kernel, 0)));
  const UniqueFd signals(ended ? ::signalfd(-1, &ending, SFD_CLOEXEC) : -1);
  if (!signals) {
    const int error = errno;
    ::kill(kernel, SIGKILL);
    kill_the_rest();
    fail(fmt::format("cannot wait for {} ({})", command.front(), std::strerror(error)));
  }

  UniqueFd ram, service;
  for (;;) {
    if (!ram) ram = find_ram(kernel);
    if (ram && !service) service = introduce(launcher, ram.get());
    pollfd waits[] = {{ended.get(), POLLIN, 0}, {signals.get(), POLLIN, 0}, {service.get(), POLLIN, 0}};
    if (::poll(waits, std::size(waits), !ram ? look_ms : !service ? reconnect_ms : -1) < 0) continue;
    if (waits[0].revents != 0) break;
    signalfd_siginfo signal{};
    if (waits[1].revents != 0 && ::read(signals.get(), &signal, sizeof(signal)) == sizeof(signal)) ::kill(kernel, static_cast<int>(signal.ssi_signo));
    if (waits[2].revents != 0) {  // the service has hung up; another may follow
      service.reset();
      ::poll(waits, 1, reconnect_ms);
    }
  }
  siginfo_t how{};
  ::waitid(P_PID, static_cast<id_t>(kernel), &how, WEXITED);
  kill_the_rest();
  return how.si_code == CLD_EXITED ? how.si_status : 128 + how.si_status;
}

}  // namespace vrdma::cli
