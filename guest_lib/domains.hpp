// Thread domains and parent domains. A parent domain is another name of a protection domain, which carries a thread domain: what is
// made on it is of that protection domain, for the service and for every check of keys. Both are this library's alone; of a thread
// domain's promise, one thread at a time, only the steps of an extended completion queue make use (DESIGN.md says why).
#pragma once

struct ibv_context;
struct ibv_parent_domain_init_attr;
struct ibv_pd;
struct ibv_td;
struct ibv_td_init_attr;

namespace vrdma::guest {

ibv_td* alloc_td(ibv_context* context, ibv_td_init_attr* wanted);
int dealloc_td(ibv_td* td);
// ibv_dealloc_pd() ends it.
ibv_pd* alloc_parent_domain(ibv_context* context, ibv_parent_domain_init_attr* wanted);

bool same_protection_domain(ibv_pd* one, ibv_pd* other);

}  // namespace vrdma::guest
