#include "vmkernel_svc/direct/stopped.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::svc {

namespace {

// The beginning of a thread's file; nothing: the thread has gone, or does not let itself be looked at.
std::string text_of(int folder, const char* thread, const char* name) {
  const vmci::UniqueFd file(::openat(folder, fmt::format("{}/{}", thread, name).c_str(), O_RDONLY | O_CLOEXEC));
  char text[256];
  const ssize_t got = file ? ::read(file.get(), text, sizeof(text)) : 0;
  return {text, got > 0 ? static_cast<std::size_t>(got) : 0};
}

// The letter after the name, which may itself hold blanks and brackets; 0: the thread has gone.
char state_in(int folder, const char* thread) {
  const std::string line = text_of(folder, thread, "stat");
  const auto end = line.rfind(')');
  return end != line.npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

// A debugger can hold a thread where a system call begins, which is carried out when it goes on: one that writes to the memory of another
// (guest_lib/direct/reached_process.hpp), say. The kernel shows its number, also where it has ended just then, and -1 for none; a word where
// the thread runs, and nothing to whom it does not concern.
bool may_begin_a_copy(int folder, const char* thread) {
  const std::string line = text_of(folder, thread, "syscall");
  char* end = nullptr;
  const long number = std::strtol(line.c_str(), &end, 10);
  return end == line.c_str() || number == SYS_pwritev || number == SYS_preadv;
}

}  // namespace

bool is_stopped(pid_t pid) {
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(fmt::format("/proc/{}/task", pid).c_str()), ::closedir);
  if (!threads) return false;
  bool any = false;
  while (const dirent* const thread = ::readdir(threads.get())) {
    if (thread->d_name[0] == '.') continue;
    const char state = state_in(::dirfd(threads.get()), thread->d_name);
    if (state == 'T' || (state == 't' && !may_begin_a_copy(::dirfd(threads.get()), thread->d_name))) any = true;
    else if (state != 'X' && state != 'Z' && state != '\0') return false;
  }
  return any;
}

}  // namespace vrdma::svc
