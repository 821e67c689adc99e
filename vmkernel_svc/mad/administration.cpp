#include "vmkernel_svc/mad/administration.hpp"

#include <algorithm>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstring>

#include "vmkernel_svc/mad/subnet_management.hpp"

namespace vrdma::svc::mad {

namespace {

constexpr Field mask_field{384, 64};        // which components of a record the request gives
constexpr Field manager_key{288, 64};
constexpr Field attribute_offset{352, 16};  // of one record to the next, in 8 bytes
constexpr std::size_t table_bytes_max = 1 << 20;
constexpr std::uint8_t exactly = 2;          // of the selectors of MTU, rate and lifetime (IBA 15.2.5.16)
constexpr std::uint8_t rate_100 = 16, lifetime = 14;  // 100 Gb/s; 67 ms
constexpr std::uint8_t full_member = 1;

// Of records, in the order of the components.
constexpr Field node_fields[] = {{0, 16},   {16, 16},  {32, 8},   {40, 8},   {48, 8},  {56, 8},   {64, 64},  {128, 64},
                                 {192, 64}, {256, 16}, {272, 16}, {288, 32}, {320, 8}, {328, 24}, {352, 512}};
constexpr Field port_fields[] = {{0, 16},   {16, 8},   {24, 8},  {32, 64}, {96, 64}, {160, 16}, {176, 16}, {192, 32},
                                 {224, 16}, {240, 16}, {256, 8}, {264, 8}, {272, 8}, {280, 8},  {288, 4},  {292, 4},
                                 {296, 4},  {300, 4},  {304, 2}, {306, 3}, {309, 3}, {312, 4},  {316, 4},  {320, 4}};
constexpr Field link_fields[] = {{0, 16}, {16, 8}, {24, 8}, {32, 16}};
constexpr Field lid_fields[] = {{0, 16}};
constexpr Field manager_fields[] = {{0, 16}, {16, 16}, {32, 64}, {96, 64}, {160, 32}, {192, 4}, {196, 4}};
constexpr Field pkey_fields[] = {{0, 16}, {16, 16}, {32, 8}};
namespace path {
constexpr Field dgid{64, 128}, sgid{192, 128}, dlid{320, 16}, slid{336, 16}, hop_limit{376, 8}, reversible{392, 1}, count{393, 7}, pkey{400, 16},
    mtu_selector{432, 2}, mtu{434, 6}, rate_selector{440, 2}, rate{442, 6}, lifetime_selector{448, 2}, lifetime{450, 6};
constexpr Field fields[] = {{0, 8}, {8, 56}, dgid, sgid, dlid, slid, {352, 1}, {353, 3}, {356, 20}, hop_limit, {384, 8}, reversible, count, pkey,
                            {416, 12}, {428, 4}, mtu_selector, mtu, rate_selector, rate, lifetime_selector, lifetime};
}  // namespace path
namespace member {
constexpr Field qkey{256, 32}, lid{288, 16}, mtu_selector{304, 2}, mtu{306, 6}, traffic_class{312, 8}, pkey{320, 16}, rate_selector{336, 2},
    rate{338, 6}, lifetime_selector{344, 2}, lifetime{346, 6}, service_level{352, 4}, flow_label{356, 20}, hop_limit{376, 8}, scope{384, 4},
    join_state{388, 4};
constexpr std::size_t group_at = 0, port_at = 16;
constexpr Field fields[] = {{0, 128}, {128, 128}, qkey, lid, mtu_selector, mtu, traffic_class, pkey, rate_selector, rate, lifetime_selector,
                            lifetime, service_level, flow_label, hop_limit, scope, join_state, {392, 1}};
// What a request that may create the group has to say.
constexpr std::uint64_t has_gid = 1u << 0, has_port = 1u << 1, has_qkey = 1u << 2, has_traffic_class = 1u << 6, has_pkey = 1u << 7,
                        has_level = 1u << 12, has_flow = 1u << 13, has_join_state = 1u << 16;
constexpr std::uint64_t to_create = has_qkey | has_traffic_class | has_pkey | has_level | has_flow;
}  // namespace member

bool equal(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b, Field field) {
  for (; field.width > 64; field.bit += 64, field.width -= 64)
    if (get(a, {field.bit, 64}) != get(b, {field.bit, 64})) return false;
  return get(a, field) == get(b, field);
}

Gid gid_at(std::span<const std::uint8_t> bytes, std::size_t at) {
  Gid gid;
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), gid.size(), gid.begin());
  return gid;
}
void put_gid(std::span<std::uint8_t> bytes, Field at, const Gid& gid) { std::copy(gid.begin(), gid.end(), bytes.begin() + at.bit / 8); }

Gid port_gid(std::uint64_t guid) { return gids_of(guid, 0, control::link_layer_infiniband)[0].gid; }

bool is_in(const Guest& guest, std::uint16_t pkey) {
  const auto& keys = guest.tenant->pkeys;
  return std::any_of(keys.begin(), keys.end(), [&](std::uint16_t mine) { return hosts::pkeys_match(mine, pkey | hosts::pkey_full); });
}

// A selector without a value that is compared is no component of its own.
std::uint64_t without(std::uint64_t mask, std::initializer_list<unsigned> components) {
  for (const unsigned one : components) mask &= ~(std::uint64_t{1} << one);
  return mask;
}

}  // namespace

// What a request asks for: records that agree with what it gives.
struct Administration::Records {
  std::span<const Field> fields;
  std::span<const std::uint8_t> wanted;
  std::uint64_t mask;
  std::uint32_t modifier;
  bool is_trusted;  // a manager's key comes with it
  std::size_t record_bytes;
  std::size_t records_max;
  std::vector<std::uint8_t> found;
  std::size_t count = 0;
  bool too_many = false;  // there are more than that, and nobody looks further

  bool gives(unsigned component) const { return (mask >> component & 1) != 0; }
  void offer(std::span<const std::uint8_t> record) {
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (gives(static_cast<unsigned>(i)) && !equal(wanted, record, fields[i])) return;
    take(record);
  }
  void take(std::span<const std::uint8_t> record) {
    if (too_many || count == records_max) return void(too_many = true);
    found.insert(found.end(), record.begin(), record.end());
    found.resize(++count * record_bytes);
  }
};

struct Administration::Kind {
  std::uint16_t attribute;
  std::size_t record_bytes;  // a multiple of 8
  std::span<const Field> fields;
  void (Administration::*collect)(Guest&, const View&, Records&);
};

const Administration::Kind Administration::kinds[] = {
    {attribute_node_record, 112, node_fields, &Administration::nodes},
    {attribute_port_info_record, 72, port_fields, &Administration::ports},
    {attribute_switch_info_record, 24, lid_fields, &Administration::switches},
    {attribute_sm_info_record, 32, manager_fields, &Administration::managers},
    {attribute_link_record, 8, link_fields, &Administration::links},
    {attribute_pkey_table_record, 72, pkey_fields, &Administration::pkeys},
    {attribute_path_record, 64, path::fields, &Administration::paths},
    {attribute_member_record, 56, member::fields, &Administration::members},
};

const Administration::Kind* Administration::kind_of(std::uint16_t attribute) {
  const auto* const found = std::find_if(std::begin(kinds), std::end(kinds), [&](const Kind& one) { return one.attribute == attribute; });
  return found == std::end(kinds) ? nullptr : found;
}

bool Administration::answer(Guest& viewer, Mad& mad) {
  const std::uint8_t method = mad.method();
  if (mad.class_version() != 2) return mad.respond(status_bad_version), true;
  if (method == method_get && mad.attribute() == attribute_class_port_info) return class_port_info(mad), true;
  const Kind* const kind = kind_of(mad.attribute());
  if (kind == nullptr) return mad.respond(status_bad_attribute), true;
  const auto data = mad.data(administration_data, kind->record_bytes);
  if (method == method_set || method == method_delete) {
    if (kind->attribute != attribute_member_record) return mad.respond(status_bad_attribute), true;
    const std::uint16_t status = method == method_set ? join(viewer, mad) : leave(viewer, mad);
    return mad.respond(status), true;
  }
  if (method != method_get && method != method_get_table) return mad.respond(status_bad_method), true;

  const std::vector<std::uint8_t> wanted(data.begin(), data.end());
  const std::size_t records_max = method == method_get ? 1 : table_bytes_max / kind->record_bytes;
  Records records{kind->fields, wanted, get(mad.bytes, mask_field), mad.modifier(), get(mad.bytes, manager_key) != 0, kind->record_bytes, records_max, {}};
  (this->*kind->collect)(viewer, subnet_.view(viewer), records);
  put(mad.bytes, attribute_offset, kind->record_bytes / 8);
  if (method == method_get) {
    if (records.too_many || records.count == 0) return mad.respond(records.too_many ? status_too_many_records : status_no_records), true;
    std::copy(records.found.begin(), records.found.end(), data.begin());
    return mad.respond(status_ok), true;
  }
  if (records.too_many) return mad.respond(status_no_resources), true;
  // IBA 13.6.2: as one segment, the first and the last; an empty one has a MAD's length, and no offset.
  constexpr std::uint8_t version = 1, is_data = 1, active_first_last = 7, no_time = 0x1f << 3;
  mad.respond(status_ok);
  mad.bytes[24] = version;
  mad.bytes[25] = is_data;
  mad.bytes[26] = no_time | active_first_last;
  put(mad.bytes, {224, 32}, 1);
  put(mad.bytes, {256, 32}, records.found.size() + administration_data - control::mad_segment_head_bytes);
  if (records.count == 0) {
    put(mad.bytes, attribute_offset, 0);
    std::fill(mad.bytes.begin() + administration_data, mad.bytes.end(), 0);
    return true;
  }
  mad.bytes.resize(administration_data);
  mad.bytes.insert(mad.bytes.end(), records.found.begin(), records.found.end());
  return true;
}

void Administration::class_port_info(Mad& mad) {
  constexpr std::uint16_t has_multicast = 1u << 9;
  const auto data = mad.data(administration_data, 72);
  std::fill(data.begin(), data.end(), 0);
  put(data, {0, 8}, 1);
  put(data, {8, 8}, 2);
  put(data, {16, 16}, has_multicast);
  put(data, {59, 5}, 18);
  mad.respond(status_ok);
}

// --- nodes and ports ------------------------------------------------------------------------------------------

void Administration::nodes(Guest& viewer, const View& view, Records& out) {
  for (const Node& node : view.nodes) {
    std::array<std::uint8_t, 108> record{};
    put(record, {0, 16}, subnet_.lid_of(node));
    const SmpData info = node_info(subnet_, node, node.is_switch() ? 0 : 1), text = node_description(subnet_, viewer, node);
    std::copy_n(info.begin(), 40, record.begin() + 4);
    std::copy(text.begin(), text.end(), record.begin() + 44);
    out.offer(record);
  }
}

void Administration::ports(Guest&, const View& view, Records& out) {
  // IBA 15.2.5.3: with that modifier, ports that have all of the given capabilities, and perhaps more.
  constexpr unsigned capability_component = 7;
  const bool by_capability = out.gives(capability_component) && (out.modifier >> 31) != 0;
  const std::uint64_t capabilities = get(out.wanted, port_fields[capability_component]);
  if (by_capability) out.mask = without(out.mask, {capability_component});
  const auto put_port = [&](const Node& node, std::uint8_t port) {
    const auto info = port_info(subnet_, view, node, port, node.is_switch() ? 0 : 1);
    if (!info) return;
    if (by_capability && (get(*info, {160, 32}) & capabilities) != capabilities) return;
    std::array<std::uint8_t, 68> record{};
    put(record, {0, 16}, subnet_.lid_of(node));
    put(record, {16, 8}, port);
    std::copy(info->begin(), info->end(), record.begin() + 4);
    out.offer(record);
  };
  const std::vector<Node>& all = view.nodes;
  put_port(all.front(), 0);
  for (const Node& node : all)  // of the switch, those that lead to somebody
    if (!node.is_switch() && node.port != 0) put_port(all.front(), node.port);
  for (const Node& node : all)
    if (!node.is_switch()) put_port(node, 1);
}

void Administration::links(Guest&, const View& view, Records& out) {
  for (const Node& node : view.nodes) {
    if (node.is_switch() || node.port == 0) continue;
    const std::uint16_t lid = node.guest->lid;
    const auto put_link = [&](std::uint16_t from, std::uint8_t from_port, std::uint8_t to_port, std::uint16_t to) {
      std::array<std::uint8_t, 6> record{};
      put(record, link_fields[0], from), put(record, link_fields[1], from_port), put(record, link_fields[2], to_port),
          put(record, link_fields[3], to);
      out.offer(record);
    };
    put_link(subnet_manager_lid, node.port, 1, lid);
    put_link(lid, 1, node.port, subnet_manager_lid);
  }
}

void Administration::switches(Guest&, const View& view, Records& out) {
  std::array<std::uint8_t, 24> record{};
  put(record, {0, 16}, subnet_manager_lid);
  const SmpData info = switch_info(view);
  std::copy_n(info.begin(), 20, record.begin() + 4);
  out.offer(record);
}

void Administration::managers(Guest&, const View&, Records& out) {
  std::array<std::uint8_t, 28> record{};
  put(record, {0, 16}, subnet_manager_lid);
  const SmpData info = sm_info();
  std::copy_n(info.begin(), 24, record.begin() + 4);
  out.offer(record);
}

void Administration::pkeys(Guest&, const View& view, Records& out) {
  for (const Node& node : view.nodes) {
    std::array<std::uint8_t, 72> record{};
    put(record, {0, 16}, subnet_.lid_of(node));
    put(record, {32, 8}, node.is_switch() ? 0 : 1);
    const SmpData table = pkey_table(node);
    std::copy(table.begin(), table.end(), record.begin() + 8);
    out.offer(record);
  }
}

// --- paths ----------------------------------------------------------------------------------------------------

// Which of the ends that a path may lead to are in a partition with a source; of the two one is a full member.
class Administration::Reach {
 public:
  // wanted_pkey: of that partition alone; 0: of any.
  Reach(const std::vector<End>& ends, std::uint16_t wanted_pkey) : ends_(ends), wanted_(hosts::partition_of(wanted_pkey)) {
    for (std::uint32_t i = 0; i < ends.size(); ++i) {
      const End& end = ends[i];
      if (end.tenant != nullptr) for (const std::uint16_t pkey : end.tenant->pkeys) add(i, pkey);
      else if (end.pkey != 0) add(i, end.pkey);
      else of_all_.push_back(i);
    }
  }

  // Tells of each that `source` reaches, in their order, and by which P_Key of the source's: visit(end, pkey).
  template <class Visit>
  void from(const End& source, Visit&& visit) const {
    std::vector<std::pair<std::uint32_t, std::uint16_t>> reached;  // place, P_Key
    if (source.tenant == nullptr) {
      for (std::uint32_t i = 0; i < ends_.size(); ++i)
        if (const std::uint16_t pkey = first_of(ends_[i])) reached.emplace_back(i, pkey);
    } else {
      for (const std::uint16_t pkey : source.tenant->pkeys) {
        if (!is_wanted(pkey)) continue;
        if (const auto found = by_partition_.find(hosts::partition_of(pkey)); found != by_partition_.end())
          for (const std::uint32_t i : (pkey & hosts::pkey_full) != 0 ? found->second.all : found->second.full) reached.emplace_back(i, pkey);
        for (const std::uint32_t i : of_all_) reached.emplace_back(i, pkey);
      }
      // By the first of several.
      std::stable_sort(reached.begin(), reached.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      reached.erase(std::unique(reached.begin(), reached.end(), [](const auto& a, const auto& b) { return a.first == b.first; }), reached.end());
    }
    for (const auto& [place, pkey] : reached) visit(ends_[place], pkey);
  }

 private:
  struct Members {
    std::vector<std::uint32_t> all, full;
  };
  bool is_wanted(std::uint16_t pkey) const {
    const std::uint16_t partition = hosts::partition_of(pkey);
    return partition != 0 && (wanted_ == 0 || partition == wanted_);
  }
  void add(std::uint32_t place, std::uint16_t pkey) {
    if (!is_wanted(pkey)) return;
    Members& members = by_partition_[hosts::partition_of(pkey)];
    members.all.push_back(place);
    if ((pkey & hosts::pkey_full) != 0) members.full.push_back(place);
  }
  // By which P_Key who is of no tenant, a full member of every partition, reaches it. A group it reaches as a member of the default one. 0: by none.
  std::uint16_t first_of(const End& end) const {
    if (end.tenant == nullptr) return is_wanted(hosts::pkey_default) && (end.pkey == 0 || hosts::pkeys_match(end.pkey, hosts::pkey_default)) ? hosts::pkey_default : 0;
    const auto& pkeys = end.tenant->pkeys;
    const auto found = std::find_if(pkeys.begin(), pkeys.end(), [this](std::uint16_t pkey) { return is_wanted(pkey); });
    return found != pkeys.end() ? *found : 0;
  }

  const std::vector<End>& ends_;
  const std::uint16_t wanted_;
  boost::unordered_flat_map<std::uint16_t, Members> by_partition_;
  std::vector<std::uint32_t> of_all_;  // in every partition
};

// An address of another host's guest is not looked for: every GID ends in its LID.
void Administration::paths(Guest& viewer, const View& view, Records& out) {
  // The answer's own choice, whatever the request would like at least or at most, as long as it can be had.
  const auto may_be = [&](unsigned component, Field selector, Field value, std::uint8_t ours) {
    if (!out.gives(component) || !out.gives(component + 1)) return true;
    const std::uint64_t theirs = get(out.wanted, value);
    switch (get(out.wanted, selector)) {
      case 0: return ours > theirs;
      case 1: return ours < theirs;
      case 2: return ours == theirs;
      default: return true;  // the most there is
    }
  };
  const bool can_be = may_be(16, path::mtu_selector, path::mtu, subnet_.mtu()) && may_be(18, path::rate_selector, path::rate, rate_100) &&
                      may_be(20, path::lifetime_selector, path::lifetime, lifetime);
  if (!can_be) return;
  const std::uint16_t wanted_pkey = out.gives(13) ? static_cast<std::uint16_t>(get(out.wanted, path::pkey)) : 0;
  if (wanted_pkey != 0 && hosts::partition_of(wanted_pkey) == 0) return;  // 0x8000: of no partition
  // What is chosen, and what makes no difference here, is not compared: a request may give it as it likes.
  out.mask = without(out.mask, {0, 1, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21});

  // Those that one end of it may be, by what the request says of it.
  const auto ends = [&](unsigned gid_component, Field gid_field, Field lid_field) {
    std::vector<End> found;
    for (const Node& node : view.nodes)
      found.push_back({port_gid(subnet_.guid_of(node)), subnet_.lid_of(node), node.is_switch() ? nullptr : node.guest->tenant, 0});
    const Gid gid = gid_at(out.wanted, gid_field.bit / 8);
    const auto lid = static_cast<std::uint16_t>(get(out.wanted, lid_field));
    if (out.gives(gid_component)) std::erase_if(found, [&](const End& end) { return end.gid != gid; });
    if (out.gives(gid_component + 2)) std::erase_if(found, [&](const End& end) { return end.lid != lid; });
    return found;
  };
  std::vector<End> to = ends(2, path::dgid, path::dlid);
  const Gid dgid = gid_at(out.wanted, path::dgid.bit / 8);
  const Group* const group = out.gives(2) ? groups_.find(dgid) : nullptr;
  if (group != nullptr && is_in(viewer, group->pkey)) to.push_back({dgid, multicast_lid(dgid), nullptr, group->pkey});
  else if (out.gives(2) && to.empty() && !is_multicast(dgid) && subnet_.fabric().far != nullptr)
    to.push_back({dgid, lid_of(dgid.data()), nullptr, 0});
  if (out.gives(4)) std::erase_if(to, [&](const End& end) { return end.lid != get(out.wanted, path::dlid); });
  // Who has no partition in common with a source is not looked at, however many they are; and nothing is written before it is known to be a table.
  const Reach reach(to, wanted_pkey);
  const std::vector<End> from = ends(3, path::sgid, path::slid);
  struct Path {
    const End *from, *to;
    std::uint16_t pkey;
  };
  std::vector<Path> found;
  for (const End& source : from) {
    reach.from(source, [&](const End& destination, std::uint16_t pkey) { found.push_back({&source, &destination, pkey}); });
    if (found.size() > out.records_max) return void(out.too_many = true);
  }
  for (const Path& one : found) put_path(*one.from, *one.to, wanted_pkey != 0 ? wanted_pkey : one.pkey, out);
}

void Administration::put_path(const End& from, const End& to, std::uint16_t pkey, Records& out) {
  std::array<std::uint8_t, 64> record{};
  put_gid(record, path::dgid, to.gid);
  put_gid(record, path::sgid, from.gid);
  put(record, path::dlid, to.lid);
  put(record, path::slid, from.lid);
  put(record, path::reversible, 1);
  for (const Field given : {path::fields[0], path::fields[1], path::fields[8], path::hop_limit, path::fields[10], path::fields[14], path::fields[15]})
    put(record, given, get(out.wanted, given));
  put(record, path::pkey, pkey);
  put(record, path::mtu_selector, exactly), put(record, path::mtu, subnet_.mtu());
  put(record, path::rate_selector, exactly), put(record, path::rate, rate_100);
  put(record, path::lifetime_selector, exactly), put(record, path::lifetime, lifetime);
  out.take(record);  // all that is compared are its ends
}

// --- multicast groups -----------------------------------------------------------------------------------------

void Administration::members(Guest& viewer, const View&, Records& out) {
  // IBA 15.4.1.2: a group once, without its members, unless the request names one, or comes with a key. There is no secret in it: who asks is
  // in the partition.
  for (const auto& [gid, group] : groups_.all()) {
    if (out.too_many) return;
    if (!is_in(viewer, group.pkey) || (out.gives(0) && gid != gid_at(out.wanted, member::group_at))) continue;
    std::uint8_t states = 0;
    for (const auto& [port, one] : group.members) {
      states |= one.join_state;
      if (out.is_trusted || out.gives(1)) put_member(gid, group, port, one.join_state, out);
    }
    if (!out.is_trusted && !out.gives(1)) put_member(gid, group, {}, states, out);
  }
}

void Administration::put_member(const Gid& gid, const Group& group, const Gid& port, std::uint8_t state, Records& out) {
  std::array<std::uint8_t, 52> record{};
  put_gid(record, {0, 128}, gid);
  put_gid(record, {128, 128}, port);
  put_group(record, gid, group);
  put(record, member::join_state, state);
  out.offer(record);
}

// What a group is like, into a record of it.
void Administration::put_group(std::span<std::uint8_t> record, const Gid& gid, const Group& group) const {
  using namespace member;
  put(record, qkey, group.qkey);
  put(record, lid, multicast_lid(gid));
  put(record, mtu_selector, exactly), put(record, mtu, subnet_.mtu());
  put(record, traffic_class, group.traffic_class);
  put(record, pkey, group.pkey);
  put(record, rate_selector, exactly), put(record, rate, rate_100);
  put(record, lifetime_selector, exactly), put(record, member::lifetime, mad::lifetime);
  put(record, service_level, group.service_level);
  put(record, flow_label, group.flow_label);
  put(record, hop_limit, group.hop_limit);
  put(record, scope, gid[1] & 0x0fu);
}

std::uint16_t Administration::join(Guest& viewer, Mad& mad) {
  using namespace member;
  const std::uint64_t mask = get(mad.bytes, mask_field);
  const auto data = mad.data(administration_data, 56);
  const Gid gid = gid_at(data, group_at), port = gid_at(data, port_at);
  const auto state = static_cast<std::uint8_t>(get(data, join_state));
  if ((mask & (has_gid | has_port | has_join_state)) != (has_gid | has_port | has_join_state) || state == 0) return status_insufficient_components;
  if (port != viewer.gids[0].gid || !is_multicast(gid) || (gid[1] & 0x0f) == 0 || (gid[1] & 0x0f) == 0x0f)
    return status_bad_gid;  // IBA 4.1.1: a scope
  const auto wanted_pkey = static_cast<std::uint16_t>(get(data, pkey));
  Group* group = groups_.find(gid);
  if (group == nullptr) {
    if ((state & full_member) == 0) return status_request_invalid;  // nobody else makes one
    if ((mask & to_create) != to_create) return status_insufficient_components;
    if (!is_in(viewer, wanted_pkey)) return status_request_invalid;
    if (groups_.all().size() >= groups_max) return status_no_resources;
    group = &groups_.add(gid, {static_cast<std::uint32_t>(get(data, qkey)),
                               static_cast<std::uint16_t>(wanted_pkey | hosts::pkey_full),
                               static_cast<std::uint8_t>(get(data, traffic_class)),
                               static_cast<std::uint8_t>(get(data, service_level)),
                               static_cast<std::uint8_t>(get(data, hop_limit)),
                               static_cast<std::uint32_t>(get(data, flow_label)),
                               {}});
  } else {
    if (!is_in(viewer, group->pkey) || ((mask & has_pkey) != 0 && hosts::partition_of(wanted_pkey) != hosts::partition_of(group->pkey)) ||
        ((mask & has_qkey) != 0 && get(data, qkey) != group->qkey))
      return status_request_invalid;
    if (group->members.size() >= members_max && !group->members.contains(port)) return status_no_resources;
  }
  if (!groups_.join(*group, port, state, *viewer.tenant)) return groups_.remove_if_empty(gid), status_no_resources;
  const std::uint8_t states = group->members.at(port).join_state;
  put_group(data, gid, *group);
  put(data, join_state, states);
  return status_ok;
}

std::uint16_t Administration::leave(Guest& viewer, Mad& mad) {
  const auto data = mad.data(administration_data, 56);
  const Gid gid = gid_at(data, member::group_at), port = gid_at(data, member::port_at);
  if (port != viewer.gids[0].gid) return status_bad_gid;
  Group* const group = groups_.find(gid);
  const auto state = static_cast<std::uint8_t>(get(data, member::join_state));
  const auto joined = group != nullptr ? group->members.find(port) : decltype(group->members.end()){};
  if (group == nullptr || joined == group->members.end() || (joined->second.join_state & state) == 0) return status_request_invalid;
  joined->second.join_state = static_cast<std::uint8_t>(joined->second.join_state & ~state);
  if (joined->second.join_state == 0) groups_.leave(gid, port);
  return status_ok;
}

void Administration::leave(const Guest& guest) { groups_.leave_all(guest.gids[0].gid); }

}  // namespace vrdma::svc::mad
