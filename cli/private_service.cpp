#include "cli/private_service.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "cli/fail.hpp"
#include "cli/installed.hpp"
#include "cli/output.hpp"
#include "cli/private_folder.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {

constexpr int ready_note_ms = 10'000;  // then who waits is told so
constexpr int ready_timeout_ms = 120'000;
// How long a private service stays that nobody uses; tests that wait for its end have no patience (tests/DESIGN.md).
const char* idle_exit_s() {
  const char* const of_tests = std::getenv("VRDMA_TEST_IDLE_EXIT_S");
  return of_tests != nullptr ? of_tests : "10";
}

// What a service said at its end, from the log that had `before_bytes` when it was started.
std::string last_words(const std::string& log, std::uintmax_t before_bytes) {
  std::ifstream file(log);
  file.seekg(static_cast<std::streamoff>(before_bytes));
  std::string last;
  for (std::string line; std::getline(file, line);)
    if (!line.empty()) last = line;
  return last.empty() ? "it ended without a word, as under small limits of memory (ulimit -v, -d); " + log + " is empty"
                      : fmt::format("{} (from {})", last, log);
}

constexpr rlim_t open_files_wished = 4096, processor_seconds_least = 600;

// Also where a hard limit is in the way, if that is allowed.
bool raise_to(decltype(RLIMIT_CPU) which, rlim_t wished) {
  rlimit limit;
  if (::getrlimit(which, &limit) != 0 || limit.rlim_max >= wished) return true;
  limit = {wished, wished};
  return ::setrlimit(which, &limit) == 0;
}

// It serves more than the program that happens to be first, whose soft limits, scheduling and niceness are its own.
void raise_limits() {
  // Where that is allowed: without CAP_SYS_NICE and a RLIMIT_NICE, neither niceness is lowered nor SCHED_IDLE left (doctor says so).
  const sched_param ordinary{};
  (void)::sched_setscheduler(0, SCHED_OTHER, &ordinary);
  (void)::setpriority(PRIO_PROCESS, 0, 0);
  (void)::syscall(SYS_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */, 0, 0 /* as the niceness is */);
  (void)raise_to(RLIMIT_NOFILE, 16 * open_files_wished);
  (void)raise_to(RLIMIT_CPU, RLIM_INFINITY);
  for (const auto which :
       {RLIMIT_AS, RLIMIT_DATA, RLIMIT_FSIZE, RLIMIT_CPU, RLIMIT_MEMLOCK, RLIMIT_NPROC}) {  // that of open files vrdmad raises itself
    rlimit limit;
    if (::getrlimit(which, &limit) != 0) continue;
    limit.rlim_cur = limit.rlim_max;
    // A second before the kernel ends it, it can say why.
    if (which == RLIMIT_CPU && limit.rlim_max != RLIM_INFINITY && limit.rlim_max > 1) --limit.rlim_cur;
    ::setrlimit(which, &limit);
  }
}

// It has our hard limits for as long as it serves, also programs that are under none.
void require_limits() {
  const auto require = [](auto which, std::uint64_t least, const char* what, const char* option) {
    rlimit limit;
    if (::getrlimit(which, &limit) != 0 || limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= least) return;
    fail(fmt::format("{} is limited to {} KiB here (ulimit -H{}), and a private service, which would have that limit, needs {} MiB for each "
                     "program: raise it, or begin where there is none",
                     what, limit.rlim_max >> 10, option, least >> 20));
  };
  require(RLIMIT_AS, address_space_least, "address space", "v");
  require(RLIMIT_FSIZE, queues_bytes, "the size of files", "f");
  rlimit processor;
  if (::getrlimit(RLIMIT_CPU, &processor) != 0 || processor.rlim_max >= processor_seconds_least) return;
  if (!raise_to(RLIMIT_CPU, RLIM_INFINITY))
    fail(fmt::format("processor time is limited to {} s here (ulimit -Ht), and a private service, which would have that limit, would end by it "
                     "under all programs: raise it to {} s, or begin where there is none",
                     processor.rlim_max, processor_seconds_least));
  ::setrlimit(RLIMIT_CPU, &processor);  // raised to see whether it can be; ours stays
}

// A private service has the limit of whoever was first. Who begins it is told, and those later who are not under that themselves.
void note_open_files(const Service& service, bool is_new) {
  const auto peer = service.socket.peer();
  rlimit its, ours;
  if (!peer || peer->pid <= 0 || ::prlimit(peer->pid, RLIMIT_NOFILE, nullptr, &its) != 0 || ::getrlimit(RLIMIT_NOFILE, &ours) != 0) return;
  if (its.rlim_max >= open_files_wished || (!is_new && its.rlim_max >= ours.rlim_max)) return;
  tell("vrdma: note: the private service, which serves all of your programs, may have {} open files, as {} (ulimit -Hn), and a program needs "
       "11 or more of them: {}\n",
       its.rlim_max, is_new ? "is the limit here" : "was the limit where it was started",
       is_new ? "for many at once, begin where it is higher"
              : fmt::format("for many at once, let it leave ({} s after the last program), and begin here", idle_exit_s()));
}

// What to do about a file of the private folder.
const char* remedy_of_file(int error) {
  return error == EROFS ? "nothing can be written there: set XDG_RUNTIME_DIR to a folder of yours where that is possible, or VRDMA_SOCKET to the "
                          "socket of a vrdmad"
                        : "remove what is there, or set XDG_RUNTIME_DIR to another folder of yours";
}

enum class Start { done, failed, under_way };

// vrdmad writes one byte when it serves; the pipe's end is its own.
Start start_of(const vmci::UniqueFd& ready, int timeout_ms) {
  pollfd waiting{ready.get(), POLLIN, 0};
  int readable;
  do {
    readable = ::poll(&waiting, 1, timeout_ms);
  } while (readable < 0 && errno == EINTR);
  if (readable == 0) return Start::under_way;
  char byte = 0;
  return ::read(ready.get(), &byte, 1) == 1 ? Start::done : Start::failed;
}

void start_private_service(const std::string& path, const char* direct) {
  require_limits();
  int ready[2];
  if (::pipe2(ready, O_CLOEXEC) != 0) fail(fmt::format("cannot make a pipe ({})", std::strerror(errno)));
  vmci::UniqueFd ready_read(ready[0]), ready_write(ready[1]);
  const std::string program = program_path("vrdmad");
  const std::string log = path.substr(0, path.rfind('/')) + "/vrdmad.log";
  const std::string ready_fd = "3";
  const std::vector<const char*> arguments{program.c_str(), "--socket", path.c_str(), "--idle-exit", idle_exit_s(), "--one-user", "--ready-fd",
                                           ready_fd.c_str(), "--direct", direct, "--log-file", log.c_str(), nullptr};
  if (const vmci::UniqueFd writable(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)); !writable)
    fail(fmt::format("cannot open the log {} of a private service ({}): {}", log, std::strerror(errno), remedy_of_file(errno)));
  std::error_code no_log;
  const std::uintmax_t logged_before = fs::is_regular_file(log, no_log) ? fs::file_size(log, no_log) : 0;
  const pid_t pid = ::fork();
  if (pid < 0) fail(fmt::format("cannot start {} ({})", program, std::strerror(errno)));
  if (pid == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);  // not our child: it outlives us
    const int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, 0);
    ::dup2(null, 1);
    if (ready[1] != 3) ::dup2(ready[1], 3);
    else ::fcntl(3, F_SETFD, 0);
    const int log_fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log_fd >= 0) ::dup2(log_fd, 2);  // else vrdmad is about to say so, and leave
    ::close_range(4, ~0u, 0);
    raise_limits();
    // It is shared by what is started later: the processors, the folder and the preloaded libraries of the program that happens to be
    // first are not its own.
    ::unsetenv("LD_PRELOAD");
    ::unsetenv("LD_AUDIT");
    cpu_set_t all;
    std::memset(&all, 0xff, sizeof(all));
    ::sched_setaffinity(0, sizeof(all), &all);
    if (::chdir("/") != 0) ::_exit(127);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execv(program.c_str(), const_cast<char**>(arguments.data()));
    ::_exit(127);
  }
  int status;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  ready_write.reset();
  Start start = start_of(ready_read, ready_note_ms);
  if (start == Start::under_way) {
    tell("vrdma: waiting for the private service {}, which has been starting for {} s; its log is {}\n", program, ready_note_ms / 1000, log);
    start = start_of(ready_read, ready_timeout_ms - ready_note_ms);
  }
  if (start == Start::under_way)
    fail(fmt::format("the private service {} has been starting for {} s, and does not serve at {} yet: its log {} may say why", program, ready_timeout_ms / 1000, path, log));
  if (start == Start::failed) fail(fmt::format("the private service {} did not come up at {}: {}", program, path, last_words(log, logged_before)));
}

// Who has that flock, as /proc/locks says: "1: FLOCK ADVISORY WRITE 4711 fe:00:815 0 EOF". 0: it does not.
pid_t holder_of(const vmci::UniqueFd& lock) {
  struct stat status;
  if (::fstat(lock.get(), &status) != 0) return 0;
  const std::string inode = fmt::format(":{}", status.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, kind, advisory, access, file;
    pid_t pid = 0;
    if (fields >> number >> kind >> advisory >> access >> pid >> file && kind == "FLOCK" && file.ends_with(inode)) return pid;
  }
  return 0;
}

// False, and errno, where it cannot be had. Who waits for long is told for whom.
bool lock_patiently(const vmci::UniqueFd& lock, const std::string& path) {
  using namespace std::chrono_literals;
  constexpr int tries = 500;
  for (int i = 0; i < tries; ++i) {
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) == 0) return true;
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    std::this_thread::sleep_for(10ms);
  }
  const pid_t holder = holder_of(lock);
  tell("vrdma: waiting for {}, which {} holds: another \"vrdma run\" or a private service that has not gone on for 5 s; if it is stopped, "
       "continue or kill it\n",
       path, holder > 0 ? fmt::format("process {}", holder) : "another process");
  while (::flock(lock.get(), LOCK_EX) != 0)
    if (errno != EINTR) return false;
  return true;
}

// The service of that folder, in which there is at most one; where another pid namespace's is in it, that of our own folder beside it.
Service start_or_find(const std::string& folder, const char* direct) {
  const std::string path = socket_in(folder);
  if (path.size() >= sizeof(sockaddr_un::sun_path))
    fail(fmt::format("{} would be the socket of a private service ({}): a socket's path has at most {} characters; set XDG_RUNTIME_DIR to a "
                     "shorter folder of yours",
                     path, std::strerror(ENAMETOOLONG), sizeof(sockaddr_un::sun_path) - 1));
  const PrivateUmask of_ours;
  make_private_folder(folder);
  const std::string lock_path = folder + "/lock";  // which a service that leaves as idle holds, too
  vmci::UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock || !lock_patiently(lock, lock_path))
    fail(fmt::format("cannot lock {} ({}): {}", lock_path, std::strerror(errno), remedy_of_file(errno)));
  auto found = connect_to(path, ChosenBy::search);  // another `vrdma run` may have been faster
  if (!found && value(found.error()) == ESRCH) return start_or_find(folder_beside(folder), direct);
  if (!found) found = connect_to(socket_in(folder_beside(folder)), ChosenBy::search);  // the other namespace's has gone, ours has not
  const bool is_new = !found;
  if (is_new) {
    start_private_service(path, direct);
    auto socket = vmci::PacketSocket::connect(path);
    if (!socket) fail(fmt::format("cannot reach the private service at {} ({})", path, std::strerror(value(socket.error()))));
    found = Service{path, std::move(*socket)};
  }
  note_open_files(*found, is_new);
  return std::move(*found);
}

}  // namespace

Service find_or_start_service() {
  if (auto found = find_service()) {
    if (is_private(*found)) note_open_files(*found, false);
    return std::move(*found);
  }
  if (const char* const named = named_socket()) {
    auto found = connect_to(named, ChosenBy::user);
    if (found) return std::move(*found);
    fail(fmt::format("cannot reach the host service at {} ({}): start vrdmad there, or unset VRDMA_SOCKET so that a private "
                     "one is started",
                     named, std::strerror(value(found.error()))));
  }
  // The host has a service, or had one: programs by it and by a private one do not see each other.
  if (const auto host = vmci::PacketSocket::connect(host_socket);
      socket_in(private_folder()) != host_socket && !host && value(host.error()) != ENOENT) {
    const int error = value(host.error());
    tell("vrdma: note: the host's service at {} cannot be reached ({}), a private one serves this program instead: {}\n", host_socket,
         std::strerror(error), error == ECONNREFUSED ? "it has ended; start vrdmad again" : service_remedy(error));
  }
  return start_or_find(private_folder(), "auto");
}

Service find_or_start_mediated_service() {
  const auto ours = private_sockets(mediated_folder());
  if (const char* const named = named_socket(); named != nullptr && std::find(ours.begin(), ours.end(), named) == ours.end())
    fail(fmt::format("VRDMA_SOCKET names {}, and --mediated means a private service: unset it, or say \"vrdma direct mediated\" to that service",
                     named));
  make_private_folder(private_folder());
  return start_or_find(mediated_folder(), "mediated");
}

}  // namespace vrdma::cli
