// The harness tested without a device: rendezvous, verdicts, the watchdog, deaths, skips, coverage.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "tests/conformance/coverage.hpp"
#include "tests/conformance/far.hpp"
#include "tests/conformance/runner.hpp"

using namespace vrdma::conformance;

CONFORMANCE(SelfExchange, "T-01") {
  struct Hello {
    std::uint64_t role, seed;
    pid_t pid;
  };
  for (unsigned i = 0; i < 200; ++i) {
    const Hello theirs = run.peer.exchange(Hello{run.a() ? 1u : 2u, run.rng.next(), ::getpid()});
    EXPECT_EQ(theirs.role, run.a() ? 2u : 1u);
    EXPECT_NE(theirs.pid, ::getpid());
    run.peer.barrier();
  }
  Rng again(run.seed);
  std::uint64_t last = 0;
  for (unsigned i = 0; i < 200; ++i) last = again.next();
  EXPECT_EQ(run.peer.exchange(last), last);
}
CONFORMANCE(SelfFailureNamesValues, "T-01") {
  if (run.a()) {
    const Note note("size ", 17);
    const int answer = 41;
    EXPECT_EQ(answer, 42);
  }
  run.peer.barrier();
}
CONFORMANCE(SelfFailureInAThreadOfB, "T-01") {
  if (run.b()) std::thread([] { EXPECT_ERRNO(EBUSY, EINVAL); }).join();
  wait_until("something that never comes", [] { return false; });
}
CONFORMANCE(SelfHang, "T-01", .timeout_s = 1) {
  if (run.b()) {
    mark_place(__FILE__, __LINE__, "sitting here");
    for (;;) ::pause();
  }
  run.peer.barrier();
}
CONFORMANCE(SelfDeath, "T-01") {
  if (run.b()) ::raise(SIGKILL);
  run.peer.barrier();
}
CONFORMANCE(SelfExit, "T-01", .solo = true) { ::_exit(3); }
CONFORMANCE(SelfSkip, "T-01") {
  if (run.a()) skip("not today");
  run.peer.barrier();
}
CONFORMANCE(SelfOutOfStep, "T-01") {
  if (run.a()) {
    run.peer.send(1);
  } else {
    run.peer.barrier();
  }
  run.peer.barrier();
}
CONFORMANCE(SelfSlow, "T-01", .slow = true) {}

namespace {

std::map<std::string, Result> all(bool reuse, Stream* far = nullptr) {
  RunnerOptions options;
  options.far = far;
  options.seed = 7;
  options.quiet = true;
  options.reuse = reuse;
  std::map<std::string, Result> by_name;
  for (Result& r : run_tests(options)) by_name[r.name] = r;
  return by_name;
}

bool mentions(const Result& r, const char* words) { return r.detail.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("A pair of processes passes, fails, hangs, dies and skips, each with the right verdict") {
  for (const bool reuse : {false, true}) {
    CAPTURE(reuse);
    auto r = all(reuse);
    CHECK(r.at("SelfExchange").outcome == Outcome::passed);
    CHECK(r.at("SelfFailureNamesValues").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfFailureNamesValues"), "[a] selftest.cpp:"));
    CHECK(mentions(r.at("SelfFailureNamesValues"), "answer: got 41, expected 42"));
    CHECK(mentions(r.at("SelfFailureNamesValues"), "at size 17"));
    CHECK(r.at("SelfFailureInAThreadOfB").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfFailureInAThreadOfB"), "[b]"));
    CHECK(mentions(r.at("SelfFailureInAThreadOfB"), "answered EBUSY, expected EINVAL"));
    CHECK(r.at("SelfFailureInAThreadOfB").seconds < 15);
    CHECK(r.at("SelfHang").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfHang"), "sitting here"));
    CHECK(r.at("SelfDeath").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfDeath"), "[b] killed by signal 9"));
    CHECK(r.at("SelfExit").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfExit"), "exit code 3"));
    CHECK(r.at("SelfSkip").outcome == Outcome::skipped);
    CHECK(mentions(r.at("SelfSkip"), "not today"));
    CHECK(r.at("SelfOutOfStep").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfOutOfStep"), "out of step"));
    CHECK(r.at("SelfSlow").outcome == Outcome::skipped);
  }
}

TEST_CASE("The second process of every test may be another machine's") {
  std::uint16_t port = 0;
  Fd listener = listen_on(port);
  const pid_t server = ::fork();
  REQUIRE(server >= 0);
  if (server == 0) ::_exit(serve_roles(listener, Settings{}));
  listener.reset();
  auto stream = connect_to("127.0.0.1:" + std::to_string(port));
  for (const bool reuse : {false, true}) {
    CAPTURE(reuse);
    auto r = all(reuse, stream.get());
    CHECK_MESSAGE(r.at("SelfExchange").outcome == Outcome::passed, r.at("SelfExchange").detail);
    CHECK(r.at("SelfFailureNamesValues").outcome == Outcome::failed);
    CHECK(mentions(r.at("SelfFailureNamesValues"), "answer: got 41, expected 42"));
    CHECK(mentions(r.at("SelfFailureInAThreadOfB"), "[b]"));
    CHECK(mentions(r.at("SelfFailureInAThreadOfB"), "answered EBUSY, expected EINVAL"));
    CHECK(mentions(r.at("SelfHang"), "[b] hung"));
    CHECK(mentions(r.at("SelfHang"), "sitting here"));
    CHECK(mentions(r.at("SelfDeath"), "[b] killed by signal 9"));
    CHECK(mentions(r.at("SelfSkip"), "not today"));
    CHECK(mentions(r.at("SelfOutOfStep"), "out of step"));
    CHECK(!r.contains("SelfExit"));
  }
  stream.reset();
  int status = -1;
  CHECK(::waitpid(server, &status, 0) == server);
  CHECK(status == 0);
  CHECK_THROWS(connect_to("127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("A sample is drawn by the seed") {
  const auto names = [](std::uint64_t seed) {
    RunnerOptions options;
    options.seed = seed;
    options.quiet = true;
    options.filter = "SelfS*";
    options.sample = 1;
    options.slow = true;
    std::string all;
    for (const Result& r : run_tests(options)) all += r.name + " ";
    return all;
  };
  std::set<std::string> drawn;
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    const std::string first = names(seed);
    CHECK(first == names(seed));
    drawn.insert(first);
  }
  CHECK(drawn == std::set<std::string>{"SelfSkip ", "SelfSlow "});
}

TEST_CASE("The summary line and the JSON count what happened") {
  Result passed;
  passed.name = "A \"quoted\" one";
  passed.outcome = Outcome::passed;
  Result failed;
  failed.detail = "two\nlines";
  CHECK(summary({passed, failed}) == "1 passed, 1 failed, 0 skipped");
  const std::string json = to_json({passed, failed});
  CHECK(json.find("A \\\"quoted\\\" one") != std::string::npos);
  CHECK(json.find("two\\u000alines") != std::string::npos);
}

TEST_CASE("Coverage complains about items without a test, unknown ids and repeats") {
  char directory[] = "/tmp/conformance-selftest-XXXXXX";
  REQUIRE(::mkdtemp(directory));
  const std::string items = std::string(directory) + "/items.txt";
  const std::string table = std::string(directory) + "/table.md";
  {
    std::ofstream out(items);
    out << "# comment\nT-01|now|has tests\nT-02|later|needs none\n";
  }
  CHECK(check_coverage(items, table).empty());
  {
    std::ofstream out(items);
    out << "T-02|now|lacks one\nT-02|now|twice\nbroken line\n";
  }
  const std::string complaints = check_coverage(items, table);
  CHECK(complaints.find("no test for T-02") != std::string::npos);
  CHECK(complaints.find("repeats T-02") != std::string::npos);
  CHECK(complaints.find("not id|scope|claim") != std::string::npos);
  CHECK(complaints.find("names T-01, which is not") != std::string::npos);
  ::unlink(items.c_str());
  ::unlink(table.c_str());
  ::rmdir(directory);
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], child_word) == 0) return child_from_arguments(argc, argv);
  doctest::Context context(argc, argv);
  return context.run();
}
