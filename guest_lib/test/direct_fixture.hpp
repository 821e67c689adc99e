// What the tests of direct mode share: whether a queue pair is direct, memory that can be reached directly, a service that stands still.
#pragma once

#include <sys/mman.h>

#include "guest_lib/test/service_fixture.hpp"
#include "guest_lib/test/shown.hpp"

namespace vrdma::test {

inline constexpr const char* with_direct = R"({"direct": "auto"})";

inline std::string mode_of(const ibv_qp* qp, std::string* because = nullptr) {
  const auto shown = show();
  for (const auto& guest : shown.at("guests"))
    for (const auto& one : guest.at("qps")) {
      if (one.at("qpn") != qp->qp_num) continue;
      if (because != nullptr && one.at("mediated_because").is_string()) *because = one.at("mediated_because");
      return one.at("mode");
    }
  return "none";
}

// Why processes of this machine may not be direct (vmkernel_svc/direct/trust.cpp).
inline bool is_apart(const std::string& because) {
  for (const char* start : {"a process ", "the processes ", "the user namespace "})
    if (because.starts_with(start)) return true;
  return false;
}

// Whole pages, which move to the memory window.
class Pages {
 public:
  static constexpr std::size_t bytes = 1 << 20;
  explicit Pages(const Device& device) {
    memory_ = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    mr = ibv_reg_mr(device.pd, memory_, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    REQUIRE(mr != nullptr);
  }
  ~Pages() {
    if (mr != nullptr) CHECK(ibv_dereg_mr(mr) == 0);
    ::munmap(memory_, bytes);
  }
  Pages(const Pages&) = delete;
  char* at(std::size_t offset) const { return memory_ + offset; }
  std::uint64_t address(std::size_t offset = 0) const { return reinterpret_cast<std::uintptr_t>(memory_ + offset); }
  ibv_sge sge(std::size_t offset, std::uint32_t length) const { return {address(offset), length, mr->lkey}; }

  ibv_mr* mr = nullptr;

 private:
  char* memory_;
};

// The service does nothing for as long as this lives.
class Stopped {
 public:
  explicit Stopped(const Service& service) : pid_(service.pid()) {
    REQUIRE(::kill(pid_, SIGSTOP) == 0);
    int status = 0;
    REQUIRE(::waitpid(pid_, &status, WUNTRACED) == pid_);
    REQUIRE(WIFSTOPPED(status));
  }
  ~Stopped() { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_;
};

}  // namespace vrdma::test
