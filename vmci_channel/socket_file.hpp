// The file of a socket that this process listens at, to be taken away when it does so no more. Somebody may have removed it meanwhile, and
// another process have put its own there, which stays. One thread.
//
// A file is told by its number, which nobody else gets while the socket is open: whoever closes it removes the file first.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace vmci {

class SocketFile {
 public:
  SocketFile() = default;  // none: is_there() says no
  // Of a socket just bound there.
  explicit SocketFile(std::string path) : path_(std::move(path)) {
    if (::lstat(path_.c_str(), &bound_) != 0) path_.clear();
  }
  bool is_there() const {
    struct stat now;
    return !path_.empty() && ::lstat(path_.c_str(), &now) == 0 && now.st_ino == bound_.st_ino && now.st_dev == bound_.st_dev;
  }
  // If it is there.
  void remove() {
    if (is_there()) ::unlink(path_.c_str());
    path_.clear();
  }

 private:
  std::string path_;
  struct stat bound_ = {};
};

}  // namespace vmci
