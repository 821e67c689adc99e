// Asks for one kind of thing until it is refused, says with which errno, checks that what it has still works, gives half
// back, and asks again.
//
//   limits_client pd|cq|qp|srq|channel|mr|mr-file|mr-stack|context|group COUNT_MAX [hold|wait]
//
// hold: says "full" when it has all that it gets, and goes on when its input ends.
// wait: says "ready" before it asks for the first, and goes on when it is given a line.
// Prints "made N refused ERRNO again M": M things were made after freeing half; 0 and "none" where nothing was refused.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char* what) {
  std::printf("fail %s: %s\n", what, strerrorname_np(errno));
  std::exit(1);
}

// ibv_reg_mr is a macro that compares its argument with another enumeration: clang wants a number.
constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;

struct Base {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_mr* mr = nullptr;
  std::vector<char> memory = std::vector<char>(4096);
  ibv_qp* qp = nullptr;
};

ibv_qp* make_qp(Base& base, std::uint32_t depth) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = base.cq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {depth, depth, 1, 1, 0};
  return ibv_create_qp(base.pd, &init);
}

void need(int result, const char* what) {
  if (result == 0) return;
  errno = result;
  fail(what);
}

// A queue pair to itself: one SEND arrives.
void check_traffic(Base& base) {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(base.memory.data()), 8, base.mr->lkey};
  ibv_recv_wr receive{1, nullptr, &sge, 1};
  ibv_recv_wr* bad_receive = nullptr;
  need(ibv_post_recv(base.qp, &receive, &bad_receive), "ibv_post_recv");
  ibv_send_wr send{};
  send.wr_id = 2;
  send.sg_list = &sge;
  send.num_sge = 1;
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad_send = nullptr;
  need(ibv_post_send(base.qp, &send, &bad_send), "ibv_post_send");
  for (int got = 0; got < 2;) {  // the alarm ends it
    ibv_wc wc;
    if (ibv_poll_cq(base.cq, 1, &wc) != 1) continue;
    if (wc.status != IBV_WC_SUCCESS) {
      std::printf("fail a completion says %s\n", ibv_wc_status_str(wc.status));
      std::exit(1);
    }
    ++got;
  }
}

void connect_to_itself(Base& base) {
  ibv_port_attr port{};
  need(ibv_query_port(base.context, 1, &port), "ibv_query_port");
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = 1;
  need(ibv_modify_qp(base.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = base.qp->qp_num;
  a.ah_attr.dlid = port.lid;
  a.ah_attr.port_num = 1;
  need(ibv_modify_qp(base.qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
       "RTR");
  a.qp_state = IBV_QPS_RTS;
  a.timeout = 14;
  a.retry_cnt = a.rnr_retry = 7;
  need(ibv_modify_qp(base.qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                      IBV_QP_MAX_QP_RD_ATOMIC),
       "RTS");
}

}  // namespace

int main(int argc, char** argv) {
  const bool hold = argc == 4 && std::strcmp(argv[3], "hold") == 0;
  const bool wait = argc == 4 && std::strcmp(argv[3], "wait") == 0;
  if (argc != 3 && !hold && !wait) return 2;
  ::alarm(60);
  const std::string kind = argv[1];
  const std::size_t count_max = std::strtoul(argv[2], nullptr, 10);
  ibv_device** list = ibv_get_device_list(nullptr);
  if (list == nullptr || list[0] == nullptr) fail("ibv_get_device_list");
  Base base;
  base.context = ibv_open_device(list[0]);
  if (base.context == nullptr) fail("ibv_open_device");
  base.pd = ibv_alloc_pd(base.context);
  if (base.pd == nullptr) fail("ibv_alloc_pd");
  base.cq = ibv_create_cq(base.context, 64, nullptr, nullptr, 0);
  if (base.cq == nullptr) fail("ibv_create_cq");
  base.mr = ibv_reg_mr(base.pd, base.memory.data(), base.memory.size(), local_write);
  if (base.mr == nullptr) fail("ibv_reg_mr");
  base.qp = make_qp(base, 16);
  if (base.qp == nullptr) fail("ibv_create_qp");
  connect_to_itself(base);

  constexpr std::size_t block_bytes = 1 << 20;
  std::function<void*()> make;
  std::function<int(void*)> free_one;
  std::vector<char> block(block_bytes);
  char on_stack[8192] = {};
  if (kind == "pd") {
    make = [&] { return ibv_alloc_pd(base.context); };
    free_one = [](void* p) { return ibv_dealloc_pd(static_cast<ibv_pd*>(p)); };
  } else if (kind == "cq") {
    make = [&] { return ibv_create_cq(base.context, 64, nullptr, nullptr, 0); };
    free_one = [](void* p) { return ibv_destroy_cq(static_cast<ibv_cq*>(p)); };
  } else if (kind == "qp") {
    make = [&] { return make_qp(base, 1024); };
    free_one = [](void* p) { return ibv_destroy_qp(static_cast<ibv_qp*>(p)); };
  } else if (kind == "srq") {
    make = [&] {
      ibv_srq_init_attr init{};
      init.attr = {1024, 1, 0};
      return ibv_create_srq(base.pd, &init);
    };
    free_one = [](void* p) { return ibv_destroy_srq(static_cast<ibv_srq*>(p)); };
  } else if (kind == "channel") {
    make = [&] { return ibv_create_comp_channel(base.context); };
    free_one = [](void* p) { return ibv_destroy_comp_channel(static_cast<ibv_comp_channel*>(p)); };
  } else if (kind == "mr") {
    make = [&] { return ibv_reg_mr(base.pd, block.data(), block.size(), local_write); };
    free_one = [](void* p) { return ibv_dereg_mr(static_cast<ibv_mr*>(p)); };
  } else if (kind == "mr-file") {  // memory of a file of its own each time
    make = [&]() -> void* {
      const int file = ::memfd_create("mr", MFD_CLOEXEC);
      void* const memory = file >= 0 && ::ftruncate(file, 65536) == 0 ? ::mmap(nullptr, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
      if (memory == MAP_FAILED) fail("memory of a file");
      ::close(file);
      ibv_mr* const made = ibv_reg_mr(base.pd, memory, 65536, local_write);
      const int error = errno;
      if (made == nullptr) ::munmap(memory, 65536);
      errno = error;
      return made;
    };
    free_one = [](void* p) {
      void* const memory = static_cast<ibv_mr*>(p)->addr;
      const int refused = ibv_dereg_mr(static_cast<ibv_mr*>(p));
      ::munmap(memory, 65536);
      return refused;
    };
  } else if (kind == "mr-stack") {  // which no file can take the place of
    make = [&] { return ibv_reg_mr(base.pd, on_stack, sizeof(on_stack), local_write); };
    free_one = [](void* p) { return ibv_dereg_mr(static_cast<ibv_mr*>(p)); };
  } else if (kind == "xrcd" || kind == "xrcd-file") {  // the second names a file of its own each time
    make = [&, named = kind == "xrcd-file"] {
      ibv_xrcd_init_attr wanted{};
      wanted.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
      wanted.fd = named ? ::memfd_create("xrcd", MFD_CLOEXEC) : -1;
      wanted.oflags = O_CREAT;
      ibv_xrcd* const made = ibv_open_xrcd(base.context, &wanted);
      const int error = errno;
      if (named) ::close(wanted.fd);
      errno = error;
      return made;
    };
    free_one = [](void* p) { return ibv_close_xrcd(static_cast<ibv_xrcd*>(p)); };
  } else if (kind == "context") {
    make = [&] { return ibv_open_device(list[0]); };
    free_one = [](void* p) { return ibv_close_device(static_cast<ibv_context*>(p)); };
  } else if (kind == "group") {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = base.cq;
    init.qp_type = IBV_QPT_UD;
    init.cap = {1, 1, 1, 1, 0};
    ibv_qp* const member = ibv_create_qp(base.pd, &init);
    if (member == nullptr) fail("ibv_create_qp of UD");
    make = [=, next = std::uint32_t{0}]() mutable -> void* {
      auto* const group = new ibv_gid{};
      group->raw[0] = 0xff;
      ++next;
      std::memcpy(group->raw + 12, &next, sizeof next);
      const int refused = ibv_attach_mcast(member, group, 0xc001);
      if (refused == 0) return group;
      delete group;
      errno = refused;
      return nullptr;
    };
    free_one = [=](void* p) {
      auto* const group = static_cast<ibv_gid*>(p);
      const int refused = ibv_detach_mcast(member, group, 0xc001);
      delete group;
      return refused;
    };
  } else {
    return 2;
  }

  if (wait) {
    std::puts("ready");
    std::fflush(stdout);
    (void)std::getchar();
  }
  std::vector<void*> made;
  const auto fill = [&]() -> int {
    while (made.size() < count_max) {
      errno = 0;
      void* const one = make();
      if (one == nullptr) return errno;
      made.push_back(one);
    }
    return 0;
  };
  const int refused = fill();
  const std::size_t first = made.size();
  check_traffic(base);
  if (hold) {
    std::puts("full");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
  }
  for (std::size_t i = 0; i < (first + 1) / 2; ++i) {
    need(free_one(made.back()), "giving one back");
    made.pop_back();
  }
  const std::size_t kept = made.size();
  if (refused != 0 && fill() != refused) fail("the second refusal");
  check_traffic(base);
  std::printf("made %zu refused %s again %zu\n", first, refused == 0 ? "none" : strerrorname_np(refused), made.size() - kept);
  return 0;
}
