#include "cli/show.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/output.hpp"
#include "cli/query.hpp"

namespace vrdma::cli {

namespace {

using nlohmann::json;

// One object on one line, as words and values in turn, in the manner of iproute2's rdma.
class Line {
 public:
  explicit Line(std::string start) : text_(std::move(start)) {}
  Line& add(const char* word, const json& value) {
    text_ += fmt::format(" {} {}", word, value.is_string() ? value.get<std::string>() : value.dump());
    return *this;
  }
  Line& add_unless_zero(const char* word, const json& value) { return value == 0 ? *this : add(word, value); }
  Line& add_counters(const json& counters) {
    for (const auto& [name, count] : counters.items()) add(name.c_str(), count);
    return *this;
  }
  void end(std::string& to) const { to += text_ + "\n"; }

 private:
  std::string text_;
};

std::string joined(const json& list, const char* none) {
  std::string text;
  for (const auto& item : list) text += (text.empty() ? "" : ",") + item.get<std::string>();
  return text.empty() ? none : text;
}

// 0x0200… as 0200:00ff:fe00:0001
std::string guid(const json& value) {
  const std::string hex = value.get<std::string>();
  if (hex.size() != 18) return hex;
  return fmt::format("{}:{}:{}:{}", hex.substr(2, 4), hex.substr(6, 4), hex.substr(10, 4), hex.substr(14, 4));
}

Line link_of(const json& guest) { return Line(fmt::format("link vrdma0/1 guest {}", guest.at("guest").get<std::uint32_t>())); }
Line dev_of(const json& guest) { return Line(fmt::format("dev vrdma0 guest {}", guest.at("guest").get<std::uint32_t>())); }

std::string access_words(std::uint32_t flags) {
  constexpr const char* words[] = {"local_write", "remote_write", "remote_read", "remote_atomic", "mw_bind", "zero_based"};
  std::string text;
  for (std::size_t bit = 0; bit < std::size(words); ++bit)
    if (flags & (1u << bit)) text += (text.empty() ? "" : ",") + std::string(words[bit]);
  return text.empty() ? "local_read" : text;
}

std::string quoted(const json& text) { return "\"" + text.get<std::string>() + "\""; }

void devices(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests")) {
    const json& device = guest.at("device");
    const json& limits = device.at("limits");
    Line line = dev_of(guest);
    line.add("name", guest.at("name")).add("adapter", "\"" + device.at("adapter").get<std::string>() + "\"");
    line.add("physical_hca_available", device.at("physical_hca_available") == true ? "yes" : "no");
    line.add("fw", device.at("fw_version")).add("node_guid", guid(device.at("node_guid")));
    line.add("sys_image_guid", guid(device.at("sys_image_guid"))).add("port", device.at("port")).add("state", device.at("state"));
    line.add("link_layer", device.at("link_layer")).add("lid", device.at("lid")).add("active_mtu", device.at("active_mtu"));
    line.add("max_mtu", device.at("max_mtu")).add("roce", joined(device.at("roce_versions"), "none"));
    line.add("qp_types", joined(device.at("qp_types"), "none")).add("srq", device.at("srq_supported") == true ? "yes" : "no");
    line.add("max_qp", limits.at("qps")).add("max_cq", limits.at("cqs")).add("max_srq", limits.at("srqs"));
    line.add("max_mr", limits.at("mrs")).add("max_pd", limits.at("pds")).add("max_qp_wr", limits.at("qp_wr"));
    line.add("max_cqe", limits.at("cqe")).add("max_sge", limits.at("sge"));
    for (const auto& gid : device.at("gids"))
      line.add("gid", fmt::format("{}={}/{}", gid.at("index").get<int>(), gid.at("gid").get<std::string>(),
                                  gid.at("type") == "RoCE v2" ? "RoCEv2" : gid.at("type") == "RoCE v1" ? "RoCEv1" : "IB"));
    line.add("pkeys", joined(device.at("pkeys"), "none"));
    line.end(out);
  }
}

void guests(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests")) {
    Line line = link_of(guest);
    line.add("name", guest.at("name")).add("lid", guest.at("device").at("lid")).add("state", guest.at("device").at("state"));
    if (guest.contains("machine") && guest.at("machine").is_string()) line.add("vm", guest.at("machine"));
    line.add("link_layer", guest.at("link_layer")).add("uid", guest.at("uid")).add("pid", guest.at("pid"));
    line.add("pd", guest.at("pds").size()).add("cq", guest.at("cqs").size()).add("qp", guest.at("qps").size());
    line.add("srq", guest.at("srqs").size()).add("mr", guest.at("mrs").size()).add("ctx", guest.at("contexts").size());
    line.add("requests", guest.at("requests")).add_unless_zero("protocol_errors", guest.at("protocol_errors"));
    line.add_unless_zero("bad_pkeys", guest.at("bad_pkeys"));
    line.end(out);
  }
}

void qps(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& qp : guest.at("qps")) {
      Line line = link_of(guest);
      line.add("lqpn", qp.at("qpn")).add_unless_zero("rqpn", qp.at("dest_qpn")).add("type", qp.at("type")).add("state", qp.at("state"));
      line.add("mode", qp.at("mode")).add("pkey", qp.at("pkey").is_string() ? qp.at("pkey") : json("none")).add_unless_zero("dlid", qp.at("dlid")).add_unless_zero("path_mtu", qp.at("path_mtu"));
      if (qp.at("dgid").is_string()) line.add("dgid", qp.at("dgid"));
      line.add("pdn", qp.at("pd")).add("scqn", qp.at("send_cq")).add("rcqn", qp.at("recv_cq")).add_unless_zero("srqn", qp.at("srq"));
      line.add("max_send_wr", qp.at("max_send_wr")).add("max_recv_wr", qp.at("max_recv_wr")).add("pid", guest.at("pid"));
      if (const auto& why = qp.at("mediated_because"); why.is_string()) line.add("mediated-because", why);
      if (const auto carrier = qp.value("carrier", json()); carrier.is_object() && carrier.at("why") != "only-carrier") line.add("via", carrier.at("via")).add("why", quoted(carrier.at("why")));
      line.end(out);
    }
}

void cqs(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& cq : guest.at("cqs")) {
      Line line = dev_of(guest);
      line.add("cqn", cq.at("cq")).add("cqe", cq.at("cqe")).add("completions", cq.at("completions"));
      line.add_unless_zero("channel", cq.at("channel"));
      if (cq.at("overrun") == true) line.add("state", "OVERRUN");
      line.add("pid", guest.at("pid")).end(out);
    }
}

void mrs(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& mr : guest.at("mrs"))
      dev_of(guest).add("mrn", mr.at("mr")).add("mrlen", mr.at("bytes")).add("address", mr.at("address")).add("path", mr.at("path"))
          .add("unmapped_by", mr.at("unmapped_by"))
          .add("mapped", mr.at("mapped_bytes")).add("pieces", mr.at("pieces")).add("access", access_words(mr.at("access")))
          .add("pid", guest.at("pid")).end(out);
}

void srqs(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& srq : guest.at("srqs"))
      dev_of(guest).add("srqn", srq.at("srqn")).add("type", srq.at("type")).add("max_wr", srq.at("max_wr")).add("taken", srq.at("taken"))
          .add("limit", srq.at("limit")).add("qp", srq.at("qps")).add("pid", guest.at("pid")).end(out);
}

void cm_ids(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& one : guest.value("cm_ids", json::array())) {
      Line line = link_of(guest);
      line.add("cm-idn", one.at("cm_id")).add("type", one.at("type")).add("state", one.at("state")).add("ps", one.at("port_space")).add("pid", guest.at("pid"));
      for (const auto& [name, key] : {std::pair{"src-addr", "src_addr"}, {"dst-addr", "dst_addr"}})
        if (one.at(key) != "") line.add(name, one.at(key));
      line.end(out);
    }
}

void routes(const json& state, std::string& out) {
  for (const auto& route : state.at("routes")) {
    Line line(route.at("lid") == 0 ? "route" : fmt::format("route lid {}", route.at("lid").get<int>()));
    for (const auto& gid : route.at("gids")) line.add("gid", gid);
    line.add("via", route.at("via")).add("guest", route.at("guest")).add("name", route.at("name")).end(out);
  }
  for (const auto& host : state.value("carriers", json::array()))
    Line("route lids " + host.at("lids").get<std::string>()).add("via", host.at("via")).add("host", host.at("host")).add("address", host.at("address"))
        .add("state", host.at("state")).add("why", host.at("why") == "only-carrier" ? host.at("why") : json(quoted(host.at("why"))))
        .add_unless_zero("records_via_tcp", host.at("via") == "hca" && host.at("records_why") != "" ? json(quoted(host.at("records_why"))) : json(0))
        .add_unless_zero("fallen_back", host.at("fallen_back") != "" ? json(quoted(host.at("fallen_back"))) : json(0)).add_unless_zero("silent_ms", host.at("silent_ms") > 1000 ? host.at("silent_ms") : json(0))
        .add_unless_zero("encrypted", host.value("encrypted", false) ? json("yes") : json(0))
        .add_unless_zero("disagreement", host.value("disagreement", "") != "" ? json(quoted(host.at("disagreement"))) : json(0))
        .add_unless_zero("unauthenticated", host.value("unauthenticated", json(0)))
        .add_unless_zero("small_packets", host.value("small_packets", false) ? json("yes") : json(0))
        .add("connections_here", host.at("connections_here")).add_unless_zero("groups", host.value("groups", json(0)))
        .add_unless_zero("multicast_datagrams", host.value("multicast_datagrams", json(0))).add_counters(host.at("counters")).end(out);
  for (const auto& group : state.value("groups", json::array()))
    Line("route mgid " + group.at("mgid").get<std::string>()).add("members_here", group.at("members")).add("hosts", joined(group.at("hosts"), "none")).end(out);
}

std::string range(const json& lids) { return lids.is_array() ? fmt::format("{}-{}", lids.at(0).get<int>(), lids.at(1).get<int>()) : "none"; }

void hosts(const json& state, std::string& out) {
  const json& us = state.at("subnet");
  if (!us.is_object()) return;
  Line line("host " + us.at("name").get<std::string>());
  line.add("address", us.at("address")).add("port", us.at("port")).add("lids", range(us.at("lids"))).add("state", "here");
  line.add("lease", us.at("may_give") == true ? fmt::format("{}s", us.at("lease_s").get<std::int64_t>()) : "none");
  if (us.at("manages") == true) line.add("manager", us.at("leader") == us.at("name") ? "leads" : "yes");
  line.add("leader", us.at("leader") == "" ? json("none") : us.at("leader"));
  if (us.at("problem") != "") line.add("problem", "\"" + us.at("problem").get<std::string>() + "\"");
  if (us.at("strangers") != 0) line.add("refused", us.at("strangers")).add("last_refused", "\"" + us.at("last_stranger").get<std::string>() + "\"");
  line.end(out);
  for (const auto& other : us.at("others")) {
    Line one("host " + other.at("name").get<std::string>());
    one.add("address", other.at("address")).add("port", other.at("port")).add("lids", range(other.at("lids")));
    one.add("state", other.at("reachable") == true ? "connected" : "unreachable");
    if (other.at("manages") == true) one.add("manager", other.at("leads") == true ? "leads" : "yes");
    if (other.at("version") != "") one.add("version", other.at("version"));
    if (other.at("reachable") != true && other.at("problem") != "") one.add("problem", "\"" + other.at("problem").get<std::string>() + "\"");
    one.end(out);
  }
}

void caches(const json& state, std::string& out) {
  for (const auto& [name, counters] : state.at("cache").items()) Line("cache " + name).add_counters(counters).end(out);
}

void hca(const json& state, std::string& out) {
  const json& hca = state.value("hca", json());
  if (!hca.is_object()) {
    Line("hca").add("state", "none").add("why", "\"vrdmad was not told to use one\"").end(out);
    return;
  }
  Line line(hca.contains("device") ? fmt::format("hca {}/{}", hca.at("device").get<std::string>(), hca.at("port").get<int>()) : "hca");
  line.add("state", hca.at("state"));
  if (hca.contains("device"))
    line.add("link_layer", hca.at("link_layer")).add("gid", hca.at("gid")).add("gid_index", hca.at("gid_index")).add("mtu", hca.at("mtu")).add("pfc", hca.at("pfc"));
  else
    line.add("why", quoted(hca.at("why")));
  line.add("connections", hca.at("connections")).add("mrs", hca.at("registrations")).add("mrs_under_way", hca.value("being_registered", 0)).add_counters(hca.at("counters")).end(out);
}

void counters(const json& state, std::string& out) {
  for (const auto& guest : state.at("guests"))
    for (const auto& qp : guest.at("qps")) link_of(guest).add("lqpn", qp.at("qpn")).add_counters(qp.at("counters")).end(out);
  for (const auto& guest : state.at("guests")) link_of(guest).add("name", guest.at("name")).add_counters(guest.at("counters")).end(out);
  for (const auto& tenant : state.at("tenants"))
    Line(fmt::format("tenant uid {}", tenant.at("uid").get<std::uint32_t>())).add("guests", tenant.at("guests"))
        .add("objects", tenant.at("objects")).add("registered_bytes", tenant.at("registered_bytes"))
        .add("queue_bytes", tenant.at("queue_bytes")).add("moved_bytes", tenant.at("moved_bytes")).end(out);
  Line("service").add_counters(state.at("counters")).end(out);
}

void overview(const json& state, std::string& out) {
  const json& service = state.at("service");
  Line("service " + service.at("socket").get<std::string>()).add("version", service.at("version"))
      .add("channel", service.at("channel_version")).add("pid", service.at("pid")).add("uid", service.at("uid"))
      .add("link_layer", service.at("link_layer")).add("active_mtu", service.at("active_mtu"))
      .add("physical_hca", service.at("physical_hca") == true ? "yes" : "no").add("guests", state.at("guests").size()).end(out);
  guests(state, out);
}

struct View {
  const char* name;
  void (*print)(const json&, std::string&);
};
constexpr View views[] = {{"", overview},  {"devices", devices}, {"guests", guests}, {"qps", qps},     {"cqs", cqs},
                          {"mrs", mrs},    {"srqs", srqs},       {"cm_ids", cm_ids}, {"routes", routes}, {"hosts", hosts}, {"hca", hca}, {"cache", caches}, {"counters", counters}};

void sort_by(json& list, const char* key) {
  std::sort(list.begin(), list.end(), [key](const json& a, const json& b) { return a.at(key) < b.at(key); });
}

json state_of(const std::string& socket) {
  auto service = find_service_to_show(socket);
  if (!service) throw unreachable(socket);
  json state = query(*service);
  sort_by(state.at("guests"), "guest");  // the service answers in the order of its tables
  sort_by(state.at("routes"), "guest");
  for (auto& guest : state.at("guests"))
    for (const auto& [list, key] : {std::pair{"qps", "qpn"}, {"cqs", "cq"}, {"mrs", "mr"}, {"srqs", "srq"}}) sort_by(guest.at(list), key);
  return state;
}

// --- Prometheus -----------------------------------------------------------------------------------------------

std::string label(const std::string& value) {  // text format 0.0.4: backslash, quote and newline are escaped
  std::string escaped;
  for (const char c : value) {
    if (c == '\n') {
      escaped += "\\n";
      continue;
    }
    if (c == '\\' || c == '"') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

class Metrics {
 public:
  // All samples of a name stand together below its heading: begin() first, then add().
  void begin(const std::string& name, const char* type, const char* help) {
    name_ = "vrdma_" + name;
    text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name_, help, name_, type);
  }
  void add(const json& value, const std::string& labels = {}) {
    text_ += labels.empty() ? fmt::format("{} {}\n", name_, value.dump()) : fmt::format("{}{{{}}} {}\n", name_, labels, value.dump());
  }
  std::string take() { return std::move(text_); }

 private:
  std::string name_, text_;
};

}  // namespace

std::string show_text(const json& state, const std::string& object) {
  std::string out;
  for (const auto& view : views)
    if (object == view.name) view.print(state, out);
  return out;
}

json show_json(const json& state, const std::string& object) {
  if (object.empty()) return state;
  if (object == "guests" || object == "cache" || object == "hca") return state.at(object);
  if (object == "hosts") return state.at("subnet");
  if (object == "routes") {  // to this host's guests, then to other hosts, then to groups
    json out = state.at("routes");
    for (const char* more : {"carriers", "groups"})
      for (const auto& route : state.value(more, json::array())) out.push_back(route);
    return out;
  }
  if (object == "counters") {
    json out{{"service", state.at("counters")}, {"tenants", state.at("tenants")}, {"guests", json::array()}};
    for (const auto& guest : state.at("guests")) {
      json queue_pairs = json::array();
      for (const auto& qp : guest.at("qps")) queue_pairs.push_back({{"qpn", qp.at("qpn")}, {"counters", qp.at("counters")}});
      out["guests"].push_back({{"guest", guest.at("guest")}, {"name", guest.at("name")}, {"counters", guest.at("counters")}, {"qps", queue_pairs}});
    }
    return out;
  }
  json out = json::array();
  for (const auto& guest : state.at("guests")) {
    const auto add = [&](json item) {
      item["guest"] = guest.at("guest");
      item["name"] = guest.at("name");
      out.push_back(std::move(item));
    };
    if (object == "devices") add(guest.at("device"));
    else for (const auto& item : guest.at(object)) add(item);
  }
  return out;
}

int show(const ShowOptions& options) {
  const json state = state_of(options.socket);
  const std::string text = options.json ? show_json(state, options.object).dump(2) + "\n" : show_text(state, options.object);
  print_all(text);
  return 0;
}

std::string metrics_text(const json& state) {
  Metrics out;
  const auto each_guest = [&](auto&& sample) {
    for (const auto& guest : state.at("guests"))
      sample(guest, fmt::format("guest=\"{}\",name=\"{}\",uid=\"{}\"", guest.at("guest").get<std::uint32_t>(),
                                label(guest.at("name").get<std::string>()), guest.at("uid").get<std::uint32_t>()));
  };
  const auto each_tenant = [&](const char* key) {
    for (const auto& tenant : state.at("tenants")) out.add(tenant.at(key), fmt::format("uid=\"{}\"", tenant.at("uid").get<std::uint32_t>()));
  };
  out.begin("service_info", "gauge", "Always 1; the labels say which service answers.");
  out.add(1, fmt::format("version=\"{}\",link_layer=\"{}\"", label(state.at("service").at("version").get<std::string>()),
                         label(state.at("service").at("link_layer").get<std::string>())));
  out.begin("guests", "gauge", "Guests that are attached.");
  out.add(state.at("guests").size());
  out.begin("objects", "gauge", "Verbs objects of a guest.");
  each_guest([&](const json& guest, const std::string& labels) {
    for (const char* kind : {"qps", "cqs", "mrs", "srqs", "pds"}) out.add(guest.at(kind).size(), labels + fmt::format(",kind=\"{}\"", kind));
  });
  out.begin("control_requests_total", "counter", "Control requests served for a guest.");
  each_guest([&](const json& guest, const std::string& labels) { out.add(guest.at("requests"), labels); });
  out.begin("protocol_errors_total", "counter", "Bytes of a guest that made no sense.");
  each_guest([&](const json& guest, const std::string& labels) { out.add(guest.at("protocol_errors"), labels); });
  if (!state.at("guests").empty())
    for (const auto& counter : state.at("guests").front().at("counters").items()) {
      const std::string& name = counter.key();
      out.begin("qp_" + name + "_total", "counter", "Sum over the queue pairs of a guest, those that are gone too.");
      each_guest([&](const json& guest, const std::string& labels) { out.add(guest.at("counters").at(name), labels); });
    }
  out.begin("tenant_objects", "gauge", "Verbs objects of a tenant; its quota counts these.");
  each_tenant("objects");
  out.begin("tenant_registered_bytes", "gauge", "Registered memory of a tenant.");
  each_tenant("registered_bytes");
  out.begin("tenant_queue_bytes", "gauge", "Memory of a tenant's queues.");
  each_tenant("queue_bytes");
  out.begin("tenant_moved_bytes_total", "counter", "Bytes moved for a tenant.");
  each_tenant("moved_bytes");
  for (const char* what : {"hits", "misses", "invalidations"}) {
    out.begin(fmt::format("cache_{}_total", what), "counter", "Look-ups of a cache of the service.");
    for (const auto& [name, counters] : state.at("cache").items()) out.add(counters.at(what), fmt::format("cache=\"{}\"", name));
  }
  for (const char* what : {"turns", "sleeps", "doorbells"}) {
    out.begin(fmt::format("shard_{}_total", what), "counter", "Of a thread that runs the engine.");
    for (const auto& shard : state.at("shards")) out.add(shard.at(what), fmt::format("shard=\"{}\"", shard.at("shard").get<std::uint32_t>()));
  }
  return out.take();
}

int metrics(const std::string& socket) {
  print_all(metrics_text(state_of(socket)));
  return 0;
}

}  // namespace vrdma::cli
