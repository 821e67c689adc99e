#include "guest_agent/pinned.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstring>

#include "vmci_channel/page_pin.hpp"

using namespace vrdma::agent;
using vmci::UniqueFd;
using vrdma::vm::page_bytes;

namespace {

UniqueFd own_pidfd() { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))); }

bool skipped(const vrdma::Errno& why) {
  MESSAGE("SKIPPED: memory cannot be pinned and translated here (root and io_uring are needed): ", std::strerror(value(why)));
  return true;
}

struct Pages {
  explicit Pages(std::size_t count) : bytes(count * page_bytes) {
    data = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(data != MAP_FAILED);
  }
  ~Pages() { ::munmap(data, bytes); }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::byte* data;
  std::size_t bytes;
};

}  // namespace

TEST_CASE("A pinned segment is zero, sealed, and translated page by page") {
  auto segment = PinnedSegment::make("vrdma-test", 64 * page_bytes);
  if (!segment && skipped(segment.error())) return;
  CHECK(vmci::sealed_bytes(segment->memory.fd()).has_value());
  std::uint64_t pages = 0;
  for (const auto& run : segment->runs) pages += run.pages;
  CHECK(pages == 64);
  // What another mapping of the same memory says.
  auto again = vmci::Mapping::map(segment->memory.fd(), 0, 64 * page_bytes, vmci::Writable::yes);
  REQUIRE(again.has_value());
  for (std::size_t i = 0; i < 64; ++i) REQUIRE(again->data()[i * page_bytes] == std::byte{0});
  const auto self = Pagemap::of_self();
  const auto seen = self->runs(reinterpret_cast<std::uintptr_t>(again->data()), 64 * page_bytes);
  REQUIRE(seen.has_value());
  REQUIRE(seen->size() == segment->runs.size());
  CHECK(std::memcmp(seen->data(), segment->runs.data(), seen->size() * sizeof(seen->front())) == 0);
}

TEST_CASE("A segment of no pages, or of parts of pages, is none") {
  CHECK(value(PinnedSegment::make("vrdma-test", 0).error()) == EINVAL);
  CHECK(value(PinnedSegment::make("vrdma-test", page_bytes + 1).error()) == EINVAL);
}

TEST_CASE("Who has given up a ring can unregister its buffers no more, nor register others") {
  Pages pages(4);
  auto ring = vmci::pin_pages(std::span(pages.data, pages.bytes));
  if (!ring && skipped(ring.error())) return;
  const auto pidfd = own_pidfd();
  auto taken = take_ring(pidfd.get(), ring->get());
  REQUIRE(taken.has_value());
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_UNREGISTER_BUFFERS, nullptr, 0) == -1);
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == -1);
  Pages others(1);
  iovec other{others.data, others.bytes};
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_REGISTER_BUFFERS, &other, 1) == -1);
  CHECK(value(take_ring(pidfd.get(), ring->get()).error()) == EPERM);  // nobody takes it twice
}

TEST_CASE("A taken ring says which memory it pins, by whole pages") {
  Pages pages(8);
  auto ring = vmci::pin_pages(std::span(pages.data + 100, 5 * page_bytes));  // six pages
  if (!ring && skipped(ring.error())) return;
  const auto pidfd = own_pidfd();
  const auto taken = take_ring(pidfd.get(), ring->get());
  REQUIRE(taken.has_value());
  CHECK(covers(taken->get(), pages.address(), 1).has_value());
  CHECK(covers(taken->get(), pages.address() + 100, 5 * page_bytes).has_value());
  CHECK(covers(taken->get(), pages.address(), 6 * page_bytes).has_value());
  CHECK(value(covers(taken->get(), pages.address(), 6 * page_bytes + 1).error()) == EFAULT);
  CHECK(value(covers(taken->get(), pages.address() - 1, 2).error()) == EFAULT);
}

TEST_CASE("Buffers that touch cover together, whatever their order; gaps and a list that is cut do not") {
  const std::string head = "pos:\t0\nSqThread:\t-1\nUserFiles:\t0\n";
  const std::string list = head + "UserBufs:\t3\n    0: 0x12000/4096\n    1: 0x10000/8192\n    2: 0x20000/4096\nPollList:\n";
  CHECK(covers(list, 0x10000, 0x3000).has_value());
  CHECK(value(covers(list, 0x10000, 0x3001).error()) == EFAULT);
  CHECK(covers(list, 0x20000, 0x1000).has_value());
  CHECK(value(covers(list, 0x12000, 0xf000).error()) == EFAULT);
  CHECK(covers(head + "UserBufs:\t2\n    0: <none>\n    1: 0x10000/8192\nPollList:\n", 0x10000, 8192).has_value());
  CHECK(value(covers(head + "UserBufs:\t1\nPollList:\n", 0x10000, 1).error()) == EAGAIN);
  CHECK(value(covers(head, 0x10000, 1).error()) == EAGAIN);
  CHECK(value(covers(head + "UserBufs:\t0\nPollList:\n", 0x10000, 1).error()) == EFAULT);
}

TEST_CASE("What is no ring, or one that was at work already, is not taken") {
  const auto pidfd = own_pidfd();
  REQUIRE(pidfd);
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  CHECK(value(take_ring(pidfd.get(), event.get()).error()) == EINVAL);
  CHECK(value(take_ring(pidfd.get(), -1).error()) == EBADF);
  CHECK(value(take_ring(pidfd.get(), 1 << 20).error()) == EBADF);
  io_uring_params parameters{};
  const UniqueFd enabled(static_cast<int>(::syscall(SYS_io_uring_setup, 1, &parameters)));
  if (!enabled && skipped(vrdma::last_error())) return;
  CHECK(value(take_ring(pidfd.get(), enabled.get()).error()) == EPERM);
}
