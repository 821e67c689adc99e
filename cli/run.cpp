#include "cli/run.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/installed.hpp"
#include "cli/loadable.hpp"
#include "cli/machine_guest.hpp"
#include "cli/output.hpp"
#include "cli/private_service.hpp"
#include "cli/query.hpp"
#include "cli/stats.hpp"

namespace vrdma::cli {

namespace {

volatile sig_atomic_t child_pid = 0;

// What the terminal sends to its foreground group has reached the program as well; of a hangup it tells the leader of the session alone.
bool has_reached_the_program(int signal, const siginfo_t& info) {
  if (info.si_code != SI_KERNEL) return false;
  if (signal == SIGHUP || signal == SIGCONT) return ::getsid(0) != ::getpid();
  return signal == SIGINT || signal == SIGQUIT || signal == SIGTSTP || signal == SIGWINCH;
}

void pass_on(int signal, siginfo_t* info, void*) {
  const int errno_before = errno;
  if (child_pid > 0 && !has_reached_the_program(signal, *info)) {
    if (info->si_code == SI_QUEUE) ::sigqueue(child_pid, signal, info->si_value);
    else ::kill(child_pid, signal);
  }
  errno = errno_before;
}

// All but those that tell of a fault of ours or of a child, and those that cannot be caught.
sigset_t passed_signals() {
  sigset_t passed;
  sigemptyset(&passed);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGALRM, SIGABRT, SIGPIPE, SIGXCPU, SIGVTALRM, SIGPROF, SIGIO, SIGPWR, SIGURG})
    sigaddset(&passed, signal);
  for (int signal = SIGRTMIN; signal <= SIGRTMAX; ++signal) sigaddset(&passed, signal);
  return passed;
}

void pass_stops();

// Both stop, so that a shell sees it; whether there is one that could continue them, the kernel looks at again.
void stop_as_the_program(int signal, siginfo_t* info, void* context) {
  pass_on(signal, info, context);
  ::raise(signal);  // has its default action here, and is not blocked
  pass_stops();
}

void pass_stops() {
  struct sigaction action {};
  action.sa_sigaction = stop_as_the_program;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_RESETHAND | SA_NODEFER;
  ::sigaction(SIGTSTP, &action, nullptr);
}

// A program whose `vrdma run` is killed would hold its ports and go on unseen. What it starts itself is not meant, and lives on as it would without us.
void end_with(pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const pid_t now = ::getppid();
  if (now != parent && now != 0) ::raise(SIGKILL);  // it has ended before; 0: it is outside of our pid namespace (unshare --pid)
}

void prepend(const char* variable, const std::string& value) {
  const char* const before = std::getenv(variable);
  ::setenv(variable, before != nullptr && *before != '\0' ? (value + ":" + before).c_str() : value.c_str(), 1);
}

// The socket's path for a program that may change its folder: absolute, where that is not too long for a socket.
std::string lasting(const std::string& path) {
  const std::string absolute = std::filesystem::absolute(path);
  return absolute.size() < sizeof(sockaddr_un::sun_path) ? absolute : path;
}

}  // namespace

int run(const RunOptions& options) {
  const std::string library = preloadable(library_path());
  Service service = options.mediated ? find_or_start_mediated_service() : find_or_start_service();
  ::fcntl(service.socket.fd(), F_SETFD, FD_CLOEXEC);
  const std::string socket_path = lasting(service.path);
  const std::string link_layer = link_layer_of(service);
  if (const Apart apart = is_private(service) ? apart_from_host(service.path) : Apart{}; !apart.why.empty())
    tell("vrdma: note: {} ({})\n", apart.why, apart.remedy);
  if (const std::string why = why_not_loadable(options.command[0]); !why.empty())
    tell("vrdma: note: {0} {1}: {0} does not see vrdma0 (programs that it starts may)\n", options.command[0], why);

  int failed[2];  // carries the errno of an exec that failed; closed by one that did not
  if (::pipe2(failed, O_CLOEXEC) != 0) throw std::runtime_error(fmt::format("cannot make a pipe ({})", std::strerror(errno)));
  vmci::UniqueFd failed_read(failed[0]), failed_write(failed[1]);

  const sigset_t passed = passed_signals();
  sigset_t blocked = passed, before;
  sigaddset(&blocked, SIGTSTP);
  ::sigprocmask(SIG_BLOCK, &blocked, &before);  // until child_pid is known
  // Where our parent ignores SIGCHLD the kernel would throw away the exit code that we are to pass on.
  struct sigaction children_before;
  struct sigaction children {};
  children.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &children, &children_before);
  const pid_t self = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(fmt::format("cannot start {} ({})", options.command[0], std::strerror(errno)));
  if (pid == 0) {
    end_with(self);
    ::sigaction(SIGCHLD, &children_before, nullptr);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    ::setenv("VRDMA_SOCKET", socket_path.c_str(), 1);
    if (!options.link_layer.empty()) ::setenv("VRDMA_LINK_LAYER", options.link_layer.c_str(), 1);
    // What the paths below /sys and /dev show of a program that has not opened the device: no wish, which would outlive this service's configuration.
    if (!link_layer.empty()) ::setenv("VRDMA_SERVED_LINK_LAYER", link_layer.c_str(), 1);
    else ::unsetenv("VRDMA_SERVED_LINK_LAYER");
    if (!options.name.empty()) ::setenv("VRDMA_NAME", options.name.c_str(), 1);
    prepend("LD_PRELOAD", library);
    // The second way to it, for what sets an LD_PRELOAD of its own (`env LD_PRELOAD=libjemalloc.so.2 PROGRAM`, wrapper scripts), and for
    // who opens libibverbs by another name than its SONAME's.
    const std::filesystem::path folder = std::filesystem::path(library).parent_path();
    if (std::error_code error; std::filesystem::exists(folder / "libibverbs.so.1", error)) prepend("LD_LIBRARY_PATH", folder);
    // The runtime of g++'s AddressSanitizer refuses to start behind any other library; ours defines nothing that it replaces but
    // calls that lead on to the next definition.
    prepend("ASAN_OPTIONS", "verify_asan_link_order=0");
    std::vector<char*> arguments;
    for (const auto& argument : options.command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    const int why = errno;
    [[maybe_unused]] const auto written = ::write(failed[1], &why, sizeof(why));
    ::_exit(why == ENOENT ? 127 : 126);
  }
  child_pid = pid;
  failed_write.reset();
  struct sigaction action {};
  action.sa_sigaction = pass_on;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  for (int signal = 1; signal < NSIG; ++signal)
    if (sigismember(&passed, signal) == 1) ::sigaction(signal, &action, nullptr);
  struct sigaction stops;
  if (::sigaction(SIGTSTP, nullptr, &stops) == 0 && stops.sa_handler != SIG_IGN) pass_stops();
  ::sigprocmask(SIG_SETMASK, &before, nullptr);

  int why = 0;
  const bool never_ran = ::read(failed_read.get(), &why, sizeof(why)) == static_cast<ssize_t>(sizeof(why));
  if (never_ran) {
    const std::string interpreter = why == ENOENT ? missing_interpreter(options.command[0]) : "";
    if (interpreter.empty()) tell("vrdma: cannot run {} ({}): check the name and its permissions\n", options.command[0].empty() ? "\"\"" : options.command[0], std::strerror(why));
    else tell("vrdma: cannot run {}: its interpreter {} is not there\n", options.command[0], interpreter);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) break;
  child_pid = 0;
  if (options.stats && !never_ran) print_stats(service, options.command[0], pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace vrdma::cli
