// A process that plays one role of a test, as the runner sees it: here, or on another machine (far.hpp). One thread; no verbs.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/child.hpp"

namespace vrdma::conformance {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  void reset(int fd = -1);
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

[[noreturn]] void system_failure(const char* what);

// Two ends of packets, by which the roles of a test meet.
struct PacketPair {
  PacketPair();
  Fd one, other;
};

class Role {
 public:
  virtual ~Role() = default;
  Role() = default;
  Role(const Role&) = delete;
  Role& operator=(const Role&) = delete;

  virtual void order(std::uint32_t test_index, std::uint64_t seed) = 0;
  virtual void dismiss() = 0;                                     // no more orders: it leaves
  virtual void look() = 0;                                        // takes in what there is without blocking
  virtual void add_to(std::vector<pollfd>& descriptors) const = 0;  // something happens here before look() finds anything
  virtual std::string place() = 0;                                // where it is; of one that hangs

  bool reported() const { return reported_; }
  bool gone() const { return gone_; }
  const Report& report() const { return report_; }
  const std::string& death() const { return death_; }  // empty for a clean exit

 protected:
  bool reported_ = false;
  bool gone_ = false;
  Report report_{};
  std::string death_;
};

// One on this machine. Kills and reaps it at the end of its life.
class RoleProcess : public Role {
 public:
  // peer_fd: inherited; its end of the packets, or -1 for a test of one process.
  RoleProcess(bool is_a, int peer_fd, const Settings& settings);
  ~RoleProcess() override;

  void order(std::uint32_t test_index, std::uint64_t seed) override;
  void dismiss() override { orders_.reset(); }
  void look() override;
  void add_to(std::vector<pollfd>& descriptors) const override;
  std::string place() override { return place_->text; }

 private:
  void reap(bool block);

  Fd orders_;
  Fd pidfd_;
  Place* place_ = nullptr;
  pid_t pid_ = -1;
};

}  // namespace vrdma::conformance
