#include "vmci_channel/peer_process.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

namespace vmci {

UniqueFd process_folder(pid_t pid) { return UniqueFd(::open(("/proc/" + std::to_string(pid)).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)); }

bool are_all(const std::string& ids, std::uint32_t id) {
  std::istringstream numbers(ids);
  std::uint32_t number = 0, count = 0;
  while (numbers >> number)
    if (++count; number != id) return false;
  return count == 4;
}

bool is_as_it_connected(int folder, const Credentials& connected) {
  struct stat memory;
  if (::fstatat(folder, "mem", &memory, 0) != 0 || memory.st_uid != connected.uid) return false;
  const UniqueFd file(::openat(folder, "status", O_RDONLY | O_CLOEXEC));
  std::string text;
  char part[4096];
  for (ssize_t got; file && ((got = ::read(file.get(), part, sizeof(part))) > 0 || (got < 0 && errno == EINTR));)
    if (got > 0) text.append(part, static_cast<std::size_t>(got));
  const auto are_own = [&text](const char* name, std::uint32_t id) {  // the first line is the program's name, with its line ends escaped
    const auto line = text.find(name);
    return line != std::string::npos && are_all(text.substr(line + 6, text.find('\n', line + 1) - line - 6), id);
  };
  return are_own("\nUid:\t", connected.uid) && are_own("\nGid:\t", connected.gid);
}

}  // namespace vmci
