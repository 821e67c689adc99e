// Extended queue pairs: every operation of ibv_wr_* against a plain queue pair in the same process, all or nothing, and extended
// completion queues beside plain polling.
#include <cerrno>
#include <cstring>
#include <thread>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::uint64_t rc_operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
                                        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                                        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
constexpr std::uint64_t datagram_operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;

// An extended queue pair connected to a plain one.
class ExtendedLoop {
 public:
  ExtendedLoop(Run& run, ibv_qp_type type, std::uint64_t operations)
      : dev(run.settings), pd(dev), scq(dev, 64), rcq(dev, 64), mem(pd, 64 * 1024), other(pd, rcq, rcq, {.type = type}) {
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = scq;
    init.cap = {8, 8, 4, 4, 64};
    init.qp_type = type;
    init.pd = pd;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = operations;
    errno = 0;
    qp = ibv_create_qp_ex(dev.ctx, &init);
    if (qp == nullptr && errno == EOPNOTSUPP) skip("ibv_create_qp_ex with SEND_OPS_FLAGS: EOPNOTSUPP");
    EXPECT(qp != nullptr);
    EXPECT_GE(init.cap.max_send_wr, 8u);
    room = init.cap.max_send_wr;
    ex = ibv_qp_to_qp_ex(qp);
    EXPECT(ex != nullptr);
    EXPECT(ibv_qp_to_qp_ex(other) == nullptr);
    bring_up(dev, qp, address_of(dev, other));
    bring_up(dev, other, address_of(dev, qp));
  }
  ~ExtendedLoop() { ibv_destroy_qp(qp); }

  void begin(std::uint64_t id, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_wr_start(ex);
    ex->wr_id = id;
    ex->wr_flags = flags;
  }
  void from(std::size_t offset, std::uint32_t bytes) { ibv_wr_set_sge(ex, mem.mr.p->lkey, mem.buffer.address(offset), bytes); }

  Device dev;
  Pd pd;
  Cq scq, rcq;
  Region mem;
  Qp other;
  ibv_qp* qp = nullptr;
  ibv_qp_ex* ex = nullptr;
  std::uint32_t room = 0;
};

void expect_text(const Region& mem, std::size_t offset, const char* wanted) {
  const std::size_t bytes = std::strlen(wanted);
  expect_bytes({mem.data(offset), bytes}, {reinterpret_cast<const std::byte*>(wanted), bytes}, wanted);
}

}  // namespace

CONFORMANCE(ExtendedQpHasEveryOperation, "QP-19", .solo = true) {
  ExtendedLoop loop(run, IBV_QPT_RC, rc_operations);
  const std::uint32_t rkey = loop.mem.mr.p->rkey;
  const auto at = [&](std::size_t offset) { return loop.mem.buffer.address(offset); };
  std::memcpy(loop.mem.data(0), "written", 7);
  std::memcpy(loop.mem.data(64), "with imm", 8);
  std::uint64_t word = 40;
  std::memcpy(loop.mem.data(4096), &word, 8);
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_OK(post(loop.other, Recv{100 + i, {loop.mem.sge(8192 + 256 * i, 256)}}));

  loop.begin(1);
  ibv_wr_rdma_write(loop.ex, rkey, at(1024));
  loop.from(0, 7);
  loop.ex->wr_id = 2;
  ibv_wr_rdma_write_imm(loop.ex, rkey, at(2048), 0x11);
  loop.from(64, 8);
  loop.ex->wr_id = 3;
  ibv_wr_send_imm(loop.ex, 0x22);
  const ibv_sge pieces[] = {loop.mem.sge(0, 7), loop.mem.sge(64, 8)};
  ibv_wr_set_sge_list(loop.ex, 2, pieces);
  EXPECT_OK(ibv_wr_complete(loop.ex));
  for (std::uint64_t id = 1; id <= 3; ++id) loop.scq.expect(id);
  const ibv_wc written = loop.rcq.expect(100);
  EXPECT_EQ(written.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(written.imm_data, 0x11u);
  const ibv_wc sent = loop.rcq.expect(101);
  EXPECT_EQ(sent.imm_data, 0x22u);
  EXPECT_EQ(sent.byte_len, 15u);
  expect_text(loop.mem, 1024, "written");
  expect_text(loop.mem, 2048, "with imm");
  expect_text(loop.mem, 8192 + 256, "writtenwith imm");

  // Inline bytes are taken when they are named.
  char first[] = "taken ", second[] = "at once";
  const ibv_data_buf buffers[] = {{first, 6}, {second, 7}};
  loop.begin(4);
  ibv_wr_send(loop.ex);
  ibv_wr_set_inline_data_list(loop.ex, 2, buffers);
  loop.ex->wr_id = 5;
  ibv_wr_rdma_write(loop.ex, rkey, at(3072));
  ibv_wr_set_inline_data(loop.ex, second, 7);
  std::memset(first, 'x', 6), std::memset(second, 'x', 7);
  EXPECT_OK(ibv_wr_complete(loop.ex));
  loop.scq.expect(4);
  loop.scq.expect(5);
  EXPECT_EQ(loop.rcq.expect(102).byte_len, 13u);
  expect_text(loop.mem, 8192 + 512, "taken at once");
  expect_text(loop.mem, 3072, "at once");

  loop.begin(6);
  ibv_wr_rdma_read(loop.ex, rkey, at(1024));
  loop.from(5120, 7);
  loop.ex->wr_id = 7;
  ibv_wr_atomic_fetch_add(loop.ex, rkey, at(4096), 2);
  loop.from(6144, 8);
  loop.ex->wr_id = 8;
  ibv_wr_atomic_cmp_swp(loop.ex, rkey, at(4096), 42, 7);
  loop.from(6152, 8);
  EXPECT_OK(ibv_wr_complete(loop.ex));
  for (std::uint64_t id = 6; id <= 8; ++id) loop.scq.expect(id);
  expect_text(loop.mem, 5120, "written");
  std::uint64_t before_add, before_swap;
  std::memcpy(&before_add, loop.mem.data(6144), 8);
  std::memcpy(&before_swap, loop.mem.data(6152), 8);
  std::memcpy(&word, loop.mem.data(4096), 8);
  EXPECT_EQ(before_add, 40u);
  EXPECT_EQ(before_swap, 42u);
  EXPECT_EQ(word, 7u);
}

CONFORMANCE(ExtendedQpPostsAllOrNothing, "QP-19", .solo = true) {
  ExtendedLoop loop(run, IBV_QPT_RC, rc_operations);
  const std::uint32_t rkey = loop.mem.mr.p->rkey;
  const auto write = [&](std::uint64_t id, std::size_t to) {
    loop.ex->wr_id = id;
    ibv_wr_rdma_write(loop.ex, rkey, loop.mem.buffer.address(to));
  };
  std::memset(loop.mem.data(0), 'a', 8);
  const auto untouched = [&] { return std::memcmp(loop.mem.data(1024), "\0\0\0\0\0\0\0\0", 8) == 0; };
  std::memset(loop.mem.data(1024), 0, 8);

  // One more than there is room for.
  loop.begin(0);
  for (std::uint64_t i = 0; i <= loop.room; ++i) {
    write(i, 1024);
    loop.from(0, 8);
  }
  EXPECT_ERRNO(ibv_wr_complete(loop.ex), ENOMEM);
  // More inline bytes than the queue pair takes, behind a request that is right.
  std::vector<char> much(4096, 'b');
  loop.begin(20);
  write(20, 1024);
  loop.from(0, 8);
  write(21, 1024);
  ibv_wr_set_inline_data(loop.ex, much.data(), much.size());
  EXPECT_ERRNO(ibv_wr_complete(loop.ex), EINVAL);
  // An operation that the device does not have.
  loop.begin(22);
  write(22, 1024);
  loop.from(0, 8);
  ibv_wr_send_tso(loop.ex, much.data(), 8, 64);
  EXPECT_NE(ibv_wr_complete(loop.ex), 0);
  // What is aborted. Who asks for the state meanwhile does not wait for himself, in a program of threads either.
  std::thread([] {}).join();
  loop.begin(23);
  write(23, 1024);
  loop.from(0, 8);
  ibv_qp_attr attributes{};
  ibv_qp_init_attr init{};
  EXPECT_OK(ibv_query_qp(loop.qp, &attributes, IBV_QP_STATE, &init));
  EXPECT_EQ(attributes.qp_state, IBV_QPS_RTS);
  ibv_wr_abort(loop.ex);
  EXPECT(untouched());
  loop.scq.expect_empty();

  // And then as many as there is room for, and an empty batch.
  loop.begin(0);
  for (std::uint64_t i = 0; i < loop.room; ++i) {
    write(i, 1024);
    loop.from(0, 8);
  }
  EXPECT_OK(ibv_wr_complete(loop.ex));
  for (std::uint64_t i = 0; i < loop.room; ++i) loop.scq.expect(i);
  EXPECT(!untouched());
  loop.begin(30);
  EXPECT_OK(ibv_wr_complete(loop.ex));
  loop.scq.expect_empty();
}

CONFORMANCE(ExtendedDatagramsNameTheirReceiver, "QP-19", .solo = true) {
  ExtendedLoop loop(run, IBV_QPT_UD, datagram_operations);
  Ah ah(loop.pd, ah_to(loop.dev, address_of(loop.dev, loop.other)));
  std::memcpy(loop.mem.data(0), "datagram", 8);
  EXPECT_OK(post(loop.other, Recv{1, {loop.mem.sge(4096, 1024)}}));
  loop.begin(2);
  ibv_wr_send_imm(loop.ex, 0x33);
  ibv_wr_set_ud_addr(loop.ex, ah, loop.other.p->qp_num, test_qkey);
  loop.from(0, 8);
  EXPECT_OK(ibv_wr_complete(loop.ex));
  loop.scq.expect(2);
  const ibv_wc came = loop.rcq.expect(1);
  EXPECT_EQ(came.imm_data, 0x33u);
  EXPECT_EQ(came.src_qp, loop.qp->qp_num);
  expect_text(loop.mem, 4096 + 40, "datagram");
  // Without an address it goes nowhere.
  loop.begin(3);
  ibv_wr_send(loop.ex);
  loop.from(0, 8);
  EXPECT_ERRNO(ibv_wr_complete(loop.ex), EINVAL);
  loop.scq.expect_empty();
}

CONFORMANCE(ExtendedQpRefusesWhatItDoesNotHave, "QP-19 OBJ-15", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  const auto made_with = [&](ibv_qp_type type, std::uint64_t operations, std::uint32_t mask = 0, std::uint32_t create_flags = 0) {
    ibv_qp_init_attr_ex init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {1, 1, 1, 1, 0};
    init.qp_type = type;
    init.pd = pd;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | mask;
    init.send_ops_flags = operations;
    init.create_flags = create_flags;
    errno = 0;
    return ibv_create_qp_ex(dev.ctx, &init);
  };
  EXPECT(made_with(IBV_QPT_RC, std::uint64_t{1} << 40) == nullptr && errno == EOPNOTSUPP);
  EXPECT(made_with(IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE) == nullptr && errno == EOPNOTSUPP);
  EXPECT(made_with(IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ) == nullptr && errno == EOPNOTSUPP);
  EXPECT(made_with(IBV_QPT_RC, IBV_QP_EX_WITH_SEND, IBV_QP_INIT_ATTR_MAX_TSO_HEADER) == nullptr && errno == EOPNOTSUPP);
  EXPECT(made_with(IBV_QPT_RC, IBV_QP_EX_WITH_SEND, IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_CREATE_SCATTER_FCS) == nullptr);
}

CONFORMANCE(ExtendedCqTellsEveryField, "CQX-01 CQX-02", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Region mem(pd, 8192);
  ibv_cq_init_attr_ex init{};
  init.cqe = 32;
  init.cq_context = &mem;
  init.wc_flags = IBV_CREATE_CQ_SUP_WC_FLAGS;  // as programs ask which take what mlx5 has for granted
  init.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  init.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
  errno = 0;
  ibv_cq_ex* cq = ibv_create_cq_ex(dev.ctx, &init);
  const bool has_all = cq != nullptr;
  if (!has_all && errno == EOPNOTSUPP) {
    init.wc_flags = IBV_WC_STANDARD_FLAGS;
    init.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    cq = ibv_create_cq_ex(dev.ctx, &init);
  }
  if (cq == nullptr && errno == EOPNOTSUPP) skip("ibv_create_cq_ex: EOPNOTSUPP");
  EXPECT(cq != nullptr);
  ibv_cq* const plain = ibv_cq_ex_to_cq(cq);
  EXPECT(plain->cq_context == &mem && plain->context == dev.ctx);
  {
    Qp qp(pd, plain, plain), other(pd, plain, plain);
    bring_up(dev, qp, address_of(dev, other));
    bring_up(dev, other, address_of(dev, qp));
    for (std::uint64_t round = 0; round < 4; ++round) {
      EXPECT_OK(post(other, Recv{10 + round, {mem.sge(4096, 64)}}));
      Send send{.opcode = IBV_WR_SEND_WITH_IMM, .id = 20 + round, .sges = {mem.sge(0, 33)}, .imm = 0x44};
      EXPECT_OK(post(qp, send));
      bool sent = false, received = false;
      const auto take = [&] {
        EXPECT_EQ(cq->status, IBV_WC_SUCCESS);
        if (cq->wr_id == 20 + round) {
          sent = true;
          EXPECT_EQ(ibv_wc_read_opcode(cq), IBV_WC_SEND);
          EXPECT_EQ(ibv_wc_read_qp_num(cq), qp.p->qp_num);
        } else {
          received = true;
          EXPECT_EQ(cq->wr_id, 10 + round);
          EXPECT_EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
          EXPECT_EQ(ibv_wc_read_byte_len(cq), 33u);
          EXPECT_EQ(ibv_wc_read_imm_data(cq), 0x44u);
          EXPECT_EQ(ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM, unsigned{IBV_WC_WITH_IMM});
          EXPECT_EQ(ibv_wc_read_qp_num(cq), other.p->qp_num);
        }
        if (!has_all) return;
        ibv_wc_tm_info tag{1, 1};
        ibv_wc_read_tm_info(cq, &tag);
        EXPECT(ibv_wc_read_cvlan(cq) == 0 && ibv_wc_read_flow_tag(cq) == 0 && tag.tag == 0 && tag.priv == 0);
      };
      // By turns: in steps, and one in steps and the other by a plain poll.
      wait_until("both completions", [&] {
        ibv_poll_cq_attr attr{};
        int rc = ibv_start_poll(cq, &attr);
        if (rc == 0) {
          take();
          for (; round % 2 == 0 && (rc = ibv_next_poll(cq)) == 0;) take();
          ibv_end_poll(cq);
        } else {
          EXPECT_EQ(rc, ENOENT);
        }
        ibv_wc wc;
        if (round % 2 == 1 && ibv_poll_cq(plain, 1, &wc) == 1) (wc.wr_id == 20 + round ? sent : received) = true;
        return sent && received;
      });
    }
    ibv_poll_cq_attr unknown{.comp_mask = 1};
    EXPECT_EQ(ibv_start_poll(cq, &unknown), EINVAL);
  }
  EXPECT_OK(ibv_destroy_cq(plain));
}

CONFORMANCE(ExtendedCqRefusesWhatItCannotTell, "CQX-03", .solo = true) {
  Device dev(run.settings);
  const auto made_with = [&](std::uint64_t fields, std::uint32_t mask, std::uint32_t flags) {
    ibv_cq_init_attr_ex init{};
    init.cqe = 4;
    init.wc_flags = fields;
    init.comp_mask = mask;
    init.flags = flags;
    errno = 0;
    ibv_cq_ex* const cq = ibv_create_cq_ex(dev.ctx, &init);
    if (cq != nullptr) EXPECT_OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    return cq != nullptr ? 0 : errno;
  };
  ibv_device_attr_ex attr{};
  EXPECT_OK(ibv_query_device_ex(dev.ctx, nullptr, &attr));
  const int timestamps = made_with(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, 0, 0);
  if (attr.completion_timestamp_mask == 0) EXPECT_EQ(timestamps, EOPNOTSUPP);
  EXPECT_NE(made_with(IBV_WC_EX_WITH_BYTE_LEN, 1u << 20, 0), 0);
  EXPECT_NE(made_with(IBV_WC_EX_WITH_BYTE_LEN, IBV_CQ_INIT_ATTR_MASK_FLAGS, 1u << 20), 0);
}

}  // namespace vrdma::conformance
