#include "vmci_channel/memory_room.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "vmci_channel/unique_fd.hpp"

namespace vmci {

namespace {

constexpr std::uint64_t unlimited = ~std::uint64_t{0};

// A short text of the kernel's; empty: it cannot be read.
std::string read_text(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[8192];
  const ssize_t got = file ? ::read(file.get(), text, sizeof(text)) : 0;
  return {text, static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
}

// The number behind a name at the beginning of a line; 0: there is none.
std::uint64_t number_after(const std::string& text, std::string_view name) {
  for (std::size_t at = text.find(name); at != text.npos; at = text.find(name, at + 1))
    if (at == 0 || text[at - 1] == '\n') return std::strtoull(text.c_str() + at + name.size(), nullptr, 10);
  return 0;
}

// One kind of control groups: the names of what they say.
struct Kind {
  const char* folder;  // under that of all control groups
  const char *limit, *used, *given_up;  // the last: of the memory in use, what could be given up or may be ours
};
constexpr Kind unified{"", "memory.max", "memory.current", "file "};
constexpr Kind unified_beside{"/unified", "memory.max", "memory.current", "file "};
constexpr Kind separate{"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache "};

// Of the group and all that it lies in. A container sees its own as the first of all, or the host's paths and no such folders.
std::uint64_t room_in(const std::string& cgroups, const Kind& kind, std::string path) {
  std::uint64_t room = unlimited;
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    const std::string folder = cgroups + kind.folder + path + "/";
    const std::string limit = read_text(folder + kind.limit);
    if (!limit.empty() && limit.front() >= '0' && limit.front() <= '9') {
      const std::uint64_t most = std::strtoull(limit.c_str(), nullptr, 10);
      const std::uint64_t used = std::strtoull(read_text(folder + kind.used).c_str(), nullptr, 10), back = number_after(read_text(folder + "memory.stat"), kind.given_up);
      const std::uint64_t lost = used - std::min(used, back);
      room = std::min(room, most - std::min(most, lost));
    }
    if (path.empty()) return room;
    path.resize(path.rfind('/') == path.npos ? 0 : path.rfind('/'));
  }
}

// By the lines of /proc/self/cgroup: number, controllers, path.
std::uint64_t room_in_cgroups(const MemoryFiles& files) {
  std::uint64_t room = unlimited;
  const std::string groups = read_text(files.proc + "/self/cgroup");
  for (std::size_t begin = 0; begin < groups.size();) {
    const std::size_t end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t first = line.find(':'), second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
    if (controllers == ",,")
      room = std::min({room, room_in(files.cgroups, unified, path), room_in(files.cgroups, unified_beside, path)});
    else if (controllers.find(",memory,") != controllers.npos)
      room = std::min(room, room_in(files.cgroups, separate, path));
  }
  return room;
}

}  // namespace

std::uint64_t memory_room(const MemoryFiles& files) {
  const std::string machine = read_text(files.proc + "/meminfo");
  std::uint64_t kib = 0;
  for (const char* const name : {"MemAvailable:", "SwapFree:", "Shmem:", "Hugetlb:"}) kib += number_after(machine, name);
  std::uint64_t room = kib == 0 ? unlimited : kib << 10;
  const std::uint64_t swap = number_after(machine, "SwapFree:") << 10, in_groups = room_in_cgroups(files);
  if (in_groups < unlimited - swap) room = std::min(room, in_groups + swap);  // others of the group can be swapped out
  if (room == unlimited) return room;
  // What is there already may be part of what is wanted.
  const std::string resident = read_text(files.proc + "/self/statm");
  const std::size_t second = resident.find(' ');
  const std::uint64_t pages = second == resident.npos ? 0 : std::strtoull(resident.c_str() + second, nullptr, 10);
  return room + pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

MemoryLeft memory_left(const MemoryFiles& files) {
  const std::string machine = read_text(files.proc + "/meminfo");
  return {number_after(machine, "MemTotal:") << 10, std::min(number_after(machine, "MemAvailable:") << 10, room_in_cgroups(files))};
}

}  // namespace vmci
