#include "guest_lib/synthetic_tree.hpp"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/sysinfo.h>

namespace vrdma {
namespace {

struct Devices {
  std::size_t count;
  SyntheticDevice device[synthetic_devices_max];
};

constexpr std::size_t slot_count = 4;
constinit Devices slots[slot_count] = {};
constinit std::atomic<std::uint32_t> readers[slot_count] = {};
constinit std::atomic<std::uint32_t> current{slot_count};  // slot_count: nobody has set any, the defaults hold

// Pins the current slot. A reader announces itself, then looks again; a writer moves `current` away, then looks for
// readers. The two store-then-load pairs need the single order of seq_cst (S1 with S2): one of them sees the other.
class Reading {
 public:
  Reading() {
    for (;;) {
      slot_ = current.load(std::memory_order_seq_cst);
      if (slot_ == slot_count) {
        defaults_.count = 1;
        defaults_.device[0] = default_synthetic_device();
        return;
      }
      readers[slot_].fetch_add(1, std::memory_order_seq_cst);         // S1
      if (current.load(std::memory_order_seq_cst) == slot_) return;
      readers[slot_].fetch_sub(1, std::memory_order_release);
    }
  }
  // R1: pairs with A1 in set_synthetic_devices; our reads of the slot are over.
  ~Reading() {
    if (slot_ != slot_count) readers[slot_].fetch_sub(1, std::memory_order_release);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::span<const SyntheticDevice> devices() const {
    const Devices& d = slot_ == slot_count ? defaults_ : slots[slot_];
    return {d.device, d.count};
  }

 private:
  std::uint32_t slot_ = slot_count;
  Devices defaults_;  // filled only before the first set_synthetic_devices()
};

struct Text {
  char* out;
  std::size_t room;
  std::size_t bytes = 0;

  __attribute__((format(printf, 2, 3))) void print(const char* format, ...) {
    std::va_list args;
    va_start(args, format);
    const int wanted = std::vsnprintf(out + bytes, room - bytes, format, args);
    va_end(args);
    if (wanted > 0) bytes = std::min(room - 1, bytes + static_cast<std::size_t>(wanted));
  }
};

void print_guid(Text& text, std::uint64_t guid) {
  text.print("%04x:%04x:%04x:%04x\n", static_cast<unsigned>(guid >> 48), static_cast<unsigned>(guid >> 32 & 0xffff),
             static_cast<unsigned>(guid >> 16 & 0xffff), static_cast<unsigned>(guid & 0xffff));
}

const char* port_state_name(std::uint8_t state) {
  constexpr const char* names[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
  return state < std::size(names) ? names[state] : "UNKNOWN";
}

const char* physical_state_name(std::uint8_t state) {
  constexpr const char* names[] = {"No state change", "Sleep",  "Polling", "Disabled", "PortConfigurationTraining",
                                   "LinkUp",          "LinkErrorRecovery", "Phy Test"};
  return state < std::size(names) ? names[state] : "UNKNOWN";
}

void print_cpu_mask(Text& text) {
  // The kernel's cpumask format: 32-bit words, the highest first. The virtual HCA is near every CPU.
  const int cpus = std::clamp(get_nprocs_conf(), 1, 1024);
  for (int word = (cpus - 1) / 32; word >= 0; --word) {
    const int bits = std::min(32, cpus - word * 32);
    text.print("%08x%s", bits == 32 ? 0xffffffffu : (1u << bits) - 1, word > 0 ? "," : "\n");
  }
}

struct Row {
  const char* path;  // below the device's directory; "#" as last component stands for 0 ... count-1
  std::size_t count;
  // False when this device has no such entry.
  bool (*render)(const SyntheticDevice&, std::size_t index, Text&);
};

template <std::size_t n>
bool line(Text& text, const char (&value)[n]) {
  text.print("%.*s\n", static_cast<int>(n), value);
  return true;
}

// As it was when it was asked for last.
struct Traffic {
  std::atomic<std::uint64_t> sent_bytes, sent_messages, received_bytes, received_messages;
};
constinit Traffic traffic{};
constinit std::atomic<bool (*)(PortTraffic&)> traffic_source{nullptr};
constinit std::atomic<void (*)()> device_source{nullptr};

bool print_count(Text& text, std::uint64_t count) { return text.print("%llu\n", static_cast<unsigned long long>(count)), true; }
// There is no link that could fail.
bool never_counts(const SyntheticDevice&, std::size_t, Text& text) { return print_count(text, 0); }

constexpr Row ib_rows[] = {
    {"node_guid", 1, [](auto& d, auto, Text& t) { return print_guid(t, d.node_guid), true; }},
    {"sys_image_guid", 1, [](auto& d, auto, Text& t) { return print_guid(t, d.sys_image_guid), true; }},
    {"node_type", 1, [](auto&, auto, Text& t) { return t.print("1: CA\n"), true; }},
    {"node_desc", 1, [](auto& d, auto, Text& t) { return line(t, d.name); }},
    {"fw_ver", 1, [](auto& d, auto, Text& t) { return line(t, d.firmware); }},
    {"hw_rev", 1, [](auto&, auto, Text& t) { return t.print("0\n"), true; }},
    {"board_id", 1, [](auto& d, auto, Text& t) { return line(t, d.board_id); }},
    {"hca_type", 1, [](auto& d, auto, Text& t) { return line(t, d.hca_type); }},
    {"device/numa_node", 1, [](auto&, auto, Text& t) { return t.print("-1\n"), true; }},
    {"device/local_cpus", 1, [](auto&, auto, Text& t) { return print_cpu_mask(t), true; }},
    {"device/local_cpulist", 1,
     [](auto&, auto, Text& t) {
       const int last = std::max(get_nprocs_conf(), 1) - 1;
       return last == 0 ? t.print("0\n") : t.print("0-%d\n", last), true;
     }},
    {"device/net/lo/address", 1, [](auto&, auto, Text& t) { return t.print("00:00:00:00:00:00\n"), true; }},
    {"device/net/lo/ifindex", 1, [](auto&, auto, Text& t) { return t.print("%u\n", synthetic_netdev_index), true; }},
    {"device/net/lo/mtu", 1, [](auto&, auto, Text& t) { return t.print("65536\n"), true; }},
    {"device/net/lo/operstate", 1, [](auto&, auto, Text& t) { return t.print("unknown\n"), true; }},
    {"ports/1/lid", 1, [](auto& d, auto, Text& t) { return t.print("0x%x\n", d.lid), true; }},
    {"ports/1/lid_mask_count", 1, [](auto&, auto, Text& t) { return t.print("0\n"), true; }},
    {"ports/1/sm_lid", 1, [](auto& d, auto, Text& t) { return t.print("0x%x\n", d.sm_lid), true; }},
    {"ports/1/sm_sl", 1, [](auto&, auto, Text& t) { return t.print("0\n"), true; }},
    {"ports/1/state", 1,
     [](auto& d, auto, Text& t) { return t.print("%d: %s\n", d.state, port_state_name(d.state)), true; }},
    {"ports/1/phys_state", 1,
     [](auto& d, auto, Text& t) {
       return t.print("%d: %s\n", d.physical_state, physical_state_name(d.physical_state)), true;
     }},
    {"ports/1/link_layer", 1,
     [](auto& d, auto, Text& t) { return t.print("%s\n", d.ethernet ? "Ethernet" : "InfiniBand"), true; }},
    {"ports/1/rate", 1, [](auto& d, auto, Text& t) { return line(t, d.rate); }},
    {"ports/1/cap_mask", 1, [](auto& d, auto, Text& t) { return t.print("0x%08x\n", capabilities_of(d)), true; }},
    {"ports/1/counters/port_xmit_data", 1, [](auto&, auto, Text& t) { return print_count(t, traffic.sent_bytes / 4); }},  // in words of 4 bytes
    {"ports/1/counters/port_rcv_data", 1, [](auto&, auto, Text& t) { return print_count(t, traffic.received_bytes / 4); }},
    {"ports/1/counters/port_xmit_packets", 1, [](auto&, auto, Text& t) { return print_count(t, traffic.sent_messages); }},
    {"ports/1/counters/port_rcv_packets", 1, [](auto&, auto, Text& t) { return print_count(t, traffic.received_messages); }},
    {"ports/1/counters/port_xmit_wait", 1, never_counts},
    {"ports/1/counters/port_xmit_discards", 1, never_counts},
    {"ports/1/counters/port_xmit_constraint_errors", 1, never_counts},
    {"ports/1/counters/port_rcv_errors", 1, never_counts},
    {"ports/1/counters/port_rcv_constraint_errors", 1, never_counts},
    {"ports/1/counters/port_rcv_remote_physical_errors", 1, never_counts},
    {"ports/1/counters/port_rcv_switch_relay_errors", 1, never_counts},
    {"ports/1/counters/symbol_error", 1, never_counts},
    {"ports/1/counters/link_error_recovery", 1, never_counts},
    {"ports/1/counters/link_downed", 1, never_counts},
    {"ports/1/counters/local_link_integrity_errors", 1, never_counts},
    {"ports/1/counters/excessive_buffer_overrun_errors", 1, never_counts},
    {"ports/1/counters/VL15_dropped", 1, never_counts},
    {"ports/1/gids/#", limits::gid_table,
     [](auto& d, std::size_t i, Text& t) {
       for (unsigned b = 0; b < 16; b += 2)
         t.print("%02x%02x%s", d.gids[i].raw[b], d.gids[i].raw[b + 1], b < 14 ? ":" : "\n");
       return true;
     }},
    {"ports/1/gid_attrs/types/#", limits::gid_table,
     [](auto& d, std::size_t i, Text& t) {
       if (d.gids[i].kind == GidKind::empty) return false;
       return t.print("%s\n", d.gids[i].kind == GidKind::roce_v2 ? "RoCE v2" : "IB/RoCE v1"), true;
     }},
    {"ports/1/gid_attrs/ndevs/#", limits::gid_table,
     [](auto& d, std::size_t i, Text& t) {
       return d.gids[i].kind != GidKind::empty && d.gids[i].netdev[0] != '\0' && line(t, d.gids[i].netdev);
     }},
    {"ports/1/pkeys/#", limits::pkey_table,
     [](auto& d, std::size_t i, Text& t) { return t.print("0x%04x\n", d.pkeys[i]), true; }},
};

constexpr Row verbs_rows[] = {
    {"ibdev", 1, [](auto& d, auto, Text& t) { return line(t, d.name); }},
    {"dev", 1, [](auto& d, auto, Text& t) { return t.print("%u:%u\n", character_major, d.verbs_minor), true; }},
};

constexpr Row mad_rows[] = {
    {"ibdev", 1, [](auto& d, auto, Text& t) { return line(t, d.name); }},
    {"port", 1, [](auto&, auto, Text& t) { return t.print("1\n"), true; }},
    {"dev", 1, [](auto&, auto, Text& t) { return t.print("%u:%u\n", character_major, management_minor), true; }},
};

std::string_view mad_name(const SyntheticDevice& d) { return d.ethernet ? std::string_view{} : d.mad_name; }
std::string_view verbs_name(const SyntheticDevice& d) { return d.verbs_name; }

struct Root {
  std::string_view path;
  std::string_view abi_version;                         // in a file of that name beside the devices' directories; "": none
  std::span<const Row> rows;                            // below each device's directory; none: device nodes
  std::string_view (*device_name)(const SyntheticDevice&);  // "": it has none here
};

constexpr Root roots[] = {
    {"/sys/class/infiniband", "", ib_rows, [](const SyntheticDevice& d) { return std::string_view(d.name); }},
    {"/sys/class/infiniband_verbs", "6\n", verbs_rows, verbs_name},
    {"/sys/class/infiniband_mad", "5\n", mad_rows, mad_name},
    {"/dev/infiniband", "", {}, verbs_name},
};
constexpr std::size_t dev_root = 3;

std::string_view take_component(std::string_view& rest) {
  const std::size_t slash = rest.find('/');
  const std::string_view first = rest.substr(0, slash);
  rest = slash == std::string_view::npos ? std::string_view{} : rest.substr(slash + 1);
  return first;
}

// A decimal index without leading zeros, below count; count when it is none.
std::size_t index_of(std::string_view digits, std::size_t count) {
  if (digits.empty() || digits.size() > 4 || (digits.size() > 1 && digits[0] == '0')) return count;
  std::size_t value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return count;
    value = value * 10 + static_cast<std::size_t>(c - '0');
  }
  return std::min(value, count);
}

enum class Match { no, file, directory, below_file };

// How `path` (below the device's directory) relates to the row; index is set for a file.
Match match(const Row& row, std::string_view path, std::size_t& index) {
  std::string_view pattern = row.path;
  index = 0;
  while (!path.empty() && !pattern.empty()) {
    const std::string_view wanted = take_component(pattern);
    const std::string_view found = take_component(path);
    if (wanted == "#") {
      index = index_of(found, row.count);
      if (index == row.count) return Match::no;
    } else if (wanted != found) {
      return Match::no;
    }
  }
  if (!pattern.empty()) return Match::directory;
  return path.empty() ? Match::file : Match::below_file;
}

struct Place {
  const Root* root = nullptr;
  const SyntheticDevice* device = nullptr;  // null: the root itself, or an unknown name below it
  std::string_view name;                    // the component below the root
  std::string_view rest;                    // and what follows it
};

Place place_of(std::string_view path, std::span<const SyntheticDevice> devices) {
  for (const Root& root : roots) {
    if (!path.starts_with(root.path)) continue;
    std::string_view rest = path.substr(root.path.size());
    if (!rest.empty() && rest[0] != '/') continue;
    if (!rest.empty()) rest.remove_prefix(1);
    Place place{.root = &root, .device = nullptr, .name = take_component(rest), .rest = {}};
    place.rest = rest;
    for (const SyntheticDevice& device : devices)
      if (!place.name.empty() && root.device_name(device) == place.name) place.device = &device;
    return place;
  }
  return {};
}

std::uint64_t inode_of(std::string_view path) {  // FNV-1a: the same path is the same file
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : path) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

bool is_dev_root(const Place& place) { return place.root == &roots[dev_root]; }

// What is in /dev/infiniband.
struct Node {
  EntryKind kind = EntryKind::none;
  std::uint32_t minor = 0;
  std::string_view name = {};
};
Node node_at(std::size_t index, std::span<const SyntheticDevice> devices) {
  for (const SyntheticDevice& device : devices) {
    if (index-- == 0) return {EntryKind::verbs_device, device.verbs_minor, device.verbs_name};
    if (!mad_name(device).empty() && index-- == 0) return {EntryKind::mad_device, management_minor, device.mad_name};
  }
  return index == 0 ? Node{EntryKind::rdma_cm_device, connection_manager_minor, "rdma_cm"} : Node{};
}
Node find_node(std::string_view name, std::span<const SyntheticDevice> devices) {
  for (std::size_t i = 0;; ++i)
    if (const Node node = node_at(i, devices); node.kind == EntryKind::none || node.name == name) return node;
}

bool put_name(SyntheticName& name, std::string_view text, EntryKind kind) {
  std::snprintf(name.text, sizeof name.text, "%.*s", static_cast<int>(text.size()), text.data());
  name.kind = kind;
  return true;
}

void find_below_device(const Place& place, SyntheticEntry& entry) {
  if (place.rest.empty()) {
    entry.kind = EntryKind::directory;
    return;
  }
  for (const Row& row : place.root->rows) {
    std::size_t index = 0;
    switch (match(row, place.rest, index)) {
      case Match::no: continue;
      case Match::directory: entry.kind = EntryKind::directory; return;
      case Match::below_file: entry.not_a_directory = true; return;
      case Match::file: break;
    }
    Text text{.out = entry.text, .room = sizeof entry.text};
    if (!row.render(*place.device, index, text)) return;
    entry.kind = EntryKind::text;
    const std::string_view what = row.path;
    entry.changes = what.starts_with("ports/1/counters/port_");
    entry.is_own = what.ends_with("_guid") || what.ends_with("lid") || what.starts_with("ports/1/gid") || what == "ports/1/pkeys/#";
    entry.text_bytes = text.bytes;
    return;
  }
}

// The index-th distinct component that follows directory `dir` in the rows.
bool list_below_device(const Place& place, std::size_t index, SyntheticName& name) {
  std::string_view previous;
  for (const Row& row : place.root->rows) {
    std::string_view pattern = row.path;
    std::string_view dir = place.rest;
    bool inside = true;
    while (!dir.empty() && inside) inside = take_component(dir) == take_component(pattern);
    if (!inside || pattern.empty()) continue;
    const std::string_view next = take_component(pattern);
    if (next == previous) continue;  // rows of one directory stand together
    previous = next;
    const std::size_t count = next == "#" ? row.count : 1;  // a folder above many files is one
    for (std::size_t i = 0; i < count; ++i) {
      char unused[512];
      Text text{.out = unused, .room = sizeof unused};
      if (next == "#" && !row.render(*place.device, i, text)) continue;
      if (index-- != 0) continue;
      name.kind = pattern.empty() ? EntryKind::text : EntryKind::directory;
      if (next == "#")
        std::snprintf(name.text, sizeof name.text, "%u", static_cast<unsigned>(i));
      else
        std::snprintf(name.text, sizeof name.text, "%.*s", static_cast<int>(next.size()), next.data());
      return true;
    }
  }
  return false;
}

}  // namespace

void set_synthetic_devices(std::span<const SyntheticDevice> devices) {
  const std::uint32_t old = current.load(std::memory_order_relaxed);
  // A1: pairs with R1 in ~Reading; with four slots a free one is found unless readers are suspended in three others.
  for (std::uint32_t slot = 0;; slot = (slot + 1) % slot_count) {
    if (slot == old || readers[slot].load(std::memory_order_seq_cst) != 0) continue;  // S2
    slots[slot].count = std::min(devices.size(), synthetic_devices_max);
    std::copy_n(devices.begin(), slots[slot].count, slots[slot].device);
    current.store(slot, std::memory_order_seq_cst);
    return;
  }
}

SyntheticDevice default_synthetic_device() {
  SyntheticDevice d{};
  std::strcpy(d.name, "vrdma0");
  std::strcpy(d.verbs_name, "uverbs0");
  std::strcpy(d.mad_name, "umad0");
  d.verbs_minor = 192;
  d.node_guid = d.sys_image_guid = 0x0200'00ff'fe00'0001;  // locally administered
  std::strcpy(d.firmware, "0.1.0");
  std::strcpy(d.board_id, "VRDMA0000000001");
  std::strcpy(d.hca_type, "vrdma");
  std::strcpy(d.rate, "100 Gb/sec (4X EDR)");
  // `vrdma run` names a service that answers, and the link layer that was asked for.
  const bool served = std::getenv("VRDMA_SOCKET") != nullptr;
  const char* const link_layer = std::getenv("VRDMA_LINK_LAYER");
  d.state = served ? 4 : 1;           // ACTIVE, DOWN
  d.physical_state = served ? 5 : 2;  // LinkUp, Polling
  d.ethernet = link_layer != nullptr && std::string_view(link_layer) == "ethernet";
  d.gids[0].raw[0] = 0xfe;
  d.gids[0].raw[1] = 0x80;
  for (unsigned i = 0; i < 8; ++i) d.gids[0].raw[8 + i] = static_cast<std::uint8_t>(d.node_guid >> (56 - 8 * i));
  d.gids[0].kind = GidKind::infiniband_or_roce_v1;
  d.pkeys[0] = 0xffff;
  return d;
}

bool normalise_synthetic(const char* path, std::span<char> out) {
  std::size_t bytes = 0;
  std::string_view rest = path;
  while (!rest.empty()) {
    const std::string_view component = take_component(rest);
    if (component.empty() || component == ".") continue;
    if (component == "..") {
      while (bytes > 0 && out[--bytes] != '/') {
      }
      continue;
    }
    if (component.size() + 2 > out.size() - bytes) return false;
    out[bytes++] = '/';
    std::memcpy(&out[bytes], component.data(), component.size());
    bytes += component.size();
  }
  if (bytes == 0) out[bytes++] = '/';
  out[bytes] = '\0';
  return true;
}

SyntheticEntry find_synthetic(const char* path) {
  SyntheticEntry entry;
  char clean[256];
  if (!normalise_synthetic(path, clean)) return entry;
  const Reading reading;
  const Place place = place_of(clean, reading.devices());
  if (place.root == nullptr) return entry;
  entry.inode = inode_of(clean);
  if (place.name.empty()) {
    if (is_dev_root(place) || !reading.devices().empty()) entry.kind = EntryKind::directory;
  } else if (is_dev_root(place)) {
    const Node node = find_node(place.name, reading.devices());
    entry.not_a_directory = node.kind != EntryKind::none && !place.rest.empty();
    if (entry.not_a_directory) return entry;
    entry.kind = node.kind;
    entry.device_minor = node.minor;
  } else if (place.name == "abi_version" && !place.root->abi_version.empty()) {
    entry.not_a_directory = !place.rest.empty();
    if (entry.not_a_directory) return entry;
    entry.kind = EntryKind::text;
    entry.text_bytes = place.root->abi_version.copy(entry.text, sizeof entry.text);
  } else if (place.device != nullptr) {
    find_below_device(place, entry);
  }
  const std::string_view given = path;
  if (entry.kind != EntryKind::none && entry.kind != EntryKind::directory && given.ends_with('/')) {
    entry.kind = EntryKind::none;
    entry.not_a_directory = true;
  }
  return entry;
}

bool list_synthetic(const char* path, std::size_t index, SyntheticName& name) {
  char clean[256];
  if (!normalise_synthetic(path, clean)) return false;
  const Reading reading;
  const Place place = place_of(clean, reading.devices());
  if (place.root == nullptr) return false;
  if (!place.name.empty()) return place.device != nullptr && list_below_device(place, index, name);
  if (is_dev_root(place)) {
    const Node node = node_at(index, reading.devices());
    return node.kind != EntryKind::none && put_name(name, node.name, node.kind);
  }
  for (const SyntheticDevice& device : reading.devices())
    if (const std::string_view own = place.root->device_name(device); !own.empty() && index-- == 0) return put_name(name, own, EntryKind::directory);
  return index == 0 && !place.root->abi_version.empty() && put_name(name, "abi_version", EntryKind::text);
}

bool find_synthetic_device(std::string_view name, SyntheticDevice& device) {
  const Reading reading;
  for (const SyntheticDevice& d : reading.devices()) {
    if (name != d.name) continue;
    device = d;
    return true;
  }
  return false;
}

void set_traffic_source(bool (*ask)(PortTraffic& now)) { traffic_source.store(ask, std::memory_order_relaxed); }

void set_device_source(void (*ask)()) { device_source.store(ask, std::memory_order_relaxed); }

void look_at_port(const char* path) {
  if (!may_be_synthetic(path)) return;
  const SyntheticEntry entry = find_synthetic(path);
  if (entry.is_own && current.load(std::memory_order_relaxed) == slot_count)
    if (auto* const find_out = device_source.load(std::memory_order_relaxed)) find_out();
  if (!entry.changes) return;
  auto* const ask = traffic_source.load(std::memory_order_relaxed);
  PortTraffic now{};
  if (ask == nullptr || !ask(now)) return;
  traffic.sent_bytes.store(now.sent_bytes, std::memory_order_relaxed);
  traffic.sent_messages.store(now.sent_messages, std::memory_order_relaxed);
  traffic.received_bytes.store(now.received_bytes, std::memory_order_relaxed);
  traffic.received_messages.store(now.received_messages, std::memory_order_relaxed);
}

}  // namespace vrdma
