// What a program sees of vrdma devices under /sys/class/infiniband, …_verbs, …_mad and /dev/infiniband:
// a table of entries, rendered on demand from a description of the devices. Pure: no system call, no allocation, no
// knowledge of who asks. Any thread may look up, also from a signal handler and before constructors have run.
//
//     device code -- set_synthetic_devices() --> [4 slots, one current] -- find(), list() --> paths.cpp, abi/sysfs.cpp
//
// The interface below device/net is the loopback's, which every network namespace has: whoever looks for a device's addresses there, as
// rdma-core's tests do, finds one that rdma_cm reaches it by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "vrdma/limits.hpp"

namespace vrdma {

enum class GidKind : std::uint8_t { empty, infiniband_or_roce_v1, roce_v2 };

struct SyntheticGid {
  std::uint8_t raw[16];
  GidKind kind;
  char netdev[16];  // "" where the GID belongs to no network interface
};

// One virtual HCA with one port. Texts are NUL-terminated; numbers are in host byte order.
struct SyntheticDevice {
  char name[64];           // as ibv_get_device_name
  char verbs_name[64];     // "uverbsN"
  char mad_name[64];       // "umadN"; not shown where the link layer is Ethernet: management is InfiniBand's
  std::uint64_t node_guid;
  std::uint64_t sys_image_guid;
  char firmware[32];
  char board_id[32];
  char hca_type[32];
  char rate[32];           // "100 Gb/sec (4X EDR)"
  std::uint32_t verbs_minor;    // of the character device /dev/infiniband/uverbsN
  std::uint16_t lid;
  std::uint16_t sm_lid;
  std::uint8_t state;           // enum ibv_port_state
  std::uint8_t physical_state;  // IBA: 5 is LinkUp
  bool ethernet;                // link layer
  SyntheticGid gids[limits::gid_table];
  std::uint16_t pkeys[limits::pkey_table];
};

constexpr std::uint32_t capabilities_of(const SyntheticDevice& d) { return d.ethernet ? limits::ethernet_port_capabilities : limits::port_capabilities; }

constexpr std::size_t synthetic_devices_max = 4;

// Replaces the devices; an empty span leaves no entries but /dev/infiniband/rdma_cm. Beyond synthetic_devices_max the
// rest is not shown. Before the first call there is one device, default_synthetic_device(). One thread at a time.
void set_synthetic_devices(std::span<const SyntheticDevice> devices);

// vrdma0 without LID, its port active where VRDMA_SOCKET names a service, of the link layer that VRDMA_LINK_LAYER wishes for, VRDMA_SERVED_LINK_LAYER
// tells of (`vrdma run`), or the service has said: what is known to a program that has asked none (ibstat, a
// script that reads the state).
SyntheticDevice default_synthetic_device();

void set_served_link_layer(bool ethernet);

constexpr char synthetic_netdev[] = "lo";
constexpr std::uint32_t synthetic_netdev_index = 1;
constexpr std::uint32_t connection_manager_minor = 58;  // of /dev/infiniband/rdma_cm, a device of major 10
constexpr std::uint32_t character_major = 231;          // of uverbsN and umadN: the kernel's admin-guide/devices.txt
constexpr std::uint32_t management_minor = 0;           // of /dev/infiniband/umad0
enum class EntryKind : std::uint8_t { none, directory, text, verbs_device, mad_device, rdma_cm_device };

struct SyntheticEntry {
  EntryKind kind = EntryKind::none;
  bool not_a_directory = false;  // with kind none: the path goes on below a file
  bool changes = false;            // a counter, whose text is another one later
  bool is_invalid = false;         // a text whose reading is EINVAL, as the kernel has it for the attributes of GIDs that are none
  bool is_own = false;             // something of the program's own port, known once it has one
  std::uint32_t device_minor = 0;  // of the device kinds
  std::uint64_t inode = 0;
  std::size_t text_bytes = 0;
  char text[512];  // of kind text; not terminated
};

// True for every path that find() could know; one comparison for all others. Reads path up to the first difference.
constexpr bool may_be_synthetic(const char* path) {
  const auto starts_with = [path](const char* prefix) {
    for (std::size_t i = 0; prefix[i] != '\0'; ++i)
      if (path[i] != prefix[i]) return false;
    return true;
  };
  if (path[0] != '/') return false;
  return path[1] == 's' ? starts_with("/sys/class/infiniband") : path[1] == 'd' && starts_with("/dev/infiniband");
}

// The entry at an absolute path ("//", "." and ".." are resolved textually), with the text of a file.
SyntheticEntry find_synthetic(const char* path);

// The name of the index-th entry of the directory at path, or "" beyond the last; buf holds it.
struct SyntheticName {
  char text[64];
  EntryKind kind;
};
bool list_synthetic(const char* path, std::size_t index, SyntheticName& name);

// The path as find_synthetic() understands it, without "//", "." and ".."; false when it does not fit.
bool normalise_synthetic(const char* path, std::span<char> out);

// The port's traffic, as "counters/port_xmit_data" and its neighbours say it (IBA 16.1.3.5; a message is a packet).
struct PortTraffic {
  std::uint64_t sent_bytes, sent_messages, received_bytes, received_messages;
};
// Who can ask for it; false: nobody can be asked, and the counters stay what they are.
void set_traffic_source(bool (*ask)(PortTraffic& now));
// Who can find out what the device is, and sets it.
void set_device_source(void (*ask)());
// Before a file at `path` is looked up to be read: a counter is asked for, and where the device is still the default, so is what is the
// program's own (GUIDs, LIDs, GIDs, P_Keys, the link layer). Not for signal handlers, where it is one of these.
void look_at_port(const char* path);

// The device whose name this is, for callers that need its GIDs; false when there is none.
bool find_synthetic_device(std::string_view name, SyntheticDevice& device);

}  // namespace vrdma
