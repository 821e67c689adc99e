#include "vmkernel_svc/direct/trust.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <sstream>

#include "vmci_channel/peer_process.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/users.hpp"

namespace vrdma::svc {

namespace {

std::string read_file(int folder, const char* name) {
  const vmci::UniqueFd file(::openat(folder, name, O_RDONLY | O_CLOEXEC));
  std::string text;
  char part[4096];
  for (ssize_t got; file && (got = ::read(file.get(), part, sizeof(part))) > 0;) text.append(part, static_cast<std::size_t>(got));
  return text;
}

using Status = std::map<std::string, std::string>;

vmci::UniqueFd folder_of(const std::string& pid) { return vmci::UniqueFd(::open(fmt::format("/proc/{}", pid).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)); }

Status status_of(int folder) {
  Status lines;
  std::istringstream text(read_file(folder, "status"));
  for (std::string line; std::getline(text, line);)
    if (const auto colon = line.find(":\t"); colon != std::string::npos) lines[line.substr(0, colon)] = line.substr(colon + 2);
  return lines;
}

constexpr const char* compared[] = {"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"};
constexpr const char* namespaces[] = {"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"};
constexpr std::uint64_t cap_sys_ptrace = std::uint64_t{1} << 19;

bool may_trace_all(const Status& status) {
  return (std::strtoull(status.at("CapEff").c_str(), nullptr, 16) & cap_sys_ptrace) != 0;
}

bool is_in(int folder, const std::string& pid_namespace) {
  struct stat space;
  return folder >= 0 && ::fstatat(folder, "ns/pid", &space, 0) == 0 && std::to_string(space.st_ino) == pid_namespace;
}

// Whether this thread, without the right to trace all processes, may still look at the process as one that traces it could.
bool seen_without_rights(int folder) {
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};  // of this thread
  __user_cap_data_struct before[2] = {}, without[2];
  if (::syscall(SYS_capget, &head, before) != 0) return false;
  std::copy(std::begin(before), std::end(before), std::begin(without));
  without[0].effective &= ~static_cast<std::uint32_t>(cap_sys_ptrace);
  if (::syscall(SYS_capset, &head, without) != 0) return false;
  struct stat space;
  const bool seen = ::fstatat(folder, "ns/user", &space, 0) == 0;
  if (::syscall(SYS_capset, &head, before) != 0) log::error("cannot take CAP_SYS_PTRACE back ({})", std::strerror(errno));
  return seen;
}

// The user that root of the process's user namespace is here.
uid_t root_of(int folder) {
  std::istringstream map(read_file(folder, "uid_map"));
  for (uid_t inside, outside, count; map >> inside >> outside >> count;)
    if (inside == 0) return outside;
  return 0;
}

// /proc shows files of a process that is not dumpable as root's, that of its user namespace. Root's own are root's anyway; whoever may trace
// all processes reaches those that are not dumpable, too. Where it may not (in most containers), the kernel says it by whether another
// without that right may look. Not in another user namespace: in those of its own, this service may do everything.
bool dumpable(int folder, const Status& status, const std::string& user_namespace) {
  std::istringstream ids(status.at("Uid"));
  uid_t real = 0, effective = 0;
  ids >> real >> effective;
  struct stat memory, space;
  if (!ids || ::fstatat(folder, "mem", &memory, 0) != 0) return false;
  if (effective != 0 && effective != root_of(folder)) return memory.st_uid == effective;
  if (may_trace_all(status)) return true;
  const vmci::UniqueFd self = folder_of("self");
  return ::fstatat(self.get(), "ns/user", &space, 0) == 0 && std::to_string(space.st_ino) == user_namespace && seen_without_rights(folder);
}

bool is_first(const Status& status) {
  const auto line = status.find("NSpid");
  return line != status.end() && (line->second == "1" || line->second.ends_with("\t1"));
}

// Of the first process of that pid namespace, which is the container's where the namespace is not this service's own: an ancestor of those that
// it has started, but not of what was put beside it from outside ("docker exec"). Nothing where it is not to be seen.
Status first_of(const std::string& pid_namespace, Status status) {
  constexpr int ancestors_max = 64;
  for (int i = 0; i < ancestors_max && status.contains("PPid"); ++i) {
    if (is_first(status)) return status;
    const auto parent = folder_of(status.at("PPid"));
    if (!is_in(parent.get(), pid_namespace)) break;
    status = status_of(parent.get());
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> all(::opendir("/proc"), ::closedir);
  while (const dirent* const entry = all ? ::readdir(all.get()) : nullptr) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    const auto folder = folder_of(entry->d_name);
    if (!is_in(folder.get(), pid_namespace)) continue;
    if (auto found = status_of(folder.get()); is_first(found)) return found;
  }
  return {};
}

bool same_filters(const Status& one, const Status& other) {
  for (const char* const name : {"Seccomp", "Seccomp_filters"}) {
    const auto ones = one.find(name), others = other.find(name);
    if (ones == one.end() || others == other.end() || ones->second != others->second) return false;
  }
  return true;
}

// Filters cannot be read, and two processes may have different ones: only as many as the service has, or as the first process of the
// container, are those that the container was started with.
bool known_filters(const Status& status, const std::string& pid_namespace) {
  if (status.at("Seccomp") == "0") return true;
  const vmci::UniqueFd self = folder_of("self");
  if (same_filters(status, status_of(self.get()))) return true;
  return !is_in(self.get(), pid_namespace) && same_filters(status, first_of(pid_namespace, status));
}

// Landlock's rules are not shown anywhere; no_new_privs, which they take of a process without rights, are. Those of the whole container, or of
// the session in which the same user has started this service, are no sign.
bool known_privileges(const Status& status, const std::string& pid_namespace, uid_t uid) {
  if (status.at("NoNewPrivs") == "0") return true;
  if (uid == ::geteuid() && ::prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1) return true;
  const auto first = first_of(pid_namespace, status);
  const auto line = first.find("NoNewPrivs");
  return line != first.end() && line->second == "1";
}

}  // namespace

TrustFacts TrustFacts::of(const vmci::Credentials& connected, const vmci::UniqueFd& pidfd) {
  const pid_t pid = connected.pid;
  TrustFacts facts;
  const auto refuse = [&facts](std::string why) { return facts.problem = std::move(why), facts; };
  if (pid <= 0 || !pidfd) return refuse("a process that the service does not see");
  if (may_be_several(connected.uid)) return refuse("a user whom the service's user namespace does not map");
  const vmci::UniqueFd folder = vmci::process_folder(pid);
  pollfd exited{pidfd.get(), POLLIN, 0};
  if (!folder || ::poll(&exited, 1, 0) != 0) return refuse("a process that has ended");
  const auto status = status_of(folder.get());
  for (const char* name : compared) {
    const auto line = status.find(name);
    if (line == status.end()) return refuse(fmt::format("{} of a process cannot be read", name));
    facts.values[name] = line->second;
  }
  if (!vmci::are_all(facts.values["Uid"], connected.uid) || !vmci::are_all(facts.values["Gid"], connected.gid))
    return refuse("a process has other ids than when it connected, or several");
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
  if (!known_filters(status, facts.values["pid namespace"])) return refuse("a process has seccomp filters of its own");
  if (!known_privileges(status, facts.values["pid namespace"], connected.uid)) return refuse("a process has given up new privileges by itself, as those do that Landlock restricts");
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
