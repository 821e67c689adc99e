// Queries of device, port, GID and P_Key tables.
#include <fcntl.h>
#include <net/if.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(QueryPortRefusesPortsThatDoNotExist, "QRY-01", .solo = true) {
  Device dev(run.settings);
  ibv_port_attr port{};
  for (int number = 0; number < 256; ++number) {
    const Note note("port ", number);
    const bool exists = number >= 1 && number <= dev.attr.phys_port_cnt;
    EXPECT_ERRNO(ibv_query_port(dev.ctx, static_cast<std::uint8_t>(number), &port), exists ? 0 : EINVAL);
  }
}

CONFORMANCE(GidQueriesAgree, "QRY-02 QRY-03 QRY-05 OBJ-05", .solo = true) {
  Device dev(run.settings);
  EXPECT_GE(dev.port.gid_tbl_len, 1);
  std::vector<ibv_gid_entry> table(static_cast<std::size_t>(dev.port.gid_tbl_len) * dev.attr.phys_port_cnt + 8);
  const ssize_t count = ibv_query_gid_table(dev.ctx, table.data(), table.size(), 0);
  EXPECT_GE(count, 1);
  EXPECT_EQ(ibv_query_gid_table(dev.ctx, table.data(), static_cast<std::size_t>(count) - 1, 0), -EINVAL);
  EXPECT_EQ(ibv_query_gid_table(dev.ctx, table.data(), static_cast<std::size_t>(count), 0), count);
  table.resize(static_cast<std::size_t>(count));
  for (int i = 0; i < dev.port.gid_tbl_len; ++i) {
    const Note note("gid index ", i);
    const ibv_gid_entry* listed = nullptr;
    for (const ibv_gid_entry& e : table) {
      if (e.port_num == dev.port_num && e.gid_index == static_cast<std::uint32_t>(i)) listed = &e;
    }
    ibv_gid gid{};
    std::memset(&gid, 0x5a, sizeof(gid));
    EXPECT_EQ(ibv_query_gid(dev.ctx, dev.port_num, i, &gid), 0);
    ibv_gid_entry entry{};
    const int rc = ibv_query_gid_ex(dev.ctx, dev.port_num, static_cast<std::uint32_t>(i), &entry, 0);
    if (!listed) {
      EXPECT_ERRNO(rc, ENODATA);
      const ibv_gid zero{};
      EXPECT(std::memcmp(&gid, &zero, sizeof(gid)) == 0);
      continue;
    }
    EXPECT_OK(rc);
    EXPECT(std::memcmp(&gid, &entry.gid, sizeof(gid)) == 0);
    EXPECT(std::memcmp(&gid, &listed->gid, sizeof(gid)) == 0);
    EXPECT_EQ(entry.gid_index, i);
    EXPECT_EQ(entry.port_num, dev.port_num);
    EXPECT_EQ(entry.gid_type, listed->gid_type);
    EXPECT_EQ(entry.ndev_ifindex, listed->ndev_ifindex);
    char interface[IF_NAMESIZE];
    EXPECT(!dev.ethernet() || ::if_indextoname(entry.ndev_ifindex, interface) != nullptr);
    EXPECT_EQ(entry.gid_type == IBV_GID_TYPE_IB, !dev.ethernet());
  }
}

CONFORMANCE(GidQueriesRefuseUnknownFlagsAndIndices, "QRY-03 QRY-04", .solo = true) {
  Device dev(run.settings);
  ibv_gid_entry entry{};
  EXPECT_NE(ibv_query_gid_ex(dev.ctx, dev.port_num, 0, &entry, 1), 0);
  std::vector<ibv_gid_entry> table(static_cast<std::size_t>(dev.port.gid_tbl_len) + 8);
  EXPECT(ibv_query_gid_table(dev.ctx, table.data(), table.size(), 1) < 0);
  EXPECT_ERRNO(ibv_query_gid_ex(dev.ctx, 200, 0, &entry, 0), EINVAL);
  EXPECT_ERRNO(ibv_query_gid_ex(dev.ctx, dev.port_num, static_cast<std::uint32_t>(dev.port.gid_tbl_len), &entry, 0), EINVAL);
}

CONFORMANCE(PkeyZeroIsTheDefaultOne, "QRY-06 OBJ-04", .solo = true) {
  Device dev(run.settings);
  EXPECT_GE(dev.port.pkey_tbl_len, 1);
  __be16 pkey = 0;
  EXPECT_EQ(ibv_query_pkey(dev.ctx, dev.port_num, 0, &pkey), 0);
  EXPECT_EQ(pkey, 0xffff);
  EXPECT_EQ(ibv_get_pkey_index(dev.ctx, dev.port_num, pkey), 0);
  EXPECT_EQ(ibv_get_pkey_index(dev.ctx, dev.port_num, 0x0bad), -1);
  EXPECT_EQ(ibv_query_pkey(dev.ctx, dev.port_num, dev.port.pkey_tbl_len, &pkey), -1);
}

CONFORMANCE(DeviceAttributesArePlausible, "QRY-07", .solo = true) {
  Device dev(run.settings);
  const ibv_device_attr& a = dev.attr;
  EXPECT_GE(a.max_qp, 2);
  EXPECT_GE(a.max_qp_wr, 1);
  EXPECT_GE(a.max_sge, 1);
  EXPECT_GE(a.max_sge_rd, 1);
  EXPECT_GE(a.max_cq, 1);
  EXPECT_GE(a.max_cqe, 1);
  EXPECT_GE(a.max_mr, 1);
  EXPECT_GE(a.max_pd, 1);
  EXPECT_GE(a.max_ah, 1);
  EXPECT_GE(a.max_qp_rd_atom, 1);
  EXPECT_GE(a.max_qp_init_rd_atom, 1);
  EXPECT_GE(a.max_mr_size, 1u << 20);
  EXPECT_GE(a.max_pkeys, 1);
  EXPECT_GE(a.phys_port_cnt, 1);
  EXPECT(a.page_size_cap != 0 && (a.page_size_cap & ~std::uint64_t{0xfff}) != 0);
  EXPECT_NE(a.vendor_id, 0u);
  EXPECT_NE(a.node_guid, 0u);
  EXPECT_NE(a.sys_image_guid, 0u);
  EXPECT_EQ(a.node_guid, ibv_get_device_guid(dev.ctx->device));
  EXPECT(std::memchr(a.fw_ver, '\0', sizeof(a.fw_ver)) != nullptr);
  if (a.max_srq > 0) {
    EXPECT_GE(a.max_srq_wr, 1);
    EXPECT_GE(a.max_srq_sge, 1);
  }
}

CONFORMANCE(QueryDeviceExHonoursTheCallersSize, "QRY-08", .solo = true) {
  Device dev(run.settings);
  ibv_device_attr_ex full{};
  const ibv_query_device_ex_input input{};
  EXPECT_OK(ibv_query_device_ex(dev.ctx, &input, &full));
  EXPECT_OK(ibv_query_device_ex(dev.ctx, nullptr, &full));
  EXPECT_EQ(full.orig_attr.max_qp, dev.attr.max_qp);
  EXPECT_EQ(full.orig_attr.max_mr_size, dev.attr.max_mr_size);
  EXPECT_EQ(full.orig_attr.node_guid, dev.attr.node_guid);
  EXPECT_EQ(full.orig_attr.device_cap_flags, dev.attr.device_cap_flags);
  EXPECT_EQ(full.phys_port_cnt_ex, dev.attr.phys_port_cnt);
  EXPECT(std::strncmp(full.orig_attr.fw_ver, dev.attr.fw_ver, sizeof(dev.attr.fw_ver)) == 0);
  // An older program passes a shorter structure: nothing is written behind it.
  verbs_context* const vctx = verbs_get_ctx_op(dev.ctx, query_device_ex);
  EXPECT(vctx != nullptr);
  for (const std::size_t size : {offsetof(ibv_device_attr_ex, comp_mask) + 4, offsetof(ibv_device_attr_ex, tso_caps),
                                 offsetof(ibv_device_attr_ex, max_dm_size)}) {
    const Note note("structure of ", size, " bytes");
    alignas(ibv_device_attr_ex) unsigned char bytes[sizeof(ibv_device_attr_ex)];
    std::memset(bytes, 0xa7, sizeof(bytes));
    EXPECT_OK(vctx->query_device_ex(dev.ctx, nullptr, reinterpret_cast<ibv_device_attr_ex*>(bytes), size));
    for (std::size_t i = size; i < sizeof(bytes); ++i) EXPECT_EQ(bytes[i], 0xa7);
    ibv_device_attr head{};
    std::memcpy(&head, bytes, sizeof(head));
    EXPECT_EQ(head.max_qp, dev.attr.max_qp);
  }
}

CONFORMANCE(PortAttributesAreConsistent, "QRY-12", .solo = true) {
  Device dev(run.settings);
  EXPECT_EQ(dev.port.state, IBV_PORT_ACTIVE);
  EXPECT_GE(dev.port.active_mtu, IBV_MTU_256);
  EXPECT_GE(dev.port.max_mtu, dev.port.active_mtu);
  EXPECT_GE(IBV_MTU_4096, dev.port.max_mtu);
  EXPECT_GE(dev.port.max_msg_sz, 1u << 30);
  EXPECT_GE(std::uint64_t{1} << 31, dev.port.max_msg_sz);
  EXPECT(dev.port.link_layer != IBV_LINK_LAYER_UNSPECIFIED);
  if (!dev.ethernet()) EXPECT_NE(dev.port.lid, 0);
  ibv_port_attr again{};
  EXPECT_OK(ibv_query_port(dev.ctx, dev.port_num, &again));
  EXPECT_EQ(again.lid, dev.port.lid);
  EXPECT_EQ(again.active_mtu, dev.port.active_mtu);
  EXPECT_EQ(again.gid_tbl_len, dev.port.gid_tbl_len);
}

namespace {
// Stays open, as monitoring programs keep it: what it says is what is so when it is read.
class PortCounter {
 public:
  PortCounter(const Device& dev, const char* name)
      : fd_(::open((std::string(dev.ctx->device->ibdev_path) + "/ports/" + std::to_string(dev.port_num) + "/counters/" + name).c_str(), O_RDONLY)) {
    EXPECT(fd_ >= 0);
  }
  ~PortCounter() { ::close(fd_); }
  PortCounter(const PortCounter&) = delete;
  PortCounter& operator=(const PortCounter&) = delete;
  std::uint64_t read() {
    char text[32] = {};
    EXPECT_OK(::lseek(fd_, 0, SEEK_SET) != 0);
    EXPECT(::read(fd_, text, sizeof(text) - 1) > 0);
    return std::strtoull(text, nullptr, 10);
  }

 private:
  int fd_;
};
}  // namespace

CONFORMANCE(ThePortCountsItsTraffic, "QRY-13") {
  constexpr std::uint64_t messages = 16, bytes = 4096, words = messages * bytes / 4;  // the unit of IBA 16.1.3.5
  Link link(run);
  PortCounter data(link.dev, run.a() ? "port_xmit_data" : "port_rcv_data"), packets(link.dev, run.a() ? "port_xmit_packets" : "port_rcv_packets");
  const std::uint64_t data_before = data.read(), packets_before = packets.read();
  for (std::uint64_t i = 0; run.b() && i < messages; ++i) EXPECT_OK(post(link.qp, link.recv(i, 0, bytes)));
  run.peer.barrier();
  for (std::uint64_t i = 0; i < messages; ++i) {
    if (run.a()) EXPECT_OK(post(link.qp, link.send(i, 0, bytes)));
    (run.a() ? link.scq : link.rcq).expect(i);
  }
  EXPECT_GE(data.read(), data_before + words);
  EXPECT_GE(packets.read(), packets_before + messages);
}

}  // namespace vrdma::conformance
