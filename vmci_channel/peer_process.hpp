// What the process that has connected is by now, from /proc. It may run another program than then, of more rights (set-user-ID, set-group-ID,
// file capabilities), while somebody else holds its socket: whoever may look into every process looks no further then. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vmci {

// Its folder, as a path only. It stays that process's: whoever sees by a pidfd afterwards that the process still runs knows that it was its own.
UniqueFd process_folder(pid_t pid);

// Whether a line of /proc/PID/status says that id four times: real, effective, saved, and that of files.
bool are_all(const std::string& ids, std::uint32_t id);

// Whether the process has all the ids with which it connected, and its memory is that user's: the kernel makes the files of a process that is
// not dumpable root's (of its user namespace). Such is one that has got rights by its program, and has given them up since, too.
// Root's own need not be dumpable: they have no more rights than who ran them. Where fs.suid_dumpable is 1, which is for debugging, programs with
// capabilities are dumpable for everybody, and for this as well.
//
// Ids are as this process's user namespace sees them, here as in SO_PEERCRED. Whom it does not map it has no rights over, so that the kernel
// looks itself whom it lets in. What is opened between two such looks is of a program without more rights: another one's memory ends with it.
bool is_as_it_connected(int folder, const Credentials& connected);

}  // namespace vmci
