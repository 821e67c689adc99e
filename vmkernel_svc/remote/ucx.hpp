// UCX's functions, found when the service starts: vrdmad runs where UCX is not installed, and says what is missing when it is needed.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace vrdma::remote {

// All that is used of it, without "ucp_".
#define VRDMA_UCP_FUNCTIONS(X) \
  X(config_read) X(config_modify) X(config_release) X(init_version) X(cleanup) X(worker_create) X(worker_destroy) \
  X(worker_progress) X(worker_get_efd) X(worker_arm) X(worker_set_am_recv_handler) X(listener_create) X(listener_destroy) \
  X(listener_reject) X(ep_create) X(ep_close_nbx) X(am_send_nbx) X(request_free)

struct Ucx {
#define VRDMA_UCP(name) decltype(&ucp_##name) name = nullptr;
  VRDMA_UCP_FUNCTIONS(VRDMA_UCP)
#undef VRDMA_UCP
  decltype(&ucs_status_string) status_string = nullptr;

  // Throws std::runtime_error with a message for a person. Before the program has other threads: UCX reads settings from the
  // environment as it is loaded, some of which it must find and nobody else.
  static const Ucx& load();
};

}  // namespace vrdma::remote
