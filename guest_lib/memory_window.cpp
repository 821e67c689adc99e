#include "guest_lib/memory_window.hpp"

#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

Result<ibv_mw*> make(ibv_pd* pd, ibv_mw_type type) {
  if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2) return Errno{EINVAL};
  auto attachment = Context::of(pd->context).usable();
  if (!attachment) return attachment.error();
  if (!offers_windows(**attachment)) return Errno{EOPNOTSUPP};
  auto pd_handle = Pd::of(pd).handle_on(*attachment);
  if (!pd_handle) return pd_handle.error();
  auto mw = std::make_unique<Mw>();
  auto made = (*attachment)->call<control::Request::alloc_mw>({*pd_handle, static_cast<std::uint32_t>(type)});
  if (!made) return made.error();
  mw->attachment = *attachment;
  mw->verbs = {pd->context, pd, made->key, made->handle, type};
  Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
  windows_made.fetch_add(1, std::memory_order_relaxed);
  return &mw.release()->verbs;
}

// What the service says of a window, as its work request will say it: the device being gone is no answer.
Result<std::uint32_t> as_completion(const Result<control::Empty>& answer) {
  if (answer) return std::uint32_t{IBV_WC_SUCCESS};
  if (value(answer.error()) == EIO) return Errno{EIO};
  return std::uint32_t{IBV_WC_MW_BIND_ERR};
}

}  // namespace

bool changes_windows_in_turn(const Attachment& attachment) { return attachment.service_minor() >= control::minor_of_windows_in_turn; }
bool offers_windows(const Attachment& attachment) { return attachment.offers(control::minor_of_windows, control::minor_of_both_in_machines); }

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  return as_ptr([&] { return make(pd, type); });
}

int dealloc_mw(ibv_mw* verbs) {
  return as_int([&]() -> Status {
    Mw& mw = Mw::of(verbs);
    if (!mw.attachment->liveness().gone()) {
      auto gone = mw.attachment->call<control::Request::dealloc_mw>({verbs->handle, 0});
      if (!gone && value(gone.error()) != EIO) return gone.error();
    }
    Pd::of(verbs->pd).users.fetch_sub(1, std::memory_order_relaxed);
    windows_made.fetch_sub(1, std::memory_order_relaxed);
    delete &mw;
    return ok();
  });
}

// Type 1. The key that peers are to be told is there on return.
int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* wanted) {
  return as_int([&]() -> Status {
    const ibv_mw_bind_info& info = wanted->bind_info;
    if (mw->type != IBV_MW_TYPE_1 || (info.mr == nullptr && (info.addr != 0 || info.length != 0)) || (info.mw_access_flags & IBV_ACCESS_ZERO_BASED) != 0)
      return Errno{EINVAL};
    if (info.mr != nullptr && mw->pd != info.mr->pd) return Errno{EPERM};
    ibv_send_wr wr{};
    wr.wr_id = wanted->wr_id;
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = wanted->send_flags;
    wr.bind_mw = {mw, ibv_inc_rkey(mw->rkey), info};
    ibv_send_wr* bad = nullptr;
    if (const int error = post_send(qp, &wr, &bad); error != 0) return Errno{error};
    mw->rkey = wr.bind_mw.rkey;
    return ok();
  });
}

int check_window(const Qp& qp, const ibv_send_wr& wr) {
  if (wr.opcode != IBV_WR_BIND_MW) return 0;
  if (wr.bind_mw.mw == nullptr || Mw::of(wr.bind_mw.mw).attachment != qp.attachment) return EINVAL;
  ibv_mr* const mr = wr.bind_mw.bind_info.mr;
  return mr != nullptr && Mr::of(mr).attachment != qp.attachment ? EINVAL : 0;
}

Result<std::uint32_t> carry_out_window(Qp& qp, const ibv_send_wr& wr) {
  if (!windows_in_use()) return std::uint32_t{IBV_WC_MW_BIND_ERR};
  if (wr.opcode == IBV_WR_LOCAL_INV) return as_completion(qp.attachment->call<control::Request::invalidate_mw>({qp.base().handle, wr.invalidate_rkey}));
  const ibv_mw_bind_info& info = wr.bind_mw.bind_info;
  return as_completion(qp.attachment->call<control::Request::bind_mw>({wr.bind_mw.mw->handle, qp.base().handle, info.mr != nullptr ? info.mr->handle : 0,
                                                                       info.mw_access_flags, wr.bind_mw.rkey, 0, info.addr, info.length}));
}

}  // namespace vrdma::guest
