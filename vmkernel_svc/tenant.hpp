// The owner of guests: the unit of trust, quota and fair share. Today a tenant is a uid.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "vmkernel_svc/config.hpp"
#include "vmkernel_svc/hosts/partitions.hpp"
#include "vmkernel_svc/memory/process_memory.hpp"

namespace vrdma::svc {

struct Tenant {
  uid_t uid;
  Quota quota;
  bool several_users = false;  // whom a user namespace does not map (users.hpp): they share all this, but see nothing of one another's
  std::uint32_t guests = 0;
  // Workers of guests that have gone, held up in memory of theirs that does not come: each counts as a guest.
  std::shared_ptr<Workers> workers = std::make_shared<Workers>();
  std::uint32_t objects = 0;
  std::uint64_t registered_bytes = 0;
  std::uint64_t queue_bytes = 0;
  std::uint64_t pieces = 0;
  std::uint64_t mappings = 0;
  std::uint64_t arena_parts = 0;  // of programs in virtual machines: a mapping each, too
  std::uint32_t descriptors = 0;
  std::uint32_t memberships = 0;
  hosts::PkeyTable pkeys{};  // what its guests' ports show (pkeys.hpp)

  bool has_room_for_guest() const { return guests + workers->lingering.load(std::memory_order_relaxed) < quota.guests; }
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
