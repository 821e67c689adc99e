#include "guest_lib/reach.hpp"

#include <fcntl.h>
#include <infiniband/verbs.h>

#include <cstdio>
#include <string>

namespace vrdma::guest {

namespace {

// The text of /proc/self/maps: one read sees one line whole or not at all.
Result<std::string> read_maps() {
  vmci::UniqueFd fd(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
  if (!fd) return last_error();
  std::string text;
  for (;;) {
    const std::size_t before = text.size();
    text.resize(before + 65536);
    const ssize_t got = ::read(fd.get(), text.data() + before, 65536);
    if (got < 0 && errno != EINTR) return last_error();
    text.resize(before + static_cast<std::size_t>(got > 0 ? got : 0));
    if (got == 0) return text;
  }
}

// Whether every byte of the range is mapped, readable, and writable where asked.
Status check_mapped(std::uint64_t address, std::uint64_t bytes, bool writable) {
  auto maps = read_maps();
  if (!maps) return maps.error();
  std::uint64_t next = address;
  const std::uint64_t end = address + bytes;
  for (std::size_t at = 0; at < maps->size() && next < end;) {
    unsigned long first, last;
    char rights[5];
    if (std::sscanf(maps->c_str() + at, "%lx-%lx %4s", &first, &last, rights) != 3) return Errno{EFAULT};
    at = maps->find('\n', at);
    at = at == std::string::npos ? maps->size() : at + 1;
    if (last <= next) continue;
    if (first > next || rights[0] != 'r' || (writable && rights[1] != 'w')) return Errno{EFAULT};
    next = last;
  }
  return next >= end ? ok() : Status(Errno{EFAULT});
}

}  // namespace

Result<std::vector<control::Extent>> reach(Attachment&, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
  const Status mapped = check_mapped(address, bytes, (access & IBV_ACCESS_LOCAL_WRITE) != 0);
  if (!mapped) return mapped.error();
  return std::vector{control::Extent{address, bytes, 0, control::backing_process, 0}};
}

}  // namespace vrdma::guest
