// Memory that is taken away under the service: who touches it hears of it, and nobody else's memory changes.
#include "vmkernel_svc/memory/bus_guard.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "vmci_channel/unique_fd.hpp"

using vrdma::svc::BusGuard;

namespace {

constexpr std::size_t page = 4096;

struct File {
  vmci::UniqueFd fd{::memfd_create("bus_guard_test", MFD_CLOEXEC)};
  explicit File(std::size_t bytes) { resize(bytes); }
  void resize(std::size_t bytes) const { REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0); }
};

std::byte* map(std::size_t bytes, int fd, std::byte* at = nullptr, int flags = 0) {
  void* const mapped = ::mmap(at, bytes, PROT_READ | PROT_WRITE, flags | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED), fd, 0);
  REQUIRE(mapped != MAP_FAILED);
  return static_cast<std::byte*>(mapped);
}

volatile std::byte& touch(std::byte* at) { return *at; }

}  // namespace

TEST_CASE("An access hears of what was lost within it, and the file is back afterwards") {
  BusGuard::install();
  const File file(2 * page);
  std::byte* const memory = map(2 * page, file.fd.get());
  REQUIRE(BusGuard::add(memory, 2 * page, page, file.fd.get(), 0));
  memory[page] = std::byte{5};
  {
    const BusGuard::Access access;
    CHECK(touch(memory + page) == std::byte{5});
    CHECK_FALSE(access.failed());
  }
  file.resize(page);
  {
    const BusGuard::Access access;
    CHECK(touch(memory + page + 7) == std::byte{0});
    CHECK(access.failed());
    CHECK(access.where() == reinterpret_cast<std::uintptr_t>(memory + page + 7));
  }
  {
    const BusGuard::Access access;
    CHECK_FALSE(access.failed());
  }
  file.resize(2 * page);
  memory[page] = std::byte{6};
  std::byte there{};
  CHECK(::pread(file.fd.get(), &there, 1, page) == 1);
  CHECK(there == std::byte{6});
  BusGuard::remove(memory);
  ::munmap(memory, 2 * page);
}

TEST_CASE("Where the file cannot be mapped any more, each access to what was lost hears of it") {
  BusGuard::install();
  const vmci::UniqueFd file(::memfd_create("bus_guard_test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(file.get(), 2 * page) == 0);
  std::byte* const memory = map(2 * page, file.get());
  REQUIRE(BusGuard::add(memory, 2 * page, page, file.get(), 0));
  memory[0] = std::byte{5};
  REQUIRE(::ftruncate(file.get(), page) == 0);
  constexpr int future_write = 0x0010;  // F_SEAL_FUTURE_WRITE, of Linux 5.1: mappings that are there may write, new ones may not
  REQUIRE(::fcntl(file.get(), F_ADD_SEALS, future_write) == 0);
  for (int i = 0; i < 3; ++i) {
    CAPTURE(i);
    const BusGuard::Access access;
    touch(memory + page) = std::byte{1};
    CHECK(access.failed());
  }
  {
    const BusGuard::Access access;
    CHECK(touch(memory) == std::byte{5});
    CHECK_FALSE(access.failed());
  }
  BusGuard::remove(memory);
  ::munmap(memory, 2 * page);
}

TEST_CASE("What was lost outside of any access is forgotten with its memory") {
  BusGuard::install();
  const File gone(page), later(page);
  std::byte* const memory = map(page, gone.fd.get());
  REQUIRE(BusGuard::add(memory, page, page, gone.fd.get(), 0));
  gone.resize(0);
  CHECK(touch(memory) == std::byte{0});  // a doorbell, say
  BusGuard::remove(memory);
  ::munmap(memory, page);
  gone.resize(page);

  // Somebody else's memory comes to lie there, and a third one loses some.
  std::byte* const other = map(page, -1, memory, MAP_FIXED);
  std::memset(other, 9, page);
  std::byte* const third = map(page, later.fd.get());
  REQUIRE(BusGuard::add(third, page, page, later.fd.get(), 0));
  later.resize(0);
  {
    const BusGuard::Access access;
    CHECK(touch(third) == std::byte{0});
    CHECK(access.failed());
  }
  CHECK(touch(other) == std::byte{9});
  other[1] = std::byte{1};
  std::byte in_file{};
  CHECK(::pread(gone.fd.get(), &in_file, 1, 1) == 1);
  CHECK(in_file == std::byte{0});
  BusGuard::remove(third);
  ::munmap(third, page);
  ::munmap(other, page);
}

TEST_CASE("A range without a file stays what it became") {
  BusGuard::install();
  const File file(page);
  std::byte* const memory = map(page, file.fd.get());
  REQUIRE(BusGuard::add(memory, page, page, -1, 0));
  file.resize(0);
  {
    const BusGuard::Access access;
    touch(memory) = std::byte{3};
    CHECK(access.failed());
  }
  CHECK(touch(memory) == std::byte{3});
  BusGuard::remove(memory);
  ::munmap(memory, page);
}

TEST_CASE("Ranges that come and go meanwhile are not taken for the one that was touched") {
  BusGuard::install();
  constexpr std::size_t huge = 2 << 20;
  std::byte* const all = map(2 * huge, -1);
  std::byte* const around = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(all) + huge - 1) / huge * huge);
  std::memset(around, 7, huge);  // of others, and in the midst of it the page that is lost
  const File file(page);
  std::byte* const lost = map(page, file.fd.get(), around + huge / 2, MAP_FIXED);
  file.resize(0);
  // The first slot is that of the range that comes and goes: it lies above, so that half of it reaches over the page.
  std::byte* const above = around + 8 * huge;
  REQUIRE(BusGuard::add(above, huge, huge, -1, 0));
  REQUIRE(BusGuard::add(lost, page, page, file.fd.get(), 0));
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      BusGuard::remove(above);
      (void)BusGuard::add(above, huge, huge, -1, 0);
    }
  });
  int failed = 0;
  bool intact = true;
  for (int i = 0; i < 20'000 && intact; ++i) {
    const BusGuard::Access access;
    touch(lost) = std::byte{1};
    failed += access.failed();
    intact = touch(around) == std::byte{7} && touch(around + huge - 1) == std::byte{7};
  }
  stop.store(true);
  changer.join();
  CHECK(intact);
  CHECK(failed == 20'000);
  BusGuard::remove(above);
  BusGuard::remove(lost);
  ::munmap(all, 2 * huge);
}
