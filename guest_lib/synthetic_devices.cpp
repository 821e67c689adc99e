#include "guest_lib/synthetic_devices.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace vrdma {
namespace synthetic {
namespace {
constexpr std::size_t slot_count = 4;
constinit Devices slots[slot_count] = {};
constinit std::atomic<std::uint32_t> readers[slot_count] = {};
constinit std::atomic<bool> served_ethernet{false};
constinit std::atomic<std::uint32_t> current{slot_count};  // slot_count: nobody has set any, the defaults hold
}  // namespace

// Pins the current slot. A reader announces itself, then looks again; a writer moves `current` away, then looks for
// readers. The two store-then-load pairs need the single order of seq_cst (S1 with S2): one of them sees the other.
Reading::Reading() {
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
Reading::~Reading() {
  if (slot_ != slot_count) readers[slot_].fetch_sub(1, std::memory_order_release);
}

std::span<const SyntheticDevice> Reading::devices() const {
  const Devices& d = slot_ == slot_count ? defaults_ : slots[slot_];
  return {d.device, d.count};
}

bool devices_are_default() { return current.load(std::memory_order_relaxed) == slot_count; }

}  // namespace synthetic

void set_synthetic_devices(std::span<const SyntheticDevice> devices) {
  using namespace synthetic;
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

void set_served_link_layer(bool ethernet) { synthetic::served_ethernet.store(ethernet, std::memory_order_relaxed); }

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
  // `vrdma run` names a service that answers, and its link layer.
  const bool served = std::getenv("VRDMA_SOCKET") != nullptr;
  d.state = served ? 4 : 1;           // ACTIVE, DOWN
  d.physical_state = served ? 5 : 2;  // LinkUp, Polling
  d.ethernet = synthetic::served_ethernet.load(std::memory_order_relaxed);
  for (const char* const variable : {"VRDMA_SERVED_LINK_LAYER", "VRDMA_LINK_LAYER"}) {
    const char* const value = std::getenv(variable);
    const std::string_view layer = value != nullptr ? value : "";
    if (layer == "ethernet") d.ethernet = true;
    if (layer == "ib" || layer == "infiniband") d.ethernet = false;
  }
  d.gids[0].raw[0] = 0xfe;
  d.gids[0].raw[1] = 0x80;
  for (unsigned i = 0; i < 8; ++i) d.gids[0].raw[8 + i] = static_cast<std::uint8_t>(d.node_guid >> (56 - 8 * i));
  d.gids[0].kind = GidKind::infiniband_or_roce_v1;
  d.pkeys[0] = 0xffff;
  return d;
}

bool find_synthetic_device(std::string_view name, SyntheticDevice& device) {
  const synthetic::Reading reading;
  for (const SyntheticDevice& d : reading.devices()) {
    if (name != d.name) continue;
    device = d;
    return true;
  }
  return false;
}

}  // namespace vrdma
