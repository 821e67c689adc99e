// `vrdma vm uml`: starts User Mode Linux, and stays while it runs.
//
// It keeps a machine's RAM in a file without a name (O_TMPFILE), so only who started it can say which that is: the launcher finds it
// among the kernel's descriptors and hands it to the service, over a connection that stands for the machine's life. And it cleans up:
// programs of such a machine are processes of the host, traced by its kernel; when that is killed they would run on, untraced.
#pragma once

#include <string>
#include <vector>

namespace vrdma::cli {

// bar, launcher: the file and the socket that the service has made. The exit code of the command, or 128 + the signal that ended it.
// Throws std::runtime_error with a message for a person.
int run_uml(const std::string& bar, const std::string& launcher, const std::vector<std::string>& command);

}  // namespace vrdma::cli
