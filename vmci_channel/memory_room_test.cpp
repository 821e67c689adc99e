#include "vmci_channel/memory_room.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "vmci_channel/page_pin.hpp"

namespace {

namespace fs = std::filesystem;
constexpr std::uint64_t mib = 1 << 20;

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// A machine's files, as a process of it sees them.
struct World {
  fs::path folder = fs::temp_directory_path() / ("vrdma-memory-room-" + std::to_string(::getpid()));
  vmci::MemoryFiles files{folder / "proc", folder / "cgroup"};
  std::uint64_t resident = 10 * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));

  World() {
    fs::remove_all(folder);
    write(folder / "proc/meminfo", "MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: 4096000 kB\nSwapFree: 0 kB\nShmem: 0 kB\nHugetlb: 0 kB\n");
    write(folder / "proc/self/statm", "1000 10 5 1 0 50 0\n");
  }
  ~World() { fs::remove_all(folder); }
  void in_groups(const std::string& lines) const { write(folder / "proc/self/cgroup", lines); }
  void group(const std::string& path, const char* limit, const std::string& value, std::uint64_t used, const std::string& stat) const {
    const bool unified = std::string(limit) == "memory.max";
    write(folder / "cgroup" / path / limit, value);
    write(folder / "cgroup" / path / (unified ? "memory.current" : "memory.usage_in_bytes"), std::to_string(used) + "\n");
    write(folder / "cgroup" / path / "memory.stat", stat);
  }
  std::uint64_t room() const { return vmci::memory_room(files) - resident; }
};

}  // namespace

TEST_CASE("What a machine has is the room where there are no control groups, or none that say anything") {
  World world;
  CHECK(world.room() == 4096000ull << 10);
  world.in_groups("0::/\n");
  CHECK(world.room() == 4096000ull << 10);
  world.in_groups("0::/a/b\n");
  world.group("a", "memory.max", "max\n", 7, "anon 7\nfile 0\n");
  CHECK(world.room() == 4096000ull << 10);
  world.in_groups("no line\n::\n0:\n\n");
  CHECK(world.room() == 4096000ull << 10);
  fs::remove_all(world.folder);
  CHECK(vmci::memory_room(world.files) == ~std::uint64_t{0});
}

TEST_CASE("The narrowest of the control groups that a process is in is the room, files of it not counted") {
  World world;
  world.in_groups("0::/a/b\n");
  world.group("a", "memory.max", std::to_string(900 * mib) + "\n", 500 * mib, "anon 1\nfile " + std::to_string(100 * mib) + "\nfile_mapped 99\n");
  CHECK(world.room() == 500 * mib);
  world.group("a/b", "memory.max", std::to_string(600 * mib) + "\n", 20 * mib, "anon 1\n");
  CHECK(world.room() == 500 * mib);
  world.group("a/b", "memory.max", std::to_string(300 * mib) + "\n", 20 * mib, "anon 1\n");
  CHECK(world.room() == 280 * mib);
  world.group("a/b", "memory.max", "0\n", 20 * mib, "anon 1\n");
  CHECK(world.room() == 0);
}

TEST_CASE("A container whose control group is the first of all that it sees has that one's room, in any hierarchy") {
  World world;
  world.in_groups("0::/\n");
  world.group("", "memory.max", std::to_string(300 * mib) + "\n", 0, "");
  CHECK(world.room() == 300 * mib);
  world.in_groups("5:devices:/\n4:cpu,memory:/docker/of/the/host\n0::/\n");
  world.group("memory", "memory.limit_in_bytes", std::to_string(200 * mib) + "\n", 50 * mib, "cache 0\ntotal_cache " + std::to_string(10 * mib) + "\n");
  CHECK(world.room() == 160 * mib);
  world.group("unified", "memory.max", std::to_string(100 * mib) + "\n", 0, "");
  CHECK(world.room() == 100 * mib);
}

// Where this process may make one: with root, in a machine or container whose control groups can be written.
TEST_CASE("Memory that a control group does not allow is not pinned, and its program lives") {
  const std::string name = "vrdma-memory-room-" + std::to_string(::getpid());
  fs::path group;
  for (const char* const kind : {"/sys/fs/cgroup", "/sys/fs/cgroup/memory"}) {
    std::error_code error;
    group = fs::path(kind) / name;
    const char* const limit = group.parent_path().filename() == "memory" ? "memory.limit_in_bytes" : "memory.max";
    if (fs::create_directory(group, error) && fs::exists(group / limit, error)) {
      std::ofstream out(group / limit);
      out << 128 * mib << std::flush;
      if (out) break;
    }
    ::rmdir(group.c_str());
    group.clear();
  }
  if (group.empty()) {
    MESSAGE("SKIPPED: no control group with a limit of memory can be made here");
    return;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    std::ofstream members(group / "cgroup.procs");
    members << ::getpid() << std::flush;
    if (!members) ::_exit(100);
    constexpr std::size_t bytes = 1024 * mib;
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) ::_exit(101);
    const auto pinned = vmci::pin_pages({static_cast<const std::byte*>(memory), bytes});
    ::_exit(pinned ? 102 : value(pinned.error()));
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(::rmdir(group.c_str()) == 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 100) {
    MESSAGE("SKIPPED: no process can be put into a control group here");
    return;
  }
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == ENOMEM);
}

TEST_CASE("What is left is what the machine has available, no more than control groups allow, and nothing where nobody knows") {
  World world;
  CHECK(vmci::memory_left(world.files).all_bytes == 9999999ull << 10);
  CHECK(vmci::memory_left(world.files).available_bytes == 4096000ull << 10);
  world.in_groups("0::/a\n");
  world.group("a", "memory.max", std::to_string(100 * mib) + "\n", 60 * mib, "file " + std::to_string(20 * mib) + "\n");
  CHECK(vmci::memory_left(world.files).available_bytes == 60 * mib);
  fs::remove_all(world.folder);
  CHECK(vmci::memory_left(world.files).available_bytes == 0);
}
