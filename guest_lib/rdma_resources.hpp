// The objects of programs and what they count, as rdma-resource(8) and rdma-statistic(8) ask the kernel for them: those of this user's
// programs (root's: of all), as `vrdma show` has them from the service. Any thread.
#pragma once

#include <cstdint>
#include <functional>

#include "guest_lib/netlink_answer.hpp"

namespace vrdma {

struct ResourceQuestion {
  static constexpr std::uint32_t absent = ~0u;
  std::uint16_t command;  // RDMA_NLDEV_CMD_RES_GET …, RDMA_NLDEV_CMD_STAT_GET, RDMA_NLDEV_CMD_STAT_GET_STATUS
  bool dump;              // all, else one
  std::function<std::uint32_t(std::uint16_t attribute)> wanted;  // the number in an attribute of the request's, or `absent`
};

// begin() makes a message that names the device already; send() takes each that is complete. 0, or an errno: EOPNOTSUPP, ENOENT, EIO.
struct ResourceReply {
  std::function<NetlinkAnswer()> begin;
  std::function<void(const NetlinkAnswer&)> send;
};
using ResourceSource = int(const ResourceQuestion& question, const ResourceReply& reply);

void set_resource_source(ResourceSource* source);  // rdma_netlink.cpp; without one such questions end in EOPNOTSUPP

}  // namespace vrdma
