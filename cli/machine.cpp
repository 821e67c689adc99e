// What the machine allows to a program, tried out one by one.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "cli/doctor.hpp"
#include "cli/service.hpp"
#include "vmci_channel/gvisor.hpp"
#include "vmci_channel/unique_fd.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;
using Level = Finding::Level;
using vmci::UniqueFd;

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

// The value after "Name:" in /proc/self/status.
std::string status_field(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name + ":")) return line.substr(line.find_first_not_of(" \t", name.size() + 1));
  return {};
}

std::string size_text(std::uint64_t bytes) {
  return bytes >= 10u << 20 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

Finding check_memfd() {
  const UniqueFd fd(::memfd_create("vrdma-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd)
    return {Level::problem, "memfd",
            fmt::format("memfd_create fails ({}): the service's queues and this program's cannot share memory", std::strerror(errno)),
            errno == EACCES ? "set vm.memfd_noexec to 0 or 1" : "allow memfd_create in the sandbox (seccomp profile)"};
  // Empty, for where a limit of file sizes (SIGXFSZ) forbids what is longer: that is another finding.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) != 0)
    return {Level::problem, "memfd", fmt::format("a memfd cannot be sealed ({})", std::strerror(errno)), "Linux 5.1 or newer is needed"};
  return {Level::ok, "memfd", "shared memory by memfd works; /dev/shm and its size do not matter", ""};
}

Finding check_file_size() {
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {Level::ok, "file-size", "no limit of file sizes (sparse shared memory is one large file)", ""};
  return {Level::note, "file-size",
          fmt::format("files are limited to {}: the sparse file from which memory is shared would be larger, so that what programs register "
                      "is reached through them; slower",
                      size_text(limit.rlim_cur)),
          "ulimit -f unlimited"};
}

Finding check_address_space() {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {Level::ok, "addresses", "no limit of address space (the queues of a program are 1 GiB, sparse)", ""};
  const std::string what = fmt::format("address space is limited to {}", size_text(limit.rlim_cur));
  if (limit.rlim_cur >= address_space_least) return {Level::ok, "addresses", what + ", of which the queues of a program are 1 GiB, sparse", ""};
  return {Level::problem, "addresses", what + ": the queues of a program are 1 GiB, sparse, and cannot be mapped",
          "ulimit -v unlimited, or a smaller \"arena_bytes\" in vrdmad.conf(5)"};
}

std::optional<Finding> check_proc() {
  if (const UniqueFd maps(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC)); maps) return std::nullopt;  // Landlock lets access() pass
  return Finding{Level::note, "proc",
                 fmt::format("/proc/self/maps cannot be read here ({}): memory is not mapped into the service but copied by a thread of the program: "
                             "correct, and slower",
                             std::strerror(errno)),
                 "mount /proc in the sandbox (bwrap --proc /proc), or let its rules (Landlock, AppArmor) read it"};
}

Finding check_open_files() {
  constexpr rlim_t few = 64, some = 1024;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string what = fmt::format("{} open files allowed (a program uses 6 for a device that it has open, 3 for each further one, "
                                       "and for a completion channel 3, or 4 where direct mode is offered)",
                                       limit.rlim_cur);
  if (limit.rlim_cur < few) return {Level::problem, "open-files", what + ": too few", fmt::format("ulimit -n {}", some)};
  if (limit.rlim_cur < some) return {Level::note, "open-files", what + ": few for a service with many guests", fmt::format("ulimit -n {}", some)};
  return {Level::ok, "open-files", what, ""};
}

Finding check_memlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string size = limit.rlim_cur == RLIM_INFINITY ? "no limit" : size_text(limit.rlim_cur);
  return {Level::ok, "memlock", fmt::format("{} of locked memory; vrdma locks none, so registrations are not bound by it", size), ""};
}

Finding check_userfaultfd() {
  const std::string cost =
      "a program with several threads cannot have its memory mapped into the service: each access goes through the process (/proc/PID/mem), "
      "by a worker of the service or, in direct mode, by the program that posts: some microseconds a message; "
      "programs with one thread are not affected";
  UniqueFd fd(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK)));
  std::string by = "the system call";
  const int syscall_error = fd ? 0 : errno;
  if (!fd) {
    const UniqueFd device(::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));
    if (device) fd.reset(::ioctl(device.get(), USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK));
    by = "/dev/userfaultfd";
  }
  if (!fd) {
    if (syscall_error == ENOSYS)
      return {Level::note, "userfaultfd", "not in this kernel (or hidden by a sandbox): " + cost, "a kernel with CONFIG_USERFAULTFD"};
    return {Level::note, "userfaultfd", fmt::format("not permitted ({}): ", std::strerror(syscall_error)) + cost,
            "as root: sysctl vm.unprivileged_userfaultfd=1, or give the user access to /dev/userfaultfd"};
  }
  uffdio_api api{UFFD_API, 0, 0};
  constexpr std::uint64_t shared_write_protect = 1ull << 12;  // UFFD_FEATURE_WP_HUGETLBFS_SHMEM, Linux 5.19
  if (::ioctl(fd.get(), UFFDIO_API, &api) != 0 || (api.features & UFFD_FEATURE_PAGEFAULT_FLAG_WP) == 0 || (api.features & shared_write_protect) == 0)
    return {Level::note, "userfaultfd", "this kernel's cannot write-protect shared memory: " + cost, "Linux 5.19 or newer"};
  return {Level::ok, "userfaultfd", "permitted by " + by + ": memory of programs with several threads can be mapped", ""};
}

Finding check_ptrace() {
  constexpr std::uint64_t cap_sys_ptrace = 1ull << 19;
  const auto scope = first_line("/proc/sys/kernel/yama/ptrace_scope");
  const bool capable = (std::strtoull(status_field("CapEff").c_str(), nullptr, 16) & cap_sys_ptrace) != 0;
  if (!scope || *scope == "0")
    return {Level::ok, "ptrace", scope ? "Yama's ptrace scope is 0: a service of the same user reaches programs' memory" :
                                 "no Yama: a service of the same user reaches programs' memory", ""};
  const std::string what = fmt::format("Yama's ptrace scope is {}{}", *scope, capable ? "; this process has CAP_SYS_PTRACE" : "");
  if (*scope == "3")
    return {Level::note, "ptrace",
            what + ": no process may reach another's memory; slower: what is not mapped (small buffers, stacks) is copied by a thread of the program",
            "it can only be changed at boot"};
  return {Level::note, "ptrace",
          what + ": a service without CAP_SYS_PTRACE does not reach memory that is not mapped (small buffers, stacks); "
                 "slower: a thread of the program copies it",
          "run vrdmad as root or by its systemd unit, or as root: sysctl kernel.yama.ptrace_scope=0"};
}

Finding check_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof(set), &set);
  const int cores = CPU_COUNT(&set);
  std::string quota;
  if (const auto line = first_line("/sys/fs/cgroup/cpu.max"); line && !line->starts_with("max")) {
    double used = 0, period = 0;
    if (std::istringstream(*line) >> used >> period && period > 0)
      quota = fmt::format(", limited to {:.1f} of them by the control group", used / period);
  }
  if (cores >= 3 && quota.empty())
    return {Level::ok, "cores", fmt::format("{} cores: two polling programs and the service have one each", cores), ""};
  return {Level::note, "cores",
          fmt::format("{} core{}{}: two polling programs and the service take turns; it works, latency depends on the scheduler and "
                      "programs that spin without calling ibv_poll_cq (ib_write_lat) are slow", cores, cores == 1 ? "" : "s", quota),
          "use event mode (-e) or more cores where latency matters"};
}

std::optional<Finding> check_memory_limit() {
  const auto line = first_line("/sys/fs/cgroup/memory.max");
  constexpr std::uint64_t small = 256u << 20;
  if (!line || *line == "max") return std::nullopt;
  const std::uint64_t bytes = std::strtoull(line->c_str(), nullptr, 10);
  return Finding{bytes < small ? Level::note : Level::ok, "memory",
                 fmt::format("the control group has {}: registered memory that is shared with the service counts there", size_text(bytes)),
                 bytes < small ? "raise memory.max if registrations fail with ENOMEM" : ""};
}

Finding check_seccomp() {
  const std::string mode = status_field("Seccomp");
  if (mode.empty() || mode == "0") return {Level::ok, "seccomp", "no filter", ""};
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!pidfd)
    return {Level::note, "seccomp",
            fmt::format("a filter is active and pidfd_open fails ({}): the end of a program is noticed by its socket only", std::strerror(errno)),
            ""};
  return {Level::ok, "seccomp", "a filter is active (a container?); what libvrdma needs is allowed", ""};
}

Finding check_devices() {
  std::string names;
  bool under_vrdma = false;  // in a container of `vrdma container`, or by `vrdma run`: what is there is libvrdma's own
  std::error_code error;
  for (fs::directory_iterator at("/sys/class/infiniband", error), end; !error && at != end; at.increment(error))
    if (first_line(at->path() / "hca_type") == "vrdma") under_vrdma = true;
    else names += (names.empty() ? "" : ", ") + at->path().filename().string();
  if (under_vrdma) return {Level::ok, "devices", "this program sees vrdma0, as libvrdma is loaded into it; RDMA devices of the kernel would be hidden from it", ""};
  if (names.empty()) return {Level::ok, "devices", "no RDMA device of the kernel: none is needed", ""};
  return {Level::note, "devices", "the kernel has " + names + ": programs under vrdma see vrdma0 only", "start a program without vrdma to use them"};
}

Finding check_kernel() {
  utsname name{};
  ::uname(&name);
  if (vmci::is_gvisor(name.release, name.version))
    return {Level::problem, "kernel", "this is gVisor, which shares no memory with the host: programs in it cannot be served",
            "another runtime for this container (runc, crun), or a virtual machine (docs/vm.md)"};
  int major = 0, minor = 0;
  std::sscanf(name.release, "%d.%d", &major, &minor);
  if (major * 1000 + minor < 5006) return {Level::problem, "kernel", fmt::format("Linux {}: too old", name.release), "Linux 5.6 or newer is needed"};
  return {Level::ok, "kernel", fmt::format("Linux {} {}", name.release, name.machine), ""};
}

// Where the memory of a process counts, as /proc/PID/cgroup says ("0::/a/b", or "4:memory:/a/b" before version 2): the folder, and the name of
// its limit. Empty where that is not to be seen, also for what is beside the root that a container sees ("/../a").
std::pair<fs::path, const char*> memory_group_of(const std::string& process) {
  std::pair<fs::path, const char*> found;
  std::ifstream file("/proc/" + process + "/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || line.find("/..") != std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 2);
    if (controllers.find(",memory,") != std::string::npos) return {fs::path("/sys/fs/cgroup/memory") / path, "memory.limit_in_bytes"};
    if (controllers == ",,") found = {fs::path("/sys/fs/cgroup") / path, "memory.max"};
  }
  return found;
}

// The least of those of a group and of the groups that it is in. 0: there is none.
std::uint64_t memory_limit_of(fs::path group, const char* name) {
  constexpr std::uint64_t unlimited = std::uint64_t{1} << 60;  // version 1 has a number for that, of pages
  std::uint64_t least = unlimited;
  for (; group.string().starts_with("/sys/fs/cgroup"); group = group.parent_path())
    if (const auto line = first_line(group / name); line && *line != "max")
      least = std::min<std::uint64_t>(least, std::strtoull(line->c_str(), nullptr, 10));
  return least == unlimited ? 0 : least;
}

// Not of another pid namespace, where that is the number of another process.
bool is_service(pid_t pid) { return first_line("/proc/" + std::to_string(pid) + "/comm") == "vrdmad"; }

}  // namespace

std::optional<Finding> examine_scheduling_of_service(pid_t pid) {
  if (!is_service(pid)) return std::nullopt;
  const auto is_idle = [](pid_t process) { return (::sched_getscheduler(process) & ~SCHED_RESET_ON_FORK) == SCHED_IDLE; };
  const auto niceness = [](pid_t process) { return ::getpriority(PRIO_PROCESS, static_cast<id_t>(process)); };
  const bool idle = is_idle(pid) && !is_idle(0);
  if (!idle && niceness(pid) <= niceness(0)) return std::nullopt;
  return Finding{Level::note, "scheduling",
                 fmt::format("vrdmad runs {}, as whoever started it did: where processors are busy, programs wait for it",
                             idle ? "as SCHED_IDLE" : fmt::format("at niceness {}", niceness(pid))),
                 "a private one leaves ten seconds after its last program: let it, and begin without nice(1) and chrt(1)"};
}

std::optional<Finding> examine_memory_of_service(pid_t pid) {
  if (!is_service(pid)) return std::nullopt;
  const std::string process = std::to_string(pid);
  const auto [group, name] = memory_group_of(process);
  if (group.empty() || group == memory_group_of("self").first) return std::nullopt;
  const std::uint64_t bytes = memory_limit_of(group, name);
  if (bytes == 0) return std::nullopt;
  return Finding{
      Level::note, "memory",
      fmt::format("vrdmad runs in a control group that has {} ({}): pages of files and memfds that nobody has touched count there when a peer "
                  "writes to them through it, whoever registered them, so that its guests can exhaust it",
                  size_text(bytes), group.string()),
      "no MemoryMax= for vrdmad beside guests that are not trusted (docs/containers.md)"};
}

std::vector<Finding> examine_machine() {
  std::vector<Finding> all{check_kernel(), check_memfd(),       check_file_size(), check_address_space(), check_open_files(), check_memlock(),
                           check_ptrace(), check_userfaultfd(), check_cores(),     check_seccomp(),       check_devices()};
  if (auto proc = check_proc()) all.push_back(std::move(*proc));
  if (auto limit = check_memory_limit()) all.push_back(std::move(*limit));
  return all;
}

}  // namespace vrdma::cli
