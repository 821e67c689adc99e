#include "vmkernel_svc/mad/performance.hpp"

namespace vrdma::svc::mad {

using control::CountersReply;

namespace {

constexpr std::uint8_t all_ports = 0xff;
constexpr std::uint16_t can_select_all = 1u << 8, has_extended = 1u << 9;

void add(CountersReply& to, const CountersReply& more) {
  to.sent_bytes += more.sent_bytes;
  to.sent_messages += more.sent_messages;
  to.received_bytes += more.received_bytes;
  to.received_messages += more.received_messages;
}

}  // namespace

std::map<std::uint16_t, CountersReply> Performance::of_user(const Viewer& user, std::optional<std::uint16_t> only) {
  std::map<std::uint16_t, CountersReply> sums;
  for (const auto& [id, guest] : subnet_.fabric().guests) {
    if (!traffic_ || !user.is_user_of(*guest) || guest->link_layer != control::link_layer_infiniband || (only && guest->lid != *only)) continue;
    const auto [sum, is_new] = sums.try_emplace(guest->lid);
    add(sum->second, traffic_(*guest));  // processes may share a port
    if (const auto reset = resets_.find(guest->lid); is_new && reset != resets_.end() && reset->second.guid != guest->guid) resets_.erase(reset);
  }
  for (auto& [lid, sum] : sums) {
    const auto reset = resets_.find(lid);
    if (reset == resets_.end()) continue;
    const CountersReply& before = reset->second.before;
    const auto since = [](std::uint64_t now, std::uint64_t then) { return now > then ? now - then : 0; };
    sum = {since(sum.sent_bytes, before.sent_bytes), since(sum.sent_messages, before.sent_messages), since(sum.received_bytes, before.received_bytes),
           since(sum.received_messages, before.received_messages)};
  }
  return sums;
}

std::optional<CountersReply> Performance::of_port(const Viewer& viewer, const Node& node, std::uint8_t port) {
  CountersReply sum{};
  if (!node.is_switch()) {
    if (port != 1 && port != all_ports) return std::nullopt;
    if (!viewer.is_user_of(*node.guest)) return sum;  // others' traffic is theirs
    for (const auto& [lid, own] : of_user(viewer, node.guest->lid)) add(sum, own);
    return sum;
  }
  if (port > subnet_.switch_ports() && port != all_ports) return std::nullopt;
  if (viewer.tenant == nullptr || port == 0) return sum;
  for (const auto& [lid, own] : of_user(viewer, std::nullopt))
    if (const std::uint8_t at = subnet_.port_of(lid); at != 0 && (port == all_ports || at == port))
      add(sum, {own.received_bytes, own.received_messages, own.sent_bytes, own.sent_messages});
  return sum;
}

bool Performance::answer(const Viewer& viewer, const Node& node, Mad& mad) {
  if (mad.method() != method_get && mad.method() != method_set) return false;
  if (mad.class_version() != 1) return mad.respond(status_bad_version), true;
  const auto data = mad.data(performance_data, mad.bytes.size() - performance_data);
  if (mad.attribute() == attribute_class_port_info) {
    if (mad.method() != method_get) return mad.respond(status_bad_attribute), true;
    std::fill(data.begin(), data.end(), 0);
    put(data, {0, 8}, 1);
    put(data, {8, 8}, 1);
    put(data, {16, 16}, can_select_all | has_extended);
    put(data, {59, 5}, 18);
    return mad.respond(status_ok), true;
  }
  const bool is_extended = mad.attribute() == attribute_port_counters_extended;
  if (mad.attribute() != attribute_port_counters && !is_extended) return mad.respond(status_bad_attribute), true;
  const auto port = static_cast<std::uint8_t>(get(data, {8, 8}));
  const auto selected = static_cast<std::uint16_t>(get(data, {16, 16}));
  auto now = of_port(viewer, node, port);
  if (!now) return mad.respond(status_bad_value), true;
  if (mad.method() == method_set) {
    // Those of one's own user only; a switch has none of its own.
    if (node.is_switch() || !viewer.is_user_of(*node.guest)) return mad.respond(status_bad_attribute), true;
    const unsigned first = is_extended ? 0 : 12;
    Reset& reset = resets_[node.guest->lid];
    if (reset.guid != node.guest->guid) reset = {node.guest->guid, {}};
    const auto forget = [&](unsigned bit, std::uint64_t& counted, std::uint64_t& before) {
      if ((selected >> (first + bit) & 1) != 0) before += counted, counted = 0;
    };
    forget(0, now->sent_bytes, reset.before.sent_bytes);
    forget(1, now->received_bytes, reset.before.received_bytes);
    forget(2, now->sent_messages, reset.before.sent_messages);
    forget(3, now->received_messages, reset.before.received_messages);
  }
  std::fill(data.begin(), data.end(), 0);
  put(data, {8, 8}, port);
  put(data, {16, 16}, selected);
  const std::uint64_t counts[] = {now->sent_bytes / 4, now->received_bytes / 4, now->sent_messages, now->received_messages};  // data in words of 4 bytes
  for (unsigned i = 0; i < 4; ++i) {
    if (!is_extended) put(data, {192 + 32 * i, 32}, counts[i]);
    else put(data, {64 + 64 * i, 64}, counts[i]);
  }
  if (is_extended) put(data, {320, 64}, counts[2]), put(data, {384, 64}, counts[3]);  // to and from one receiver
  mad.respond(status_ok);
  return true;
}

}  // namespace vrdma::svc::mad
