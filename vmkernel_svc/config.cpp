#include "vmkernel_svc/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "vmkernel_svc/hosts/address.hpp"

namespace vrdma::svc {

namespace {

using nlohmann::json;
using Setter = std::function<void(const json&)>;

constexpr std::uint64_t arena_bytes_min = 1ull << 20, arena_bytes_max = 1ull << 40, machine_arena_bytes_max = 1ull << 32;

[[noreturn]] void refuse(const std::string& origin, const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", origin, what));
}

// A value as a message names it. What holds other values is named by its kind: it may be as deep as the stack, and longer than a line.
std::string shown(const json& value) {
  return value.is_structured() ? value.type_name() : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// A key as a message names it: of the sections, several have a "port".
std::string quoted_key(const std::string& key) { return "\"" + key + "\""; }
std::string quoted_key(const std::string& key, const std::string& section) { return quoted_key(key) + " of " + section; }

// `what`: the key, quoted. `least` and `most` are for the message; whether a number is one of them, Config::check() says, also of those that flags give.
template <class Number>
Setter number(Number& to, const std::string& origin, const std::string& what, std::uint64_t least = 0,
              std::uint64_t most = std::numeric_limits<Number>::max()) {
  return [&to, origin, what, least, most](const json& value) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<Number>::max())
      refuse(origin, fmt::format("{} is {}: it must be a whole number from {} to {}", what, shown(value), least, most));
    to = value.get<Number>();
  };
}

Setter text(std::string& to, const std::string& origin, const std::string& what) {
  return [&to, origin, what](const json& value) {
    if (!value.is_string()) refuse(origin, fmt::format("{} is {}: it must be a string", what, shown(value)));
    to = value.get<std::string>();
    if (to.find('\0') != std::string::npos) refuse(origin, fmt::format("{} is {}: it must be a string without NUL", what, shown(value)));
  };
}

Setter choice(bool& to, const std::string& origin, const std::string& what) {
  return [&to, origin, what](const json& value) {
    if (!value.is_boolean()) refuse(origin, fmt::format("{} is {}: it must be true or false", what, shown(value)));
    to = value.get<bool>();
  };
}

// Permission bits as people write them: "0660".
Setter mode(std::uint32_t& to, const std::string& origin, const std::string& what) {
  return [&to, origin, what](const json& value) {
    const std::string digits = value.is_string() ? value.get<std::string>() : "";
    if (digits.empty() || digits.size() > 4 || digits.find_first_not_of("01234567") != std::string::npos || std::stoul(digits, nullptr, 8) > 0777)
      refuse(origin, fmt::format("{} is {}: it must be permission bits in a string, such as \"0666\" or \"0660\"", what, shown(value)));
    to = static_cast<std::uint32_t>(std::stoul(digits, nullptr, 8));
  };
}

void apply(const json& object, const std::map<std::string, Setter>& known, const std::string& origin, const std::string& where) {
  if (!object.is_object()) refuse(origin, fmt::format("{} must be a JSON object, not {}", where, object.type_name()));
  for (const auto& [key, value] : object.items()) {
    const auto setter = known.find(key);
    if (setter == known.end()) {
      std::string names;
      for (const auto& [name, ignored] : known) names += (names.empty() ? "" : ", ") + name;
      refuse(origin, fmt::format("unknown key \"{}\" in {}: known are {}", key, where, names));
    }
    setter->second(value);
  }
}

// Digits alone, of a unicast LID.
std::optional<std::uint16_t> lid_in(const std::string& text) {
  std::uint16_t lid = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), lid);
  if (error != std::errc() || end != text.data() + text.size() || lid < 1 || lid > hosts::lid_max) return std::nullopt;
  return lid;
}

// "1-4095", or one LID.
Setter lids(RemoteHost& to, const std::string& origin) {
  return [&to, origin](const json& value) {
    const std::string range = value.is_string() ? value.get<std::string>() : "";
    const std::size_t dash = range.find('-');
    const auto first = lid_in(range.substr(0, dash)), last = dash == std::string::npos ? first : lid_in(range.substr(dash + 1));
    if (!first || !last || *first > *last)
      refuse(origin, fmt::format("\"lids\" is {}: it must be a range of unicast LIDs (1 to {}) in a string, such as \"1-4095\"", shown(value),
                                 hosts::lid_max));
    to.lid_first = *first, to.lid_last = *last;
  };
}

void read_remote(const json& value, RemoteConfig& remote, const std::string& origin) {
  const auto read_hosts = [&](const json& list) {
    if (!list.is_array()) refuse(origin, fmt::format("\"hosts\" in \"remote\" must be a list, not {}", list.type_name()));
    for (const auto& entry : list) {
      RemoteHost host;
      const std::string where = "a host of \"remote\"";
      apply(entry, {{"name", text(host.name, origin, quoted_key("name", where))}, {"address", text(host.address, origin, quoted_key("address", where))},
                    {"port", number(host.port, origin, quoted_key("port", where), 1)}, {"lids", lids(host, origin)}},
            origin, where);
      remote.hosts.push_back(std::move(host));
    }
  };
  remote.hosts.clear();
  const std::string where = "\"remote\"";
  apply(value, {{"name", text(remote.name, origin, quoted_key("name", where))}, {"address", text(remote.address, origin, quoted_key("address", where))},
                {"port", number(remote.port, origin, quoted_key("port", where), 1)}, {"secret_file", text(remote.secret_file, origin, quoted_key("secret_file", where))},
                {"encrypt", choice(remote.encrypt, origin, quoted_key("encrypt", where))}, {"hosts", read_hosts}},
        origin, where);
  if (remote.hosts.empty()) refuse(origin, "\"remote\" has no \"hosts\": name every host of the subnet, this one among them");
}

// false, or what is known of it.
void read_hca(const json& section, std::optional<HcaSettings>& to, const std::string& origin) {
  if (section.is_boolean() && !section.get<bool>()) return to.reset();
  HcaSettings& hca = to.emplace();
  if (section.is_boolean()) return;
  const std::string where = "\"hca\"";
  std::uint16_t port = 0, gid_index = 0, ack_timeout = 0;
  apply(section,
        {{"device", text(hca.device, origin, quoted_key("device", where))},
         {"port", number(port, origin, quoted_key("port", where), 1, 254)},
         {"gid_index", number(gid_index, origin, quoted_key("gid_index", where))},
         {"mtu", number(hca.mtu, origin, quoted_key("mtu", where), 256, 4096)},
         {"ack_timeout", number(ack_timeout, origin, quoted_key("ack_timeout", where), 0, 31)},
         {"library", text(hca.library, origin, quoted_key("library", where))}},
        origin, where);
  if (section.contains("mtu") && (hca.mtu < 256 || hca.mtu > 4096 || (hca.mtu & (hca.mtu - 1)) != 0))
    refuse(origin, fmt::format("\"mtu\" of \"hca\" is {}: it must be 256, 512, 1024, 2048 or 4096", hca.mtu));
  if (ack_timeout > 31) refuse(origin, fmt::format("\"ack_timeout\" of \"hca\" is {}: it must be from 0 to 31", ack_timeout));
  hca.ack_timeout = static_cast<std::uint8_t>(ack_timeout);
  if (port > 254) refuse(origin, fmt::format("\"port\" of \"hca\" is {}: it must be from 1 to 254", port));
  hca.port = static_cast<std::uint8_t>(port);
  if (section.contains("gid_index")) hca.gid_index = gid_index;
}

// A numeric address and port in one string, as for "seed"; or a list of them with names, as for "peers".
void read_hosts(const json& section, hosts::Settings& to, const std::string& origin) {
  std::string where = "\"hosts\"";
  const auto n = [&](auto& value, const std::string& key, auto... range) { return std::pair{key, number(value, origin, quoted_key(key, where), range...)}; };
  const auto t = [&](std::string& value, const std::string& key) { return std::pair{key, text(value, origin, quoted_key(key, where))}; };
  std::string folder = to.folder, seed;
  std::uint32_t lease_s = static_cast<std::uint32_t>(to.timing.lease_ms / 1000);
  std::map<std::string, Setter> keys{t(to.name, "name"),
                                     t(to.address, "address"),
                                     n(to.port, "port", 1u),
                                     n(to.carrier_port, "carrier_port"),
                                     n(to.lids, "lids", 1u, hosts::lid_max),
                                     t(folder, "folder"),
                                     t(seed, "seed"),
                                     n(lease_s, "lease_s", 1u, 86'400u),
                                     n(to.timing.heartbeat_ms, "heartbeat_ms", 10u, 200'000u),
                                     n(to.timing.election_ms, "election_ms", 30u, 600'000u),
                                     n(to.timing.refresh_ms, "refresh_ms", 10u, 28'800'000u),
                                     n(to.limits.opening_ms, "opening_ms", 100u),
                                     n(to.limits.silence_ms, "silence_ms", 1000u)};
  keys["encrypt"] = choice(to.encrypt, origin, quoted_key("encrypt", where));
  keys["peers"] = [&](const json& peers) {
    if (!peers.is_array())
      refuse(origin, fmt::format("\"peers\" is {}: it must be a list of objects with \"name\", \"address\" and \"port\"", shown(peers)));
    where = "\"peers\"";
    for (const json& peer : peers) {
      hosts::Endpoint& one = to.peers.emplace_back();
      one.port = hosts::default_port;
      apply(peer, {t(one.name, "name"), t(one.address, "address"), n(one.port, "port", 1u)}, origin, where);
    }
  };
  keys["etcd"] = [&](const json& etcd) {
    hosts::EtcdSettings& one = to.etcd.emplace();
    where = "\"etcd\"";
    const auto read_endpoints = [&](const json& list) {
      if (!list.is_array())
        refuse(origin, fmt::format("\"endpoints\" is {}: it must be a list of strings, as in [\"http://10.0.0.9:2379\"]", shown(list)));
      for (const json& url : list) text(one.endpoints.emplace_back(), origin, quoted_key("endpoints", where))(url);
    };
    apply(etcd,
          {{"endpoints", read_endpoints},
           t(one.prefix, "prefix"),
           t(one.ca_file, "ca_file"),
           t(one.certificate_file, "certificate_file"),
           t(one.key_file, "key_file")},
          origin, where);
  };
  apply(section, keys, origin, "\"hosts\"");
  to.folder = folder;
  to.timing.lease_ms = std::uint64_t{lease_s} * 1000;
  if (!section.contains("seed")) return;
  to.seed = hosts::address_and_port(seed);
  if (!to.seed) refuse(origin, fmt::format("\"seed\" is \"{}\": it must be a numeric address, with a port or without: \"10.0.0.1:28250\"", seed));
}

// "0x8001": ["1000", "b/1001"]
void read_partitions(const json& section, hosts::Partitions& to, const std::string& origin) {
  if (!section.is_object()) refuse(origin, fmt::format("\"partitions\" must be a JSON object, not {}", section.type_name()));
  to = {};
  for (const auto& [key, members] : section.items()) {
    const auto pkey = hosts::pkey_of(key);
    if (!pkey)
      refuse(origin, fmt::format("\"{}\" in \"partitions\" is no P_Key: 0x and four digits, as in \"0x8001\", a full membership, "
                                 "or \"0x0001\", a limited one",
                                 key));
    if (!members.is_array()) refuse(origin, fmt::format("\"{}\" in \"partitions\" must be a list of members, not {}", key, members.type_name()));
    for (const json& member : members) {
      const auto one = member.is_string()            ? hosts::membership_of(*pkey, member.get<std::string>())
                       : member.is_number_unsigned() ? hosts::membership_of(*pkey, member.dump())  // 1000 is as good as "1000"
                                                     : std::nullopt;
      if (!one)
        refuse(origin, fmt::format("{} in \"{}\" of \"partitions\" is no member: give a uid, or a host and a uid, as in \"1000\", "
                                   "\"b/1000\", \"b/*\" or \"*\"",
                                   shown(member), key));
      to.add(*one);
      if (to.memberships().size() >= hosts::memberships_max)
        refuse(origin, fmt::format("\"partitions\" has {} members or more", hosts::memberships_max));
    }
  }
}

void read_quota(const json& section, Quota& to, const std::string& origin) {
  const auto n = [&](auto& value, const std::string& key) { return std::pair{key, number(value, origin, quoted_key(key, "\"quota\""))}; };
  apply(section,
        {n(to.guests, "guests"), n(to.objects, "objects"), n(to.registered_bytes, "registered_bytes"), n(to.queue_bytes, "queue_bytes"),
         n(to.pieces, "pieces"), n(to.mappings, "mappings"), n(to.descriptors, "descriptors"), n(to.memberships, "memberships")},
        origin, "\"quota\"");
}

json document_of(const std::string& content, const std::string& origin) {
  // The parser takes a NUL for the end of the text, and of two values of one name the last: neither is what somebody meant.
  if (content.find('\0') != std::string::npos) refuse(origin, "not valid JSON: it contains a NUL byte");
  std::vector<std::set<std::string>> open;  // the keys of the objects that the parser is inside of
  const auto no_key_twice = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      refuse(origin, fmt::format("\"{}\" is given twice", parsed.get<std::string>()));
    return true;
  };
  try {
    return json::parse(content, no_key_twice, true, /*ignore_comments=*/true);
  } catch (const json::exception& error) {  // not only parse_error: a number that no double holds is out_of_range
    refuse(origin, fmt::format("not valid JSON: {}", error.what()));
  }
}

// A host sends from its own address, so it reaches none of the other family.
std::string one_family(const std::string& address, const std::string& what, const std::string& its) {
  const auto family = [](const std::string& one) { return hosts::is_v6(one) ? "IPv6" : "IPv4"; };
  return fmt::format("\"address\" is {} ({}), that of {} {} ({}): hosts reach each other by addresses of one family", address, family(address), what,
                     its, family(its));
}

}  // namespace

void Config::read_file(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) refuse(path, "that is a folder: give the file itself");
  std::ifstream file(path);
  if (!file) refuse(path, fmt::format("cannot read the configuration ({}): check the path and its permissions", std::strerror(errno)));
  constexpr std::size_t most = 1 << 20;  // what has no end, as /dev/zero, is told too
  std::string content(most + 1, '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  if (static_cast<std::size_t>(file.gcount()) > most) refuse(path, "that is longer than 1 MiB, and no configuration of vrdmad's");
  content.resize(static_cast<std::size_t>(file.gcount()));
  read_text(content, path);
}

void Config::read_text(const std::string& content, const std::string& origin) {
  const json document = document_of(content, origin);
  const auto n = [&](auto& to, const std::string& key, auto... range) { return std::pair{key, number(to, origin, quoted_key(key), range...)}; };
  const auto t = [&](std::string& to, const std::string& key) { return std::pair{key, text(to, origin, quoted_key(key))}; };
  const auto named_layer = [&](const json& value) {
    text(link_layer, origin, quoted_key("link_layer"))(value);
    if (link_layer == "ib") link_layer = "infiniband";
  };
  std::map<std::string, Setter> keys{t(socket, "socket"),           {"link_layer", named_layer},
                                     t(log_file, "log_file"),       t(log_level, "log_level"),
                                     t(vm_folder, "vm_folder"),
                                     {"socket_mode", mode(socket_mode, origin, quoted_key("socket_mode"))}, n(shards, "shards", 1u, shards_max),
                                     n(arena_bytes, "arena_bytes", arena_bytes_min, arena_bytes_max),
                                     n(machine_arena_bytes, "machine_arena_bytes", arena_bytes_min, machine_arena_bytes_max),
                                     n(machine_keep_s, "machine_keep_s"), n(lid_first, "lid_first", 1u, hosts::lid_max),
                                     n(lid_count, "lid_count", 1u, hosts::lid_max), n(active_mtu, "active_mtu", 256u, 4096u),
                                     n(idle_exit_s, "idle_exit_s"),
                                     t(process_memory, "process_memory"), t(direct, "direct")};
  keys["quota"] = [&](const json& value) { read_quota(value, quota, origin); };
  keys["remote"] = [&](const json& value) { read_remote(value, remote, origin); };
  keys["hca"] = [&](const json& value) { read_hca(value, hca, origin); };
  keys["partitions"] = [&](const json& value) { read_partitions(value, partitions, origin); };
  keys["hosts"] = [&](const json& value) { read_hosts(value, hosts.emplace(), origin); };
  apply(document, keys, origin, "the configuration");
}

void RemoteConfig::check() const {
  namespace addresses = vrdma::hosts;
  if (hosts.empty()) return;
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw std::runtime_error("configuration: \"remote\": " + what);
  };
  require(addresses::no_place(address).empty(), fmt::format("\"address\" is \"{}\", {}", address, addresses::no_place(address)));
  require(addresses::is_numeric(address), fmt::format("\"address\" is \"{}\": it must be the numeric address of this host's interface", address));
  require(port != 0, "\"port\" is 0: give the port to listen at (28251 by default)");
  require(!secret_file.empty(), "\"secret_file\" is missing: the file with the subnet's secret, the same on all hosts");
  bool self = false;
  for (const RemoteHost& host : hosts) {
    require(!host.name.empty() && host.name.size() < 40, fmt::format("\"name\" is \"{}\": it must have 1 to 39 characters", host.name));
    require(addresses::no_place(host.address).empty(), fmt::format("the \"address\" of host {} is \"{}\", {}", host.name, host.address, addresses::no_place(host.address)));
    require(addresses::is_numeric(host.address), fmt::format("the \"address\" of host {} is \"{}\": it must be numeric", host.name, host.address));
    require(host.port != 0, fmt::format("the \"port\" of host {} is 0", host.name));
    const auto named = std::count_if(hosts.begin(), hosts.end(), [&](const RemoteHost& other) { return other.name == host.name; });
    require(named == 1, fmt::format("host {} is named twice in \"hosts\"", host.name));
    require(host.lid_first != 0, fmt::format("host {} has no \"lids\"", host.name));
    require(host.name != name || (addresses::same_address(host.address, address) && host.port == port),
            fmt::format("this host, {}, is at {} by its \"address\" and \"port\", at {} in \"hosts\": the others look for it there", name,
                        addresses::with_port(address, port), addresses::with_port(host.address, host.port)));
    require(addresses::is_v6(host.address) == addresses::is_v6(address), one_family(address, fmt::format("host {}", host.name), host.address));
    self |= host.name == name;
    for (const RemoteHost& other : hosts) {
      if (&other == &host) break;
      require(host.port != other.port || !addresses::same_address(host.address, other.address),
              fmt::format("hosts {} and {} are both at {}: give each an address or a port of its own", other.name, host.name,
                          addresses::with_port(host.address, host.port)));
      require(other.lid_last < host.lid_first || host.lid_last < other.lid_first,
              fmt::format("hosts {} and {} have LIDs in common: {}-{} and {}-{}", other.name, host.name, other.lid_first, other.lid_last,
                          host.lid_first, host.lid_last));
    }
  }
  require(self, fmt::format("\"name\" is \"{}\", which is none of \"hosts\": this host must be among them", name));
}

std::uint32_t default_shards() {
  constexpr std::uint32_t processors_each = 4;  // it polls beside the programs that it serves
  return std::clamp(std::thread::hardware_concurrency() / processors_each, 1u, shards_max);
}

std::string Config::machines_folder() const {
  if (!vm_folder.empty()) return vm_folder;
  return std::filesystem::absolute(std::filesystem::path(socket)).parent_path() / "vm";
}

namespace {

void require(bool good, const std::string& what) {
  if (!good) throw WrongConfiguration("configuration: " + what);
}

}  // namespace

void check_place_among_peers(const hosts::Settings& section, const std::string& name) {
  for (const auto& peer : section.peers) {
    const bool here = hosts::same_address(peer.address, section.address) && peer.port == section.port;
    require((peer.name == name) == here,
            fmt::format("\"peers\" has \"{}\" at {}, this host, \"{}\", is at {} by its \"address\" and \"port\": the others look for it by \"peers\"", peer.name,
                        hosts::with_port(peer.address, peer.port), name, hosts::with_port(section.address, section.port)));
  }
}

namespace {

void check_hosts(const hosts::Settings& section) {
  const auto endpoint = [](const std::string& what, const std::string& address, std::uint16_t port) {
    require(hosts::no_place(address).empty(), fmt::format("\"address\" of {} is \"{}\", {}", what, address, hosts::no_place(address)));
    require(hosts::is_numeric(address), fmt::format("\"address\" of {} is \"{}\": it must be a numeric IP address", what, address));
    require(port != 0, fmt::format("\"port\" of {} is 0: it must be from 1 to 65535", what));
  };
  endpoint("\"hosts\"", section.address, section.port);
  require(section.carrier_port != section.port,
          fmt::format("\"port\" and \"carrier_port\" of \"hosts\" are both {}: give each its own", section.port));
  const auto reachable = [&](const std::string& what, const std::string& address) {
    require(hosts::is_v6(address) == hosts::is_v6(section.address), one_family(section.address, what, address));
  };
  if (section.seed) {
    const std::string& address = section.seed->first;
    require(hosts::no_place(address).empty(), fmt::format("\"seed\" is \"{}\", {}", address, hosts::no_place(address)));
    reachable("the \"seed\"", address);
  }
  require(section.port != 65535 || section.carrier_port != 0, "\"port\" of \"hosts\" is 65535: give a \"carrier_port\", as there is none after it");
  require(section.lids >= 1 && section.lids <= hosts::lid_max, fmt::format("\"lids\" is {}: it must be from 1 to {}", section.lids, hosts::lid_max));
  require(!section.folder.empty(), "\"folder\" of \"hosts\" is empty: give that of \"vrdma host\"");
  require(section.peers.empty() || !section.seed, "\"hosts\" has \"peers\" and \"seed\": give one of them");
  if (section.etcd) {
    const auto& etcd = *section.etcd;
    require(section.peers.empty() && !section.seed,
            "\"hosts\" has \"etcd\" and \"peers\" or \"seed\": where an etcd knows who leads, they are not needed");
    require(!etcd.endpoints.empty(), "\"etcd\" has no \"endpoints\": give a list of URLs, as in [\"http://10.0.0.9:2379\"]");
    for (const auto& url : etcd.endpoints)
      require(hosts::etcd_endpoint(url).has_value(),
              fmt::format("\"{}\" in \"endpoints\" of \"etcd\" is not http://HOST:PORT or https://HOST:PORT", url));
    require(!etcd.prefix.empty(), "\"prefix\" of \"etcd\" is empty: it is the beginning of the subnet's keys");
    require(etcd.certificate_file.empty() == etcd.key_file.empty(),
            "\"etcd\" has one of \"certificate_file\" and \"key_file\": give both or neither");
  }
  require(section.peers.size() <= hosts::managers_max,
          fmt::format("\"peers\" has {} hosts: at most {} lead a subnet, the others name one as \"seed\"", section.peers.size(),
                      hosts::managers_max));
  for (const auto& peer : section.peers) {
    endpoint("\"" + peer.name + "\" in \"peers\"", peer.address, peer.port);
    reachable("\"" + peer.name + "\" in \"peers\"", peer.address);
    const auto same = [&](const hosts::Endpoint& other) {
      return other.name == peer.name || (other.address == peer.address && other.port == peer.port);
    };
    require(std::count_if(section.peers.begin(), section.peers.end(), same) == 1,
            fmt::format("\"{}\" or its address is in \"peers\" twice", peer.name));
  }
  if (!section.name.empty()) check_place_among_peers(section, section.name);
  const auto& timing = section.timing;
  require(timing.heartbeat_ms >= 10 && timing.election_ms >= 3 * timing.heartbeat_ms && timing.election_ms <= 600'000,
          fmt::format("\"election_ms\" is {}, \"heartbeat_ms\" {}: at least 10 ms between heartbeats, and three of them (to ten minutes) "
                      "until an election",
                      timing.election_ms, timing.heartbeat_ms));
  require(timing.refresh_ms >= 10, fmt::format("\"refresh_ms\" is {}: it must be at least 10", timing.refresh_ms));
  require(timing.lease_ms >= 3 * timing.refresh_ms && timing.lease_ms <= 86'400'000,
          fmt::format("\"lease_s\" is {}, \"refresh_ms\" {}: a lease lasts at least three of them, and at most a day", timing.lease_ms / 1000,
                      timing.refresh_ms));
  require(section.limits.opening_ms >= 100 && section.limits.silence_ms >= 1000, "\"opening_ms\" is at least 100, \"silence_ms\" at least 1000");
}

}  // namespace

void Config::check() const {
  require(!socket.empty(), "\"socket\" is empty: give the path of the socket to listen at");
  require(socket.size() <= socket_characters_max,
          fmt::format("\"socket\" is \"{}\" ({}): a socket's path has at most {} characters", socket, std::strerror(ENAMETOOLONG), socket_characters_max));
  require(link_layer == "infiniband" || link_layer == "ethernet",
          fmt::format("\"link_layer\" is \"{}\": it must be \"infiniband\" (or \"ib\") or \"ethernet\"", link_layer));
  require(shards >= 1 && shards <= shards_max, fmt::format("\"shards\" is {}: 1 to {} are possible", shards, shards_max));
  require(arena_bytes >= arena_bytes_min && arena_bytes <= arena_bytes_max && arena_bytes % 4096 == 0,
          fmt::format("\"arena_bytes\" is {}: it must be a multiple of 4096 from 1 MiB to 1 TiB", arena_bytes));
  require(machine_arena_bytes >= arena_bytes_min && machine_arena_bytes <= machine_arena_bytes_max && machine_arena_bytes % 4096 == 0,
          fmt::format("\"machine_arena_bytes\" is {}: it must be a multiple of 4096 from 1 MiB to 4 GiB", machine_arena_bytes));
  constexpr std::uint32_t lid_max = hosts::lid_max;
  require(lid_first >= 1 && lid_first <= lid_max && lid_count >= 1 && lid_count <= lid_max - lid_first + 1,
          fmt::format("\"lid_count\" {} from \"lid_first\" {}: unicast LIDs are 1 to {}", lid_count, lid_first, lid_max));
  remote.check();
  require(active_mtu == 256 || active_mtu == 512 || active_mtu == 1024 || active_mtu == 2048 || active_mtu == 4096,
          fmt::format("\"active_mtu\" is {}: it must be 256, 512, 1024, 2048 or 4096", active_mtu));
  require(process_memory == "auto" || process_memory == "direct" || process_memory == "guest",
          fmt::format("\"process_memory\" is \"{}\": it must be \"auto\", \"direct\" or \"guest\"", process_memory));
  require(direct == "mediated" || direct == "auto", fmt::format("\"direct\" is \"{}\": it must be \"mediated\" or \"auto\"", direct));
  if (hosts) check_hosts(*hosts);
  require(!hosts || remote.hosts.empty(), "\"hosts\" and \"remote\" are both given: a subnet has a manager, or is simply configured");
  require(!hosts || partitions.empty(),
          "\"hosts\" and \"partitions\" are both given: the subnet's managers know the partitions, see \"vrdma host partition\"");
  for (const auto& one : partitions.memberships())
    require(one.host.empty() || std::any_of(remote.hosts.begin(), remote.hosts.end(), [&](const RemoteHost& host) { return host.name == one.host; }),
            fmt::format("\"{}\" in \"partitions\": there is no host \"{}\" in \"remote\"", one.member(), one.host));
  static const std::vector<std::string> levels{"trace", "debug", "info", "warn", "error", "off"};
  require(std::find(levels.begin(), levels.end(), log_level) != levels.end(),
          fmt::format("\"log_level\" is \"{}\": it must be one of trace, debug, info, warn, error, off", log_level));
}

}  // namespace vrdma::svc
