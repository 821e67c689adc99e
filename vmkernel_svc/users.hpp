// Whom the kernel means by a uid that it tells this service (SO_PEERCRED, stat, /proc). In a user namespace it tells one id, the overflow
// id, for everybody whom the namespace does not map: then several users have it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace vrdma::svc {

// Whether more than one user may have that uid. What it goes by is read once; a map is written once, too, before anybody else comes.
bool may_be_several(uid_t uid);

// What it goes by: /proc/self/uid_map and /proc/sys/kernel/overflowuid. nullopt: the namespace maps everybody.
std::optional<uid_t> overflow_uid(const std::string& uid_map, const std::string& overflow);

}  // namespace vrdma::svc
