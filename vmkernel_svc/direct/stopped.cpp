#include "vmkernel_svc/direct/stopped.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <string_view>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::svc {

namespace {

// The letter after the name, which may itself hold blanks and brackets; 0: the thread has gone.
char state_in(int folder, const char* thread) {
  const vmci::UniqueFd file(::openat(folder, fmt::format("{}/stat", thread).c_str(), O_RDONLY | O_CLOEXEC));
  char text[256];
  const ssize_t got = file ? ::read(file.get(), text, sizeof(text)) : 0;
  const std::string_view line(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  const auto end = line.rfind(')');
  return end != line.npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

}  // namespace

bool is_stopped(pid_t pid) {
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(fmt::format("/proc/{}/task", pid).c_str()), ::closedir);
  if (!threads) return false;
  bool any = false;
  while (const dirent* const thread = ::readdir(threads.get())) {
    if (thread->d_name[0] == '.') continue;
    const char state = state_in(::dirfd(threads.get()), thread->d_name);
    if (state == 'T' || state == 't') any = true;
    else if (state != 'X' && state != 'Z' && state != '\0') return false;
  }
  return any;
}

}  // namespace vrdma::svc
