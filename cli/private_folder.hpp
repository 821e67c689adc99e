// Where the private services of a user lie: folders of his own, which nobody else can write to.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace vrdma::cli {

std::string private_folder();   // $XDG_RUNTIME_DIR/vrdma or /tmp/vrdma-UID; /tmp/vrdma-UID-user-INODE, of the user namespace, where that is somebody else's
std::string mediated_folder();  // of the service that offers no direct mode, below it
// Throws std::runtime_error with a message for a person where it cannot be had, or others can write to it.
void make_private_folder(const std::string& folder);

std::string socket_in(const std::string& folder);
// Below that folder, where another pid namespace's service is in it: for processes of this one.
std::string folder_beside(const std::string& folder);
// Where a private service of that folder may listen.
std::vector<std::string> private_sockets(const std::string& folder);
// Of a process as /proc names it; 0: that cannot be read.
ino_t pid_namespace(const std::string& process);

// The program's umask is not meant for what lies in the private folder, nor for the service.
class PrivateUmask {
 public:
  PrivateUmask() : before_(::umask(077)) {}
  ~PrivateUmask() { ::umask(before_); }
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  mode_t before_;
};

}  // namespace vrdma::cli
