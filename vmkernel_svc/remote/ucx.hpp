// UCX's functions, found when the service starts: vrdmad runs where UCX is not installed, and says what is missing when it is needed.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace vrdma::remote {

struct Ucx {
#define VRDMA_UCP(name) decltype(&ucp_##name) name = nullptr
  VRDMA_UCP(config_read);
  VRDMA_UCP(config_modify);
  VRDMA_UCP(config_release);
  VRDMA_UCP(init_version);
  VRDMA_UCP(cleanup);
  VRDMA_UCP(worker_create);
  VRDMA_UCP(worker_destroy);
  VRDMA_UCP(worker_progress);
  VRDMA_UCP(worker_get_efd);
  VRDMA_UCP(worker_arm);
  VRDMA_UCP(worker_set_am_recv_handler);
  VRDMA_UCP(listener_create);
  VRDMA_UCP(listener_destroy);
  VRDMA_UCP(listener_reject);
  VRDMA_UCP(ep_create);
  VRDMA_UCP(ep_close_nbx);
  VRDMA_UCP(am_send_nbx);
  VRDMA_UCP(request_check_status);
  VRDMA_UCP(request_free);
  VRDMA_UCP(get_version_string);
#undef VRDMA_UCP
  decltype(&ucs_status_string) status_string = nullptr;

  // Throws std::runtime_error with a message for a person. Before the program has other threads: UCX reads settings from the
  // environment as it is loaded, some of which it must find and nobody else.
  static const Ucx& load();
};

}  // namespace vrdma::remote
