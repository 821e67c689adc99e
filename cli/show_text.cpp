#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/show.hpp"
#include "cli/shown.hpp"

namespace vrdma::cli {

namespace {

using nlohmann::json;

std::string quoted(Shown text) { return "\"" + text.text() + "\""; }

// One object on one line, as words and values in turn, in the manner of iproute2's rdma.
class Line {
 public:
  explicit Line(std::string start) : text_(std::move(start)) {}
  Line& add(const char* word, const std::string& value) {
    text_ += fmt::format(" {} {}", word, value);
    return *this;
  }
  // What is missing is left out.
  Line& add(const char* word, Shown value) { return value.is_null() ? *this : add(word, value.text()); }
  Line& add_unless_zero(const char* word, Shown value) { return value.json() == 0 ? *this : add(word, value); }
  Line& add_count(const char* word, Shown list) { return list.is_null() ? *this : add(word, std::to_string(list.size())); }
  Line& add_truth(const char* word, Shown truth, const char* yes, const char* no) { return truth.is_null() ? *this : add(word, truth.is_true() ? yes : no); }
  Line& add_quoted(const char* word, Shown text) { return text.says_something() ? add(word, quoted(text)) : *this; }
  Line& add_if(bool is_so, const char* word, const char* value) { return is_so ? add(word, value) : *this; }
  Line& add_counters(Shown counters) {
    for (const auto& [name, count] : counters.items()) add(name.c_str(), Shown(count));
    return *this;
  }
  void end(std::string& to) const { to += text_ + "\n"; }

 private:
  std::string text_;
};

std::string joined(Shown list, const char* none) {
  std::string text;
  for (const Shown item : list) text += (text.empty() ? "" : ",") + item.text();
  return text.empty() ? list.is_null() ? "-" : none : text;
}

// 0x0200… as 0200:00ff:fe00:0001
std::string guid(Shown value) {
  const std::string hex = value.text();
  if (hex.size() != 18) return hex;
  return fmt::format("{}:{}:{}:{}", hex.substr(2, 4), hex.substr(6, 4), hex.substr(10, 4), hex.substr(14, 4));
}

Line link_of(Shown guest) { return Line("link vrdma0/1 guest " + guest.at("guest").text()); }
Line dev_of(Shown guest) { return Line("dev vrdma0 guest " + guest.at("guest").text()); }

std::string access_words(Shown bits) {
  if (bits.is_null()) return "-";
  const std::uint64_t flags = bits.number();
  constexpr const char* words[] = {"local_write", "remote_write", "remote_read", "remote_atomic", "mw_bind", "zero_based"};
  std::string text;
  for (std::size_t bit = 0; bit < std::size(words); ++bit)
    if ((flags & (1u << bit)) != 0) text += (text.empty() ? "" : ",") + std::string(words[bit]);
  return text.empty() ? "local_read" : text;
}

void devices(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests")) {
    const Shown device = guest.at("device"), limits = device.at("limits");
    Line line = dev_of(guest);
    line.add("name", guest.at("name")).add_quoted("adapter", device.at("adapter"));
    line.add_truth("physical_hca_available", device.at("physical_hca_available"), "yes", "no");
    line.add("fw", device.at("fw_version")).add("node_guid", guid(device.at("node_guid")));
    line.add("sys_image_guid", guid(device.at("sys_image_guid"))).add("port", device.at("port")).add("state", device.at("state"));
    line.add("link_layer", device.at("link_layer")).add("lid", device.at("lid")).add("active_mtu", device.at("active_mtu"));
    line.add("max_mtu", device.at("max_mtu")).add("roce", joined(device.at("roce_versions"), "none"));
    line.add("qp_types", joined(device.at("qp_types"), "none")).add_truth("srq", device.at("srq_supported"), "yes", "no");
    line.add("max_qp", limits.at("qps")).add("max_cq", limits.at("cqs")).add("max_srq", limits.at("srqs"));
    line.add("max_mr", limits.at("mrs")).add("max_pd", limits.at("pds")).add("max_qp_wr", limits.at("qp_wr"));
    line.add("max_cqe", limits.at("cqe")).add("max_sge", limits.at("sge"));
    for (const Shown gid : device.at("gids"))
      line.add("gid", fmt::format("{}={}/{}", gid.at("index").text(), gid.at("gid").text(),
                                  gid.at("type").is("RoCE v2") ? "RoCEv2" : gid.at("type").is("RoCE v1") ? "RoCEv1" : "IB"));
    line.add("pkeys", joined(device.at("pkeys"), "none"));
    line.end(out);
  }
}

void guests(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests")) {
    Line line = link_of(guest);
    line.add("name", guest.at("name")).add("lid", guest.at("device").at("lid")).add("state", guest.at("device").at("state"));
    line.add("vm", guest.at("machine"));
    line.add("link_layer", guest.at("link_layer")).add("uid", guest.at("uid")).add("pid", guest.at("pid"));
    line.add_count("pd", guest.at("pds")).add_count("cq", guest.at("cqs")).add_count("qp", guest.at("qps"));
    line.add_count("srq", guest.at("srqs")).add_count("mr", guest.at("mrs")).add_count("ctx", guest.at("contexts"));
    line.add("requests", guest.at("requests")).add_unless_zero("protocol_errors", guest.at("protocol_errors"));
    line.add_unless_zero("bad_pkeys", guest.at("bad_pkeys"));
    line.end(out);
  }
}

void qps(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown qp : guest.at("qps")) {
      Line line = link_of(guest);
      line.add("lqpn", qp.at("qpn")).add_unless_zero("rqpn", qp.at("dest_qpn")).add("type", qp.at("type")).add("state", qp.at("state"));
      line.add("mode", qp.at("mode"));
      if (qp.has("pkey")) line.add("pkey", qp.at("pkey").is_string() ? qp.at("pkey").text() : "none");
      line.add_unless_zero("dlid", qp.at("dlid")).add_unless_zero("path_mtu", qp.at("path_mtu")).add("dgid", qp.at("dgid"));
      line.add("pdn", qp.at("pd")).add("scqn", qp.at("send_cq")).add("rcqn", qp.at("recv_cq")).add_unless_zero("srqn", qp.at("srq"));
      line.add("max_send_wr", qp.at("max_send_wr")).add("max_recv_wr", qp.at("max_recv_wr")).add("pid", guest.at("pid"));
      line.add("mediated-because", qp.at("mediated_because"));
      if (const Shown carrier = qp.at("carrier"); carrier.is_object() && !carrier.at("why").is("only-carrier")) line.add("via", carrier.at("via")).add_quoted("why", carrier.at("why"));
      line.end(out);
    }
}

void cqs(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown cq : guest.at("cqs")) {
      Line line = dev_of(guest);
      line.add("cqn", cq.at("cq")).add("cqe", cq.at("cqe")).add("completions", cq.at("completions"));
      line.add_unless_zero("channel", cq.at("channel"));
      line.add_if(cq.at("overrun").is_true(), "state", "OVERRUN");
      line.add("pid", guest.at("pid")).end(out);
    }
}

void mrs(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown mr : guest.at("mrs"))
      dev_of(guest).add("mrn", mr.at("mr")).add("mrlen", mr.at("bytes")).add("address", mr.at("address")).add("path", mr.at("path"))
          .add("unmapped_by", mr.at("unmapped_by"))
          .add("mapped", mr.at("mapped_bytes")).add("pieces", mr.at("pieces")).add("access", access_words(mr.at("access")))
          .add("pid", guest.at("pid")).end(out);
}

void srqs(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown srq : guest.at("srqs"))
      dev_of(guest).add("srqn", srq.at("srqn")).add("type", srq.at("type")).add("max_wr", srq.at("max_wr")).add("taken", srq.at("taken"))
          .add("limit", srq.at("limit")).add("qp", srq.at("qps")).add("pid", guest.at("pid")).end(out);
}

void cm_ids(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown one : guest.at("cm_ids")) {
      Line line = link_of(guest);
      line.add("cm-idn", one.at("cm_id")).add("type", one.at("type")).add("state", one.at("state")).add("ps", one.at("port_space")).add("pid", guest.at("pid"));
      for (const auto& [name, key] : {std::pair{"src-addr", "src_addr"}, {"dst-addr", "dst_addr"}})
        if (one.at(key).says_something()) line.add(name, one.at(key));
      line.end(out);
    }
}

void routes(Shown state, std::string& out) {
  for (const Shown route : state.at("routes")) {
    Line line(route.at("lid").number() == 0 ? "route" : "route lid " + route.at("lid").text());
    for (const Shown gid : route.at("gids")) line.add("gid", gid);
    line.add("via", route.at("via")).add("guest", route.at("guest")).add("name", route.at("name")).end(out);
  }
  for (const Shown host : state.at("carriers")) {
    Line line("route lids " + host.at("lids").text());
    line.add("via", host.at("via")).add("host", host.at("host")).add("address", host.at("address")).add("state", host.at("state"));
    if (const Shown why = host.at("why"); why.is("only-carrier")) line.add("why", why);
    else line.add_quoted("why", why);
    if (host.at("via").is("hca")) line.add_quoted("records_via_tcp", host.at("records_why"));
    line.add_quoted("fallen_back", host.at("fallen_back"));
    if (host.at("silent_ms").number() > 1000) line.add("silent_ms", host.at("silent_ms"));
    line.add_if(host.at("encrypted").is_true(), "encrypted", "yes").add_quoted("disagreement", host.at("disagreement")).add_quoted("problem", host.at("problem"));
    line.add_unless_zero("unauthenticated", host.at("unauthenticated")).add_if(host.at("small_packets").is_true(), "small_packets", "yes");
    line.add_if(host.at("other_protocol").is_true(), "other_protocol", "yes");
    line.add("connections_here", host.at("connections_here")).add_unless_zero("groups", host.at("groups"));
    line.add_unless_zero("multicast_datagrams", host.at("multicast_datagrams")).add_counters(host.at("counters")).end(out);
  }
  for (const Shown group : state.at("groups"))
    Line("route mgid " + group.at("mgid").text()).add("members_here", group.at("members")).add("hosts", joined(group.at("hosts"), "none")).end(out);
}

std::string range(Shown lids) {
  return lids.size() == 2 ? fmt::format("{}-{}", lids.json().at(0).get<int>(), lids.json().at(1).get<int>()) : "none";
}

void hosts(Shown state, std::string& out) {
  const Shown us = state.at("subnet");
  if (!us.is_object()) {
    const bool listed = state.at("carriers").size() != 0;
    Line("host").add("state", "none").add("why", listed ? "\"vrdmad was given a list of them: see routes\"" : "\"vrdmad was not told of any\"").end(out);
    return;
  }
  const std::string leader = us.at("leader").text();
  Line line("host " + us.at("name").text());
  line.add("address", us.at("address")).add("port", us.at("port")).add("lids", range(us.at("lids"))).add("state", "here");
  line.add("lease", us.at("may_give").is_true() ? us.at("lease_s").text() + "s" : "none");
  line.add_if(us.at("manages").is_true(), "manager", leader == us.at("name").text() ? "leads" : "yes");
  line.add("leader", leader.empty() ? "none" : leader).add_quoted("problem", us.at("problem"));
  if (us.at("manager_problem").says_something()) line.add_quoted("manager_problem", us.at("manager_problem"));
  if (us.at("strangers").number() != 0) line.add("refused", us.at("strangers")).add_quoted("last_refused", us.at("last_stranger"));
  line.end(out);
  for (const Shown other : us.at("others")) {
    const bool reachable = other.at("reachable").is_true();
    Line one("host " + other.at("name").text());
    one.add("address", other.at("address")).add("port", other.at("port")).add("lids", range(other.at("lids")));
    one.add("state", reachable ? "connected" : "unreachable");
    one.add_if(other.at("manages").is_true(), "manager", other.at("leads").is_true() ? "leads" : "yes");
    if (other.at("version").says_something()) one.add("version", other.at("version"));
    if (!reachable) one.add_quoted("problem", other.at("problem"));
    one.end(out);
  }
}

void caches(Shown state, std::string& out) {
  for (const auto& [name, counters] : state.at("cache").items()) Line("cache " + name).add_counters(Shown(counters)).end(out);
}

void hca(Shown state, std::string& out) {
  const Shown hca = state.at("hca");
  if (!hca.is_object()) {
    Line("hca").add("state", "none").add("why", "\"vrdmad was not told to use one\"").end(out);
    return;
  }
  const bool found = hca.at("device").is_string();
  Line line(found ? "hca " + hca.at("device").text() + "/" + hca.at("port").text() : "hca");
  line.add("state", hca.at("state"));
  if (found) line.add("link_layer", hca.at("link_layer")).add("gid", hca.at("gid")).add("gid_index", hca.at("gid_index")).add("mtu", hca.at("mtu")).add("pfc", hca.at("pfc"));
  else line.add_quoted("why", hca.at("why"));
  line.add("connections", hca.at("connections")).add("mrs", hca.at("registrations")).add("mrs_under_way", hca.at("being_registered")).add_counters(hca.at("counters")).end(out);
}

void counters(Shown state, std::string& out) {
  for (const Shown guest : state.at("guests"))
    for (const Shown qp : guest.at("qps")) link_of(guest).add("lqpn", qp.at("qpn")).add_counters(qp.at("counters")).end(out);
  for (const Shown guest : state.at("guests")) link_of(guest).add("name", guest.at("name")).add_counters(guest.at("counters")).end(out);
  for (const Shown tenant : state.at("tenants"))
    Line("tenant uid " + tenant.at("uid").text()).add("guests", tenant.at("guests"))
        .add("objects", tenant.at("objects")).add("registered_bytes", tenant.at("registered_bytes"))
        .add("queue_bytes", tenant.at("queue_bytes")).add("moved_bytes", tenant.at("moved_bytes")).end(out);
  Line("service").add_counters(state.at("counters")).end(out);
}

void overview(Shown state, std::string& out) {
  const Shown service = state.at("service");
  Line("service " + service.at("socket").text()).add("version", service.at("version"))
      .add("channel", service.at("channel_version")).add("pid", service.at("pid")).add("uid", service.at("uid"))
      .add("link_layer", service.at("link_layer")).add("active_mtu", service.at("active_mtu"))
      .add_truth("physical_hca", service.at("physical_hca"), "yes", "no").add_count("guests", state.at("guests")).end(out);
  guests(state, out);
}

struct View {
  const char* name;
  void (*print)(Shown, std::string&);
};
constexpr View views[] = {{"", overview},  {"devices", devices}, {"guests", guests}, {"qps", qps},     {"cqs", cqs},
                          {"mrs", mrs},    {"srqs", srqs},       {"cm_ids", cm_ids}, {"routes", routes}, {"hosts", hosts}, {"hca", hca}, {"cache", caches}, {"counters", counters}};

void sort_by(json& list, const char* key) {
  std::sort(list.begin(), list.end(), [key](const json& a, const json& b) { return Shown(a).at(key).json() < Shown(b).at(key).json(); });
}

}  // namespace

void sort_answer(json& state) {
  const auto sort = [](json& object, const char* list, const char* key) {
    if (const auto found = object.find(list); found != object.end()) sort_by(*found, key);
  };
  sort(state, "guests", "guest");
  sort(state, "routes", "guest");
  if (const auto guests = state.find("guests"); guests != state.end())
    for (json& guest : *guests)
      for (const auto& [list, key] : {std::pair{"qps", "qpn"}, {"cqs", "cq"}, {"mrs", "mr"}, {"srqs", "srq"}}) sort(guest, list, key);
}

std::string show_text(const json& state, const std::string& object) {
  std::string out;
  for (const auto& view : views)
    if (object == view.name) view.print(Shown(state), out);
  return out;
}

json show_json(const json& answer, const std::string& object) {
  const Shown state(answer);
  if (object.empty()) return answer;
  if (object == "guests" || object == "cache" || object == "hca" || object == "hosts") {
    const json& shown = state.at(object == "hosts" ? "subnet" : object.c_str()).json();
    return !shown.is_null() ? shown : object == "guests" ? json::array() : json::object();
  }
  json out = json::array();
  if (object == "routes") {  // to this host's guests, then to other hosts, then to groups
    for (const char* kind : {"routes", "carriers", "groups"})
      for (const Shown route : state.at(kind)) out.push_back(route.json());
    return out;
  }
  if (object == "counters") {
    for (const Shown guest : state.at("guests")) {
      json queue_pairs = json::array();
      for (const Shown qp : guest.at("qps")) queue_pairs.push_back({{"qpn", qp.at("qpn").json()}, {"counters", qp.at("counters").json()}});
      out.push_back({{"guest", guest.at("guest").json()}, {"name", guest.at("name").json()}, {"counters", guest.at("counters").json()}, {"qps", queue_pairs}});
    }
    return {{"service", state.at("counters").json()}, {"tenants", state.at("tenants").json()}, {"guests", out}};
  }
  for (const Shown guest : state.at("guests")) {
    const auto add = [&](json item) {
      item["guest"] = guest.at("guest").json();
      item["name"] = guest.at("name").json();
      out.push_back(std::move(item));
    };
    if (object != "devices")
      for (const Shown item : guest.at(object.c_str())) add(item.json());
    else if (const Shown device = guest.at("device"); device.is_object()) add(device.json());
  }
  return out;
}

}  // namespace vrdma::cli
