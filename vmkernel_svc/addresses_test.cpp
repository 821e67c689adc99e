#include "vmkernel_svc/addresses.hpp"

#include "doctest/doctest.h"
#include "vmkernel_svc/fabric.hpp"

using namespace vrdma;
using namespace vrdma::control;
using namespace vrdma::svc;

namespace {
constexpr std::uint16_t lid = 0x1234;
constexpr std::uint64_t guid = 0x0200'00ff'fe00'1234;
}  // namespace

TEST_CASE("Every GID of a port leads to it, and ends in its LID") {
  for (const std::uint32_t link_layer : {link_layer_infiniband, link_layer_ethernet}) {
    const auto gids = gids_of(guid, lid, link_layer);
    std::size_t count = 0;
    for (const auto& entry : gids) {
      if (entry.gid == Gid{}) continue;
      ++count;
      CHECK(lid_of(entry.gid.data()) == lid);
      CHECK(Fabric::leads_to(lid, gids, link_layer_ethernet, 0, true, entry.gid.data()));
      CHECK(!Fabric::leads_to(lid, gids, link_layer_ethernet, 0, false, entry.gid.data()));
    }
    CHECK(count == (link_layer == link_layer_ethernet ? 4 : 1));
  }
}

TEST_CASE("A GID of zeroes is nobody's, though most of a port's table is empty") {
  for (const std::uint32_t link_layer : {link_layer_infiniband, link_layer_ethernet})
    CHECK(!Fabric::leads_to(lid, gids_of(guid, lid, link_layer), link_layer, 0, true, Gid{}.data()));
}

TEST_CASE("On InfiniBand the LID decides where there is one, on Ethernet the GID") {
  const auto gids = gids_of(guid, lid, link_layer_infiniband), others = gids_of(guid + 1, lid + 1, link_layer_infiniband);
  CHECK(Fabric::leads_to(lid, gids, link_layer_infiniband, lid, true, others[0].gid.data()));
  CHECK(!Fabric::leads_to(lid, gids, link_layer_infiniband, lid + 1, true, gids[0].gid.data()));
  CHECK(!Fabric::leads_to(lid, gids, link_layer_ethernet, lid, true, others[0].gid.data()));
}
