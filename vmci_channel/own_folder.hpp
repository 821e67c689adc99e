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

// What nobody but this user and root has made or can write: a folder or a file, or a link of theirs to one.
inline bool is_ours_or_roots(const std::string& path) {
  const auto has_our_owner = [](const struct stat& status) { return status.st_uid == ::geteuid() || status.st_uid == 0; };
  struct stat name, meant;
  return ::lstat(path.c_str(), &name) == 0 && ::stat(path.c_str(), &meant) == 0 && has_our_owner(name) && has_our_owner(meant) && (meant.st_mode & 022) == 0;
}
// Where nobody else renames or removes what is ours: others may make something beside it, as in /tmp.
inline bool others_keep_ours_in(const std::string& folder) {
  struct stat status;
  if (::stat(folder.c_str(), &status) != 0 || (status.st_uid != ::geteuid() && status.st_uid != 0)) return false;
  return (status.st_mode & 022) == 0 || (status.st_mode & S_ISVTX) != 0;
}

// Whether who listens at a socket of such a folder is this user after all, or root: a second wall, for where it was another folder when it was looked at. In a
// user namespace our own uid is told as ours, too. Where a filter of system calls forbids to ask (docs/containers.md), the folder alone counts.
inline bool is_own_or_roots(const PacketSocket& socket) {
  const auto peer = socket.peer();
  return !peer || peer->uid == ::geteuid() || peer->uid == 0;
}

}  // namespace vmci
