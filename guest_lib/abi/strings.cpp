// Names of verbs' enumerations. Programs print them and their users search for them, so the texts are libibverbs'.
#include <infiniband/verbs.h>

#include <cstddef>
#include <iterator>

#include "guest_lib/abi/export.hpp"

namespace {

template <std::size_t count>
const char* text_or_unknown(const char* const (&texts)[count], int value) {
  if (value < 0 || static_cast<std::size_t>(value) >= count || texts[value] == nullptr) return "unknown";
  return texts[value];
}

constexpr const char* node_types[] = {nullptr,
                                      "InfiniBand channel adapter",
                                      "InfiniBand switch",
                                      "InfiniBand router",
                                      "iWARP NIC",
                                      "usNIC",
                                      "usNIC UDP",
                                      "unspecified"};
static_assert(std::size(node_types) == IBV_NODE_UNSPECIFIED + 1);

constexpr const char* port_states[] = {"no state change (NOP)", "down", "init", "armed", "active", "active defer"};
static_assert(std::size(port_states) == IBV_PORT_ACTIVE_DEFER + 1);

constexpr const char* event_types[] = {"CQ error",
                                       "local work queue catastrophic error",
                                       "invalid request local work queue error",
                                       "local access violation work queue error",
                                       "communication established",
                                       "send queue drained",
                                       "path migrated",
                                       "path migration request error",
                                       "local catastrophic error",
                                       "port active",
                                       "port error",
                                       "LID change",
                                       "P_Key change",
                                       "SM change",
                                       "SRQ catastrophic error",
                                       "SRQ limit reached",
                                       "last WQE reached",
                                       "client reregistration",
                                       "GID table change",
                                       "WQ fatal",
                                       "Device link speed change"};  // which older <infiniband/verbs.h> has not
static_assert(std::size(event_types) == IBV_EVENT_WQ_FATAL + 2);

constexpr const char* wc_statuses[] = {"success",
                                       "local length error",
                                       "local QP operation error",
                                       "local EE context operation error",
                                       "local protection error",
                                       "Work Request Flushed Error",
                                       "memory management operation error",
                                       "bad response error",
                                       "local access error",
                                       "remote invalid request error",
                                       "remote access error",
                                       "remote operation error",
                                       "transport retry counter exceeded",
                                       "RNR retry counter exceeded",
                                       "local RDD violation error",
                                       "remote invalid RD request",
                                       "aborted error",
                                       "invalid EE context number",
                                       "invalid EE context state",
                                       "fatal error",
                                       "response timeout error",
                                       "general error",
                                       "TM error",
                                       "TM software rendezvous"};
static_assert(std::size(wc_statuses) == IBV_WC_TM_RNDV_INCOMPLETE + 1);

}  // namespace

VRDMA_EXPORT const char* ibv_node_type_str(ibv_node_type type) {
  return text_or_unknown(node_types, static_cast<int>(type));
}

VRDMA_EXPORT const char* ibv_port_state_str(ibv_port_state state) {
  return text_or_unknown(port_states, static_cast<int>(state));
}

VRDMA_EXPORT const char* ibv_event_type_str(ibv_event_type type) {
  return text_or_unknown(event_types, static_cast<int>(type));
}

VRDMA_EXPORT const char* ibv_wc_status_str(ibv_wc_status status) {
  return text_or_unknown(wc_statuses, static_cast<int>(status));
}
