#include "cli/service.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include "cli/fail.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {

constexpr int ready_timeout_ms = 10'000;
constexpr const char* idle_exit_s = "10";

fs::path own_folder() {
  std::error_code error;
  fs::path self = fs::read_symlink("/proc/self/exe", error);
  // A sandbox without /proc: what we were started as.
  if (error) self = fs::canonical(reinterpret_cast<const char*>(::getauxval(AT_EXECFN)), error);
  return self.parent_path();
}

// The folder of the private service: ours, and nobody else's to write.
std::string private_folder() {
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    struct stat status;
    if (::stat(runtime, &status) == 0 && status.st_uid == ::geteuid()) return std::string(runtime) + "/vrdma";
  }
  return fmt::format("/tmp/vrdma-{}", ::geteuid());
}

// VRDMA_SOCKET; nullptr where it names nothing.
const char* named_socket() {
  const char* const named = std::getenv("VRDMA_SOCKET");
  return named != nullptr && *named != '\0' ? named : nullptr;
}

std::string mediated_folder() { return private_folder() + "/mediated"; }
std::string mediated_socket() { return mediated_folder() + "/vrdmad.sock"; }

void make_private_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    fail(fmt::format("cannot make {} ({}): set XDG_RUNTIME_DIR to a folder of yours, or start vrdmad and set VRDMA_SOCKET",
                     folder, std::strerror(errno)));
  struct stat status;
  if (::lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 022))
    fail(fmt::format("{} is not a folder that only you can write: remove it, or set XDG_RUNTIME_DIR", folder));
}

// What a service said at its end, from the log that had `before_bytes` when it was started.
std::string last_words(const std::string& log, std::uintmax_t before_bytes) {
  std::ifstream file(log);
  file.seekg(static_cast<std::streamoff>(before_bytes));
  std::string last;
  for (std::string line; std::getline(file, line);)
    if (!line.empty()) last = line;
  return last.empty() ? "it ended without a word, as under small limits of memory (ulimit -v, -d); " + log + " is empty" : fmt::format("{} (from {})", last, log);
}

// It serves more than the program that happens to be first, whose soft limits and niceness are its own.
void raise_limits() {
  (void)::setpriority(PRIO_PROCESS, 0, 0);  // where that is allowed
  for (const auto which : {RLIMIT_AS, RLIMIT_DATA, RLIMIT_FSIZE, RLIMIT_CPU, RLIMIT_MEMLOCK, RLIMIT_NPROC}) {  // that of open files vrdmad raises itself
    rlimit limit;
    if (::getrlimit(which, &limit) != 0) continue;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(which, &limit);
  }
}

void start_private_service(const std::string& path, const char* direct) {
  int ready[2];
  if (::pipe2(ready, O_CLOEXEC) != 0) fail(fmt::format("cannot make a pipe ({})", std::strerror(errno)));
  vmci::UniqueFd ready_read(ready[0]), ready_write(ready[1]);
  const std::string program = program_path("vrdmad");
  const std::string log = path.substr(0, path.rfind('/')) + "/vrdmad.log";
  const std::string ready_fd = "3";
  const std::vector<const char*> arguments{program.c_str(), "--socket", path.c_str(), "--idle-exit", idle_exit_s, "--ready-fd",
                                           ready_fd.c_str(), "--direct", direct, "--log-file", log.c_str(), nullptr};
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
  pollfd waiting{ready_read.get(), POLLIN, 0};
  char byte = 0;
  if (::poll(&waiting, 1, ready_timeout_ms) <= 0 || ::read(ready_read.get(), &byte, 1) != 1)
    fail(fmt::format("the private service {} did not come up at {}: {}", program, path, last_words(log, logged_before)));
}

// The service of that folder, in which there is at most one.
Service start_or_find(const std::string& folder, const char* direct) {
  const std::string path = folder + "/vrdmad.sock";
  make_private_folder(folder);
  const std::string lock_path = folder + "/lock";  // which a service that leaves as idle holds, too
  vmci::UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock || ::flock(lock.get(), LOCK_EX) != 0)
    fail(fmt::format("cannot lock {} ({})", lock_path, std::strerror(errno)));
  auto socket = vmci::PacketSocket::connect(path);  // another `vrdma run` may have been faster
  if (!socket) {
    start_private_service(path, direct);
    socket = vmci::PacketSocket::connect(path);
    if (!socket) fail(fmt::format("cannot reach the private service at {} ({})", path, std::strerror(value(socket.error()))));
  }
  return Service{path, std::move(*socket)};
}

}  // namespace

std::string private_socket() { return private_folder() + "/vrdmad.sock"; }

bool is_private(const Service& service) { return service.path == private_socket() || service.path == mediated_socket(); }

std::vector<std::string> service_paths(const std::string& wanted) {
  if (!wanted.empty()) return {wanted};
  if (const char* const named = named_socket()) return {named};
  return {private_socket(), host_socket};
}

Result<Service> find_service(const std::string& wanted) {
  Errno last{ENOENT};
  for (const auto& path : service_paths(wanted)) {
    auto socket = vmci::PacketSocket::connect(path);
    if (socket) return Service{path, std::move(*socket)};
    last = socket.error();
  }
  return last;
}

Result<Service> find_service_to_show(const std::string& wanted) {
  auto found = find_service(wanted);
  if (!found && wanted.empty() && named_socket() == nullptr)
    if (auto mediated = find_service(mediated_socket())) return mediated;
  return found;
}

const char* service_remedy(int error) {
  switch (error) {
    case ENOENT:
    case ECONNREFUSED:
      return "start vrdmad, or use \"vrdma run\"";
    case EACCES:
    case EPERM:
      return "its permissions do not admit this user; see \"socket_mode\" in vrdmad.conf(5)";
    case EAFNOSUPPORT:
      return "this program may have no Unix sockets: its unit's RestrictAddressFamilies needs AF_UNIX";
    case ENAMETOOLONG:
      return "a socket's path has at most 107 characters";
    case EPROTOTYPE:
    case ENOTSOCK:
      return "that is not a socket of vrdmad; check the path";
    case EAGAIN:
      return "too many are waiting to attach; try again";
    default:
      return "check the path";
  }
}

std::runtime_error unreachable(const std::string& wanted) {
  std::string tried;
  int last = ENOENT;
  for (const auto& path : service_paths(wanted)) {
    const auto socket = vmci::PacketSocket::connect(path);
    const int error = socket ? EAGAIN : value(socket.error());
    if (tried.empty() || error != ENOENT) last = error;  // the remedy is that of the path which exists
    tried += fmt::format("{}{} ({})", tried.empty() ? "" : " or ", path, std::strerror(error));
  }
  return std::runtime_error(fmt::format("cannot reach the host service at {}: {}", tried, service_remedy(last)));
}

Service find_or_start_service() {
  if (auto found = find_service()) return std::move(*found);
  if (const char* const named = named_socket()) {
    auto socket = vmci::PacketSocket::connect(named);
    if (socket) return Service{named, std::move(*socket)};
    fail(fmt::format("cannot reach the host service at {} ({}): start vrdmad there, or unset VRDMA_SOCKET so that a private "
                     "one is started",
                     named, std::strerror(value(socket.error()))));
  }
  // The host has a service, or had one: programs by it and by a private one do not see each other.
  if (const auto host = vmci::PacketSocket::connect(host_socket); private_socket() != host_socket && !host && value(host.error()) != ENOENT) {
    const int error = value(host.error());
    fmt::print(stderr, "vrdma: note: the host's service at {} cannot be reached ({}), a private one serves this program instead: {}\n", host_socket, std::strerror(error),
               error == ECONNREFUSED ? "it has ended; start vrdmad again" : service_remedy(error));
  }
  return start_or_find(private_folder(), "auto");
}

Service find_or_start_mediated_service() {
  if (const char* const named = named_socket(); named != nullptr && named != mediated_socket())
    fail(fmt::format("VRDMA_SOCKET names {}, and --mediated means a private service: unset it, or say \"vrdma direct mediated\" to that service", named));
  make_private_folder(private_folder());
  return start_or_find(mediated_folder(), "mediated");
}

std::string program_path(const std::string& name) {
  const fs::path beside = own_folder() / name;
  if (fs::exists(beside)) return beside;
  for (const char* folder : {"/usr/local/bin/", "/usr/local/sbin/", "/usr/bin/", "/usr/sbin/"})
    if (fs::exists(folder + name)) return folder + name;
  fail(fmt::format("cannot find {}: it should stand beside vrdma in {}", name, own_folder().string()));
}

std::string library_path() {
  const std::vector<fs::path> places{own_folder().parent_path() / "lib" / "libvrdma.so", own_folder().parent_path() / VRDMA_LIBRARY_FOLDER / "libvrdma.so"};
  std::string tried;
  for (const auto& place : places) {
    std::error_code error;
    if (fs::exists(place, error)) return fs::canonical(place);
    tried += (tried.empty() ? "" : " and ") + place.string();
  }
  fail(fmt::format("cannot find libvrdma.so (looked at {}): build or install it", tried));
}

std::string preloadable(const std::string& library) {
  constexpr const char* special_to_the_loader = " :$";
  if (library.find_first_of(special_to_the_loader) == std::string::npos) return library;
  const std::string folder = private_folder();
  const std::string link = fmt::format("{}/libvrdma-{:016x}.so", folder, std::hash<std::string>{}(library));
  if (link.find_first_of(special_to_the_loader) != std::string::npos)
    fail(fmt::format("LD_PRELOAD cannot hold {}, nor a link to it in {}, because of a blank, colon or dollar sign: install vrdma "
                     "in a folder without, or set XDG_RUNTIME_DIR to one",
                     library, folder));
  make_private_folder(folder);
  std::error_code error;
  if (fs::read_symlink(link, error) == library) return link;
  const std::string fresh = fmt::format("{}.{}", link, ::getpid());
  if (::symlink(library.c_str(), fresh.c_str()) != 0 || ::rename(fresh.c_str(), link.c_str()) != 0)
    fail(fmt::format("cannot make the link {} ({})", link, std::strerror(errno)));
  return link;
}

}  // namespace vrdma::cli
