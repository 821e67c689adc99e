// XRC between processes, one of which is killed: domains that a file names, targets with several handles, SRQs that go.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "guest_lib/test/service_fixture.hpp"
#include "guest_lib/test/shown.hpp"

using namespace vrdma::test;

namespace {

struct XrcdDeleter {
  void operator()(ibv_xrcd* xrcd) const { CHECK(ibv_close_xrcd(xrcd) == 0); }
};
using XrcdPtr = std::unique_ptr<ibv_xrcd, XrcdDeleter>;
using SrqPtr = std::unique_ptr<ibv_srq, SrqDeleter>;

XrcdPtr open_domain(const Device& device, int file) {
  ibv_xrcd_init_attr wanted{};
  wanted.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  wanted.fd = file;
  wanted.oflags = O_CREAT;
  XrcdPtr xrcd(ibv_open_xrcd(device.context, &wanted));
  REQUIRE(xrcd != nullptr);
  return xrcd;
}

SrqPtr make_srq(const Device& device, ibv_xrcd* xrcd, ibv_cq* cq) {
  ibv_srq_init_attr_ex wanted{};
  wanted.attr = {16, 1, 0};
  wanted.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
  wanted.srq_type = IBV_SRQT_XRC;
  wanted.pd = device.pd;
  wanted.xrcd = xrcd;
  wanted.cq = cq;
  SrqPtr srq(ibv_create_srq_ex(device.context, &wanted));
  REQUIRE(srq != nullptr);
  return srq;
}

std::uint32_t number_of(ibv_srq* srq) {
  std::uint32_t number = 0;
  REQUIRE(ibv_get_srq_num(srq, &number) == 0);
  return number;
}

void receive(const Device& device, ibv_srq* srq, std::uint64_t wr_id) {
  ibv_sge sge = device.sge();
  ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
  ibv_recv_wr* bad = nullptr;
  REQUIRE(ibv_post_srq_recv(srq, &wr, &bad) == 0);
}

QpPtr make_target(const Device& device, ibv_xrcd* xrcd) {
  ibv_qp_init_attr_ex wanted{};
  wanted.qp_type = IBV_QPT_XRC_RECV;
  wanted.comp_mask = IBV_QP_INIT_ATTR_XRCD;
  wanted.xrcd = xrcd;
  QpPtr target(ibv_create_qp_ex(device.context, &wanted));
  REQUIRE(target != nullptr);
  return target;
}

QpPtr make_initiator(const Device& device, ibv_cq* cq) {
  ibv_qp_init_attr init{};
  init.send_cq = cq;
  init.qp_type = IBV_QPT_XRC_SEND;
  init.cap = {16, 0, 1, 0, 0};
  QpPtr initiator(ibv_create_qp(device.pd, &init));
  REQUIRE(initiator != nullptr);
  return initiator;
}

ibv_wc_status sent(const Device& device, ibv_qp* initiator, ibv_cq* cq, std::uint32_t srqn, std::uint64_t wr_id) {
  REQUIRE(post_send(device, initiator, wr_id, IBV_SEND_SIGNALED, srqn) == 0);
  const auto done = collect(cq, 1);
  REQUIRE(done[0].wr_id == wr_id);
  return done[0].status;
}

struct Told {
  std::uint32_t number;
  std::uint16_t lid;
};

std::uint16_t lid_of(const Device& device) {
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
  return port.lid;
}

// Another process, which runs `body(say, hear)` until it is killed.
class Other {
 public:
  template <class Body>
  explicit Other(Body body) {
    std::array<int, 2> up, down;
    REQUIRE(::pipe2(up.data(), O_CLOEXEC) == 0);
    REQUIRE(::pipe2(down.data(), O_CLOEXEC) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      body([&](Told told) { return ::write(up[1], &told, sizeof(told)) == sizeof(told); },
           [&] {
             Told told{};
             if (::read(down[0], &told, sizeof(told)) != sizeof(told)) ::_exit(1);
             return told;
           });
      for (;;) ::pause();
    }
    ::close(up[1]), ::close(down[0]);
    from_ = up[0], to_ = down[1];
  }
  ~Other() {
    kill();
    ::close(from_), ::close(to_);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  Told hear() const {
    Told told{};
    REQUIRE(::read(from_, &told, sizeof(told)) == sizeof(told));
    return told;
  }
  void say(Told told) const { REQUIRE(::write(to_, &told, sizeof(told)) == sizeof(told)); }
  void kill() {
    if (pid_ == 0) return;
    ::kill(std::exchange(pid_, 0), SIGKILL);
    ::wait(nullptr);
  }

 private:
  pid_t pid_ = 0;
  int from_ = -1, to_ = -1;
};

struct File {
  int fd = ::memfd_create("an XRC domain", MFD_CLOEXEC);
  ~File() { ::close(fd); }
};

}  // namespace

TEST_CASE("an XRC target lives on when the process that made it is killed and another has it open, and not without") {
  Service service;
  SUBCASE("one shard") { service.start(); }
  SUBCASE("several, of which the domain's programs come to share one") { service.start(R"({"shards": 3})"); }
  File file;
  Other creator([&](auto say, auto hear) {
    Device device;
    XrcdPtr xrcd = open_domain(device, file.fd);
    QpPtr kept = make_target(device, xrcd.get()), lost = make_target(device, xrcd.get());
    say({kept->qp_num, lid_of(device)});
    say({lost->qp_num, lid_of(device)});
    for (ibv_qp* target : {kept.get(), lost.get()}) {
      const Told initiator = hear();
      connect(target, initiator.number, {}, 0, initiator.lid);
    }
    say({0, 0});
    for (;;) ::pause();
  });
  Device device;
  XrcdPtr xrcd = open_domain(device, file.fd);
  CqPtr cq = make_cq(device), receives = make_cq(device);
  SrqPtr srq = make_srq(device, xrcd.get(), receives.get());
  QpPtr initiator = make_initiator(device, cq.get()), other = make_initiator(device, cq.get());
  const Told kept = creator.hear(), lost = creator.hear();
  for (const ibv_qp* qp : {initiator.get(), other.get()}) creator.say({qp->qp_num, lid_of(device)});
  creator.hear();
  connect(initiator.get(), kept.number, {14, 3, 7}, 0, kept.lid);
  connect(other.get(), lost.number, {10, 1, 7}, 0, lost.lid);
  ibv_qp_open_attr wanted{};
  wanted.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
  wanted.qp_num = kept.number;
  wanted.xrcd = xrcd.get();
  wanted.qp_type = IBV_QPT_XRC_RECV;
  QpPtr opened(ibv_open_qp(device.context, &wanted));
  REQUIRE(opened != nullptr);
  for (std::uint64_t id = 0; id < 8; ++id) receive(device, srq.get(), id);

  CHECK(sent(device, initiator.get(), cq.get(), number_of(srq.get()), 1) == IBV_WC_SUCCESS);
  CHECK(sent(device, other.get(), cq.get(), number_of(srq.get()), 2) == IBV_WC_SUCCESS);
  creator.kill();
  CHECK(sent(device, initiator.get(), cq.get(), number_of(srq.get()), 3) == IBV_WC_SUCCESS);
  eventually("the service has heard of the death", [] { return show().at("guests").size() == 1; });
  CHECK(sent(device, other.get(), cq.get(), number_of(srq.get()), 4) == IBV_WC_RETRY_EXC_ERR);
  const auto came = collect(receives.get(), 3);
  CHECK(came[0].qp_num == kept.number);
  CHECK(came[1].qp_num == lost.number);
  CHECK(came[2].qp_num == kept.number);
}

TEST_CASE("an XRC SRQ whose process is killed is unknown to the targets of its domain, which go on for others") {
  Service service;
  SUBCASE("one shard") { service.start(); }
  SUBCASE("several, of which the domain's programs come to share one") { service.start(R"({"shards": 3})"); }
  File file;
  Other owner([&](auto say, auto) {
    Device device;
    XrcdPtr xrcd = open_domain(device, file.fd);
    CqPtr cq = make_cq(device);
    SrqPtr srq = make_srq(device, xrcd.get(), cq.get());
    for (std::uint64_t id = 0; id < 4; ++id) receive(device, srq.get(), id);
    say({number_of(srq.get()), 0});
    for (;;) ::pause();
  });
  Device device;
  XrcdPtr xrcd = open_domain(device, file.fd);
  CqPtr cq = make_cq(device), receives = make_cq(device);
  SrqPtr mine = make_srq(device, xrcd.get(), receives.get());
  const std::uint32_t theirs = owner.hear().number;
  receive(device, mine.get(), 70);
  QpPtr target = make_target(device, xrcd.get()), initiator = make_initiator(device, cq.get());
  connect(target.get(), initiator->qp_num);
  connect(initiator.get(), target->qp_num);
  CHECK(sent(device, initiator.get(), cq.get(), theirs, 1) == IBV_WC_SUCCESS);
  owner.kill();
  CHECK(sent(device, initiator.get(), cq.get(), number_of(mine.get()), 2) == IBV_WC_SUCCESS);
  CHECK(collect(receives.get(), 1)[0].wr_id == 70);
  std::uint64_t id = 3;
  // The service hears of the death when the socket closes; until then there are receives left.
  eventually("the dead process's SRQ is unknown", [&] {
    const ibv_wc_status status = sent(device, initiator.get(), cq.get(), theirs, id++);
    REQUIRE((status == IBV_WC_SUCCESS || status == IBV_WC_REM_INV_REQ_ERR));
    return status == IBV_WC_REM_INV_REQ_ERR;
  });
}

// As libibverbs, which writes the capabilities only: a program makes one after another of the same attributes.
TEST_CASE("making an XRC initiator leaves the receiving parts of the attributes as they are, which mean nothing for it") {
  Service service;
  service.start();
  const Device device;
  const CqPtr cq = make_cq(device), unused = make_cq(device);
  ibv_srq_init_attr wanted{};
  wanted.attr = {16, 1, 0};
  const SrqPtr srq(ibv_create_srq(device.pd, &wanted));
  REQUIRE(srq != nullptr);
  ibv_qp_init_attr init{};
  init.send_cq = cq.get();
  init.recv_cq = unused.get();
  init.srq = srq.get();
  init.qp_type = IBV_QPT_XRC_SEND;
  init.cap = {3, 4, 1, 1, 0};
  const QpPtr initiator(ibv_create_qp(device.pd, &init));
  REQUIRE(initiator != nullptr);
  CHECK(init.recv_cq == unused.get());
  CHECK(init.srq == srq.get());
  CHECK(init.send_cq == cq.get());
  CHECK(init.cap.max_send_wr >= 3);
  CHECK(init.cap.max_recv_wr == 0);
}

TEST_CASE("a dead service flushes what an XRC initiator has outstanding, and everything of XRC can be destroyed") {
  Service service;
  service.start();
  Device device;
  XrcdPtr xrcd = open_domain(device, -1);
  CqPtr cq = make_cq(device), receives = make_cq(device);
  SrqPtr srq = make_srq(device, xrcd.get(), receives.get());
  QpPtr target = make_target(device, xrcd.get()), initiator = make_initiator(device, cq.get());
  connect(target.get(), initiator->qp_num);
  connect(initiator.get(), target->qp_num);
  receive(device, srq.get(), 1);
  CHECK(sent(device, initiator.get(), cq.get(), number_of(srq.get()), 1) == IBV_WC_SUCCESS);
  service.kill_now();
  CHECK(sent(device, initiator.get(), cq.get(), number_of(srq.get()), 2) == IBV_WC_WR_FLUSH_ERR);
}

// Their handles may be those of others of the child's.
TEST_CASE("a fork's child makes no queue pair of an SRQ or of a domain that is its parent's") {
  Service service;
  service.start();
  Device device;
  const XrcdPtr xrcd = open_domain(device, -1);
  ibv_srq_init_attr plain{};
  plain.attr = {16, 1, 0};
  const SrqPtr srq(ibv_create_srq(device.pd, &plain));
  REQUIRE(srq != nullptr);
  CHECK(in_child([&] {
          ::alarm(60);
          ibv_pd* const pd = ibv_alloc_pd(device.context);
          ibv_cq* const cq = ibv_create_cq(device.context, 16, nullptr, nullptr, 0);
          if (pd == nullptr || cq == nullptr) return 1;
          int wrong = 0;
          ibv_qp_init_attr init{};
          init.send_cq = init.recv_cq = cq;
          init.srq = srq.get();
          init.qp_type = IBV_QPT_RC;
          init.cap = {4, 1, 1, 1, 0};
          wrong |= ibv_create_qp(pd, &init) != nullptr || errno != EIO ? 2 : 0;
          ibv_qp_init_attr_ex target{};
          target.qp_type = IBV_QPT_XRC_RECV;
          target.comp_mask = IBV_QP_INIT_ATTR_XRCD;
          target.xrcd = xrcd.get();
          wrong |= ibv_create_qp_ex(device.context, &target) != nullptr || errno != EIO ? 4 : 0;
          ibv_srq_init_attr_ex inside{};
          inside.attr = {16, 1, 0};
          inside.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
          inside.srq_type = IBV_SRQT_XRC;
          inside.pd = pd, inside.xrcd = xrcd.get(), inside.cq = cq;
          wrong |= ibv_create_srq_ex(device.context, &inside) != nullptr || errno != EIO ? 8 : 0;
          init.srq = nullptr;  // all else is the child's
          wrong |= ibv_create_qp(pd, &init) == nullptr ? 16 : 0;
          return wrong;
        }) == 0);
}
