// Numbers of a guest's objects and memory that have gone round once.
#include "vmkernel_svc/numbers.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <set>

#include "vmkernel_svc/control/test_service.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;

namespace {

struct World : TestService {
  std::uint32_t open_context() {
    const auto opened = desk.on(*guest, control::OpenContextRequest{}, given);
    REQUIRE(opened.has_value());
    return opened->context;
  }
  std::uint32_t add_backing() {
    const auto added = desk.on(*guest, control::AddBackingRequest{}, vmci::UniqueFd(::memfd_create("numbers-test", MFD_CLOEXEC)));
    REQUIRE(added.has_value());
    return added->backing;
  }

  Guest* const guest = attach();
  std::vector<vmci::UniqueFd> given;
};

}  // namespace

TEST_CASE("On the first round nobody is asked; then what is taken is passed over") {
  Numbers numbers(1, 5);
  int asked = 0;
  const auto is_taken = [&](std::uint32_t number) { return ++asked, number != 2 && number != 5; };
  for (std::uint32_t number = 1; number <= 5; ++number) CHECK(numbers.take(1, is_taken) == number);
  CHECK(asked == 0);
  for (const std::uint32_t number : {2u, 5u, 2u}) CHECK(numbers.take(5, is_taken) == number);
  CHECK(asked == 2 + 3 + 2);
}

TEST_CASE("Where so many in a row are taken there is none, and the next look goes on from there") {
  Numbers numbers(1, 8, 8);
  const auto is_taken = [](std::uint32_t number) { return number <= 5; };
  CHECK(numbers.take(1, is_taken) == 8u);
  CHECK(!numbers.take(3, is_taken).has_value());
  CHECK(numbers.take(3, is_taken) == 6u);
}

TEST_CASE("A guest's number that comes round again is none of a guest that is there, nor the host's") {
  World world;
  constexpr std::uint32_t first = control::host_context + 1;
  CHECK(world.guest->id.value == first);
  world.shard.fabric().guest_numbers = Numbers(first, first + 2, first + 2);
  CHECK(world.attach()->id.value == first + 2);
  CHECK(world.attach()->id.value == first + 1);
  CHECK(world.shard.fabric().guests.size() == 3);
}

TEST_CASE("A handle that comes round again is neither 0 nor that of an object that is there") {
  World world;
  std::set<std::uint32_t> handles{world.open_context(), world.open_context()};
  world.guest->handle_numbers = Numbers(1, ~std::uint32_t{0}, ~std::uint32_t{0});
  for (int i = 0; i < 3; ++i) handles.insert(world.open_context());
  CHECK(handles == std::set<std::uint32_t>{1, 2, 3, 4, ~std::uint32_t{0}});
  CHECK(world.guest->contexts.size() == 5);
}

TEST_CASE("Memory made after 2^24 others has a number by which peers can map it, and not that of memory that is there") {
  World world;
  const std::uint32_t first = world.add_backing();
  CHECK(first == 1);
  world.guest->backing_numbers = Numbers(1, direct::key_backings - 1, direct::key_backings - 1);
  CHECK(world.add_backing() == direct::key_backings - 1);
  CHECK(world.add_backing() == 2);
  CHECK(world.guest->backings.size() == 3);
}
