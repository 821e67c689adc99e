#include "vmkernel_svc/direct/key_book.hpp"

#include <doctest/doctest.h>

#include "vmkernel_svc/objects.hpp"

using namespace vrdma;
using namespace vrdma::svc;

TEST_CASE("A place that a key has left says nothing of it: who asks for key 0 finds no memory") {
  Guest guest;
  guest.reached_by_service = true;
  RegionTable regions;
  auto book = KeyBook::create(guest, regions);
  REQUIRE(book.has_value());
  const auto table = vmci::Mapping::map((*book)->fd(), 0, sizeof(direct::KeyTable), vmci::Writable::no);
  REQUIRE(table.has_value());
  const direct::KeyEntry& place_of_0 = reinterpret_cast<const direct::KeyTable*>(table->data())->entries[direct::key_place(0, 0)];

  Region region{};
  region.key = Key{3 * direct::key_entries};  // whose place is that of 0
  region.pd = 7;
  region.address = region.iova = 0x10000;
  region.bytes = 0x1000;
  region.access = 0xf;
  (*book)->add(guest, region);
  REQUIRE(place_of_0.key == region.key.value);
  REQUIRE(place_of_0.pd == 7);
  (*book)->remove(region.key);
  CHECK(place_of_0.key == 0);
  CHECK(place_of_0.pd == 0);
  CHECK(place_of_0.file == 0);
}
