// Extended queue pairs: ibv_create_qp_ex with send_ops_flags, and the operations behind ibv_wr_start … ibv_wr_complete. They collect
// what becomes a chain of ordinary work requests, which is posted whole or not at all.
#include "guest_lib/post_ex.hpp"

#include <cstring>
#include <new>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/memory_window.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"
#include "guest_lib/xrc.hpp"

namespace vrdma::guest {

ibv_send_wr* WrBatch::add(const ibv_qp_ex& qp, ibv_wr_opcode opcode) {
  try {
    Request& request = requests_.emplace_back();
    request = {};
    request.first_piece = pieces_.size();
    request.wr.wr_id = qp.wr_id;
    request.wr.opcode = opcode;
    request.wr.send_flags = qp.wr_flags & ~unsigned{IBV_SEND_INLINE};
    return &request.wr;
  } catch (const std::bad_alloc&) {
    fail(ENOMEM);
    return nullptr;
  }
}

void WrBatch::set_pieces(const ibv_sge* pieces, std::size_t count) {
  if (requests_.empty() || count > INT32_MAX) return fail(EINVAL);
  Request& request = requests_.back();
  try {
    pieces_.resize(request.first_piece);  // said twice, the last counts
    pieces_.insert(pieces_.end(), pieces, pieces + count);
  } catch (const std::bad_alloc&) {
    return fail(ENOMEM);
  }
  request.wr.num_sge = static_cast<int>(count);
  request.wr.send_flags &= ~unsigned{IBV_SEND_INLINE};
}

// The bytes are taken now: the application may change them as soon as this returns.
void WrBatch::set_inline(const ibv_data_buf* buffers, std::size_t count) {
  if (requests_.empty()) return fail(EINVAL);
  Request& request = requests_.back();
  const std::size_t offset = inline_bytes_.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (buffers[i].length > UINT32_MAX - (inline_bytes_.size() - offset)) return fail(EINVAL);
    if (buffers[i].length == 0) continue;
    try {
      const auto* const bytes = static_cast<const std::byte*>(buffers[i].addr);
      inline_bytes_.insert(inline_bytes_.end(), bytes, bytes + buffers[i].length);
    } catch (const std::bad_alloc&) {
      return fail(ENOMEM);
    }
  }
  const ibv_sge whole{0, static_cast<std::uint32_t>(inline_bytes_.size() - offset), 0};
  set_pieces(&whole, 1);
  request.inline_offset = offset;
  request.wr.send_flags |= IBV_SEND_INLINE;
}

ibv_send_wr* WrBatch::chain() {
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    Request& request = requests_[i];
    request.wr.next = i + 1 < requests_.size() ? &requests_[i + 1].wr : nullptr;
    request.wr.sg_list = pieces_.data() + request.first_piece;
    if (request.wr.send_flags & IBV_SEND_INLINE)
      request.wr.sg_list->addr = reinterpret_cast<std::uintptr_t>(inline_bytes_.data() + request.inline_offset);
  }
  return requests_.empty() ? nullptr : &requests_.front().wr;
}

namespace {

Qp& of(ibv_qp_ex* qp) { return Qp::of(&qp->qp_base); }
WrBatch& batch_of(ibv_qp_ex* qp) { return *of(qp).batch; }

// Where at the responder; fill(wr) sets the operand.
template <class Fill>
void add(ibv_qp_ex* qp, ibv_wr_opcode opcode, Fill&& fill) {
  if (ibv_send_wr* const wr = batch_of(qp).add(*qp, opcode)) fill(*wr);
}
void add_rdma(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t address, std::uint32_t imm_data = 0) {
  add(qp, opcode, [&](ibv_send_wr& wr) {
    wr.imm_data = imm_data;
    wr.wr.rdma = {address, rkey};
  });
}
void add_atomic(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t address, std::uint64_t compare_add, std::uint64_t swap) {
  add(qp, opcode, [&](ibv_send_wr& wr) { wr.wr.atomic = {address, compare_add, swap, rkey}; });
}

void refuse(ibv_qp_ex* qp) { batch_of(qp).fail(EOPNOTSUPP); }

int complete(ibv_qp_ex* verbs) {
  Qp& qp = of(verbs);
  const int error = qp.batch->error() != 0 ? qp.batch->error() : post_all(qp, qp.batch->chain());
  qp.batch->clear();
  qp.send_lock.unlock();
  tell_if_gone(qp, qp.base().send_cq);
  return error;
}

constexpr std::uint64_t send_operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
constexpr std::uint64_t write_operations = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
constexpr std::uint64_t fetch_operations = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
                                           IBV_QP_EX_WITH_ATOMIC_WRITE;

constexpr std::uint64_t window_operations = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;

std::uint64_t operations_of(ibv_qp_type type, bool windows) {
  switch (type) {
    case IBV_QPT_RC:
    case IBV_QPT_XRC_SEND: return send_operations | write_operations | fetch_operations | (windows ? window_operations | IBV_QP_EX_WITH_SEND_WITH_INV : 0);
    case IBV_QPT_UC: return send_operations | write_operations | (windows ? window_operations : 0);
    default: return send_operations;
  }
}

Result<ibv_qp*> create(ibv_qp_init_attr_ex& wanted) {
  constexpr std::uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  if ((wanted.comp_mask & ~known) != 0) return Errno{EOPNOTSUPP};
  if (wanted.qp_type == IBV_QPT_XRC_RECV) return create_xrc_target(wanted);
  if ((wanted.comp_mask & IBV_QP_INIT_ATTR_PD) == 0 || wanted.pd == nullptr) return Errno{EINVAL};
  if ((wanted.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) != 0 && wanted.create_flags != 0) return Errno{EOPNOTSUPP};
  const bool extended = (wanted.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0;
  const auto attachment = Context::of(wanted.pd->context).usable();
  const bool windows = attachment && offers_windows(**attachment);
  if (extended && (wanted.send_ops_flags & ~operations_of(wanted.qp_type, windows)) != 0) return Errno{EOPNOTSUPP};
  auto batch = extended ? std::make_unique<WrBatch>() : nullptr;
  ibv_qp_init_attr plain{wanted.qp_context, wanted.send_cq, wanted.recv_cq, wanted.srq, wanted.cap, wanted.qp_type, wanted.sq_sig_all};
  const auto made = create_qp(wanted.pd, plain, nullptr);
  if (!made) return made;
  wanted.cap = plain.cap;
  Qp& qp = Qp::of(*made);
  qp.batch = std::move(batch);
  if (extended) set_wr_operations(qp.verbs);
  return made;
}

}  // namespace

void set_wr_operations(ibv_qp_ex& qp) {
  qp.wr_start = [](ibv_qp_ex* of_them) {
    if (!of(of_them).liveness->inherited()) of(of_them).send_lock.lock();  // which a thread of the parent's may have held
    batch_of(of_them).clear();
  };
  qp.wr_complete = complete;
  qp.wr_abort = [](ibv_qp_ex* of_them) {
    batch_of(of_them).clear();
    of(of_them).send_lock.unlock();
  };

  qp.wr_send = [](ibv_qp_ex* to) { add(to, IBV_WR_SEND, [](ibv_send_wr&) {}); };
  qp.wr_send_imm = [](ibv_qp_ex* to, __be32 imm_data) {
    add(to, IBV_WR_SEND_WITH_IMM, [&](ibv_send_wr& wr) { wr.imm_data = imm_data; });
  };
  qp.wr_rdma_write = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address) { add_rdma(to, IBV_WR_RDMA_WRITE, rkey, address); };
  qp.wr_rdma_write_imm = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address, __be32 imm_data) {
    add_rdma(to, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address, imm_data);
  };
  qp.wr_rdma_read = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address) { add_rdma(to, IBV_WR_RDMA_READ, rkey, address); };
  qp.wr_atomic_cmp_swp = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address, std::uint64_t compare, std::uint64_t swap) {
    add_atomic(to, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, address, compare, swap);
  };
  qp.wr_atomic_fetch_add = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address, std::uint64_t addend) {
    add_atomic(to, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, address, addend, 0);
  };

  qp.wr_atomic_write = [](ibv_qp_ex* to, std::uint32_t rkey, std::uint64_t address, const void* word) {
    add_rdma(to, IBV_WR_ATOMIC_WRITE, rkey, address);
    const ibv_data_buf eight_bytes{const_cast<void*>(word), 8};
    batch_of(to).set_inline(&eight_bytes, 1);
  };
  qp.wr_bind_mw = [](ibv_qp_ex* to, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info* info) {
    add(to, IBV_WR_BIND_MW, [&](ibv_send_wr& wr) { wr.bind_mw = {mw, rkey, *info}; });
  };
  qp.wr_local_inv = [](ibv_qp_ex* to, std::uint32_t rkey) { add(to, IBV_WR_LOCAL_INV, [&](ibv_send_wr& wr) { wr.invalidate_rkey = rkey; }); };
  qp.wr_send_inv = [](ibv_qp_ex* to, std::uint32_t rkey) { add(to, IBV_WR_SEND_WITH_INV, [&](ibv_send_wr& wr) { wr.invalidate_rkey = rkey; }); };

  qp.wr_set_ud_addr = [](ibv_qp_ex* to, ibv_ah* ah, std::uint32_t remote_qpn, std::uint32_t remote_qkey) {
    ibv_send_wr* const wr = batch_of(to).last();
    if (wr == nullptr || to->qp_base.qp_type != IBV_QPT_UD) return batch_of(to).fail(EINVAL);
    wr->wr.ud = {ah, remote_qpn, remote_qkey};
  };
  qp.wr_set_xrc_srqn = [](ibv_qp_ex* to, std::uint32_t remote_srqn) {
    ibv_send_wr* const wr = batch_of(to).last();
    if (wr == nullptr || to->qp_base.qp_type != IBV_QPT_XRC_SEND) return batch_of(to).fail(EINVAL);
    wr->qp_type.xrc.remote_srqn = remote_srqn;
  };
  qp.wr_set_sge = [](ibv_qp_ex* to, std::uint32_t lkey, std::uint64_t address, std::uint32_t length) {
    const ibv_sge piece{address, length, lkey};
    batch_of(to).set_pieces(&piece, 1);
  };
  qp.wr_set_sge_list = [](ibv_qp_ex* to, std::size_t count, const ibv_sge* pieces) { batch_of(to).set_pieces(pieces, count); };
  qp.wr_set_inline_data = [](ibv_qp_ex* to, void* address, std::size_t length) {
    const ibv_data_buf buffer{address, length};
    batch_of(to).set_inline(&buffer, 1);
  };
  qp.wr_set_inline_data_list = [](ibv_qp_ex* to, std::size_t count, const ibv_data_buf* buffers) {
    batch_of(to).set_inline(buffers, count);
  };

  // Callers do not look whether a pointer is there.
  qp.wr_send_tso = [](ibv_qp_ex* to, void*, std::uint16_t, std::uint16_t) { refuse(to); };
}

ibv_qp* create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* wanted) {
  return as_ptr([&] { return create(*wanted); });
}

}  // namespace vrdma::guest

using namespace vrdma::guest;

VRDMA_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return Qp::of(qp).batch != nullptr ? &Qp::of(qp).verbs : nullptr; }
