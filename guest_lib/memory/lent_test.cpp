// Memory that moves to pages which somebody lends, in place of a window of our own. A memfd stands for the BAR; what only a device's
// memory does (no userfaultfd, no copies by the kernel into it by another's hand) the machines of tests/vm show.
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <thread>

#include "guest_lib/memory/test_support.hpp"
#include "vmci_channel/segment.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

namespace {

// Lends from the front, nothing twice.
struct Lender {
  static constexpr std::uint64_t bytes = 64 << 20;
  vmci::Segment bar = *vmci::Segment::create("vrdma-test-bar", bytes);
  std::uint64_t left = bytes, next = 0, service = 1;
  std::uint32_t backing = 0;
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint64_t>> lent;  // by backing: offset, bytes
  MemoryManager manager{{[](int, std::uint64_t) -> Result<std::uint32_t> { return Errno{EOPNOTSUPP}; },
                         [this](std::uint32_t gone) {
                           const auto found = lent.find(gone);
                           REQUIRE(found != lent.end());
                           left += found->second.second;
                           lent.erase(found);
                         },
                         [this] { return service; },
                         [this](std::uint64_t wanted) -> Result<Lent> {
                           if (wanted > left || next + wanted > bytes) return Errno{ENOMEM};
                           left -= wanted;
                           lent[++backing] = {next, wanted};
                           next += wanted;
                           return Lent{bar.fd(), next - wanted, backing};
                         }}};
  Lender() { manager.move_to_lent_pages(); }

  // What the service sees of an address that is registered.
  unsigned char* seen(const Registration& registration, const void* address) {
    for (const Extent& extent : registration.extents)
      if (extent.backing != backing_process && extent.address <= at(address) && at(address) < extent.address + extent.bytes)
        return reinterpret_cast<unsigned char*>(bar.data()) + lent.at(extent.backing).first + extent.backing_offset + (at(address) - extent.address);
    return nullptr;
  }
  bool all_back() const { return lent.empty() && left == bytes; }
};

bool moved(const Registration& registration) {
  for (const Extent& extent : registration.extents)
    if (extent.backing == backing_process) return false;
  return true;
}

constexpr std::uint64_t bytes = 16 * page;
#define REQUIRE_ALONE(registration) REQUIRE_OR_SKIP(moved(registration), "there is another thread, of a sanitizer")

}  // namespace

TEST_CASE("Private memory lies in lent pages while it is registered, with its contents, before and after") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  for (std::uint64_t i = 0; i < bytes; i += page) p[i] = static_cast<unsigned char>(i / page + 1);
  auto registration = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(registration.has_value());
  REQUIRE_ALONE(*registration);
  unsigned char* const there = lender.seen(*registration, p);
  REQUIRE(there != nullptr);
  CHECK(there[5 * page] == 6);
  there[7 * page + 1] = 77;  // the service writes
  CHECK(p[7 * page + 1] == 77);
  p[8] = 88;
  CHECK(there[8] == 88);
  lender.manager.remove(std::move(*registration));
  CHECK(lender.all_back());
  CHECK(p[7 * page + 1] == 77);
  CHECK(p[8] == 88);
  CHECK(p[15 * page] == 16);
  p[8] = 1;
  CHECK(there[8] == 88);  // it is the application's own again
  ::munmap(p, bytes);
}

TEST_CASE("A page stays lent while any registration holds it, and each sees it") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  auto whole = lender.manager.add(at(p), bytes, writable_access), part = lender.manager.add(at(p) + 3 * page + 5, page, writable_access);
  REQUIRE(whole.has_value());
  REQUIRE(part.has_value());
  REQUIRE_ALONE(*whole);
  CHECK(lender.lent.size() == 1);
  CHECK(lender.seen(*whole, p + 4 * page) == lender.seen(*part, p + 4 * page));
  lender.manager.remove(std::move(*whole));
  CHECK(lender.lent.size() == 1);
  *lender.seen(*part, p + 4 * page) = 9;
  CHECK(p[4 * page] == 9);
  lender.manager.remove(std::move(*part));
  CHECK(lender.all_back());
  CHECK(p[4 * page] == 9);
  ::munmap(p, bytes);
}

TEST_CASE("Pages of which a part is copied through the process do not move for another registration") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  auto part = lender.manager.add(at(p) + page + 100, 200, writable_access);
  REQUIRE(part.has_value());
  CHECK(part->extents.front().backing == backing_process);
  auto whole = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(whole.has_value());
  if (lender.seen(*whole, p) != nullptr) {
    CHECK(lender.seen(*whole, p + page) == nullptr);
    CHECK(lender.seen(*whole, p + 2 * page) != nullptr);
  }
  lender.manager.remove(std::move(*part));
  lender.manager.remove(std::move(*whole));
  CHECK(lender.all_back());
  ::munmap(p, bytes);
}

TEST_CASE("Nothing is lent for a program that wants its private pages to stay, and its memory is reached through the process") {
  Lender lender;
  lender.manager.keep_private_pages();
  unsigned char* const p = map_anonymous(bytes);
  auto registration = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(registration.has_value());
  REQUIRE(registration->extents.size() == 1);
  CHECK(registration->extents.front().backing == backing_process);
  CHECK(registration->extents.front().bytes == bytes);
  CHECK(lender.all_back());
  CHECK(lender.manager.statistics().moved_in_bytes == 0);
  lender.manager.remove(std::move(*registration));
  ::munmap(p, bytes);
}

TEST_CASE("More than can be lent is ENOMEM, and nothing of it has moved or stays lent") {
  Lender lender;
  unsigned char* const p = map_anonymous(Lender::bytes + page);
  p[0] = 5;
  auto registration = lender.manager.add(at(p), Lender::bytes + page, writable_access);
  REQUIRE_OR_SKIP(!registration, "there is another thread, of a sanitizer");
  CHECK(value(registration.error()) == ENOMEM);
  CHECK(lender.all_back());
  CHECK(lender.manager.statistics().resident_bytes == 0);
  CHECK(p[0] == 5);
  ::munmap(p, Lender::bytes + page);
}

TEST_CASE("Beside another thread nothing moves; and what has moved before comes back when the process is alone again") {
  Lender lender;
  unsigned char* const p = map_anonymous(2 * bytes);
  auto early = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(early.has_value());
  REQUIRE_ALONE(*early);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop.load()) std::atomic_ref(p[0]).fetch_add(1), std::this_thread::yield();
  });
  auto late = lender.manager.add(at(p) + bytes, bytes, writable_access);
  REQUIRE(late.has_value());
  CHECK(late->extents.front().backing == backing_process);
  lender.manager.remove(std::move(*late));
  lender.manager.remove(std::move(*early));
  // A memfd may be moved out of by who may hold back writes; a device's memory never.
  if (!can_move_with_threads()) {
    CHECK(lender.lent.size() == 1);
    CHECK(lender.manager.statistics().stranded_bytes == bytes);
  }
  stop.store(true);
  writer.join();
  const unsigned char last = p[0];
  auto next = lender.manager.add(at(p) + bytes, bytes, writable_access);
  REQUIRE(next.has_value());
  lender.manager.remove(std::move(*next));
  CHECK(lender.all_back());
  CHECK(p[0] == last);
  ::munmap(p, 2 * bytes);
}

TEST_CASE("A fork's child has copies of its own, and registers anew") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  p[3] = 42;
  auto registration = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(registration.has_value());
  REQUIRE_ALONE(*registration);
  unsigned char* const there = lender.seen(*registration, p);
  CHECK(in_child([&] {
    if (p[3] != 42) return 1;
    p[3] = 1;
    if (there[3] != 42) return 2;  // the parent's
    lender.manager.remove(std::move(*registration));  // void here
    lender.manager.move_to_lent_pages();
    auto own = lender.manager.add(at(p), bytes, writable_access);
    if (!own || !moved(*own) || lender.seen(*own, p) == there || lender.seen(*own, p)[3] != 1) return 3;
    lender.manager.remove(std::move(*own));
    return p[3] == 1 ? 0 : 4;
  }) == 0);
  CHECK(p[3] == 42);
  there[4] = 6;
  CHECK(p[4] == 6);
  lender.manager.remove(std::move(*registration));
  CHECK(lender.all_back());
  ::munmap(p, bytes);
}

TEST_CASE("Memory that the application discards, unmaps or replaces while it is registered") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  std::memset(p, 7, bytes);
  auto registration = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(registration.has_value());
  REQUIRE_ALONE(*registration);
  CHECK(MemoryManager::on_madvise(at(p) + page, page, MADV_DONTNEED) == 0);
  CHECK(p[page] == 0);
  CHECK(p[2 * page] == 7);
  REQUIRE(::munmap(p + 4 * page, page) == 0);
  map_anonymous(page, p + 6 * page)[0] = 66;
  // The new memory at that place is registered by itself.
  auto newer = lender.manager.add(at(p) + 6 * page, page, writable_access);
  REQUIRE(newer.has_value());
  CHECK(*lender.seen(*newer, p + 6 * page) == 66);
  lender.manager.remove(std::move(*registration));
  p[6 * page] = 67;
  CHECK(*lender.seen(*newer, p + 6 * page) == 67);
  lender.manager.remove(std::move(*newer));
  CHECK(lender.all_back());
  CHECK(p[0] == 7);
  CHECK(p[6 * page] == 67);
  CHECK(p[15 * page] == 7);
  ::munmap(p, 4 * page);  // the page after these is whoever's by now
  ::munmap(p + 5 * page, bytes - 5 * page);
}

TEST_CASE("Memory in pages that an earlier service lent moves on to what the next one lends") {
  Lender lender;
  unsigned char* const p = map_anonymous(bytes);
  p[9] = 9;
  auto old = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(old.has_value());
  REQUIRE_ALONE(*old);
  lender.service = 2;
  lender.lent.clear();
  auto now = lender.manager.add(at(p), bytes, writable_access);
  REQUIRE(now.has_value());
  REQUIRE(lender.seen(*now, p) != nullptr);
  CHECK(lender.seen(*now, p)[9] == 9);
  lender.manager.remove(std::move(*old));  // what it was lent is not the new service's to take back
  CHECK(lender.seen(*now, p)[9] == 9);
  p[9] = 10;
  CHECK(lender.seen(*now, p)[9] == 10);
  lender.manager.remove(std::move(*now));
  CHECK(lender.lent.empty());
  CHECK(p[9] == 10);
  ::munmap(p, bytes);
}
