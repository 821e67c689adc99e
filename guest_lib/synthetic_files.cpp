#include "guest_lib/synthetic_files.hpp"

#include <sys/sysinfo.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <iterator>

namespace vrdma::synthetic {
namespace {

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

bool print_count(Text& text, std::uint64_t count) { return text.print("%llu\n", static_cast<unsigned long long>(count)), true; }
// There is no link that could fail.
bool never_counts(const SyntheticDevice&, std::size_t, Text& text) { return print_count(text, 0); }

constexpr Row ib_rows[] = {
    {"node_guid", 1, [](auto& d, auto, Text& t) { return print_guid(t, d.node_guid), true; }},
    {"sys_image_guid", 1, [](auto& d, auto, Text& t) { return print_guid(t, d.sys_image_guid), true; }},
    {"node_type", 1, [](auto&, auto, Text& t) { return t.print("1: CA\n"), true; }},
    {"node_desc", 1, [](auto& d, auto, Text& t) { return line(t, d.name); }},
    {"fw_ver", 1, [](auto& d, auto, Text& t) { return line(t, d.firmware); }},
    {"hw_rev", 1, [](auto&, auto, Text& t) { return t.print("1\n"), true; }},
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

std::string_view verbs_name(const SyntheticDevice& d) { return d.verbs_name; }

constexpr Root all_roots[] = {
    {"/sys/class/infiniband", "", ib_rows, [](const SyntheticDevice& d) { return std::string_view(d.name); }},
    {"/sys/class/infiniband_verbs", "6\n", verbs_rows, verbs_name},
    {"/sys/class/infiniband_mad", "5\n", mad_rows, mad_name},
    {"/dev/infiniband", "", {}, verbs_name},
};
constexpr std::size_t dev_root = 3;

}  // namespace

std::span<const Root> roots() { return all_roots; }
bool is_dev_root(const Root* root) { return root == &all_roots[dev_root]; }

std::string_view mad_name(const SyntheticDevice& d) { return d.ethernet ? std::string_view{} : d.mad_name; }

void show_traffic(const PortTraffic& now) {
  traffic.sent_bytes.store(now.sent_bytes, std::memory_order_relaxed);
  traffic.sent_messages.store(now.sent_messages, std::memory_order_relaxed);
  traffic.received_bytes.store(now.received_bytes, std::memory_order_relaxed);
  traffic.received_messages.store(now.received_messages, std::memory_order_relaxed);
}

void Text::print(const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  const int wanted = std::vsnprintf(out + bytes, room - bytes, format, args);
  va_end(args);
  if (wanted > 0) bytes = std::min(room - 1, bytes + static_cast<std::size_t>(wanted));
}

}  // namespace vrdma::synthetic
