// Whose a folder or file is that others could have made at its name: who listens in a folder of somebody else's, or writes there, is somebody else. Any thread.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "vmci_channel/packet_socket.hpp"

namespace vmci {

// Where nobody but this user makes, renames or replaces anything: a directory of its own, no link to one, that neither group nor others may write.
inline bool is_own_folder(const std::string& path) {
  struct stat status;
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 022) == 0;
}

// Whether who listens at a socket of such a folder is this user after all, or root: a second wall, for where it was another folder when it was looked at. In a
// user namespace our own uid is told as ours, too. Where a filter of system calls forbids to ask (docs/containers.md), the folder alone counts.
inline bool is_own_or_roots(const PacketSocket& socket) {
  const auto peer = socket.peer();
  return !peer || peer->uid == ::geteuid() || peer->uid == 0;
}

}  // namespace vmci
