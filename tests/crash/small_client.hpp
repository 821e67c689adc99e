// What the small clients of these tests share: they say lines, and connect one RC queue pair to their peer's.
#pragma once

#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace crash {

inline constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;  // ibv_reg_mr is a macro that compares its argument with another enumeration

inline void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}
[[noreturn]] inline void fail(const std::string& what) {
  say("fail " + what);
  _exit(1);
}
// result: 0, -1 with errno, or an errno value.
inline void check(int result, const char* what) {
  if (result != 0) fail(std::string(what) + ": " + std::strerror(result > 0 ? result : errno));
}

inline ibv_context* open_first_device() {
  ibv_device** const list = ibv_get_device_list(nullptr);
  ibv_context* const context = list != nullptr && list[0] != nullptr ? ibv_open_device(list[0]) : nullptr;
  if (context == nullptr) fail("ibv_open_device");
  ibv_free_device_list(list);
  return context;
}

// To RTS, with the process at the other end of the socket, which does the same. in_init(): once requests may be posted.
template <class InInit>
void connect(ibv_qp* qp, int peer_fd, InInit&& in_init) {
  struct Info {
    std::uint32_t qpn, lid;
  };
  ibv_port_attr port{};
  check(ibv_query_port(qp->context, 1, &port), "ibv_query_port");
  const Info mine{qp->qp_num, port.lid};
  Info peer{};
  const auto exchange = [&] {
    if (::send(peer_fd, &mine, sizeof(mine), MSG_NOSIGNAL) != sizeof(mine) || ::recv(peer_fd, &peer, sizeof(peer), 0) != sizeof(peer)) fail("the peer");
  };
  exchange();
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = 1;
  check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
  in_init();
  a = {};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = peer.qpn;
  a.max_dest_rd_atomic = 1;
  a.min_rnr_timer = 12;
  a.ah_attr.dlid = static_cast<std::uint16_t>(peer.lid);
  a.ah_attr.port_num = 1;
  check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
  a = {};
  a.qp_state = IBV_QPS_RTS;
  a.retry_cnt = a.rnr_retry = 7;
  a.max_rd_atomic = 1;
  check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
  exchange();
}

struct Options {
  int peer_fd = -1;
  std::string role;
};
inline Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--peer-fd") options.peer_fd = std::atoi(argv[i + 1]);
    else if (name == "--role") options.role = argv[i + 1];
  }
  return options;
}

}  // namespace crash
