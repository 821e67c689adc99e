#include "guest_agent/shared_pages.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

using namespace vrdma::agent;
using vmci::UniqueFd;
using vrdma::vm::page_bytes;

namespace {

int why_not(std::uint64_t address, std::uint64_t bytes, const char* maps) {
  std::istringstream text(maps);
  const auto found = shared_mapping(text, address, bytes);
  return found ? 0 : value(found.error());
}

struct Shared {
  Shared(int protection, int fd, std::uint64_t pages = 4) : bytes(pages * page_bytes) {
    data = static_cast<std::byte*>(::mmap(nullptr, bytes, protection, fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0));
    REQUIRE(data != MAP_FAILED);
  }
  ~Shared() { ::munmap(data, bytes); }
  Shared(const Shared&) = delete;
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::byte* data;
  std::uint64_t bytes;
};

}  // namespace

TEST_CASE("A mapping that is shared and may be written to is one, if all of the range lies in it") {
  constexpr const char* maps =
      "1000-3000 rw-p 00000000 00:00 0 \n"
      "3000-7000 rw-s 00002000 00:01 77                         /memfd:some name (deleted)\n"
      "7000-9000 r--s 00000000 00:01 78                         /dev/shm/other\n";
  CHECK(why_not(0x3000, 0x4000, maps) == 0);
  CHECK(why_not(0x3000, 0x4001, maps) == EACCES);
  CHECK(why_not(0x2000, 0x2000, maps) == EACCES);
  CHECK(why_not(0x1000, 0x1000, maps) == EACCES);
  CHECK(why_not(0x7000, 0x1000, maps) == EACCES);
  CHECK(why_not(0x9000, 0x1000, maps) == EACCES);
  std::istringstream text(maps);
  const auto found = shared_mapping(text, 0x4000, 0x1000);
  REQUIRE(found.has_value());
  CHECK(found->begin == 0x3000);
  CHECK(found->offset == 0x2000);
  CHECK(found->device_minor == 1);
  CHECK(found->inode == 77);
}

TEST_CASE("Pages that a process shares are pinned where they lie, by a mapping of the agent's") {
  const UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  const UniqueFd file(::memfd_create("shared pages", MFD_CLOEXEC));
  REQUIRE(::ftruncate(file.get(), 4 * page_bytes) == 0);
  for (const int fd : {file.get(), -1}) {
    CAPTURE(fd);
    const Shared memory(PROT_READ | PROT_WRITE, fd);
    std::memset(memory.data, 1, memory.bytes);
    const auto pinned = pin_shared(self.get(), memory.address() + page_bytes, 2 * page_bytes);
    if (!pinned && (value(pinned.error()) == EPERM || value(pinned.error()) == ENOSYS)) {
      MESSAGE("SKIPPED: memory cannot be pinned and translated here (root and io_uring are needed)");
      return;
    }
    REQUIRE(pinned.has_value());
    const auto seen = Pagemap::of_self()->runs(memory.address() + page_bytes, 2 * page_bytes);
    REQUIRE(seen.has_value());
    REQUIRE(seen->size() == pinned->runs.size());
    CHECK(std::memcmp(seen->data(), pinned->runs.data(), seen->size() * sizeof(seen->front())) == 0);
    CHECK(value(pin_shared(self.get(), memory.address(), 5 * page_bytes).error()) == EACCES);
  }
}

TEST_CASE("Shared memory that a process may only read, and files on a disk, are not pinned for it") {
  const UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  const UniqueFd file(::memfd_create("shared pages", MFD_CLOEXEC)), program(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  REQUIRE(::ftruncate(file.get(), 4 * page_bytes) == 0);
  const Shared read_only(PROT_READ, file.get()), of_disk(PROT_READ, program.get());
  CHECK(value(pin_shared(self.get(), read_only.address(), page_bytes).error()) == EACCES);
  CHECK(value(pin_shared(self.get(), of_disk.address(), page_bytes).error()) == EACCES);
  void* const own = ::mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(value(pin_shared(self.get(), reinterpret_cast<std::uintptr_t>(own), page_bytes).error()) == EACCES);
  ::munmap(own, page_bytes);
}
