#include "tests/conformance/runner.hpp"

#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "tests/conformance/child.hpp"

namespace vrdma::conformance {
namespace {

using Clock = std::chrono::steady_clock;

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

[[noreturn]] void system_failure(const char* what) {
  throw std::runtime_error(text("the runner cannot go on: ", what, ": ", errno_name(errno)));
}

// One role's process, seen from the runner. Kills and reaps it at the end of its life.
class RoleProcess {
 public:
  RoleProcess(bool is_a, int peer_fd, const Settings& settings) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) system_failure("socketpair");
    orders_.reset(pair[0]);
    const Fd theirs(pair[1]);
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

  ~RoleProcess() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      reap(true);
    }
    ::munmap(place_, sizeof(Place));
  }
  RoleProcess(const RoleProcess&) = delete;
  RoleProcess& operator=(const RoleProcess&) = delete;

  void order(std::uint32_t test_index, std::uint64_t seed) {
    reported_ = false;
    report_ = Report{};
    const Order order{test_index, 0, seed};
    (void)::send(orders_.get(), &order, sizeof(order), MSG_NOSIGNAL);
  }
  void dismiss() { orders_.reset(); }

  // Takes in what there is without blocking.
  void look() {
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
  bool reported() const { return reported_; }
  bool gone() const { return pid_ <= 0; }
  const Report& report() const { return report_; }
  const char* place() const { return place_->text; }
  // Empty for a clean exit.
  std::string death() const {
    if (!gone()) return "";
    if (WIFSIGNALED(status_)) return text("killed by signal ", WTERMSIG(status_), " (", ::strsignal(WTERMSIG(status_)), ")");
    if (WEXITSTATUS(status_) != 0) return text("left with exit code ", WEXITSTATUS(status_));
    return "";
  }
  void add_to(std::vector<pollfd>& fds) const {
    if (!reported_ && orders_.get() >= 0) fds.push_back({orders_.get(), POLLIN, 0});
    if (!gone() && pidfd_.get() >= 0) fds.push_back({pidfd_.get(), POLLIN, 0});
  }

 private:
  void reap(bool block) {
    if (pid_ <= 0) return;
    int status = 0;
    const pid_t got = ::waitpid(pid_, &status, block ? 0 : WNOHANG);
    if (got == pid_) {
      status_ = status;
      pid_ = -1;
    }
  }

  Fd orders_;
  Fd pidfd_;
  Place* place_ = nullptr;
  pid_t pid_ = -1;
  int status_ = 0;
  bool reported_ = false;
  Report report_{};
};

struct Pair {
  std::vector<std::unique_ptr<RoleProcess>> roles;  // a, then b unless solo
};

Pair start_pair(bool solo, const Settings& settings) {
  int sockets[2] = {-1, -1};
  if (!solo && ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) system_failure("socketpair");
  const Fd a(sockets[0]);
  const Fd b(sockets[1]);
  Pair pair;
  pair.roles.push_back(std::make_unique<RoleProcess>(true, a.get(), settings));
  if (!solo) pair.roles.push_back(std::make_unique<RoleProcess>(false, b.get(), settings));
  return pair;
}

// Sleeps until something happens to one of the processes or the time is over; false when it is over.
template <class Done>
bool wait_for(Pair& pair, Clock::time_point end, Done done) {
  for (;;) {
    std::vector<pollfd> fds;
    bool finished = true;
    for (auto& role : pair.roles) {
      role->look();
      finished = finished && done(*role);
      role->add_to(fds);
    }
    if (finished) return true;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    // A kernel without pidfd_open still gets its dead noticed by the period.
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<long long>(left + 1, 100)));
  }
}

void judge(const Pair& pair, bool in_time, int timeout_s, Result& result) {
  bool failed = false;
  bool skipped = false;
  std::string detail;
  const auto add = [&](const RoleProcess& role, const std::string& line) {
    if (!detail.empty()) detail += "\n    ";
    if (pair.roles.size() > 1) detail += &role == pair.roles[0].get() ? "[a] " : "[b] ";
    detail += line;
  };
  for (const auto& role : pair.roles) {
    const std::string death = role->death();
    if (role->reported() && role->report().verdict == Verdict::failed) {
      failed = true;
      add(*role, role->report().text);
    } else if (role->reported() && role->report().verdict == Verdict::skipped) {
      skipped = true;
      add(*role, role->report().text);
    } else if (!death.empty()) {
      failed = true;
      add(*role, text(death, ", last at ", role->place()));
    } else if (!role->reported()) {
      failed = true;
      add(*role, role->gone() ? text("left without a verdict, last at ", role->place())
                              : text("hung, killed after ", timeout_s, " s, last at ", role->place()));
    } else if (!in_time && !role->gone()) {
      failed = true;
      add(*role, text("gave its verdict but did not exit within ", timeout_s, " s"));
    }
  }
  const bool abandoned = std::any_of(pair.roles.begin(), pair.roles.end(), [](const auto& role) {
    return role->reported() && role->report().verdict == Verdict::peer_ended;
  });
  if (abandoned && !failed && !skipped) {
    failed = true;
    detail = "one role lost the other, which gave no reason";
  }
  result.outcome = failed ? Outcome::failed : skipped ? Outcome::skipped : Outcome::passed;
  result.detail = std::move(detail);
}

void print(const Result& result) {
  const char* word = result.outcome == Outcome::passed ? "PASS" : result.outcome == Outcome::failed ? "FAIL" : "SKIP";
  std::printf("%s  %-64s %7.2f s", word, result.name.c_str(), result.seconds);
  if (!result.detail.empty()) std::printf("\n    %s", result.detail.c_str());
  if (result.outcome == Outcome::failed) {
    std::printf("\n    again: --filter %s --seed %llu", result.name.c_str(), static_cast<unsigned long long>(result.seed));
  }
  std::printf("\n");
  std::fflush(stdout);
}

std::string quoted(const std::string& in) {
  std::string out = "\"";
  for (const char c : in) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

std::vector<Result> run_tests(const RunnerOptions& options) {
  std::vector<Result> results;
  Pair kept;  // with --reuse, while it is healthy
  for (unsigned round = 0; round < options.repeat; ++round) {
    for (std::size_t index = 0; index < registry().size(); ++index) {
      const Test& test = registry()[index];
      if (::fnmatch(options.filter.c_str(), test.name, 0) != 0) continue;
      if (std::any_of(options.except.begin(), options.except.end(),
                      [&](const std::string& glob) { return ::fnmatch(glob.c_str(), test.name, 0) == 0; })) {
        continue;
      }
      Result result;
      result.name = test.name;
      result.items = test.items;
      result.seed = options.seed + round;
      if (test.options.slow && !options.slow) {
        result.outcome = Outcome::skipped;
        result.detail = "slow: run with --slow";
        if (!options.quiet) print(result);
        results.push_back(std::move(result));
        continue;
      }
      const auto begin = Clock::now();
      const int timeout_s = std::max(1, static_cast<int>(test.options.timeout_s * options.settings.timeout_scale));
      const auto end = begin + std::chrono::seconds(timeout_s);
      const bool keep = options.reuse && !test.options.solo;
      Pair pair = keep && !kept.roles.empty() ? std::move(kept) : start_pair(test.options.solo, options.settings);
      kept.roles.clear();
      for (auto& role : pair.roles) role->order(static_cast<std::uint32_t>(index), result.seed);
      bool in_time = wait_for(pair, end, [](const RoleProcess& r) { return r.reported() || r.gone(); });
      const bool healthy = in_time && std::all_of(pair.roles.begin(), pair.roles.end(), [](const auto& r) {
                             return r->reported() && r->report().verdict == Verdict::passed && !r->gone();
                           });
      if (!(keep && healthy)) {
        for (auto& role : pair.roles) role->dismiss();
        // Leaving counts as part of the test: a library that hangs or crashes in its destructor has failed it.
        if (in_time) in_time = wait_for(pair, end, [](const RoleProcess& r) { return r.gone(); });
      }
      judge(pair, in_time, timeout_s, result);
      if (keep && healthy) kept = std::move(pair);
      result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (!options.quiet) print(result);
      const bool stop = options.fail_fast && result.outcome == Outcome::failed;
      results.push_back(std::move(result));
      if (stop) return results;
    }
  }
  return results;
}

std::string summary(const std::vector<Result>& results) {
  const auto count = [&](Outcome outcome) {
    return std::count_if(results.begin(), results.end(), [&](const Result& r) { return r.outcome == outcome; });
  };
  return text(count(Outcome::passed), " passed, ", count(Outcome::failed), " failed, ", count(Outcome::skipped), " skipped");
}

std::string to_json(const std::vector<Result>& results) {
  std::string out = "{\n  \"summary\": " + quoted(summary(results)) + ",\n  \"tests\": [";
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3f", r.seconds);
    out += text(i ? ",\n    " : "\n    ", "{\"name\": ", quoted(r.name), ", \"items\": ", quoted(r.items), ", \"outcome\": \"",
                r.outcome == Outcome::passed ? "passed" : r.outcome == Outcome::failed ? "failed" : "skipped",
                "\", \"seed\": ", r.seed, ", \"seconds\": ", std::string(seconds), ", \"detail\": ", quoted(r.detail), "}");
  }
  return out + "\n  ]\n}\n";
}

int child_from_arguments(int argc, char** argv) {
  if (argc < 8) return 2;
  ChildArguments arguments;
  arguments.is_a = std::string(argv[2]) == "a";
  if (std::sscanf(argv[3], "%d,%d,%d", &arguments.orders_fd, &arguments.peer_fd, &arguments.place_fd) != 3) return 2;
  arguments.settings.device = argv[4];
  arguments.settings.port = std::atoi(argv[5]);
  arguments.settings.gid_index = std::atoi(argv[6]);
  arguments.settings.timeout_scale = std::atof(argv[7]);
  return child_main(arguments);
}

}  // namespace vrdma::conformance
