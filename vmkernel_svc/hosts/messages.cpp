#include "vmkernel_svc/hosts/messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "vmkernel_svc/hosts/address.hpp"
#include "vrdma/printable.hpp"

namespace vrdma::hosts {

namespace {

using nlohmann::json;

struct Malformed : std::runtime_error {
  using runtime_error::runtime_error;
};

constexpr std::size_t text_bytes_max = 1024;
constexpr std::size_t hosts_max = lid_max;

// --- reading: every field is there, of its type, in its bounds

template <class Number>
Number number(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned() || found->get<std::uint64_t>() > std::numeric_limits<Number>::max())
    throw Malformed(fmt::format("\"{}\" is not a number that fits", key));
  return found->get<Number>();
}
// Older managers say none.
std::uint64_t number_or_0(const json& object, const char* key) { return object.contains(key) ? number<std::uint64_t>(object, key) : 0; }
std::string text(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string() || found->get_ref<const std::string&>().size() > text_bytes_max)
    throw Malformed(fmt::format("\"{}\" is not a string of at most {} bytes", key, text_bytes_max));
  return found->get<std::string>();
}
bool truth(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_boolean()) throw Malformed(fmt::format("\"{}\" is neither true nor false", key));
  return found->get<bool>();
}
const json& list(const json& object, const char* key, std::size_t most) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array() || found->size() > most)
    throw Malformed(fmt::format("\"{}\" is not a list of at most {}", key, most));
  return *found;
}
std::string name_in(const json& object, const char* key, bool may_be_empty = false) {
  std::string value = text(object, key);
  const bool good =
      value.size() <= 63 && (may_be_empty || !value.empty()) && value.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
  if (!good) throw Malformed(fmt::format("\"{}\" is not a host's name", key));
  return value;
}
std::string address_in(const json& object, const char* key, bool may_be_empty = false) {
  std::string value = text(object, key);
  if (!(may_be_empty && value.empty()) && !is_numeric(value)) throw Malformed(fmt::format("\"{}\" is not a numeric IP address", key));
  return value;
}
std::string serial_in(const json& object, const char* key) {
  std::string value = text(object, key);
  if (value.size() > 64 || value.find_first_not_of("0123456789abcdef") != std::string::npos)
    throw Malformed(fmt::format("\"{}\" is not a serial number", key));
  return value;
}
LidRange lids_in(const json& object, const char* key, bool may_be_none) {
  const json& pair = list(object, key, 2);
  if (pair.size() != 2 || !pair[0].is_number_unsigned() || !pair[1].is_number_unsigned())
    throw Malformed(fmt::format("\"{}\" is not a range of LIDs", key));
  const auto first = pair[0].get<std::uint64_t>(), last = pair[1].get<std::uint64_t>();
  if (may_be_none && first == 0 && last == 0) return no_lids;
  if (first == 0 || last < first || last > lid_max) throw Malformed(fmt::format("\"{}\" is {} to {}: not a range of LIDs", key, first, last));
  return {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(last)};
}
StateId id_in(const json& object, const char* key) {
  const json& pair = list(object, key, 2);
  if (pair.size() != 2 || !pair[0].is_number_unsigned() || !pair[1].is_number_unsigned())
    throw Malformed(fmt::format("\"{}\" is not a state's number", key));
  return {pair[0].get<std::uint64_t>(), pair[1].get<std::uint64_t>()};
}

json as_json(LidRange lids) { return json::array({lids.first, lids.last}); }
json as_json(StateId id) { return json::array({id.term, id.version}); }

// As in the configuration: {"0x8001": ["1000", "b/*"]}
json as_json(const Partitions& partitions) {
  json out = json::object();
  for (const auto& one : partitions.memberships()) out[pkey_text(one.pkey)].push_back(one.member());
  return out;
}
Membership membership_in(std::uint16_t pkey, const json& member) {
  const auto one = member.is_string() ? membership_of(pkey, member.get_ref<const std::string&>()) : std::nullopt;
  if (!one) throw Malformed("a member of a partition is not HOST/UID");
  return *one;
}
Partitions partitions_of(const json& object) {
  if (!object.is_object()) throw Malformed("partitions are not an object");
  Partitions partitions;
  for (const auto& [key, members] : object.items()) {
    const auto pkey = pkey_of(key);
    if (!pkey || !members.is_array()) throw Malformed("a partition is not a P_Key with a list");
    for (const json& member : members)
      if (!partitions.add(membership_in(*pkey, member))) throw Malformed("a member is in a partition twice, or there are too many");
  }
  return partitions;
}

json as_json(const Delta& delta) {
  json out{{"from", as_json(delta.from)}, {"to", as_json(delta.to)}, {"next_id", delta.next_host_id}, {"next_lid", delta.next_lid}};
  if (delta.partitions) out["partitions"] = as_json(*delta.partitions);
  if (delta.origin != 0) out["origin"] = delta.origin;
  json& hosts = out["hosts"] = json::array();
  for (const auto& host : delta.hosts)
    hosts.push_back({{"name", host.name}, {"address", host.address}, {"port", host.port}, {"carrier_port", host.carrier_port}, {"id", host.id},
                     {"lids", as_json(host.lids)}, {"serial", host.serial}, {"changed", host.changed}});
  json& removed = out["removed"] = json::array();
  for (const auto& gone : delta.removed)
    removed.push_back({{"name", gone.name}, {"serial", gone.serial}, {"resting", as_json(gone.resting)}, {"changed", gone.changed}});
  return out;
}

Delta delta_of(const json& object) {
  if (!object.is_object()) throw Malformed("not a state of the subnet");
  Delta delta{
      id_in(object, "from"), id_in(object, "to"), number<std::uint32_t>(object, "next_id"), number<std::uint16_t>(object, "next_lid"), {}, {}};
  if (const auto found = object.find("partitions"); found != object.end()) delta.partitions = partitions_of(*found);
  delta.origin = number_or_0(object, "origin");
  for (const json& host : list(object, "hosts", hosts_max)) {
    if (!host.is_object()) throw Malformed("a host is not an object");
    delta.hosts.push_back({name_in(host, "name"), address_in(host, "address"), number<std::uint16_t>(host, "port"),
                           number<std::uint16_t>(host, "carrier_port"), number<std::uint32_t>(host, "id"), lids_in(host, "lids", false),
                           serial_in(host, "serial"), number<std::uint64_t>(host, "changed")});
  }
  for (const json& gone : list(object, "removed", hosts_max)) {
    if (!gone.is_object()) throw Malformed("a removed host is not an object");
    delta.removed.push_back(
        {serial_in(gone, "serial"), name_in(gone, "name"), lids_in(gone, "resting", true), number<std::uint64_t>(gone, "changed")});
  }
  return delta;
}

// --- one pair of functions a message

json body(const Hello& m) {
  json managers = json::array();
  for (const auto& one : m.managers) managers.push_back({{"name", one.name}, {"address", one.address}, {"port", one.port}});
  return {{"type", "hello"}, {"protocol", "vrdma-hosts"}, {"major", m.major}, {"minor", m.minor}, {"version", m.version}, {"name", m.name},
          {"run", m.run}, {"address", m.address}, {"port", m.port}, {"carrier_port", m.carrier_port}, {"managers", managers},
          {"manages", m.manages}};
}
Hello hello_of(const json& o) {
  if (text(o, "protocol") != "vrdma-hosts") throw Malformed("not vrdma's protocol");
  Hello m;
  m.major = number<std::uint32_t>(o, "major");
  m.minor = number<std::uint32_t>(o, "minor");
  m.version = printable(text(o, "version"));
  if (m.major != protocol_major) return m;  // of the rest, nothing is known
  m.name = name_in(o, "name");
  m.run = printable(text(o, "run"));
  m.address = address_in(o, "address", true);
  m.port = number<std::uint16_t>(o, "port");
  m.carrier_port = number<std::uint16_t>(o, "carrier_port");
  for (const json& one : list(o, "managers", managers_max)) {
    if (!one.is_object()) throw Malformed("a manager is not an object");
    m.managers.push_back({name_in(one, "name"), address_in(one, "address"), number<std::uint16_t>(one, "port")});
  }
  m.manages = truth(o, "manages");
  return m;
}
json body(const Ping& m) { return {{"type", "ping"}, {"sequence", m.sequence}}; }
json body(const Pong& m) { return {{"type", "pong"}, {"sequence", m.sequence}}; }
json body(const Goodbye& m) { return {{"type", "goodbye"}, {"why", m.why}}; }
json body(const Probe& m) { return {{"type", "probe"}, {"address", m.address}, {"port", m.port}}; }
json body(const Probed& m) { return {{"type", "probed"}, {"error", m.error}}; }
json body(const Remove& m) {
  json out{{"type", "remove"}, {"name", m.name}};
  if (!m.serial.empty()) out["serial"] = m.serial;
  return out;
}
json body(const RemoveReply& m) { return {{"type", "removed"}, {"error", m.error}, {"leader", m.leader}, {"port", m.port}}; }
json body(const ChangePartition& m) {
  json members = json::array();
  for (const auto& one : m.members) members.push_back(one.member());
  return {{"type", "partition"}, {"pkey", m.pkey}, {"add", m.add}, {"members", members}};
}
ChangePartition change_of(const json& o) {
  ChangePartition m{number<std::uint16_t>(o, "pkey"), truth(o, "add"), {}};
  for (const json& member : list(o, "members", memberships_max)) m.members.push_back(membership_in(m.pkey, member));
  if (m.pkey == 0 ? !m.members.empty() || m.add : partition_of(m.pkey) == 0 || (m.add && m.members.empty()))
    throw Malformed("that makes no partition");
  return m;
}
json body(const PartitionsReply& m) {
  return {{"type", "partitions"}, {"error", m.error}, {"leader", m.leader}, {"port", m.port}, {"partitions", as_json(m.partitions)}};
}
json with_numbers(json out, std::uint64_t blank, std::uint64_t origin) {
  if (blank != 0) out["blank"] = blank;
  if (origin != 0) out["origin"] = origin;
  return out;
}
json body(const VoteRequest& m) { return with_numbers({{"type", "vote"}, {"term", m.term}, {"last", as_json(m.last)}, {"trial", m.trial}}, 0, m.origin); }
json body(const VoteReply& m) {
  return with_numbers({{"type", "voted"}, {"term", m.term}, {"granted", m.granted}, {"trial", m.trial}}, m.blank, m.origin);
}
json body(const Append& m) {
  json out{{"type", "append"}, {"term", m.term}, {"sequence", m.sequence}};
  if (m.delta) out["delta"] = as_json(*m.delta);
  return with_numbers(out, m.blank, m.origin);
}
json body(const AppendReply& m) {
  json out = with_numbers({{"type", "appended"}, {"term", m.term}, {"sequence", m.sequence}, {"at", as_json(m.at)}}, m.blank, 0);
  if (m.origin) out["origin"] = *m.origin;
  return out;
}
json body(const Renew& m) {
  return {{"type", "renew"}, {"sequence", m.sequence}, {"run", m.run}, {"address", m.address}, {"port", m.port}, {"carrier_port", m.carrier_port},
          {"lids_wanted", m.lids_wanted}, {"held", as_json(m.held)}, {"known", as_json(m.known)}};
}
json body(const Lease& m) {
  return {{"type", "lease"}, {"sequence", m.sequence}, {"lease_ms", m.lease_ms}, {"lids", as_json(m.lids)}, {"news", as_json(m.news)}};
}
json body(const Refused& m) { return {{"type", "refused"}, {"sequence", m.sequence}, {"why", m.why}}; }
json body(const Redirect& m) { return {{"type", "redirect"}, {"sequence", m.sequence}, {"leader", m.leader}}; }

Message message_of(const json& o) {
  const auto n64 = [&](const char* key) { return number<std::uint64_t>(o, key); };
  const auto blank = [&] { return number_or_0(o, "blank"); };
  const auto origin = [&] { return number_or_0(o, "origin"); };
  const std::string type = text(o, "type");
  if (type == "hello") return hello_of(o);
  if (type == "ping") return Ping{n64("sequence")};
  if (type == "pong") return Pong{n64("sequence")};
  if (type == "goodbye") return Goodbye{printable(text(o, "why"))};
  if (type == "probe") return Probe{address_in(o, "address"), number<std::uint16_t>(o, "port")};
  if (type == "probed") return Probed{printable(text(o, "error"))};
  if (type == "remove") return Remove{name_in(o, "name"), o.contains("serial") ? serial_in(o, "serial") : ""};  // older tools name none
  if (type == "removed") return RemoveReply{printable(text(o, "error")), address_in(o, "leader", true), number<std::uint16_t>(o, "port")};
  if (type == "partition") return change_of(o);
  if (type == "partitions") {
    const auto found = o.find("partitions");
    return PartitionsReply{printable(text(o, "error")), address_in(o, "leader", true), number<std::uint16_t>(o, "port"),
                           partitions_of(found == o.end() ? json() : *found)};
  }
  if (type == "vote") return VoteRequest{n64("term"), id_in(o, "last"), truth(o, "trial"), origin()};
  if (type == "voted") return VoteReply{n64("term"), truth(o, "granted"), truth(o, "trial"), blank(), origin()};
  if (type == "append") {
    Append m{n64("term"), n64("sequence"), std::nullopt, blank(), origin()};
    if (const auto found = o.find("delta"); found != o.end()) m.delta = delta_of(*found);
    return m;
  }
  if (type == "appended") {
    AppendReply m{n64("term"), n64("sequence"), id_in(o, "at"), blank()};
    if (o.contains("origin")) m.origin = origin();
    return m;
  }
  if (type == "renew")
    return Renew{n64("sequence"),
                 printable(text(o, "run")),
                 address_in(o, "address"),
                 number<std::uint16_t>(o, "port"),
                 number<std::uint16_t>(o, "carrier_port"),
                 number<std::uint16_t>(o, "lids_wanted"),
                 lids_in(o, "held", true),
                 id_in(o, "known")};
  if (type == "lease") {
    const auto news = o.find("news");
    return Lease{n64("sequence"), number<std::uint32_t>(o, "lease_ms"), lids_in(o, "lids", false), delta_of(news == o.end() ? json() : *news)};
  }
  if (type == "refused") return Refused{n64("sequence"), printable(text(o, "why"))};
  if (type == "redirect") return Redirect{n64("sequence"), name_in(o, "leader", true)};
  throw Malformed("of an unknown type");
}

// Deeper than any message is refused before it is parsed, so that nobody's nesting costs more than its bytes. (The parser's own
// callbacks would look through a list of hosts once for each of them.)
json parse(std::string_view encoded) {
  constexpr int depth_max = 8;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    const char c = encoded[i];
    if (in_string) {
      if (c == '\\') ++i;
      else in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (depth > depth_max) throw Malformed("nested too deeply");
  }
  return json::parse(encoded);
}

template <class Read>
auto attempt(std::string_view encoded, std::string& why, Read read) -> std::optional<decltype(read(json()))> {
  try {
    const json object = parse(encoded);
    if (!object.is_object()) throw Malformed("not an object");
    return read(object);
  } catch (const Malformed& error) {
    why = error.what();
  } catch (const json::exception&) {
    why = "not valid JSON";
  }
  return std::nullopt;
}

}  // namespace

std::vector<std::string> names_of(const std::vector<Endpoint>& managers) {
  std::vector<std::string> names;
  for (const auto& one : managers) names.push_back(one.name);
  return names;
}

std::string listed(std::vector<Endpoint> managers) {
  std::sort(managers.begin(), managers.end(), [](const Endpoint& a, const Endpoint& b) { return a.name < b.name; });
  std::string text;
  for (const auto& one : managers) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", one.name, with_port(one.address, one.port));
  return text;
}

// Text of others (an error's, say) may not be UTF-8: that must not throw.
std::string encode(const Message& message) {
  return std::visit([](const auto& m) { return body(m); }, message).dump(-1, ' ', false, json::error_handler_t::replace);
}
std::optional<Message> decode(std::string_view encoded, std::string& why) {
  return attempt(encoded, why, [](const json& object) { return message_of(object); });
}
std::string encode(const Delta& delta) { return as_json(delta).dump(); }
std::optional<Delta> decode_delta(std::string_view encoded, std::string& why) {
  return attempt(encoded, why, [](const json& object) { return delta_of(object); });
}

}  // namespace vrdma::hosts
