#include "cli/private_folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/fail.hpp"
#include "vmci_channel/own_folder.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {
// In a folder that is everybody's the name may be taken: by somebody else, or, as a uid is somebody else's in each user namespace, by such a
// one (root of one, of "vrdma-0"). Then it is that of the namespace.
std::string folder_in_tmp() {
  const std::string folder = fmt::format("/tmp/vrdma-{}", ::geteuid());
  struct stat status;
  if (::lstat(folder.c_str(), &status) != 0 || status.st_uid == ::geteuid()) return folder;
  const ino_t user_namespace = ::stat("/proc/self/ns/user", &status) == 0 ? status.st_ino : 0;
  return fmt::format("{}-user-{}", folder, user_namespace);
}
}  // namespace

std::string private_folder() {
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    struct stat status;
    if (::stat(runtime, &status) == 0 && status.st_uid == ::geteuid()) return std::string(runtime) + "/vrdma";
  }
  return folder_in_tmp();
}

std::string mediated_folder() { return private_folder() + "/mediated"; }

std::string socket_in(const std::string& folder) { return folder + "/vrdmad.sock"; }

ino_t pid_namespace(const std::string& process) {
  struct stat status;
  return ::stat(("/proc/" + process + "/ns/pid").c_str(), &status) == 0 ? status.st_ino : 0;
}

std::string folder_beside(const std::string& folder) { return fmt::format("{}/pid-{}", folder, pid_namespace("self")); }

std::vector<std::string> private_sockets(const std::string& folder) {
  std::error_code error;
  const std::string beside = folder_beside(folder);
  if (!fs::exists(beside, error)) return {socket_in(folder)};
  return {socket_in(folder), socket_in(beside)};
}

void make_private_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    fail(fmt::format("cannot make {} ({}): set XDG_RUNTIME_DIR to a folder of yours, or start vrdmad and set VRDMA_SOCKET",
                     folder, std::strerror(errno)));
  struct stat status;
  // Made under a umask that leaves nothing, now or by another version.
  if (::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 0700) != 0700) ::chmod(folder.c_str(), 0700);
  if (!vmci::is_own_folder(folder))
    fail(fmt::format("{} is not a folder that only you can write: remove it, or set XDG_RUNTIME_DIR", folder));
}

}  // namespace vrdma::cli
