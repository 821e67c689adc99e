// What travels between a guest and the host service for rdma_cm: identifiers, addresses, events. The states are the service's
// (vmkernel_svc/cm/); the guest speaks the kernel's ABI to librdmacm (guest_lib/cm/). Private data are bytes, as IBA 12.6 has them.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>

#include "vrdma/attributes.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::control {

// enum rdma_cm_event_type of <rdma/rdma_cma.h>.
enum CmEventType : std::uint32_t {
  cm_address_resolved = 0,
  cm_address_error,
  cm_route_resolved,
  cm_route_error,
  cm_connect_request,
  cm_connect_response,
  cm_connect_error,
  cm_unreachable,
  cm_rejected,
  cm_established,
  cm_disconnected,
  cm_device_removal,
  cm_multicast_join,
  cm_multicast_error,
  cm_address_change,
  cm_timewait_exit,
  cm_user = 18,  // what a program has written for itself
  cm_internal,   // and what its librdmacm has
};
constexpr std::uint32_t cm_udp_qkey = 0x01234567;  // RDMA_UDP_QKEY

struct CmAddress {
  std::uint16_t family;  // AF_INET, AF_INET6, AF_IB; 0: none
  std::uint16_t port;    // host order; 0: none, or any
  std::uint32_t scope;   // of a link-local IPv6 address; AF_IB: a P_Key, and above it a port space; 0: neither is said
  std::array<std::uint8_t, 16> ip;  // network order, the first four of IPv4; AF_IB: a GID; zeros: any

  // AF_IB: a service ID is a port space and a port (IBA A11.2).
  static constexpr std::uint16_t other_space = 0xffff;  // of service IDs that are not rdma_cm's
  static constexpr std::uint32_t ib_scope(std::uint16_t pkey, std::uint16_t port_space) { return std::uint32_t{port_space} << 16 | pkey; }
  std::uint16_t pkey() const { return static_cast<std::uint16_t>(scope); }
  std::uint16_t port_space() const { return static_cast<std::uint16_t>(scope >> 16); }

  bool operator==(const CmAddress&) const = default;
  bool is_any() const { return ip == std::array<std::uint8_t, 16>{}; }
  bool is_loopback() const {
    return family == AF_INET ? ip[0] == 127 : family == AF_INET6 && ip == std::array<std::uint8_t, 16>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  }
  bool is_multicast() const { return family == AF_INET ? ip[0] >> 4 == 0xe : ip[0] == 0xff; }
  bool same_host(const CmAddress& other) const { return family == other.family && ip == other.ip; }
};
static_assert(WireRecord<CmAddress>);

constexpr std::uint32_t cm_private_max = 256;
// struct rdma_ucm_conn_param, rdma_ucm_ud_param.
struct CmParameters {
  std::uint32_t qpn;
  std::uint32_t qkey;
  std::uint8_t private_bytes;
  std::uint8_t srq, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count;
  std::uint8_t reserved;
  std::array<std::uint8_t, cm_private_max> private_data;
};
static_assert(WireRecord<CmParameters>);

// Reply descriptor: the read end of a pipe with one AsyncRecord in it for as long as events wait.
struct CmOpenReply {
  std::uint32_t channel;
  std::uint32_t reserved;
};
struct CmChannelRequest {
  std::uint32_t channel;
  std::uint32_t reserved;
};
// Where the guest is: its network namespace, and the addresses of the interfaces there. Said before the first address is bound or
// resolved, and when they have changed.
constexpr std::uint32_t cm_addresses_at_once = 64, cm_addresses_max = 4096;
struct CmPlaceRequest {
  std::uint64_t network;  // inode of its network namespace
  std::uint32_t count;
  std::uint32_t more;     // 1: besides those that were said before (minor_of_many_addresses)
  CmAddress addresses[cm_addresses_at_once];
};
struct CmCreateRequest {
  std::uint32_t channel;
  std::uint16_t port_space;  // enum rdma_ucm_port_space
  std::uint16_t qp_type;     // enum ibv_qp_type
  std::uint64_t uid;         // what events of this identifier name
};
struct CmId {
  std::uint32_t id;
  std::uint32_t channel;  // to which it belongs; in replies: 0
};
// last: some event waited in its channel, and none does now: the guest takes the record out of the pipe.
struct CmGone {
  std::uint32_t last;
  std::uint32_t reserved;
};
struct CmBindRequest {
  CmId id;
  CmAddress address;
};
struct CmResolveAddressRequest {
  CmId id;
  CmAddress source;  // family 0: the service's choice
  CmAddress destination;
  std::uint32_t is_local;  // to the guest's network namespace
  std::uint32_t timeout_ms;
};
struct CmListenRequest {
  CmId id;
  std::uint32_t backlog;  // what its program says; the service allows as many as there can be (cm/messages.cpp)
  std::uint32_t reserved;
};
struct CmConnectRequest {
  CmId id;
  CmParameters parameters;
};
struct CmAcceptRequest {
  CmId id;
  std::uint64_t uid;
  std::uint32_t has_parameters;  // 0: who connects has seen the other one's answer, and its queue pair is in RTS
  std::uint32_t reserved;
  CmParameters parameters;
};
struct CmRejectRequest {
  CmId id;
  std::uint32_t reason;  // IBA 12.6.7.2
  std::uint32_t private_bytes;
  std::array<std::uint8_t, cm_private_max> private_data;
};
enum CmOption : std::uint32_t { cm_option_reuse_address = 1, cm_option_only_ipv6, cm_option_ack_timeout, cm_option_tos };
struct CmOptionRequest {
  CmId id;
  std::uint32_t option;
  std::uint32_t value;
};
struct CmQueryReply {
  CmAddress source, destination;
  std::array<std::uint8_t, 16> sgid, dgid;
  std::uint16_t slid, dlid;
  std::uint16_t pkey;
  std::uint8_t has_device, has_path;
  std::uint8_t mtu;   // enum ibv_mtu
  std::uint8_t lifetime;  // of a packet: 4.096 us << lifetime
  std::uint8_t traffic_class;
  std::uint8_t reserved;
  std::uint32_t link_layer;  // LinkLayer
};
struct CmAttributesRequest {
  CmId id;
  std::uint32_t state;  // enum ibv_qp_state that the queue pair is to enter
  std::uint32_t reserved;
};
struct CmAttributesReply {
  QpAttributes attributes;
  std::uint32_t mask;  // QpAttributeMask
};
struct CmMigrateRequest {
  CmId id;               // with the channel that it leaves
  std::uint32_t to;      // channel
  std::uint32_t reserved;
};  // the reply's `last` is that of the channel that it has left
struct CmJoinRequest {
  CmId id;
  std::uint64_t uid;
  CmAddress group;
  std::uint32_t flags;  // RDMA_MC_JOIN_FLAG_*
  std::uint32_t reserved;
};
struct CmEvent {
  std::uint64_t uid;
  std::uint32_t id;     // of the identifier that it is about; CONNECT_REQUEST: a new one's
  std::uint32_t event;  // CmEventType
  std::int32_t status;
  std::uint32_t is_datagram;  // `address` is meant
  CmParameters parameters;
  AddressVector address;
};
// An event of the guest's own making (rdma_write_cm_event(3)), for itself: cm_user or cm_internal.
struct CmWriteEventRequest {
  CmId id;
  std::uint32_t event;  // CmEventType
  std::int32_t status;
  std::array<std::uint8_t, 8> argument;  // comes with it as its private data
};
struct CmTakeReply {
  std::uint32_t found;
  std::uint32_t last;        // as CmGone's
  std::uint32_t counted_at;  // the identifier, or the membership of a group, among whose events this one is
  std::uint32_t reserved;
  CmEvent event;
};

}  // namespace vrdma::control

// Rows of the control table (vrdma/control.hpp): name, request body, reply body, on the socket?
#define VRDMA_CM_REQUESTS(X)                                              \
  X(cm_open, Empty, CmOpenReply, true)                                    \
  X(cm_close, CmChannelRequest, Empty, false)                             \
  X(cm_place, CmPlaceRequest, Empty, false)                               \
  X(cm_create_id, CmCreateRequest, CmId, false)                           \
  X(cm_destroy_id, CmId, CmGone, false)                                   \
  X(cm_bind, CmBindRequest, Empty, false)                                 \
  X(cm_resolve_address, CmResolveAddressRequest, Empty, false)            \
  X(cm_resolve_route, CmId, Empty, false)                                 \
  X(cm_listen, CmListenRequest, Empty, false)                             \
  X(cm_connect, CmConnectRequest, Empty, false)                           \
  X(cm_accept, CmAcceptRequest, Empty, false)                             \
  X(cm_reject, CmRejectRequest, Empty, false)                             \
  X(cm_disconnect, CmId, Empty, false)                                    \
  X(cm_is_established, CmId, Empty, false)                                   \
  X(cm_option, CmOptionRequest, Empty, false)                             \
  X(cm_query, CmId, CmQueryReply, false)                                  \
  X(cm_attributes, CmAttributesRequest, CmAttributesReply, false)         \
  X(cm_migrate, CmMigrateRequest, CmGone, false)                  \
  X(cm_join, CmJoinRequest, CmId, false)                                  \
  X(cm_leave, CmId, CmGone, false)                                        \
  X(cm_take_event, CmChannelRequest, CmTakeReply, false)
