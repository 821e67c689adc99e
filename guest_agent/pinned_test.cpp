#include "guest_agent/pinned.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

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

struct PinnedPages {
  explicit PinnedPages(std::size_t count) : bytes(count * page_bytes) {
    data = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(data != MAP_FAILED);
  }
  ~PinnedPages() { ::munmap(data, bytes); }
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

TEST_CASE("A segment of huge pages is of whole ones, that lie as they must and go back to the kernel") {
  constexpr std::uint64_t huge = 2 << 20;
  const auto surplus = [] {
    std::uint64_t pages = 0, allowed = 0;
    std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages") >> pages;
    std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages") >> allowed;
    return std::pair(pages, allowed);
  };
  const auto before = surplus();
  {
    auto segment = PinnedSegment::make_huge("vrdma-test", huge + page_bytes, huge);
    if (!segment && skipped(segment.error())) return;  // or there is no memory in pieces of this size
    CHECK(segment->memory.bytes() == 2 * huge);
    CHECK(*vmci::sealed_bytes(segment->memory.fd()) == 2 * huge);
    std::uint64_t pages = 0;
    for (const auto& run : segment->runs) {
      CHECK(run.page % (huge / page_bytes) == 0);
      CHECK(run.pages % (huge / page_bytes) == 0);
      pages += run.pages;
    }
    CHECK(pages == 2 * huge / page_bytes);
    CHECK(segment->memory.data()[2 * huge - 1] == std::byte{0});
    CHECK((surplus().second == before.second));  // only while they were made

    // As the service puts such pages behind one another.
    const vmci::Mapping::Part swapped[] = {{segment->memory.fd(), huge, huge}, {segment->memory.fd(), 0, huge}};
    segment->memory.data()[0] = std::byte{7};
    auto again = vmci::Mapping::gather(swapped, huge);
    REQUIRE(again.has_value());
    CHECK(again->bytes() == 2 * huge);
    CHECK(reinterpret_cast<std::uintptr_t>(again->data()) % huge == 0);
    CHECK(again->data()[huge] == std::byte{7});
    CHECK(value(vmci::Mapping::gather(std::vector<vmci::Mapping::Part>{{segment->memory.fd(), page_bytes, page_bytes}}).error()) == EINVAL);
  }
  // The kernel takes rings apart on its own time.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (surplus() != before && std::chrono::steady_clock::now() < until) ::sched_yield();
  CHECK((surplus() == before));
}

TEST_CASE("A segment of no pages, or of parts of pages, is none") {
  CHECK(value(PinnedSegment::make_huge("vrdma-test", 0, 2 << 20).error()) == EINVAL);
  CHECK(value(PinnedSegment::make_huge("vrdma-test", 1, (2 << 20) + 1).error()) == EINVAL);
  CHECK(value(PinnedSegment::make_huge("vrdma-test", 1, 8 << 20).error()) == ENODEV);  // the kernel knows no such page
  CHECK(value(PinnedSegment::make("vrdma-test", 0).error()) == EINVAL);
  CHECK(value(PinnedSegment::make("vrdma-test", page_bytes + 1).error()) == EINVAL);
}

TEST_CASE("Who has given up a ring can unregister its buffers no more, nor register others") {
  PinnedPages pages(4);
  auto ring = vmci::pin_pages(std::span(pages.data, pages.bytes));
  if (!ring && skipped(ring.error())) return;
  const auto pidfd = own_pidfd();
  auto taken = take_ring(pidfd.get(), ring->get());
  REQUIRE(taken.has_value());
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_UNREGISTER_BUFFERS, nullptr, 0) == -1);
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == -1);
  PinnedPages others(1);
  iovec other{others.data, others.bytes};
  CHECK(::syscall(SYS_io_uring_register, ring->get(), IORING_REGISTER_BUFFERS, &other, 1) == -1);
  CHECK(value(take_ring(pidfd.get(), ring->get()).error()) == EPERM);  // nobody takes it twice
}

TEST_CASE("A taken ring says which memory it pins, by whole pages") {
  PinnedPages pages(8);
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

TEST_CASE("PinnedPages that are not kept are given up for others, which are zero and pinned; the rest stays") {
  constexpr std::uint64_t pages = 64;
  auto segment = PinnedSegment::make("vrdma-test", pages * page_bytes);
  if (!segment && skipped(segment.error())) return;
  const auto frames = [&] {
    std::vector<std::uint64_t> each;
    for (const auto& run : segment->runs)
      for (std::uint64_t i = 0; i < run.pages; ++i) each.push_back(run.page + i);
    return each;
  };
  for (std::uint64_t i = 0; i < pages; ++i) segment->memory.data()[i * page_bytes] = std::byte{1};
  const auto had = frames();
  const auto first = segment->runs.front();
  auto before = segment->give_up([&](const vrdma::vm::Run& run) { return run.page != first.page; });
  REQUIRE(before.has_value());
  segment->touch();
  REQUIRE(segment->pin().has_value());
  CHECK(*before);
  CHECK(segment->ring);
  const auto has = frames();
  REQUIRE(has.size() == pages);
  for (std::uint64_t i = 0; i < pages; ++i) {
    const bool kept = i >= first.pages;
    CHECK((has[i] == had[i]) == kept);
    CHECK((segment->memory.data()[i * page_bytes] == std::byte{1}) == kept);
    // What was given up is held by the ring, and so is nobody else's.
    if (!kept) CHECK(std::find(had.begin(), had.end(), has[i]) == had.end());
  }
}
