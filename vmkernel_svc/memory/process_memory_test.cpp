// Copies through a process, this one's own: who pays for a worker that does not come back.
#include "vmkernel_svc/memory/process_memory.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <semaphore>
#include <string>
#include <thread>

#include "doctest/doctest.h"
#include "vmci_channel/test_programs.hpp"

namespace vrdma::svc {
namespace {

const vmci::Credentials own{::getpid(), ::geteuid(), ::getegid()};

// Holds the worker up, as memory that does not come does.
struct Sink : JobSink {
  std::atomic<int> came{0};
  std::binary_semaphore let_go{0};
  void finished(ProcessJob* job) override {
    CHECK(job->ok);
    delete job;
    ++came;
    let_go.acquire();
  }
};

template <class Condition>
bool eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  return condition();
}

TEST_CASE("a worker that is held up when its guest goes counts for as long as it stays") {
  const vmci::UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const auto workers = std::make_shared<Workers>();
  Sink sink;
  {
    ProcessMemory memory;
    memory.open(own, self, sink, workers);
    const std::uint64_t word = 7;
    auto job = std::make_unique<ProcessJob>();
    job->kind = ProcessJob::Kind::read;
    job->ranges = {{reinterpret_cast<std::uintptr_t>(&word), sizeof(word)}};
    job->buffer.resize(sizeof(word));
    REQUIRE(memory.submit(std::move(job)));
    REQUIRE(eventually([&] { return sink.came == 1; }));
    CHECK(workers->lingering == 0);
  }
  CHECK(workers->lingering == 1);
  sink.let_go.release();
  CHECK(eventually([&] { return workers->lingering == 0; }));
}

TEST_CASE("a write that is called off before its step changes nothing, and its job comes back failed") {
  struct Refused : JobSink {
    std::atomic<int> came{0};
    std::atomic<bool> ok{true};
    void finished(ProcessJob* job) override {
      ok = job->ok;
      delete job;
      ++came;
    }
  } sink;
  const vmci::UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  std::uint64_t word = 7;
  int jobs = 0;
  ProcessMemory memory;
  memory.open(own, self, sink, std::make_shared<Workers>());
  for (const auto kind : {ProcessJob::Kind::write, ProcessJob::Kind::fetch_and_add})
    for (const bool called_off : {true, false}) {
      auto job = std::make_unique<ProcessJob>();
      job->kind = kind;
      job->ranges = {{reinterpret_cast<std::uintptr_t>(&word), sizeof(word)}};
      job->buffer.resize(sizeof(word));
      job->operand = 1;
      job->leash = std::make_shared<WriteLeash>();
      if (called_off) CHECK(job->leash->call_off());
      const std::uint64_t before = word;
      REQUIRE(memory.submit(std::move(job)));
      REQUIRE(eventually([&, expected = ++jobs] { return sink.came == expected; }));
      CHECK(sink.ok == !called_off);
      CHECK((std::atomic_ref(word).load() == before) == called_off);
    }
}

TEST_CASE("who calls a write off within a step is told so, and when the step is over, after which there is none") {
  WriteLeash leash;
  REQUIRE(leash.begin_step());
  CHECK_FALSE(leash.call_off());
  CHECK_FALSE(leash.over());
  CHECK_FALSE(leash.end_step());
  CHECK(leash.over());
  CHECK_FALSE(leash.begin_step());
}

TEST_CASE("a memory that was never used leaves nobody behind") {
  const vmci::UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const auto workers = std::make_shared<Workers>();
  Sink sink;
  {
    ProcessMemory memory;
    memory.open(own, self, sink, workers);
    CHECK(memory.opened());
  }
  CHECK(workers->lingering == 0);
}

TEST_CASE("two workers of one tenant are atomic with each other on a word that both reach") {
  struct Counted : JobSink {
    std::atomic<int> came{0};
    void finished(ProcessJob* job) override {
      CHECK(job->ok);
      delete job;
      ++came;
    }
  } sink;
  const vmci::UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const auto workers = std::make_shared<Workers>();
  constexpr int memories = 2, adds = 3000;
  ProcessMemory both[memories];
  for (ProcessMemory& memory : both) memory.open(own, self, sink, workers);
  std::atomic<std::uint64_t> word{0};
  for (int i = 0; i < adds; ++i) {
    for (ProcessMemory& memory : both) {
      auto job = std::make_unique<ProcessJob>();
      job->kind = ProcessJob::Kind::fetch_and_add;
      job->operand = 1;
      job->ranges = {{reinterpret_cast<std::uintptr_t>(&word), sizeof(word)}};
      REQUIRE(eventually([&, given = memories * i] { return given - sink.came < static_cast<int>(jobs_max); }));
      REQUIRE(memory.submit(std::move(job)));
    }
  }
  CHECK(eventually([&] { return sink.came == memories * adds; }));
  CHECK(word == memories * adds);
}

// Seen before: the folder of a process belongs to its effective user whatever it runs, and all memory of a set-group-ID program that somebody ran
// could be read and written through this service by whoever ran it.
TEST_CASE("a process that has become a program of a group's or of capabilities is not reached, though this service may") {
  using vmci::test::Gives;
  if (!vmci::test::programs_give_rights()) return;
  Sink sink;
  for (const Gives gives : {Gives::nothing, Gives::group, Gives::capability}) {
    CAPTURE(static_cast<int>(gives));
    const vmci::test::ProgramOf program(gives);
    const std::string file = "/proc/" + std::to_string(program.connected().pid) + "/mem";
    if (!vmci::UniqueFd(::open(file.c_str(), O_RDWR | O_CLOEXEC))) {
      MESSAGE("SKIPPED: this root may not look into others (CAP_SYS_PTRACE)");
      return;
    }
    ProcessMemory memory;
    memory.open(program.connected(), program.pidfd(), sink, std::make_shared<Workers>());
    CHECK(memory.opened() == (gives == Gives::nothing));
  }
}

}  // namespace
}  // namespace vrdma::svc
