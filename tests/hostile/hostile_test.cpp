// Hostile guests against a live service, beside an honest pair that must not notice.
//
//   hostile_test TARGET [--seconds N] [--guests N] [--seed N] [--direct] [--shards N]    direct: direct mode is offered to who may have it
//
// Passes when the service lives, no sanitizer has reported, the pair went on without a gap and saw no wrong byte or status, and
// after the hostile guests are gone the service holds nothing of theirs: no guest, queue pair or region, tenants' counters at
// zero, descriptors, threads and memory back to where they were.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/hostile/report.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vrdma/control.hpp"

namespace {

using namespace vrdma;
using nlohmann::json;

constexpr uid_t hostile_uid = 65534;
constexpr std::uint64_t gap_max_ms = 2000, last_limit_ms = 20'000;
constexpr std::uint64_t growth_max_kib = 96 * 1024;  // allocator's and sanitizer's slack

int failures = 0;
void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

std::uint64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

bool eventually(std::uint64_t patience_ms, const std::function<bool()>& condition) {
  for (const std::uint64_t until = now_ms() + patience_ms; !condition();) {
    if (now_ms() > until) return false;
    ::usleep(20'000);
  }
  return true;
}

std::string read_all(const std::string& path) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

// How long the threads of a process have waited for processors, since it began: time in which a machine under load let others run (the
// second number of schedstat; 0 where the kernel does not count).
std::uint64_t waited_ms(pid_t pid) {
  std::uint64_t all_ns = 0;
  std::error_code error;
  for (auto task = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", error);
       !error && task != std::filesystem::directory_iterator(); task.increment(error)) {
    std::uint64_t ran = 0, waited = 0;
    std::ifstream(task->path() / "schedstat") >> ran >> waited;
    all_ns += waited;
  }
  return all_ns / 1'000'000;
}

pid_t spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment = {}, int errors = -1) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  for (const auto& setting : environment) ::putenv(const_cast<char*>(setting.c_str()));
  if (errors >= 0) ::dup2(errors, STDERR_FILENO);
  ::execv(arguments[0], arguments.data());
  ::_exit(127);
}

// Where the threads of a process stand: time run and waited for processors (schedstat), the system call and, for root, the kernel's stack.
std::string whereabouts(pid_t pid) {
  std::string all;
  std::error_code error;
  for (auto task = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", error);
       !error && task != std::filesystem::directory_iterator(); task.increment(error)) {
    const std::string thread = task->path().string() + "/";
    all += "thread " + task->path().filename().string() + " " + read_all(thread + "comm");
    for (const char* what : {"schedstat", "syscall", "stack"}) all += std::string("  ") + what + " " + read_all(thread + what);
  }
  return all;
}

// Ends it if need be; its wait status, -1: it had to be.
int reap(pid_t pid, std::uint64_t patience_ms) {
  int status = 0;
  if (eventually(patience_ms, [&] { return ::waitpid(pid, &status, WNOHANG) == pid; })) return status;
  if (patience_ms != 0) std::fprintf(stderr, "%d does not end:\n%s", pid, whereabouts(pid).c_str());
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  return -1;
}

struct Footprint {
  std::size_t descriptors = 0, threads = 0;
  std::uint64_t resident_kib = 0;
};
Footprint footprint(pid_t pid) {
  const auto count = [pid](const char* what) {
    std::size_t n = 0;
    std::error_code error;
    for (auto entry = std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + what, error);
         !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
      ++n;
    return n;
  };
  Footprint now{count("/fd"), count("/task"), 0};
  std::istringstream status(read_all("/proc/" + std::to_string(pid) + "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) now.resident_kib = std::strtoull(line.c_str() + 6, nullptr, 10);
  return now;
}

// What the service says of itself; empty if it does not answer in time.
json show(const std::string& path) {
  auto socket = vmci::PacketSocket::connect(path);
  if (!socket) return {};
  control::Head head{};
  head.record.control = static_cast<std::uint32_t>(control::Request::show);
  if (!socket->send(std::as_bytes(std::span(&head, 1)))) return {};
  std::byte answer[256];
  auto received = socket->receive(answer, 5000);
  if (!received || received->descriptors.size() != 1) return {};
  std::string text;
  char part[65536];
  for (off_t at = 0;;) {
    const ssize_t got = ::pread(received->descriptors[0].get(), part, sizeof(part), at);
    if (got <= 0) break;
    text.append(part, static_cast<std::size_t>(got));
    at += got;
  }
  return json::parse(text, nullptr, false);
}

// Empty: nothing of any guest is left.
std::string leftovers(const json& state) {
  if (!state.is_object()) return "no answer";
  if (!state["guests"].empty()) return std::to_string(state["guests"].size()) + " guests";
  for (const char* what : {"regions", "queue_pairs", "multicast_groups"})
    if (state["counters"][what] != 0) return state["counters"][what].dump() + " " + what;
  for (const auto& tenant : state["tenants"])
    for (const char* what : {"guests", "objects", "registered_bytes", "queue_bytes"})
      if (tenant[what] != 0) return "tenant " + tenant["uid"].dump() + ": " + tenant[what].dump() + " " + what;
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  std::string target, direct = "mediated", shards = "1";
  unsigned long seconds = 5, guests = 3, seed = static_cast<unsigned long>(::time(nullptr));
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--direct") direct = "auto";
    else if (word == "--shards" && i + 1 < argc) shards = argv[++i];
    else if (word == "--seconds" && i + 1 < argc) seconds = std::strtoul(argv[++i], nullptr, 10);
    else if (word == "--guests" && i + 1 < argc) guests = std::strtoul(argv[++i], nullptr, 10);
    else if (word == "--seed" && i + 1 < argc) seed = std::strtoul(argv[++i], nullptr, 10);
    else target = word;
  }
  if (const char* soak = std::getenv("VRDMA_SOAK"); soak != nullptr && std::atol(soak) > 0)
    seconds = std::atol(soak) > 1 ? std::strtoul(soak, nullptr, 10) : 1800;  // 1: half an hour a target
  const char* const library = std::getenv("VRDMA_LIBRARY") != nullptr ? std::getenv("VRDMA_LIBRARY") : VRDMA_LIBRARY_PATH;
  const char* const service_path = std::getenv("VRDMAD") != nullptr ? std::getenv("VRDMAD") : VRDMAD_PATH;
  if (::access(library, R_OK) != 0) {
    std::printf("SKIP  hostile %s: no %s: build the release, whose library the honest pair preloads\n", target.c_str(), library);
    return 77;
  }
  const bool other_uid = ::geteuid() == 0, of_machine = target.starts_with("machine");
  if (!other_uid) std::printf("SKIP  hostile guests run as the same user: only root can give them another\n");
  std::printf("target %s, %lu s, %lu guests, seed %lu\n", target.c_str(), seconds, guests, seed);

  char pattern[] = "/tmp/vrdma-hostile-XXXXXX";
  if (::mkdtemp(pattern) == nullptr) return 2;
  ::chmod(pattern, 0755);
  ::umask(022);
  const std::string directory = pattern, path = directory + "/vrdmad.sock", log = directory + "/log";
  for (const char* name : {"0", "1", "2"}) {
    if (!of_machine) break;
    const std::filesystem::path folder = std::filesystem::path(directory) / "vm" / name;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "ram").close();
    std::filesystem::resize_file(folder / "ram", 32 << 20);
    std::ofstream(folder / "vm.json") << json{{"ram", folder / "ram"}, {"tenant", hostile_uid}, {"vectors", 4}};
  }
  const int errors = ::open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
  int ready[2];
  if (errors < 0 || ::pipe2(ready, 0) != 0) return 2;
  ::fcntl(ready[0], F_SETFD, FD_CLOEXEC);
  const pid_t service = spawn({service_path, "--socket", path, "--log-level", "error", "--direct", direct, "--shards", shards, "--ready-fd", std::to_string(ready[1])},
                              {"ASAN_OPTIONS=quarantine_size_mb=8:malloc_context_size=8:allocator_release_to_os_interval_ms=100"}, errors);
  ::close(ready[1]);
  char byte;
  if (::read(ready[0], &byte, 1) != 1) {
    std::fprintf(stderr, "vrdmad did not start:\n%s", read_all(log).c_str());
    return 1;
  }
  ::close(ready[0]);
  const auto service_lives = [&] { return ::waitpid(service, nullptr, WNOHANG) == 0; };

  const int shared = ::memfd_create("victims", 0);
  if (shared < 0 || ::ftruncate(shared, sizeof(hostile::VictimReport)) != 0) return 2;
  auto* const report = static_cast<hostile::VictimReport*>(
      ::mmap(nullptr, sizeof(hostile::VictimReport), PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0));
  const Footprint before = footprint(service);
  const pid_t victims = spawn({VICTIM_PATH, std::to_string(shared)}, {"VRDMA_SOCKET=" + path, std::string("LD_PRELOAD=") + library});
  ::close(shared);
  if (!eventually(60'000, [&] { return report->rounds.load() > 2 || report->failed.load() != 0; })) fail("the honest pair did not start");

  std::vector<pid_t> enemies;
  for (unsigned long i = 0; i < guests; ++i) {
    std::vector<std::string> command{GUEST_PATH, path, target, std::to_string(seed + i), std::to_string(seconds)};
    if (other_uid && !of_machine) command.push_back(std::to_string(hostile_uid));
    // Nobody judges their leaks, and LeakSanitizer, which stops the program at its end, waits for ever where a SIGCONT comes in between.
    enemies.push_back(spawn(command, {"ASAN_OPTIONS=detect_leaks=0"}));
  }

  bool lives = true;
  // Time in which one of them wanted to run and could not (a machine under load) is not the service's; they do so one after the other.
  // All three poll, so together they may wait for longer than time passes: hence a last limit.
  const auto kept_waiting_ms = [&] { return waited_ms(service) + waited_ms(victims) + waited_ms(report->second.load(std::memory_order_relaxed)); };
  std::uint64_t rounds = report->rounds.load(), since = now_ms(), waited = kept_waiting_ms(), longest_gap_ms = 0;
  std::string stood;  // where all of them were in the middle of this gap, if it is a long one
  const std::uint64_t first_round = rounds;
  for (const std::uint64_t until = now_ms() + seconds * 1000; now_ms() < until && failures == 0;) {
    ::usleep(10'000);
    if (!(lives = service_lives())) {
      fail("the service died");
      break;
    }
    if (report->failed.load(std::memory_order_acquire) != 0) fail(std::string("an honest guest saw: ") + report->message);
    const std::uint64_t now_rounds = report->rounds.load();
    const std::uint64_t now = now_ms(), gap = now - since;
    if (stood.empty() && gap > gap_max_ms / 2)
      for (const auto& [who, pid] : {std::pair{"service", service}, {"first", victims}, {"second", report->second.load(std::memory_order_relaxed)}})
        stood += std::string("--- ") + who + " after " + std::to_string(gap) + " ms\n" + whereabouts(pid);
    if (now_rounds != rounds || gap > gap_max_ms) {
      const std::uint64_t kept = kept_waiting_ms() - waited, own = gap > kept ? gap - kept : 0;
      longest_gap_ms = std::max(longest_gap_ms, own);
      if (own > gap_max_ms || gap > last_limit_ms)
        fail("the honest pair stood still for " + std::to_string(gap) + " ms, of which they waited " + std::to_string(kept) + " for processors\n" + stood +
             "--- service at the end\n" + whereabouts(service));
      if (now_rounds != rounds) rounds = now_rounds, since = now, waited += kept, stood.clear();
    }
  }
  for (const pid_t enemy : enemies) {
    ::kill(enemy, SIGCONT);  // some stop themselves
    const int status = reap(enemy, failures == 0 ? 30'000 : 0);
    if (failures == 0 && status != 0)
      fail("a hostile guest did nothing: it hung (-1) or never attached: wait status " + std::to_string(status));
  }
  const std::uint64_t done = report->rounds.load() - first_round;
  if (lives && failures == 0 && !eventually(30'000, [&] { return report->rounds.load() > rounds; })) fail("the honest pair did not go on afterwards");
  ::kill(victims, SIGTERM);
  reap(victims, 30'000);

  if (lives && (lives = service_lives())) {
    std::string left;
    if (!eventually(30'000, [&] { return (left = leftovers(show(path))).empty(); })) fail("the service still holds " + left);
    Footprint after;
    if (!eventually(30'000, [&] {
          after = footprint(service);
          return after.descriptors <= before.descriptors && after.threads <= before.threads + 1 &&
                 after.resident_kib <= before.resident_kib + growth_max_kib;
        }))
      fail("the service has " + std::to_string(after.descriptors) + " descriptors (" + std::to_string(before.descriptors) + " before), " +
           std::to_string(after.threads) + " threads (" + std::to_string(before.threads) + "), " + std::to_string(after.resident_kib) +
           " KiB (" + std::to_string(before.resident_kib) + ")");
    std::printf("honest rounds %llu, longest gap %llu ms; service %llu -> %llu KiB, %zu -> %zu descriptors\n",
                static_cast<unsigned long long>(done), static_cast<unsigned long long>(longest_gap_ms),
                static_cast<unsigned long long>(before.resident_kib), static_cast<unsigned long long>(after.resident_kib),
                before.descriptors, after.descriptors);
    ::kill(service, SIGTERM);
    const int status = reap(service, 20'000);
    if (status != 0) fail("the service did not end cleanly (wait status " + std::to_string(status) + ")");
  }
  const std::string said = read_all(log);
  if (said.find("Sanitizer") != std::string::npos || said.find("runtime error") != std::string::npos) fail("a sanitizer reported");
  // The keeper ends after the service whose machines it kept, and takes its socket along.
  if (!eventually(30'000, [&] { return !std::filesystem::exists(directory + "/vm/keeper.sock"); })) fail("the service's keeper is still there");
  if (failures != 0) std::fprintf(stderr, "--- the service's log (seed %lu)\n%.20000s\n", seed, said.c_str());
  std::filesystem::remove_all(directory);
  return failures == 0 ? 0 : 1;
}
