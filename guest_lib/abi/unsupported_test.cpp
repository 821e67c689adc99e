#include <doctest/doctest.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstring>
#include <span>

#include "guest_lib/synthetic_tree.hpp"

using namespace vrdma;

extern "C" int ibv_resolve_eth_l2_from_gid(ibv_context*, ibv_ah_attr*, std::uint8_t*, std::uint16_t*);

TEST_CASE("verbs a device may lack say EOPNOTSUPP, in the return value or in errno") {
  ibv_ece ece{};
  CHECK(ibv_query_ece(nullptr, &ece) == EOPNOTSUPP);
  CHECK(ibv_set_ece(nullptr, &ece) == EOPNOTSUPP);
  errno = 0;
  CHECK(ibv_import_device(0) == nullptr);
  CHECK(errno == EOPNOTSUPP);
  errno = 0;
  CHECK(ibv_reg_dmabuf_mr(nullptr, 0, 4096, 0, -1, 0) == nullptr);
  CHECK(errno == EOPNOTSUPP);
  CHECK(ibv_query_qp_data_in_order(nullptr, IBV_WR_RDMA_WRITE, 0) == 0);
}

TEST_CASE("fork needs no preparation") {
  CHECK(ibv_fork_init() == 0);
  CHECK(ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
}

TEST_CASE("an Ethernet address is derived from GIDs that carry or name it, and only on Ethernet") {
  SyntheticDevice device = default_synthetic_device();
  const std::uint8_t link_local[16] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x11, 0x22, 0xff, 0xfe, 0x33, 0x44, 0x55};
  const std::uint8_t ipv4[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
  std::memcpy(device.gids[0].raw, link_local, 16);
  std::memcpy(device.gids[2].raw, ipv4, 16);
  device.gids[2].kind = GidKind::roce_v2;
  device.ethernet = true;
  set_synthetic_devices(std::span(&device, 1));

  ibv_device handle{};
  std::strcpy(handle.name, "vrdma0");
  ibv_context context{};
  context.device = &handle;
  ibv_ah_attr attr{};
  attr.port_num = 1;
  std::uint8_t mac[6] = {};
  std::uint16_t vid = 0;
  const std::uint8_t expected[6] = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55};

  for (const auto* gid : {&link_local, &ipv4}) {
    std::memset(mac, 0xaa, sizeof mac);
    std::memcpy(attr.grh.dgid.raw, *gid, 16);
    CHECK(ibv_resolve_eth_l2_from_gid(&context, &attr, mac, &vid) == 0);
    CHECK(std::memcmp(mac, expected, 6) == 0);
    CHECK(vid == 0xffff);
  }
  attr.grh.dgid.raw[15] = 2;  // somebody else's IPv4
  CHECK(ibv_resolve_eth_l2_from_gid(&context, &attr, mac, &vid) == EOPNOTSUPP);
  attr.grh.sgid_index = 1;  // empty
  CHECK(ibv_resolve_eth_l2_from_gid(&context, &attr, mac, &vid) == EINVAL);
  attr.grh.sgid_index = 255;
  CHECK(ibv_resolve_eth_l2_from_gid(&context, &attr, mac, &vid) == EINVAL);

  attr.grh.sgid_index = 0;
  std::memcpy(attr.grh.dgid.raw, link_local, 16);
  device.ethernet = false;
  set_synthetic_devices(std::span(&device, 1));
  CHECK(ibv_resolve_eth_l2_from_gid(&context, &attr, mac, &vid) == EOPNOTSUPP);

  device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
}
