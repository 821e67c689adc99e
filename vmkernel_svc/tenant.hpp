// The owner of guests: the unit of trust, quota and fair share. Today a tenant is a uid.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "vmkernel_svc/config.hpp"

namespace vrdma::svc {

struct Tenant {
  uid_t uid;
  Quota quota;
  std::uint32_t guests = 0;
  std::uint32_t objects = 0;
  std::uint64_t registered_bytes = 0;
  std::uint64_t queue_bytes = 0;
  std::uint64_t pieces = 0;
  std::uint64_t mappings = 0;
  std::uint32_t descriptors = 0;
  // Deficit round robin by bytes among tenants (Shreedhar and Varghese): what it may still move in this round.
  std::int64_t deficit_bytes = 0;
  std::uint64_t moved_bytes = 0;

  bool take_object() {
    if (objects >= quota.objects) return false;
    ++objects;
    return true;
  }
  bool take_descriptors(std::uint32_t count) {
    if (descriptors > quota.descriptors || count > quota.descriptors - descriptors) return false;
    descriptors += count;
    return true;
  }
};

}  // namespace vrdma::svc
