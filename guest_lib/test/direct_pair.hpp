// Two queue pairs of one process that become direct, and a service that is stopped meanwhile.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

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

struct Pair {
  // channels: each end's completion queue has one.
  explicit Pair(Patience patience = {}, bool channels = false)
      : a_channel(channels ? ibv_create_comp_channel(device.context) : nullptr), b_channel(channels ? ibv_create_comp_channel(device.context) : nullptr) {
    connect(a.get(), b->qp_num, patience, all_access);
    connect(b.get(), a->qp_num, patience, all_access);
  }
  static constexpr unsigned all_access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  int send(std::uint64_t wr_id, std::size_t from, std::uint32_t length) const { return post(a.get(), IBV_WR_SEND, wr_id, near.sge(from, length), 0); }
  int receive(std::uint64_t wr_id, std::size_t to, std::uint32_t length) const {
    ibv_sge sge = far.sge(to, length);
    ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(b.get(), &wr, &bad);
  }
  int post(ibv_qp* qp, ibv_wr_opcode opcode, std::uint64_t wr_id, ibv_sge sge, std::size_t remote, std::uint64_t operand = 0, unsigned more_flags = 0) const {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED | more_flags;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
      wr.wr.atomic = {far.address(remote), operand, 0, far.mr->rkey};
    else
      wr.wr.rdma = {far.address(remote), far.mr->rkey};
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
  // Until the service has given the connection away, with the memory of both ends mapped: each of these posts, unless it finds the
  // service in charge, takes the offer up, or maps what it misses. False: nobody can be direct where this process runs, as is said aloud.
  bool become_direct() const {
    for (std::uint64_t i = 0; i < 4; ++i) {
      std::string because;
      eventually("the connection is direct, or may not be", [&] { return mode_of(a.get(), &because) == "direct" || is_apart(because); });
      if (is_apart(because)) {
        MESSAGE("SKIP: processes cannot be direct here: ", because);
        return false;
      }
      REQUIRE(post(a.get(), IBV_WR_RDMA_WRITE, i, near.sge(0, 8), 0) == 0);
      CHECK(collect(a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
    }
    eventually("the connection is direct", [this] { return mode_of(a.get()) == "direct"; });
    return true;
  }
  static bool is_apart(const std::string& because) {  // vmkernel_svc/direct/trust.cpp
    for (const char* start : {"a process ", "the processes ", "the user namespace "})
      if (because.starts_with(start)) return true;
    return false;
  }

  Device device;
  Pages near{device}, far{device};
  ChannelPtr a_channel, b_channel;
  CqPtr a_cq = make_cq(device, 256, a_channel.get()), b_cq = make_cq(device, 256, b_channel.get());
  QpPtr a = make_qp(device, a_cq.get()), b = make_qp(device, b_cq.get());
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
