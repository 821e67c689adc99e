#include "guest_lib/synthetic_tree.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <thread>

using namespace vrdma;

namespace {

std::string text_of(const std::string& path) {
  const SyntheticEntry entry = find_synthetic(path.c_str());
  return entry.kind == EntryKind::text ? std::string(entry.text, entry.text_bytes) : "<no text>";
}

EntryKind kind_of(const std::string& path) { return find_synthetic(path.c_str()).kind; }

std::set<std::string> names_in(const std::string& path) {
  std::set<std::string> names;
  SyntheticName name;
  for (std::size_t i = 0; list_synthetic(path.c_str(), i, name); ++i) CHECK(names.insert(name.text).second);
  return names;
}

// Every directory entry must be found, with the kind the listing gave, down to the last file.
std::size_t walk(const std::string& path) {
  std::size_t files = 0;
  SyntheticName name;
  names_in(path);  // each once
  for (std::size_t i = 0; list_synthetic(path.c_str(), i, name); ++i) {
    const std::string below = path + "/" + name.text;
    INFO(below);
    CHECK(kind_of(below) == name.kind);
    files += name.kind == EntryKind::directory ? walk(below) : 1;
  }
  return files;
}

const std::string ib = "/sys/class/infiniband/vrdma0";

}  // namespace

TEST_CASE("the device's files read as the kernel writes them") {
  SyntheticDevice device = default_synthetic_device();
  device.lid = 0x1a;
  device.state = 4;
  device.physical_state = 5;
  set_synthetic_devices(std::span(&device, 1));
  CHECK(text_of(ib + "/ports/1/lid") == "0x1a\n");
  CHECK(text_of(ib + "/ports/1/state") == "4: ACTIVE\n");
  CHECK(text_of(ib + "/ports/1/phys_state") == "5: LinkUp\n");
  CHECK(text_of(ib + "/ports/1/link_layer") == "InfiniBand\n");
  CHECK(text_of(ib + "/ports/1/rate") == "100 Gb/sec (4X EDR)\n");
  CHECK(text_of(ib + "/ports/1/gids/0") == "fe80:0000:0000:0000:0200:00ff:fe00:0001\n");
  CHECK(text_of(ib + "/ports/1/gids/1") == "0000:0000:0000:0000:0000:0000:0000:0000\n");
  CHECK(text_of(ib + "/ports/1/gid_attrs/types/0") == "IB/RoCE v1\n");
  // The files are there for every index, and of a GID that is none, reading them is EINVAL.
  CHECK_FALSE(find_synthetic((ib + "/ports/1/gid_attrs/types/0").c_str()).is_invalid);
  for (const char* none : {"/ports/1/gid_attrs/types/1", "/ports/1/gid_attrs/ndevs/0", "/ports/1/gid_attrs/ndevs/15"}) {
    CHECK(kind_of(ib + none) == EntryKind::text);
    CHECK(find_synthetic((ib + none).c_str()).is_invalid);
  }
  CHECK(kind_of(ib + "/ports/1/gid_attrs/types/16") == EntryKind::none);
  CHECK(text_of(ib + "/hw_rev") == "1\n");  // ibv_device_attr::hw_ver
  CHECK(text_of(ib + "/ports/1/pkeys/0") == "0xffff\n");
  CHECK(text_of(ib + "/node_guid") == "0200:00ff:fe00:0001\n");
  CHECK(text_of(ib + "/node_type") == "1: CA\n");
  CHECK(text_of(ib + "/device/numa_node") == "-1\n");
  CHECK(text_of("/sys/class/infiniband_verbs/uverbs0/ibdev") == "vrdma0\n");
  CHECK(text_of("/sys/class/infiniband_verbs/uverbs0/dev") == "231:192\n");
  CHECK(text_of("/sys/class/infiniband_verbs/abi_version") == "6\n");
  CHECK(text_of("/sys/class/infiniband_mad/abi_version") == "5\n");
  CHECK(text_of("/sys/class/infiniband_mad/umad0/ibdev") == "vrdma0\n");
  CHECK(text_of("/sys/class/infiniband_mad/umad0/port") == "1\n");
  CHECK(find_synthetic("/sys/class/infiniband_mad/abi_version/x").not_a_directory);
}

TEST_CASE("on Ethernet the GID attributes name version and interface") {
  SyntheticDevice device = default_synthetic_device();
  device.ethernet = true;
  device.gids[1] = device.gids[0];
  device.gids[1].kind = GidKind::roce_v2;
  std::strcpy(device.gids[1].netdev, "eth0");
  set_synthetic_devices(std::span(&device, 1));
  CHECK(text_of(ib + "/ports/1/link_layer") == "Ethernet\n");
  // Management datagrams are InfiniBand's.
  CHECK(names_in("/sys/class/infiniband_mad") == std::set<std::string>{"abi_version"});
  CHECK(names_in("/dev/infiniband") == std::set<std::string>{"uverbs0", "rdma_cm"});
  CHECK(kind_of("/dev/infiniband/umad0") == EntryKind::none);
  CHECK(text_of(ib + "/ports/1/gid_attrs/types/1") == "RoCE v2\n");
  CHECK(text_of(ib + "/ports/1/gid_attrs/ndevs/1") == "eth0\n");
  CHECK(names_in(ib + "/ports/1/gid_attrs/types").size() == limits::gid_table);
  CHECK(names_in(ib + "/ports/1/gid_attrs/ndevs").size() == limits::gid_table);
}

TEST_CASE("the link layer is the one that is wished for, else the one that the service gives") {
  ::unsetenv("VRDMA_LINK_LAYER"), ::unsetenv("VRDMA_SERVED_LINK_LAYER");
  CHECK_FALSE(default_synthetic_device().ethernet);
  set_served_link_layer(true);
  CHECK(default_synthetic_device().ethernet);
  ::setenv("VRDMA_SERVED_LINK_LAYER", "ib", 1);
  CHECK_FALSE(default_synthetic_device().ethernet);
  ::setenv("VRDMA_SERVED_LINK_LAYER", "ethernet", 1);
  set_served_link_layer(false);
  CHECK(default_synthetic_device().ethernet);
  ::setenv("VRDMA_LINK_LAYER", "infiniband", 1);
  CHECK_FALSE(default_synthetic_device().ethernet);
  ::setenv("VRDMA_LINK_LAYER", "token-ring", 1);
  CHECK(default_synthetic_device().ethernet);
  ::unsetenv("VRDMA_LINK_LAYER"), ::unsetenv("VRDMA_SERVED_LINK_LAYER");
}

TEST_CASE("every listed entry exists and every directory lists what it holds") {
  const SyntheticDevice device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
  CHECK(walk("/sys/class/infiniband") > 40);
  CHECK(walk("/sys/class/infiniband_verbs") == 3);
  CHECK(names_in("/sys/class/infiniband") == std::set<std::string>{"vrdma0"});
  CHECK(walk("/sys/class/infiniband_mad") == 4);
  CHECK(names_in("/dev/infiniband") == std::set<std::string>{"uverbs0", "umad0", "rdma_cm"});
  CHECK(names_in(ib + "/device") == std::set<std::string>{"numa_node", "local_cpus", "local_cpulist", "net"});
  CHECK(names_in(ib + "/ports/1/gid_attrs") == std::set<std::string>{"ndevs", "types"});
  CHECK(names_in(ib + "/lid").empty());
}

TEST_CASE("a port's counters are asked for when one of them is to be read") {
  set_synthetic_devices(std::array{default_synthetic_device()});
  const std::string counters = ib + "/ports/1/counters/";
  static int asked = 0;
  set_traffic_source([](PortTraffic& now) {
    now = {4000, 5, 80, 1};
    return ++asked != 2;
  });
  const auto read = [&](const char* name) {
    look_at_port((counters + name).c_str());
    return text_of(counters + name);
  };
  CHECK(read("port_xmit_data") == "1000\n");  // words of four bytes
  CHECK(read("port_xmit_packets") == "5\n");  // nobody answered: as it was
  CHECK(read("port_rcv_data") == "20\n");
  CHECK(read("port_rcv_packets") == "1\n");
  CHECK(read("symbol_error") == "0\n");
  CHECK(asked == 4);
  set_traffic_source(nullptr);
  CHECK(read("port_xmit_data") == "1000\n");
}

TEST_CASE("what is the program's own is asked for as long as nobody has said it") {
  static int asked = 0;
  set_device_source([] { ++asked; });
  set_synthetic_devices(std::array{default_synthetic_device()});
  look_at_port((ib + "/ports/1/lid").c_str());
  CHECK(asked == 0);  // it is known
  for (const char* own : {"/ports/1/lid", "/ports/1/sm_lid", "/ports/1/gids/0", "/ports/1/pkeys/0", "/ports/1/link_layer", "/ports/1/gid_attrs/types/3", "/node_guid"}) CHECK(find_synthetic((ib + own).c_str()).is_own);
  for (const char* all : {"/ports/1/state", "/fw_ver", "/ports/1/counters/port_xmit_data"}) CHECK_FALSE(find_synthetic((ib + all).c_str()).is_own);
  set_device_source(nullptr);
}

TEST_CASE("paths outside the tree, near misses and paths below files are not entries") {
  const SyntheticDevice device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
  for (const char* path : {"/sys/class/infinibandx", "/sys/class/infiniband/vrdma", "/sys/class/infiniband/vrdma00",
                           "/sys/class/infiniband_verbs/vrdma0", "/dev/infiniband/umad1", "/sys/class/infiniband_mad/uverbs0", "/dev/infinibandx/uverbs0",
                           "/sys/class/infiniband/vrdma0/device/net/eth0", "/sys/class/infiniband/vrdma0/ports/2/lid",
                           "/sys/class/infiniband/vrdma0/ports/1/gids/16", "/sys/class/infiniband/vrdma0/ports/1/gids/",
                           "/sys/class/infiniband/vrdma0/ports/1/gids/00", "/sys/class/infiniband/vrdma0/ports/1/gids/#",
                           "/sys/class/infiniband/vrdma0/ports/1/gids/-1", "/sys/class/infiniband/../../../etc/passwd"}) {
    INFO(std::string(path));
    const EntryKind kind = kind_of(path);
    if (std::string(path).ends_with("gids/"))
      CHECK(kind == EntryKind::directory);
    else
      CHECK(kind == EntryKind::none);
  }
  CHECK(find_synthetic((ib + "/node_guid/x").c_str()).not_a_directory);
  CHECK(find_synthetic((ib + "/node_guid/").c_str()).not_a_directory);
  CHECK_FALSE(find_synthetic((ib + "/none/x").c_str()).not_a_directory);
  CHECK(kind_of("/sys/class/infiniband/" + std::string(5000, 'a')) == EntryKind::none);
}

TEST_CASE("paths are understood with doubled slashes and dots") {
  const SyntheticDevice device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
  CHECK(text_of("/sys/class/infiniband//vrdma0/./ports/../node_type") == "1: CA\n");
  CHECK(kind_of("/sys/class/infiniband/") == EntryKind::directory);
  CHECK(kind_of("/dev/infiniband/uverbs0") == EntryKind::verbs_device);
  char clean[64];
  REQUIRE(normalise_synthetic("/a/.././/b/c/..", clean));
  CHECK(std::string(clean) == "/b");
  REQUIRE(normalise_synthetic("/../..", clean));
  CHECK(std::string(clean) == "/");
  CHECK_FALSE(normalise_synthetic(("/" + std::string(63, 'x')).c_str(), clean));
}

TEST_CASE("only the three prefixes cost more than a comparison") {
  for (const char* path : {"", "relative", "/", "/s", "/sys", "/sys/class/infiniban", "/dev/null", "/dev/infiniban", "/etc"})
    CHECK_FALSE(may_be_synthetic(path));
  for (const char* path : {"/sys/class/infiniband", "/sys/class/infiniband_verbs/x", "/dev/infiniband/uverbs0"})
    CHECK(may_be_synthetic(path));
}

TEST_CASE("without devices only the connection manager's node is left") {
  set_synthetic_devices({});
  CHECK(kind_of("/sys/class/infiniband") == EntryKind::none);
  CHECK(kind_of(ib) == EntryKind::none);
  CHECK(names_in("/dev/infiniband") == std::set<std::string>{"rdma_cm"});
  const SyntheticDevice device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
}

TEST_CASE("readers see whole devices while the description changes") {
  SyntheticDevice device = default_synthetic_device();
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0}, torn{0};
  device.node_guid = device.sys_image_guid = 0;
  set_synthetic_devices(std::span(&device, 1));
  std::thread readers[2];
  for (auto& reader : readers)
    reader = std::thread([&] {
      SyntheticDevice seen;
      while (!stop.load()) {
        if (!find_synthetic_device("vrdma0", seen) || seen.node_guid != seen.sys_image_guid) ++torn;
        ++reads;
      }
    });
  for (std::uint64_t guid = 1; guid < 20000 || reads.load() < 1000; ++guid) {
    device.node_guid = device.sys_image_guid = guid;
    set_synthetic_devices(std::span(&device, 1));
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK(torn.load() == 0);
  device = default_synthetic_device();
  set_synthetic_devices(std::span(&device, 1));
}
