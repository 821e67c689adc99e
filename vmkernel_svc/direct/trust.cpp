#include "vmkernel_svc/direct/trust.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

namespace vrdma::svc {

namespace {

std::string read_file(int folder, const char* name) {
  const vmci::UniqueFd file(::openat(folder, name, O_RDONLY | O_CLOEXEC));
  std::string text;
  char part[4096];
  for (ssize_t got; file && (got = ::read(file.get(), part, sizeof(part))) > 0;) text.append(part, static_cast<std::size_t>(got));
  return text;
}

std::map<std::string, std::string> status_of(int folder) {
  std::map<std::string, std::string> lines;
  std::istringstream text(read_file(folder, "status"));
  for (std::string line; std::getline(text, line);)
    if (const auto colon = line.find(":\t"); colon != std::string::npos) lines[line.substr(0, colon)] = line.substr(colon + 2);
  return lines;
}

constexpr const char* compared[] = {"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"};
constexpr const char* namespaces[] = {"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"};
constexpr std::uint64_t cap_sys_ptrace = std::uint64_t{1} << 19;

bool may_trace_all(const std::map<std::string, std::string>& status) {
  return (std::strtoull(status.at("CapEff").c_str(), nullptr, 16) & cap_sys_ptrace) != 0;
}

// /proc shows files of a process that is not dumpable as root's. Root's own are root's anyway; whoever may trace all processes
// reaches those that are not dumpable, too. Where neither that root may (in most containers) nor this service, its namespaces could be
// read only because it is dumpable. In another user namespace this service may more than its own capabilities say.
bool dumpable(int folder, const std::map<std::string, std::string>& status, const std::string& user_namespace) {
  std::istringstream ids(status.at("Uid"));
  uid_t real = 0, effective = 0;
  ids >> real >> effective;
  struct stat memory;
  if (!ids || ::fstatat(folder, "mem", &memory, 0) != 0) return false;
  if (effective != 0) return memory.st_uid == effective;
  if (may_trace_all(status)) return true;
  const vmci::UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  struct stat space;
  return ::fstatat(self.get(), "ns/user", &space, 0) == 0 && std::to_string(space.st_ino) == user_namespace && !may_trace_all(status_of(self.get()));
}

// Filters cannot be read, and two processes may have different ones. Those that the service has, too, are its container's.
bool known_filters(const std::map<std::string, std::string>& status) {
  if (status.at("Seccomp") == "0") return true;
  const vmci::UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  const auto mine = status_of(self.get());
  const auto count = status.find("Seccomp_filters"), my_count = mine.find("Seccomp_filters");
  return count != status.end() && my_count != mine.end() && count->second == my_count->second && mine.at("Seccomp") == status.at("Seccomp");
}

}  // namespace

TrustFacts TrustFacts::of(pid_t pid, const vmci::UniqueFd& pidfd) {
  TrustFacts facts;
  const auto refuse = [&facts](std::string why) { return facts.problem = std::move(why), facts; };
  if (pid <= 0 || !pidfd) return refuse("a process that the service does not see");
  const vmci::UniqueFd folder(::open(fmt::format("/proc/{}", pid).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  pollfd exited{pidfd.get(), POLLIN, 0};
  if (!folder || ::poll(&exited, 1, 0) != 0) return refuse("a process that has ended");
  const auto status = status_of(folder.get());
  for (const char* name : compared) {
    const auto line = status.find(name);
    if (line == status.end()) return refuse(fmt::format("{} of a process cannot be read", name));
    facts.values[name] = line->second;
  }
  if (const auto line = status.find("NSpid"); line != status.end()) {  // from this process's namespace to its own
    std::istringstream pids(line->second);
    while (pids >> facts.own_pid) {
    }
  }
  for (const char* name : namespaces) {
    struct stat space;
    if (::fstatat(folder.get(), fmt::format("ns/{}", name).c_str(), &space, 0) != 0)
      return refuse(fmt::format("the {} namespace of a process cannot be read ({})", name, std::strerror(errno)));
    facts.values[fmt::format("{} namespace", name)] = std::to_string(space.st_ino);
  }
  facts.values["security label"] = read_file(folder.get(), "attr/current");
  if (!known_filters(status)) return refuse("a process has seccomp filters of its own");
  if (!dumpable(folder.get(), status, facts.values["user namespace"])) return refuse("a process is not dumpable");
  return facts;
}

std::string why_apart(const TrustFacts& one, const TrustFacts& other) {
  if (!one.problem.empty()) return one.problem;
  if (!other.problem.empty()) return other.problem;
  for (const auto& [name, value] : one.values)
    if (const auto same = other.values.find(name); same == other.values.end() || same->second != value)
      return fmt::format("the processes differ in {}", name);
  return {};
}

}  // namespace vrdma::svc
