// Which files of the application's are announced to the service, when, and when they are withdrawn.
#include "guest_lib/memory/shareable_file.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("A memfd of the application is announced once, sealed, and withdrawn after its last registration") {
  Service service;
  MemoryManager manager(service.backings());
  const int fd = ::memfd_create("app", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(::ftruncate(fd, 16 * page) == 0);
  auto* p = static_cast<unsigned char*>(::mmap(nullptr, 8 * page, 3, MAP_SHARED, fd, 4 * page));
  auto a = manager.add(at(p) + 10, page, writable_access);
  auto b = manager.add(at(p), 8 * page, writable_access);
  REQUIRE(a.has_value());
  REQUIRE(b.has_value());
  CHECK(service.announced == 1);
  CHECK(a->extents.size() == 1);
  CHECK(a->extents[0].backing == 1);
  CHECK(a->extents[0].backing_offset == 4 * page + 10);
  CHECK((::fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0);
  manager.remove(std::move(*a));
  CHECK(service.withdrawn == 0);
  manager.remove(std::move(*b));
  CHECK(service.withdrawn == 1);
  service.accept = false;
  auto refused = manager.add(at(p), page, writable_access);
  REQUIRE(refused.has_value());
  CHECK(refused->extents[0].backing == backing_process);
  manager.remove(std::move(*refused));
  ::munmap(p, 8 * page);
  ::close(fd);
}

TEST_CASE("A file that has grown is announced anew for what reaches beyond, and each time withdrawn after its last registration") {
  Service service;
  MemoryManager manager(service.backings());
  const vmci::UniqueFd fd(::memfd_create("app", MFD_CLOEXEC));
  const auto mapped = [&](std::uint64_t offset, std::uint64_t bytes) {
    void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), static_cast<off_t>(offset));
    REQUIRE(p != MAP_FAILED);
    return p;
  };
  const auto registered = [&](const void* p, std::uint64_t bytes, std::uint32_t backing, std::uint64_t offset) {
    auto r = manager.add(at(p), bytes, writable_access);
    REQUIRE(r.has_value());
    REQUIRE(r->extents.size() == 1);
    CHECK(r->extents[0].backing == backing);
    CHECK(r->extents[0].backing_offset == offset);
    return std::move(*r);
  };
  REQUIRE(::ftruncate(fd.get(), 4 * page) == 0);
  void* const small = mapped(0, 4 * page);
  auto before = registered(small, 4 * page, 1, 0);
  REQUIRE(::ftruncate(fd.get(), 16 * page) == 0);
  void* const large = mapped(0, 16 * page);
  void* const behind = mapped(8 * page, 8 * page);
  auto within = registered(large, 2 * page, 1, 0);  // it lies in what is known
  auto across = registered(large, 16 * page, 2, 0), beyond = registered(behind, 8 * page, 2, 8 * page);
  auto again = registered(small, 4 * page, 2, 0);  // so that what was announced first can go
  CHECK(service.announced == 2);
  manager.remove(std::move(before));
  CHECK(service.withdrawn == 0);
  manager.remove(std::move(within));
  CHECK(service.withdrawn == 1);
  for (Registration* r : {&across, &again}) manager.remove(std::move(*r));
  CHECK(service.withdrawn == 1);
  manager.remove(std::move(beyond));
  CHECK(service.withdrawn == 2);
  ::munmap(small, 4 * page);
  ::munmap(large, 16 * page);
  ::munmap(behind, 8 * page);
}

TEST_CASE("Shared memory that cannot be sealed is announced as well, by whatever leads to it") {
  const auto announced = [](void* p) {
    Service service;
    MemoryManager manager(service.backings());
    auto r = manager.add(at(p) + page, 2 * page, writable_access);
    REQUIRE(r.has_value());
    const bool told = service.announced == 1 && r->extents.size() == 1 && r->extents[0].backing == 1 && r->extents[0].backing_offset == page;
    manager.remove(std::move(*r));
    CHECK(service.withdrawn == service.announced);
    ::munmap(p, 4 * page);
    return told;
  };
  const auto mapped = [](int fd) {
    REQUIRE(::ftruncate(fd, 4 * page) == 0);
    return ::mmap(nullptr, 4 * page, 3, MAP_SHARED, fd, 0);
  };
  const vmci::UniqueFd memfd(::memfd_create("unsealable", MFD_CLOEXEC));
  CHECK(announced(mapped(memfd.get())));
  const std::string name = "/vrdma-memory-" + std::to_string(::getpid());
  vmci::UniqueFd object(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
  REQUIRE(object);
  void* const closed = mapped(object.get());
  object.reset();
  CHECK(announced(closed));  // by its name, or its mapping
  object.reset(::shm_open(name.c_str(), O_RDWR, 0));
  REQUIRE(::shm_unlink(name.c_str()) == 0);
  CHECK(announced(mapped(object.get())));  // by its descriptor, or its mapping
}

TEST_CASE("A memfd that is sealed against writing stays with the process, announced to nobody who would map it") {
  constexpr int seal_write = 0x0008, seal_future_write = 0x0010;  // of linux/fcntl.h; the latter Linux 5.1
  const auto process_only = [](void* p, unsigned access) {
    Service service;
    MemoryManager manager(service.backings());
    auto r = manager.add(at(p), 4 * page, access);
    REQUIRE(r.has_value());
    CHECK(service.announced == 0);
    CHECK(r->extents.size() == 1);
    CHECK(r->extents[0].backing == backing_process);
    manager.remove(std::move(*r));
    ::munmap(p, 4 * page);
  };
  const auto made = [] {
    vmci::UniqueFd fd(::memfd_create("app", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(fd.get(), 4 * page) == 0);
    return fd;
  };
  const vmci::UniqueFd data = made(), stream = made();
  REQUIRE(::fcntl(data.get(), F_ADD_SEALS, seal_write) == 0);
  constexpr unsigned remote_read = 4;
  process_only(::mmap(nullptr, 4 * page, PROT_READ, MAP_SHARED, data.get(), 0), remote_read);
  void* const mapped_before = ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, stream.get(), 0);
  REQUIRE(::fcntl(stream.get(), F_ADD_SEALS, seal_future_write) == 0);
  process_only(mapped_before, writable_access);
}
