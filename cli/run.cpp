#include "cli/run.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/loadable.hpp"
#include "cli/machine_guest.hpp"
#include "cli/service.hpp"
#include "cli/stats.hpp"

namespace vrdma::cli {

namespace {

volatile sig_atomic_t child_pid = 0;

// What a person types reaches the whole process group; only what was sent to us alone is passed on.
void pass_on(int signal, siginfo_t* info, void*) {
  if (info->si_code != SI_USER && info->si_code != SI_QUEUE && info->si_code != SI_TKILL) return;
  if (child_pid > 0) ::kill(child_pid, signal);
}

constexpr int passed_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH, SIGALRM};

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
  if (const Apart apart = is_private(service) ? apart_from_host(service.path) : Apart{}; !apart.why.empty())
    fmt::print(stderr, "vrdma: note: {} ({})\n", apart.why, apart.remedy);
  if (const std::string why = why_not_loadable(options.command[0]); !why.empty())
    fmt::print(stderr, "vrdma: note: {} {}: it does not see vrdma0 (programs that it starts may)\n", options.command[0], why);

  int failed[2];  // carries the errno of an exec that failed; closed by one that did not
  if (::pipe2(failed, O_CLOEXEC) != 0) throw std::runtime_error(fmt::format("cannot make a pipe ({})", std::strerror(errno)));
  vmci::UniqueFd failed_read(failed[0]), failed_write(failed[1]);

  sigset_t passed, before;
  sigemptyset(&passed);
  for (const int signal : passed_signals) sigaddset(&passed, signal);
  ::sigprocmask(SIG_BLOCK, &passed, &before);  // until child_pid is known
  // Where our parent ignores SIGCHLD the kernel would throw away the exit code that we are to pass on.
  struct sigaction children_before;
  struct sigaction children {};
  children.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &children, &children_before);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(fmt::format("cannot start {} ({})", options.command[0], std::strerror(errno)));
  if (pid == 0) {
    ::sigaction(SIGCHLD, &children_before, nullptr);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    ::setenv("VRDMA_SOCKET", socket_path.c_str(), 1);
    if (!options.link_layer.empty()) ::setenv("VRDMA_LINK_LAYER", options.link_layer.c_str(), 1);
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
  for (const int signal : passed_signals) ::sigaction(signal, &action, nullptr);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);

  int why = 0;
  if (::read(failed_read.get(), &why, sizeof(why)) == static_cast<ssize_t>(sizeof(why))) {
    const std::string interpreter = why == ENOENT ? missing_interpreter(options.command[0]) : "";
    if (interpreter.empty()) fmt::print(stderr, "vrdma: cannot run {} ({}): check the name and its permissions\n", options.command[0], std::strerror(why));
    else fmt::print(stderr, "vrdma: cannot run {}: its interpreter {} is not there\n", options.command[0], interpreter);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) break;
  child_pid = 0;
  if (options.stats) print_stats(service, options.command[0], pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace vrdma::cli
