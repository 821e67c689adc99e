// What the VMCI tests stand on: a vrdmad of their own in a directory of its own, child processes that report numbers, and the
// service's account of itself. Everything ends with its object; nothing waits for a time, only for conditions.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/context.hpp"

namespace vrdma::test {

constexpr int watchdog_ms = 60'000;

class Service {
 public:
  Service() {
    char name[] = "/tmp/vmci-test-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    directory_ = name;
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(ready[0]);
      const std::string fd = std::to_string(ready[1]), path = socket();
      ::execl(VRDMAD, "vrdmad", "--socket", path.c_str(), "--foreground", "--log-level", "error", "--ready-fd", fd.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(ready[1]);
    char byte = 0;
    const bool up = ::read(ready[0], &byte, 1) == 1;
    ::close(ready[0]);
    REQUIRE(up);
  }
  ~Service() {
    if (pid_ > 0) {
      ::kill(pid_, SIGTERM);
      int status = -1;
      ::waitpid(pid_, &status, 0);
      CHECK(status == 0);  // a sanitizer's report is another status
    }
    std::filesystem::remove_all(directory_);
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string socket() const { return directory_ + "/s"; }
  pid_t pid() const { return pid_; }

  std::shared_ptr<vmci::Context> attach(const std::string& name = "test") const {
    auto context = vmci::Context::attach({socket(), name});
    if (!context) std::abort();
    return *context;
  }
  std::size_t descriptors() const {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid_) + "/fd")) ++count;
    return count;
  }

 private:
  std::string directory_;
  pid_t pid_ = -1;
};

inline nlohmann::json show(vmci::Context& context) {
  auto reply = context.call_on_socket<control::Request::show>({});
  REQUIRE(reply.has_value());
  REQUIRE(reply->descriptors.size() == 1);
  std::string text;
  std::array<char, 65536> part;
  for (ssize_t got; (got = ::pread(reply->descriptors[0].get(), part.data(), part.size(), static_cast<off_t>(text.size()))) > 0;)
    text.append(part.data(), static_cast<std::size_t>(got));
  return nlohmann::json::parse(text);
}
inline nlohmann::json guest_of(const nlohmann::json& all, std::uint32_t context) {
  for (const auto& guest : all["guests"])
    if (guest["guest"] == context) return guest;
  return {};
}
// Asks the service until it says so; false under the watchdog.
inline bool eventually(vmci::Context& context, const std::function<bool(const nlohmann::json&)>& condition) {
  const std::uint64_t until = vmci::monotonic_ns() + std::uint64_t{watchdog_ms} * 1'000'000;
  while (vmci::monotonic_ns() < until)
    if (condition(show(context))) return true;
  return false;
}

// A process that runs `body`, which may report() numbers; its result is its exit code. Made before the parent has threads.
class Child {
 public:
  struct Reporter {
    int fd;
    void report(std::uint32_t number) const {
      if (::write(fd, &number, sizeof(number)) != sizeof(number)) ::_exit(90);
    }
  };
  explicit Child(const std::function<int(const Reporter&)>& body) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(ends[0]);
      ::alarm(watchdog_ms / 1000 * 2);
      ::_exit(body(Reporter{ends[1]}));
    }
    ::close(ends[1]);
    reports_.reset(ends[0]);
  }
  ~Child() {
    if (pid_ > 0) kill();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  std::uint32_t next() {
    std::uint32_t number = 0;
    pollfd waiting{reports_.get(), POLLIN, 0};
    REQUIRE(::poll(&waiting, 1, watchdog_ms) == 1);
    REQUIRE(::read(reports_.get(), &number, sizeof(number)) == sizeof(number));
    return number;
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    (void)wait();
  }
  int wait() {
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  vmci::UniqueFd reports_;
};

}  // namespace vrdma::test
