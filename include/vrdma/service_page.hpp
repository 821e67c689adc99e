// The service page: one memfd, written by the service, mapped read-only by every guest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vrdma::control {

struct alignas(64) ShardState {
  std::uint32_t sleeping;  // not 0: ring the doorbell descriptor after setting a bit
  std::uint32_t reserved[15];
};
struct ServicePage {
  std::uint32_t magic;
  std::uint16_t major, minor;
  std::uint32_t device_generation;  // changes when a device, port or GID query would answer otherwise
  std::uint32_t shard_count;
  std::uint64_t machine_generation;  // in a virtual machine's copy: what the service knows it by when it has been loaded from a file; another one after each stop
  std::uint64_t reserved[5];
  // A robust pthread mutex held by the service for as long as it lives. Its futex word gets FUTEX_OWNER_DIED within
  // microseconds of the service's death, however it died: the guest's poll loops look at it.
  alignas(64) std::byte alive_mutex[64];
  ShardState shards[62];
};
static_assert(sizeof(ServicePage) == 4096);

}  // namespace vrdma::control
