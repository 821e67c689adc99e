// Strings, rates and marshalling against the libibverbs of the machine, over the whole range of inputs.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <unistd.h>

#include "guest_lib/abi/private_abi.hpp"

namespace {

void* real_library() {
  static void* library = dlopen("/lib/x86_64-linux-gnu/libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) MESSAGE("SKIPPED: no libibverbs.so.1 on this machine to compare with");
  return library;
}

// The real function of this name and version; ours where no library is installed, so that the test still runs.
template <class Function>
Function* real(const char* name, const char* version, Function* ours) {
  if (real_library() == nullptr) return ours;
  auto* found = reinterpret_cast<Function*>(dlvsym(real_library(), name, version));
  const bool usable = found != nullptr && found != ours;
  REQUIRE_MESSAGE(usable, name);
  return found;
}

template <class Enum, class Result>
void compare_texts(const char* name, Result (*ours)(Enum)) {
  auto* theirs = real<Result(Enum)>(name, "IBVERBS_1.1", ours);
  for (int value = -300; value < 300; ++value) {
    INFO(std::string(name) << " of " << value);
    if (ours(static_cast<Enum>(value)) == std::string("Device link speed change") && theirs(static_cast<Enum>(value)) == std::string("unknown")) continue;  // before rdma-core 60
    CHECK(std::string(ours(static_cast<Enum>(value))) == theirs(static_cast<Enum>(value)));
  }
}

// Fills source and destination with noise, copies with both functions, and wants every byte of the result the same.
template <class Destination, class Source>
void compare_copies(const char* name, const char* version, void (*ours)(Destination*, Source*)) {
  auto* theirs = real<void(Destination*, Source*)>(name, version, ours);
  std::mt19937 random{0x76726d61};
  for (int round = 0; round < 1000; ++round) {
    unsigned char noise[2][256];
    for (auto& row : noise)
      for (auto& byte : row) byte = static_cast<unsigned char>(random());
    alignas(8) unsigned char source[sizeof(Source)], mine[sizeof(Destination)], expected[sizeof(Destination)];
    std::memcpy(source, noise[0], sizeof source);
    std::memcpy(mine, noise[1], sizeof mine);
    std::memcpy(expected, noise[1], sizeof expected);
    ours(reinterpret_cast<Destination*>(mine), reinterpret_cast<Source*>(source));
    theirs(reinterpret_cast<Destination*>(expected), reinterpret_cast<Source*>(source));
    INFO(std::string(name) << " round " << round << ", byte "
         << std::mismatch(std::begin(mine), std::end(mine), expected).first - mine);
    REQUIRE(std::memcmp(mine, expected, sizeof mine) == 0);
    REQUIRE(std::memcmp(source, noise[0], sizeof source) == 0);
  }
}

}  // namespace

TEST_CASE("texts of node types, port states, events and statuses are libibverbs' own") {
  compare_texts("ibv_node_type_str", ibv_node_type_str);
  compare_texts("ibv_port_state_str", ibv_port_state_str);
  compare_texts("ibv_event_type_str", ibv_event_type_str);
  compare_texts("ibv_wc_status_str", ibv_wc_status_str);
  CHECK(std::string(ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR)) == "Work Request Flushed Error");
  CHECK(std::string(ibv_wc_status_str(static_cast<ibv_wc_status>(24))) == "unknown");
  CHECK(std::string(ibv_node_type_str(IBV_NODE_UNKNOWN)) == "unknown");
}

TEST_CASE("rates convert as in libibverbs in both directions") {
  auto* to_mult = real("ibv_rate_to_mult", "IBVERBS_1.0", ibv_rate_to_mult);
  auto* to_mbps = real("ibv_rate_to_mbps", "IBVERBS_1.1", ibv_rate_to_mbps);
  for (int value = -300; value < 300; ++value) {
    const auto rate = static_cast<ibv_rate>(value);
    INFO("rate " << value);
    CHECK(ibv_rate_to_mult(rate) == to_mult(rate));
    CHECK(ibv_rate_to_mbps(rate) == to_mbps(rate));
  }
  auto* from_mult = real("mult_to_ibv_rate", "IBVERBS_1.0", mult_to_ibv_rate);
  auto* from_mbps = real("mbps_to_ibv_rate", "IBVERBS_1.1", mbps_to_ibv_rate);
  int differences = 0;
  for (int value = -1000; value < 1'500'000; ++value) {
    differences += mbps_to_ibv_rate(value) != from_mbps(value);
    differences += mult_to_ibv_rate(value) != from_mult(value);
  }
  CHECK(differences == 0);
  CHECK(mbps_to_ibv_rate(103125) == IBV_RATE_100_GBPS);
  CHECK(mult_to_ibv_rate(-1) == IBV_RATE_MAX);
}

TEST_CASE("marshalled structs convert byte for byte as in libibverbs") {
  compare_copies("ibv_copy_ah_attr_from_kern", "IBVERBS_1.1", ibv_copy_ah_attr_from_kern);
  compare_copies("ibv_copy_qp_attr_from_kern", "IBVERBS_1.0", ibv_copy_qp_attr_from_kern);
  compare_copies("ibv_copy_path_rec_from_kern", "IBVERBS_1.0", ibv_copy_path_rec_from_kern);
  compare_copies("ibv_copy_path_rec_to_kern", "IBVERBS_1.0", ibv_copy_path_rec_to_kern);
}

TEST_CASE("a path record survives the way to the kernel's form and back") {
  ib_user_path_rec kernel{}, back{};
  for (unsigned i = 0; i < 16; ++i) kernel.dgid[i] = static_cast<std::uint8_t>(i + 1);
  kernel.dlid = 0x1234;
  kernel.mtu = 5;
  kernel.pkey = 0xffff;
  kernel.sl = 7;
  kernel.preference = 9;
  ibv_sa_path_rec record{};
  ibv_copy_path_rec_from_kern(&record, &kernel);
  CHECK(record.dlid == 0x1234);
  CHECK(record.mtu == 5);
  ibv_copy_path_rec_to_kern(&back, &record);
  CHECK(std::memcmp(&kernel, &back, sizeof kernel) == 0);
}

namespace {

struct TemporaryFile {
  std::string dir = [] {
    char name[] = "/tmp/vrdma-sysfs-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    return std::string(name);
  }();
  explicit TemporaryFile(const std::string& text) {
    std::FILE* file = std::fopen((dir + "/f").c_str(), "w");
    REQUIRE(file != nullptr);
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
  }
  ~TemporaryFile() {
    std::remove((dir + "/f").c_str());
    rmdir(dir.c_str());
  }
};

}  // namespace

TEST_CASE("reading a sysfs file strips one newline, terminates, and refuses a text without room, as libibverbs does") {
  auto* theirs = real("ibv_read_sysfs_file", "IBVERBS_1.0", ibv_read_sysfs_file);
  for (const std::string text : {"", "\n", "a", "a\n", "a\n\n", "abcd", "abcd\n", "abcde", "abcde\n", "abcdefgh\n"}) {
    const TemporaryFile file(text);
    for (std::size_t size = 1; size <= 8; ++size) {
      char mine[16], expected[16];
      std::memset(mine, 'x', sizeof mine);
      std::memset(expected, 'x', sizeof expected);
      INFO("text of " << text.size() << " bytes into " << size);
      CHECK(ibv_read_sysfs_file(file.dir.c_str(), "f", mine, size) ==
            theirs(file.dir.c_str(), "f", expected, size));
      CHECK(std::memcmp(mine, expected, sizeof mine) == 0);
    }
  }
  char buf[16];
  errno = 0;
  CHECK(ibv_read_sysfs_file("/nonexistent", "f", buf, sizeof buf) == -1);
  CHECK(errno == ENOENT);
  CHECK(ibv_read_sysfs_file("/", std::string(5000, 'a').c_str(), buf, sizeof buf) == -1);
}

TEST_CASE("our device's sysfs files are read without any file in the file system") {
  if (access("/sys/class/infiniband/vrdma0", F_OK) == 0) {
    MESSAGE("SKIPPED: a real vrdma0 exists");
    return;
  }
  char buf[64];
  REQUIRE(ibv_read_sysfs_file("/sys/class/infiniband/vrdma0", "board_id", buf, sizeof buf) > 0);
  CHECK(std::string(buf) == "VRDMA0000000001");
  CHECK(ibv_read_sysfs_file("/sys/class/infiniband/vrdma0", "ports/1/pkeys/0", buf, sizeof buf) == 6);
  CHECK(std::string(buf) == "0xffff");
  CHECK(ibv_read_sysfs_file("/sys/class/infiniband/vrdma0", "device/net", buf, sizeof buf) == -1);
  CHECK(ibv_read_sysfs_file("/sys/class/infiniband/vrdma0", "board_id", buf, 4) == -1);
}

TEST_CASE("the sysfs root follows SYSFS_PATH without trailing slashes and never changes afterwards") {
  // No other case of this program asks, so this is the first call.
  setenv("SYSFS_PATH", "/tmp/elsewhere//", 1);
  const std::string first = ibv_get_sysfs_path();
  CHECK(first == "/tmp/elsewhere");
  setenv("SYSFS_PATH", "/other", 1);
  CHECK(ibv_get_sysfs_path() == first);
  unsetenv("SYSFS_PATH");
  CHECK(ibv_get_sysfs_path() == first);
}
