// Protection domains and memory registrations.
#include <algorithm>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/on_demand.hpp"
#include "guest_lib/reach.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/access.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

Result<std::uint32_t> Pd::handle_on(const std::shared_ptr<Attachment>& wanted) {
  std::lock_guard lock(Process::instance().mutex);
  Pd& pd = proper();
  if (pd.attachment != wanted) {
    if (!pd.attachment->liveness().inherited()) return Errno{EIO};
    auto made = wanted->call<control::Request::create_pd>({Context::of(verbs.context).handle, 0});
    if (!made) return made.error();
    pd.attachment = wanted;
    pd.verbs.handle = made->handle;
  }
  if (verbs.handle != pd.verbs.handle) verbs.handle = pd.verbs.handle;
  return verbs.handle;
}

namespace {

constexpr std::uint32_t optional_access = IBV_ACCESS_OPTIONAL_RANGE;
constexpr std::uint32_t known_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                       IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
                                       IBV_ACCESS_HUGETLB | IBV_ACCESS_ON_DEMAND;

constexpr std::size_t bytes_worth_waking_for = 256 << 10, bytes_moved_at_once = 4 << 20;

Status check_range(std::uint64_t address, std::uint64_t bytes) {
  if (bytes == 0) return Errno{EINVAL};
  return address + bytes < address ? Status(Errno{EINVAL}) : ok();
}

Status check_access(std::uint32_t access) {
  if ((access & ~known_access) != 0) return Errno{EINVAL};
  return access_is_consistent(access) ? ok() : Status(Errno{EINVAL});
}

// The extents wait in the service until the request that follows takes them. The registration mutex is held.
template <control::Request R>
Result<ReplyBody<R>> call_with_extents(Attachment& attachment, std::span<const control::Extent> extents, const RequestBody<R>& body) {
  for (bool first = true;; first = false) {
    control::StageExtentsRequest stage;
    stage.count = static_cast<std::uint32_t>(std::min<std::size_t>(extents.size(), control::stage_extents_max));
    stage.clear_first = first;
    std::copy_n(extents.begin(), stage.count, stage.extents);
    extents = extents.subspan(stage.count);
    const auto bytes = std::as_bytes(std::span(&stage, 1)).first(control::stage_extents_bytes(stage.count));
    // Where this one is refused, the other is, for lack of extents.
    if (extents.empty()) return attachment.call_after<R>(control::Request::stage_extents, bytes, body);
    if (auto staged = attachment.call<control::Request::stage_extents>(stage); !staged) return staged.error();
  }
}

}  // namespace

Result<ibv_mr*> make_mr(ibv_pd* pd, void* start, const std::size_t wanted_bytes, std::uint64_t iova, std::uint32_t access) {
  auto address = reinterpret_cast<std::uintptr_t>(start);
  std::uint64_t bytes = wanted_bytes;
  access &= ~optional_access;  // promises of the application that need not be used
  if ((access & IBV_ACCESS_ON_DEMAND) != 0 && start == nullptr && wanted_bytes == SIZE_MAX) {
    address = iova = first_address;
    bytes = address_space_bytes - first_address;
  }
  if (Status range = check_range(address, bytes); !range) return range.error();
  if (Status allowed = check_access(access); !allowed) return allowed.error();
  if (access & IBV_ACCESS_ZERO_BASED) iova = 0;
  else if ((iova - address) % memory::page_bytes() != 0) return Errno{EINVAL};  // an adapter translates whole pages
  auto attachment = Context::of(pd->context).usable();
  if (!attachment) return attachment.error();
  if ((access & IBV_ACCESS_ON_DEMAND) != 0 && !offers_on_demand(**attachment)) return Errno{EOPNOTSUPP};
  auto pd_handle = Pd::of(pd).handle_on(*attachment);
  if (!pd_handle) return pd_handle.error();

  auto mr = std::make_unique<Mr>();
  std::unique_lock lock((*attachment)->registration_mutex());
  // It takes about as long to wake up as these pages to move.
  if (bytes >= bytes_worth_waking_for && bytes <= bytes_moved_at_once) (*attachment)->doorbell().announce();
  auto reached = reach(**attachment, address, bytes, access);
  if (!reached) return reached.error();
  VRDMA_CRASH_POINT("guest.reg_mr.pages_moved");
  auto made = call_with_extents<control::Request::reg_mr>(**attachment, reached->extents, {*pd_handle, access, address, bytes, iova});
  VRDMA_CRASH_POINT("guest.reg_mr.answered");
  if (!made) {
    unreach(std::move(reached->registration));
    return made.error();
  }
  mr->registration = std::move(reached->registration);
  mr->attachment = *attachment;
  mr->iova = iova;
  mr->access = access;
  mr->verbs = {pd->context, pd, start, wanted_bytes, made->handle, made->key, made->key};
  Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
  lock.unlock();
  if (mr->on_demand()) know_on_demand(*mr);
  return &mr.release()->verbs;
}

namespace {

// The return values are enum ibv_rereg_mr_err_code.
int rereg_mr(Mr& mr, int flags, ibv_pd* pd, void* start, std::size_t bytes, std::uint32_t access) {
  const auto refuse = [](int error) {  // as libibverbs itself would
    errno = error;
    return IBV_REREG_MR_ERR_INPUT;
  };
  const auto fail = [](int error) {  // as the kernel would
    errno = error;
    return IBV_REREG_MR_ERR_CMD;
  };
  auto wanted = static_cast<std::uint32_t>(flags);
  access &= ~optional_access;
  if (wanted == 0 || (wanted & ~std::uint32_t{IBV_REREG_MR_FLAGS_SUPPORTED}) != 0) return refuse(EINVAL);
  // How memory may be reached depends on whether peers may be allowed atomics: then it is looked at anew.
  constexpr std::uint32_t allows_atomics = IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
  const bool looks_anew = (wanted & IBV_REREG_MR_CHANGE_ACCESS) != 0 && (wanted & IBV_REREG_MR_CHANGE_TRANSLATION) == 0 && mr.device_memory == nullptr &&
                          ((access | mr.access) & IBV_ACCESS_ON_DEMAND) == 0 && (access & ~mr.access & allows_atomics) != 0;
  if (looks_anew) {
    wanted |= IBV_REREG_MR_CHANGE_TRANSLATION;
    start = mr.verbs.addr;
    bytes = mr.verbs.length;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  control::ReregMrRequest request{mr.verbs.handle, wanted, 0, access, address, bytes, looks_anew ? mr.iova : address};
  if (wanted & IBV_REREG_MR_CHANGE_TRANSLATION)
    if (Status range = check_range(address, bytes); !range || start == nullptr) return refuse(EINVAL);
  if (wanted & IBV_REREG_MR_CHANGE_ACCESS) {
    if (Status allowed = check_access(access); !allowed) return fail(value(allowed.error()));
    if (((access ^ mr.access) & IBV_ACCESS_ON_DEMAND) != 0) return fail(EOPNOTSUPP);  // it would be another memory
    if (access & IBV_ACCESS_ZERO_BASED) request.iova = 0;
  }
  if (mr.device_memory != nullptr) return fail(EINVAL);  // as the kernel
  if (wanted & IBV_REREG_MR_CHANGE_PD) {
    if (pd == nullptr) return refuse(EINVAL);
    auto handle = Pd::of(pd).handle_on(mr.attachment);
    if (!handle) return fail(value(handle.error()));
    request.pd = *handle;
  }

  std::lock_guard lock(mr.attachment->registration_mutex());
  std::vector<control::Extent> extents;
  memory::Registration before;  // what is given back at the end: the old memory, or the new where the service refused
  if (wanted & IBV_REREG_MR_CHANGE_TRANSLATION) {
    auto reached = reach(*mr.attachment, address, bytes, wanted & IBV_REREG_MR_CHANGE_ACCESS ? access : mr.access);
    if (!reached) return fail(value(reached.error()));
    before = std::move(reached->registration);
    extents = std::move(reached->extents);
  }
  auto made = extents.empty() ? mr.attachment->call<control::Request::rereg_mr>(request)
                              : call_with_extents<control::Request::rereg_mr>(*mr.attachment, extents, request);
  if (wanted & IBV_REREG_MR_CHANGE_TRANSLATION) {
    if (made) std::swap(before, mr.registration);
    unreach(std::move(before));
  }
  if (!made) return fail(value(made.error()));
  mr.verbs.handle = made->handle;
  mr.verbs.lkey = mr.verbs.rkey = made->key;
  if (wanted & IBV_REREG_MR_CHANGE_ACCESS) mr.access = access;
  if (wanted & IBV_REREG_MR_CHANGE_TRANSLATION) {
    mr.verbs.addr = start;
    mr.verbs.length = bytes;
    mr.iova = request.iova;
  }
  if (wanted & IBV_REREG_MR_CHANGE_PD) {
    Pd::of(mr.verbs.pd).users.fetch_sub(1, std::memory_order_relaxed);
    Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
    mr.verbs.pd = pd;
  }
  return 0;
}

}  // namespace
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  return as_ptr([&]() -> Result<ibv_pd*> {
    auto attachment = Context::of(context).usable();
    if (!attachment) return attachment.error();
    auto pd = std::make_unique<Pd>();
    prepare_reach();
    auto made = (*attachment)->call<control::Request::create_pd>({Context::of(context).handle, 0});
    if (!made) return made.error();
    pd->attachment = *attachment;
    pd->verbs = {context, made->handle};
    return &pd.release()->verbs;
  });
}

VRDMA_EXPORT int ibv_dealloc_pd(ibv_pd* verbs) {
  return as_int([&]() -> Status {
    Pd& pd = Pd::of(verbs);
    if (pd.users.load(std::memory_order_relaxed) != 0) return Errno{EBUSY};
    if (pd.parent_of != nullptr) {
      pd.parent_of->users.fetch_sub(1, std::memory_order_relaxed);
      if (pd.thread_domain != nullptr) pd.thread_domain->users.fetch_sub(1, std::memory_order_relaxed);
    } else if (!pd.attachment->liveness().gone()) {
      auto gone = pd.attachment->call<control::Request::destroy_pd>({verbs->handle, 0});
      if (!gone && value(gone.error()) != EIO) return gone.error();
    }
    delete &pd;
    return ok();
  });
}

#undef ibv_reg_mr
VRDMA_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) {
  return as_ptr([&] {
    return make_mr(pd, address, bytes, reinterpret_cast<std::uintptr_t>(address), static_cast<std::uint32_t>(access));
  });
}

#undef ibv_reg_mr_iova
VRDMA_EXPORT ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* address, std::size_t bytes, std::uint64_t iova, int access) {
  return as_ptr([&] { return make_mr(pd, address, bytes, iova, static_cast<std::uint32_t>(access)); });
}

VRDMA_EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t bytes, std::uint64_t iova, unsigned int access) {
  return as_ptr([&] { return make_mr(pd, address, bytes, iova, access); });
}

VRDMA_EXPORT int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* address, std::size_t bytes, int access) {
  int outcome = IBV_REREG_MR_ERR_CMD;
  as_int([&]() -> Status {
    outcome = rereg_mr(Mr::of(mr), flags, pd, address, bytes, static_cast<std::uint32_t>(access));
    if (outcome == 0 && Mr::of(mr).on_demand()) know_on_demand(Mr::of(mr));
    return outcome == 0 ? ok() : Status(last_error());
  });
  return outcome;
}

VRDMA_EXPORT int ibv_dereg_mr(ibv_mr* verbs) {
  return as_int([&]() -> Status {
    Mr& mr = Mr::of(verbs);
    VRDMA_CRASH_POINT("guest.dereg_mr.before_request");
    if (!mr.attachment->liveness().gone()) {
      auto gone = mr.attachment->call<control::Request::dereg_mr>({verbs->handle, 0});
      if (!gone && value(gone.error()) != EIO) return gone.error();
    }
    VRDMA_CRASH_POINT("guest.dereg_mr.answered");
    Pd::of(verbs->pd).users.fetch_sub(1, std::memory_order_relaxed);
    if (mr.on_demand()) forget_on_demand(mr);
    if (mr.device_memory != nullptr) mr.device_memory->users.fetch_sub(1, std::memory_order_relaxed);
    if (!mr.attachment->liveness().inherited()) {
      std::lock_guard lock(mr.attachment->registration_mutex());
      unreach(std::move(mr.registration));
    }
    delete &mr;
    return ok();
  });
}
