#include "guest_lib/synthetic_tree.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "guest_lib/synthetic_devices.hpp"
#include "guest_lib/synthetic_files.hpp"

namespace vrdma {

using synthetic::is_dev_root;
using synthetic::Reading;
using synthetic::Root;
using synthetic::Row;
using synthetic::Text;

namespace {

constinit std::atomic<bool (*)(PortTraffic&)> traffic_source{nullptr};
constinit std::atomic<void (*)()> device_source{nullptr};

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
  for (const Root& root : synthetic::roots()) {
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

// What is in /dev/infiniband.
struct Node {
  EntryKind kind = EntryKind::none;
  std::uint32_t minor = 0;
  std::string_view name = {};
};
Node node_at(std::size_t index, std::span<const SyntheticDevice> devices) {
  for (const SyntheticDevice& device : devices) {
    if (index-- == 0) return {EntryKind::verbs_device, device.verbs_minor, device.verbs_name};
    if (!synthetic::mad_name(device).empty() && index-- == 0) return {EntryKind::mad_device, management_minor, device.mad_name};
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
    entry.is_invalid = !row.render(*place.device, index, text);
    entry.kind = EntryKind::text;
    const std::string_view what = row.path;
    entry.changes = what.starts_with("ports/1/counters/port_");
    entry.is_own = what.ends_with("_guid") || what.ends_with("lid") || what.ends_with("/link_layer") || what.ends_with("/cap_mask") || what.starts_with("ports/1/gid") || what == "ports/1/pkeys/#";
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
    if (is_dev_root(place.root) || !reading.devices().empty()) entry.kind = EntryKind::directory;
  } else if (is_dev_root(place.root)) {
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
  if (is_dev_root(place.root)) {
    const Node node = node_at(index, reading.devices());
    return node.kind != EntryKind::none && put_name(name, node.name, node.kind);
  }
  for (const SyntheticDevice& device : reading.devices())
    if (const std::string_view own = place.root->device_name(device); !own.empty() && index-- == 0) return put_name(name, own, EntryKind::directory);
  return index == 0 && !place.root->abi_version.empty() && put_name(name, "abi_version", EntryKind::text);
}

void set_traffic_source(bool (*ask)(PortTraffic& now)) { traffic_source.store(ask, std::memory_order_relaxed); }

void set_device_source(void (*ask)()) { device_source.store(ask, std::memory_order_relaxed); }

void look_at_port(const char* path) {
  if (!may_be_synthetic(path)) return;
  const SyntheticEntry entry = find_synthetic(path);
  if (entry.is_own && synthetic::devices_are_default())
    if (auto* const find_out = device_source.load(std::memory_order_relaxed)) find_out();
  if (!entry.changes) return;
  auto* const ask = traffic_source.load(std::memory_order_relaxed);
  PortTraffic now{};
  if (ask == nullptr || !ask(now)) return;
  synthetic::show_traffic(now);
}

}  // namespace vrdma
