#include "guest_lib/show_device.hpp"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <endian.h>
#include <net/if.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "guest_lib/attachment.hpp"
#include "guest_lib/control.hpp"
#include "guest_lib/port_interface.hpp"
#include "guest_lib/synthetic_tree.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {
bool ask_for_traffic(PortTraffic& now) {
  const int before = errno;
  const auto attachment = Attachment::existing();
  if (!attachment || attachment->service_minor() < control::minor_of_counters) return false;
  const auto reply = attachment->call<control::Request::read_counters>({});
  errno = before;
  if (reply) now = {reply->sent_bytes, reply->sent_messages, reply->received_bytes, reply->received_messages};
  return static_cast<bool>(reply);
}
constinit std::atomic<bool> link_layer_is_known{false};

// The one that this program would get, where `vrdma run` has not told it: once, and without becoming a guest.
Status ask_for_link_layer() {
  constexpr int patience_ms = 1000;
  if (link_layer_is_known.load(std::memory_order_relaxed)) return ok();
  const auto socket = connect_to_service(patience_ms);
  if (!socket) return socket.error();
  control::LinkLayerReply reply{};
  const auto answered = exchange_packet(*socket, {.kind = control::Request::query_link_layer}, std::as_writable_bytes(std::span(&reply, 1)), {patience_ms});
  if (answered) set_served_link_layer(reply.link_layer == control::link_layer_ethernet);
  link_layer_is_known.store(true, std::memory_order_relaxed);  // an older service does not say
  return ok();
}
// Reading them makes a guest of a program of libibumad's that was none: ibstat, or who looks for the subnet manager before it opens umad0.
// Others stay as they were: of a script, each `cat` would be another guest, with another port.
void ask_for_device() {
  const int before = errno;
  if (::dlsym(RTLD_DEFAULT, "umad_get_port") == nullptr) {
    (void)as_int(ask_for_link_layer);
    errno = before;
    return;
  }
  (void)as_int([]() -> Status {
    const auto attachment = Attachment::current();
    if (!attachment) return attachment.error();
    const auto device = (*attachment)->device();
    if (!device) return device.error();
    return ok();
  });
  errno = before;
}
__attribute__((constructor)) void offer_to_ask() {
  link_layer_is_known.store(std::getenv("VRDMA_SERVED_LINK_LAYER") != nullptr, std::memory_order_relaxed);
  set_device_source(ask_for_device);
}

}  // namespace

void show_device_in_paths(const control::DeviceReply& reply) {
  constexpr std::uint32_t roce_v2 = 2;
  SyntheticDevice device = default_synthetic_device();
  device.node_guid = be64toh(reply.node_guid);
  device.sys_image_guid = be64toh(reply.sys_image_guid);
  std::memcpy(device.firmware, reply.fw_version, sizeof(device.firmware));
  device.firmware[sizeof(device.firmware) - 1] = '\0';
  device.lid = reply.lid;
  device.sm_lid = reply.sm_lid;
  device.state = reply.port_state;
  device.physical_state = 5;  // LinkUp, as ibv_query_port says
  device.ethernet = reply.link_layer == control::link_layer_ethernet;
  static_assert(sizeof(SyntheticGid::netdev) >= IF_NAMESIZE);
  char interface[IF_NAMESIZE] = "";
  if (const std::uint32_t index = find_port_interface(reply); index != 0 && ::if_indextoname(index, interface) == nullptr) interface[0] = '\0';
  for (std::size_t i = 0; i < std::size(device.gids); ++i) {
    const control::GidEntry& from = reply.gids[i];
    SyntheticGid& to = device.gids[i];
    to = {};
    std::memcpy(to.raw, from.gid.data(), sizeof(to.raw));
    to.kind = from.gid == Gid{}      ? GidKind::empty
              : from.type == roce_v2 ? GidKind::roce_v2
                                     : GidKind::infiniband_or_roce_v1;
    std::strcpy(to.netdev, interface);
  }
  for (std::size_t i = 0; i < std::size(device.pkeys); ++i) device.pkeys[i] = ntohs(reply.pkeys[i]);
  set_synthetic_devices({&device, 1});
  set_traffic_source(ask_for_traffic);
}

}  // namespace vrdma::guest
