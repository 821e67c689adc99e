#include "guest_lib/domains.hpp"

#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

// Allocators are for the buffers of queues, which lie in the service's memory here: as with any provider that has none to allocate,
// they are not called, and neither is their context kept.
constexpr std::uint32_t known_domain_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;

Result<ibv_td*> make_td(ibv_context* context, const ibv_td_init_attr& wanted) {
  if (wanted.comp_mask != 0) return Errno{EOPNOTSUPP};
  auto td = std::make_unique<Td>();
  td->verbs.context = context;
  return &td.release()->verbs;
}

Result<ibv_pd*> make_parent_domain(ibv_context* context, const ibv_parent_domain_init_attr& wanted) {
  if ((wanted.comp_mask & ~known_domain_mask) != 0) return Errno{EOPNOTSUPP};
  if (wanted.pd == nullptr || wanted.pd->context != context) return Errno{EINVAL};
  if (wanted.td != nullptr && wanted.td->context != context) return Errno{EINVAL};
  auto domain = std::make_unique<Pd>();
  domain->verbs = {context, wanted.pd->handle};
  domain->parent_of = &Pd::of(wanted.pd);
  domain->parent_of->users.fetch_add(1, std::memory_order_relaxed);
  if (wanted.td != nullptr) {
    domain->thread_domain = &Td::of(wanted.td);
    domain->thread_domain->users.fetch_add(1, std::memory_order_relaxed);
  }
  return &domain.release()->verbs;
}

}  // namespace

ibv_td* alloc_td(ibv_context* context, ibv_td_init_attr* wanted) {
  return as_ptr([&] { return make_td(context, *wanted); });
}

int dealloc_td(ibv_td* td) {
  return as_int([&]() -> Status {
    if (Td::of(td).users.load(std::memory_order_relaxed) != 0) return Errno{EBUSY};
    delete &Td::of(td);
    return ok();
  });
}

ibv_pd* alloc_parent_domain(ibv_context* context, ibv_parent_domain_init_attr* wanted) {
  return as_ptr([&] { return make_parent_domain(context, *wanted); });
}

bool same_protection_domain(ibv_pd* one, ibv_pd* other) { return &Pd::of(one).proper() == &Pd::of(other).proper(); }

}  // namespace vrdma::guest
