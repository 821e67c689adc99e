// vrdma-conformance: the verbs conformance suite. A client of libibverbs and nothing else, in two processes per test.
#include <fnmatch.h>
#include <infiniband/verbs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "tests/conformance/coverage.hpp"
#include "tests/conformance/far.hpp"
#include "tests/conformance/runner.hpp"

namespace {

using namespace vrdma::conformance;

constexpr int exit_skip = 77;
constexpr const char* probe_word = "--conformance-probe";

constexpr const char* usage =
    "usage: vrdma-conformance [options]\n"
    "  --list               names and items of the tests\n"
    "  --filter GLOB        only tests whose name matches\n"
    "  --except GLOB        not these (may be repeated)\n"
    "  --seed N             seed of the random tests (default: from the clock, printed)\n"
    "  --repeat N           N rounds, each with the next seed\n"
    "  --dev NAME           device (default: the first)\n"
    "  --ib-port N          port (default: 1)\n"
    "  --gid-index N        address by this GID (default: by LID on InfiniBand, by a RoCE v2 GID on Ethernet)\n"
    "  --slow               the slow tests too\n"
    "  --reuse              keep one pair of processes for all tests while they pass\n"
    "  --fail-fast          stop at the first failure\n"
    "  --timeout-scale X    multiply every time limit (sanitizers, busy machines)\n"
    "  --serve PORT         be the second process of every test, for another vrdma-conformance that says --with\n"
    "  --with HOST:PORT     the second process is there: only tests of two processes, started here\n"
    "  --sample N           only so many of the tests, drawn by the seed\n"
    "  --json FILE          results as JSON\n"
    "  --coverage ITEMS --markdown FILE   no device: check that every item has a test and write the table\n"
    "exit: 0 all passed, 1 something failed, 2 wrong usage, 77 no device to test\n";

// Runs in a process of its own: the runner never touches verbs.
int probe(const Settings& settings) {
  int count = 0;
  errno = 0;
  ibv_device** list = ibv_get_device_list(&count);
  if (!list || count == 0) {
    std::fprintf(stderr,
                 "no verbs device (ibv_get_device_list found none, %s): nothing can be tested.\n"
                 "Run on a machine with an HCA or rxe, or under LD_PRELOAD=libvrdma.so with vrdmad running.\n",
                 errno_name(errno).c_str());
    return exit_skip;
  }
  ibv_device* chosen = nullptr;
  for (int i = 0; i < count && !chosen; ++i) {
    if (settings.device.empty() || settings.device == list[i]->name) chosen = list[i];
  }
  if (!chosen) {
    std::fprintf(stderr, "no verbs device named %s; there is %s\n", settings.device.c_str(), list[0]->name);
    return exit_skip;
  }
  ibv_context* context = ibv_open_device(chosen);
  ibv_port_attr port{};
  if (!context || ibv_query_port(context, static_cast<std::uint8_t>(settings.port), &port) != 0) {
    std::fprintf(stderr, "cannot open %s or query its port %d (%s)\n", chosen->name, settings.port,
                 errno_name(errno).c_str());
    return exit_skip;
  }
  if (port.state != IBV_PORT_ACTIVE) {
    std::fprintf(stderr, "port %d of %s is not active (%s)\n", settings.port, chosen->name, ibv_port_state_str(port.state));
    return exit_skip;
  }
  std::printf("device %s port %d, link layer %s, lid %u, mtu %d\n", chosen->name, settings.port,
              port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand", port.lid, 128 << port.active_mtu);
  ibv_close_device(context);
  ibv_free_device_list(list);
  return 0;
}

int run_probe(const Settings& settings) {
  std::fflush(stdout);
  const std::string port = std::to_string(settings.port);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::execl("/proc/self/exe", "vrdma-conformance", probe_word, settings.device.c_str(), port.c_str(), nullptr);
    ::_exit(2);
  }
  int status = 0;
  if (pid < 0 || ::waitpid(pid, &status, 0) != pid) return 1;
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "looking for the device died by signal %d (%s)\n", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
    return 1;
  }
  return WEXITSTATUS(status);
}

struct Command {
  RunnerOptions runner;
  bool list = false;
  std::optional<std::uint16_t> serve;
  std::string with;
  std::string json;
  std::string coverage_items;
  std::string coverage_markdown;
};

Command parse(int argc, char** argv) {
  Command command;
  command.runner.seed = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) % 1'000'000'007u;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) throw std::invalid_argument(word + " needs a value");
      return argv[++i];
    };
    if (word == "--list") {
      command.list = true;
    } else if (word == "--filter") {
      command.runner.filter = value();
    } else if (word == "--except") {
      command.runner.except.push_back(value());
    } else if (word == "--seed") {
      command.runner.seed = std::stoull(value());
    } else if (word == "--repeat") {
      command.runner.repeat = static_cast<unsigned>(std::stoul(value()));
    } else if (word == "--dev") {
      command.runner.settings.device = value();
    } else if (word == "--ib-port") {
      command.runner.settings.port = std::stoi(value());
    } else if (word == "--gid-index") {
      command.runner.settings.gid_index = std::stoi(value());
    } else if (word == "--timeout-scale") {
      command.runner.settings.timeout_scale = std::stod(value());
    } else if (word == "--slow") {
      command.runner.slow = true;
    } else if (word == "--reuse") {
      command.runner.reuse = true;
    } else if (word == "--fail-fast") {
      command.runner.fail_fast = true;
    } else if (word == "--serve") {
      command.serve = static_cast<std::uint16_t>(std::stoul(value()));
    } else if (word == "--with") {
      command.with = value();
    } else if (word == "--sample") {
      command.runner.sample = std::stoul(value());
    } else if (word == "--json") {
      command.json = value();
    } else if (word == "--coverage") {
      command.coverage_items = value();
    } else if (word == "--markdown") {
      command.coverage_markdown = value();
    } else {
      throw std::invalid_argument("unknown option " + word);
    }
  }
  if (command.coverage_items.empty() != command.coverage_markdown.empty()) {
    throw std::invalid_argument("--coverage and --markdown go together");
  }
  return command;
}

int run_suite(const Command& command) {
  if (const int rc = run_probe(command.runner.settings); rc != 0) {
    std::printf("0 passed, 0 failed, %zu skipped\n", registry().size());
    return rc;
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(command.runner.seed));
  RunnerOptions options = command.runner;
  std::unique_ptr<Stream> far;
  if (!command.with.empty()) far = connect_to(command.with);
  options.far = far.get();
  const std::vector<Result> results = run_tests(options);
  bool failed = false;
  for (const Result& r : results) failed = failed || r.outcome == Outcome::failed;
  if (!command.json.empty()) {
    std::ofstream out(command.json);
    out << to_json(results);
    out.flush();
    if (!out) {
      std::fprintf(stderr, "cannot write %s\n", command.json.c_str());
      failed = true;
    }
  }
  if (results.empty()) {
    std::fprintf(stderr, "no test is left of those that match %s\n", command.runner.filter.c_str());
    failed = true;
  }
  std::printf("%s\n", summary(results).c_str());
  return failed ? 1 : 0;
}

int serve(const Command& command) {
  if (const int rc = run_probe(command.runner.settings); rc != 0) return rc;
  std::uint16_t port = *command.serve;
  const Fd listener = listen_on(port);
  std::printf("serving at port %u\n", port);
  std::fflush(stdout);
  return serve_roles(listener, command.runner.settings);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], child_word) == 0) return child_from_arguments(argc, argv);
  if (argc > 3 && std::strcmp(argv[1], probe_word) == 0) {
    Settings settings;
    settings.device = argv[2];
    settings.port = std::atoi(argv[3]);
    return probe(settings);
  }
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0) return std::printf("%s", usage) < 0;
  }
  Command command;
  try {
    command = parse(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "vrdma-conformance: %s\n%s", error.what(), usage);
    return 2;
  }
  if (!command.coverage_items.empty()) {
    const std::string complaints = check_coverage(command.coverage_items, command.coverage_markdown);
    std::fputs(complaints.c_str(), stderr);
    return complaints.empty() ? 0 : 1;
  }
  const std::string& filter = command.runner.filter;
  if (std::none_of(registry().begin(), registry().end(), [&](const Test& test) { return ::fnmatch(filter.c_str(), test.name, 0) == 0; })) {
    std::fprintf(stderr, "vrdma-conformance: no test matches --filter %s: --list says their names\n", filter.c_str());
    return 2;
  }
  if (command.list) {
    for (const Test& test : registry()) {
      if (::fnmatch(filter.c_str(), test.name, 0) == 0) std::printf("%-64s %s\n", test.name, test.items);
    }
    return 0;
  }
  try {
    return command.serve ? serve(command) : run_suite(command);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "vrdma-conformance: %s\n", error.what());
    return 1;
  }
}
