// The host's own libibverbs, loaded only where an HCA is configured: never ours, which has the same name, also when vrdmad itself was
// started under it, unless the configuration names it: then the HCA is one of another vrdmad's. Thread-safe.
#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace vrdma::remote {

#define VRDMA_HCA_FUNCTIONS(F)                                                                                                    \
  F(ibv_get_device_list) F(ibv_free_device_list) F(ibv_open_device) F(ibv_close_device) F(ibv_query_device) F(ibv_query_port)     \
  F(ibv_query_gid) F(ibv_alloc_pd) F(ibv_dealloc_pd) F(ibv_reg_mr_iova) F(ibv_dereg_mr) F(ibv_create_comp_channel)                \
  F(ibv_destroy_comp_channel) F(ibv_create_cq) F(ibv_destroy_cq) F(ibv_get_cq_event) F(ibv_ack_cq_events) F(ibv_create_qp)        \
  F(ibv_modify_qp) F(ibv_destroy_qp) F(ibv_create_srq) F(ibv_destroy_srq) F(ibv_get_async_event) F(ibv_ack_async_event)         \
  F(ibv_wc_status_str)

struct HcaLibrary {
  // nullptr: it is not there; `why` says so to a person. path: of its file; empty: in the system's folders.
  static const HcaLibrary* load(const std::string& path, std::string& why);

  // errno of the library's last call: it may have a C library of its own.
  int error() const { return *(*errno_location)(); }

  std::string path;
  int* (*errno_location)() = nullptr;
#define VRDMA_HCA(name) decltype(&::name) name = nullptr;
  VRDMA_HCA_FUNCTIONS(VRDMA_HCA)
#undef VRDMA_HCA
};

}  // namespace vrdma::remote
