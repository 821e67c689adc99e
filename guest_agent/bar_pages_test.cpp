#include "guest_agent/bar_pages.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "vmci_channel/segment.hpp"

namespace vrdma::agent {
namespace {

constexpr std::uint64_t mib = 1 << 20, bar_bytes = 8 * mib, lent_bytes = bar_bytes - vm::bar_bytes;

// A BAR of plain memory.
struct Bar {
  vmci::Segment memory = *vmci::Segment::create("vrdma-test-bar", bar_bytes);
  Device device() const {
    Device device;
    device.bar = memory.data();
    device.bar_bytes = bar_bytes;
    device.bar_file = memory.fd();
    return device;
  }
};

// A process of the machine that has a slice mapped, until it is told to unmap it, or ends.
class Holder {
 public:
  explicit Holder(const vmci::UniqueFd& slice, std::uint64_t bytes) {
    int told[2], tells[2];
    REQUIRE(::pipe(told) == 0);
    REQUIRE(::pipe(tells) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(told[1]);
      void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, slice.get(), ::lseek(slice.get(), 0, SEEK_CUR));
      char word = memory != MAP_FAILED;
      // Some of it twice, as libvrdma has it.
      void* const part = ::mmap(nullptr, bytes / 2, PROT_READ, MAP_SHARED, slice.get(), ::lseek(slice.get(), 0, SEEK_CUR) + static_cast<off_t>(bytes / 4));
      if (::write(tells[1], &word, 1) != 1 || ::read(told[0], &word, 1) != 1) ::_exit(1);
      ::munmap(memory, bytes);
      ::munmap(part, bytes / 2);
      if (::write(tells[1], &word, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(told[0]);
    ::close(tells[1]);
    to_.reset(told[1]);
    from_.reset(tells[0]);
    REQUIRE(hears() == 1);
    folder_.reset(::open(("/proc/" + std::to_string(pid_)).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    REQUIRE(folder_);
  }
  ~Holder() { end(); }
  void unmap() {
    REQUIRE(::write(to_.get(), "x", 1) == 1);
    REQUIRE(hears() == 'x');
  }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);  // a later one has the other end of its pipe, too
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  int folder() const { return folder_.get(); }

 private:
  int hears() {
    char word = 0;
    return ::read(from_.get(), &word, 1) == 1 ? word : -1;
  }
  pid_t pid_ = 0;
  vmci::UniqueFd to_, from_, folder_;
};

TEST_CASE("Pages of a BAR are lent zero, apart from one another and from the link's, and all come back") {
  const Bar bar;
  BarPages pages(bar.device());
  CHECK(pages.free_bytes() == lent_bytes);
  CHECK(value(pages.take(0).error()) == EINVAL);
  CHECK(value(pages.take(lent_bytes + 1).error()) == ENOMEM);
  CHECK(value(pages.take(~std::uint64_t{0}).error()) == ENOMEM);
  {
    auto one = pages.take(1);
    REQUIRE(one.has_value());
    CHECK(one->bytes() == vm::page_bytes);
    CHECK(one->offset() >= vm::bar_bytes);
    auto two = pages.take(2 * mib), three = pages.take(mib);
    REQUIRE(two.has_value());
    REQUIRE(three.has_value());
    std::memset(one->data(), 1, one->bytes());
    std::memset(two->data(), 2, two->bytes());
    std::memset(three->data(), 3, three->bytes());
    CHECK(static_cast<int>(one->data()[vm::page_bytes - 1]) == 1);
    CHECK(static_cast<int>(two->data()[2 * mib - 1]) == 2);
    CHECK(two->runs().front().page == two->offset() / vm::page_bytes);
    CHECK(two->runs().front().pages == 2 * mib / vm::page_bytes);
    const std::uint64_t had = two->offset();
    *two = {};
    auto again = pages.take(2 * mib);  // the place that fits
    REQUIRE(again.has_value());
    CHECK(again->offset() == had);
    CHECK(static_cast<int>(again->data()[0]) == 0);
    CHECK(static_cast<int>(again->data()[2 * mib - 1]) == 0);
    CHECK(value(pages.take(lent_bytes).error()) == ENOMEM);
  }
  CHECK(pages.free_bytes() == lent_bytes);
  CHECK(pages.take(lent_bytes).has_value());
}

TEST_CASE("A descriptor of a slice is where the slice begins, and of no other's position") {
  const Bar bar;
  BarPages pages(bar.device());
  const auto one = pages.take(vm::page_bytes), two = pages.take(vm::page_bytes);
  REQUIRE(two.has_value());
  const auto fd = pages.descriptor(*one, vmci::Writable::yes), other = pages.descriptor(*two, vmci::Writable::no);
  REQUIRE(fd.has_value());
  REQUIRE(other.has_value());
  CHECK(::lseek(fd->get(), 0, SEEK_CUR) == static_cast<off_t>(one->offset()));
  CHECK(::lseek(other->get(), 0, SEEK_CUR) == static_cast<off_t>(two->offset()));
  CHECK(::mmap(nullptr, vm::page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, other->get(), static_cast<off_t>(two->offset())) == MAP_FAILED);
}

TEST_CASE("What a process has mapped is nobody else's until it has unmapped it, or has ended") {
  const Bar bar;
  BarPages pages(bar.device());
  for (const bool by_unmapping : {true, false}) {
    auto slice = pages.take(4 * mib);
    REQUIRE(slice.has_value());
    Holder holder(*pages.descriptor(*slice, vmci::Writable::yes), slice->bytes());
    pages.give_back(std::move(*slice), holder.folder());
    CHECK(pages.free_bytes() == lent_bytes - 4 * mib);
    CHECK(value(pages.take(4 * mib).error()) == ENOMEM);
    by_unmapping ? holder.unmap() : holder.end();
    CHECK(pages.free_bytes() == lent_bytes);
  }
}

TEST_CASE("Who begins anew lends nothing that a process has from the one before") {
  const Bar bar;
  BarPages before(bar.device());
  auto slice = before.take(3 * mib);
  REQUIRE(slice.has_value());
  Holder holder(*before.descriptor(*slice, vmci::Writable::yes), slice->bytes());
  std::optional<Holder> another(std::in_place, *before.descriptor(*slice, vmci::Writable::yes), mib);
  BarPages pages(bar.device());
  CHECK(pages.free_bytes() == lent_bytes - 3 * mib);
  CHECK(pages.user_before().has_value() == (::getuid() != 0));
  const auto rest = pages.take(lent_bytes - 3 * mib);
  REQUIRE(rest.has_value());
  holder.end();
  CHECK(value(pages.take(3 * mib).error()) == ENOMEM);
  another.reset();
  CHECK(pages.free_bytes() == 3 * mib);
  CHECK(pages.take(3 * mib).has_value());
  CHECK(value(pages.take(3 * mib + 1).error()) == ENOMEM);
}

}  // namespace
}  // namespace vrdma::agent
