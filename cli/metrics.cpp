// What Prometheus reads, text format 0.0.4.
#include <fmt/format.h>

#include <utility>

#include "cli/show.hpp"
#include "cli/shown.hpp"

namespace vrdma::cli {

namespace {

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
  void add(Shown value, const std::string& labels = {}) {
    if (!value.is_null()) add(value.text(), labels);
  }
  void add(const std::string& value, const std::string& labels = {}) {
    text_ += labels.empty() ? fmt::format("{} {}\n", name_, value) : fmt::format("{}{{{}}} {}\n", name_, labels, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string name_, text_;
};

}  // namespace

std::string metrics_text(const nlohmann::json& answer) {
  const Shown state(answer);
  Metrics out;
  const auto each_guest = [&](auto&& sample) {
    for (const Shown guest : state.at("guests"))
      sample(guest, fmt::format("guest=\"{}\",name=\"{}\",uid=\"{}\"", guest.at("guest").text(), label(guest.at("name").text()), guest.at("uid").text()));
  };
  const auto each_tenant = [&](const char* key) {
    for (const Shown tenant : state.at("tenants")) out.add(tenant.at(key), fmt::format("uid=\"{}\"", tenant.at("uid").text()));
  };
  out.begin("service_info", "gauge", "Always 1; the labels say which service answers.");
  out.add("1", fmt::format("version=\"{}\",link_layer=\"{}\"", label(state.at("service").at("version").text()), label(state.at("service").at("link_layer").text())));
  out.begin("guests", "gauge", "Guests that are attached.");
  out.add(std::to_string(state.at("guests").size()));
  out.begin("objects", "gauge", "Verbs objects of a guest.");
  each_guest([&](Shown guest, const std::string& labels) {
    for (const char* kind : {"qps", "cqs", "mrs", "srqs", "pds"}) {
      if (const Shown list = guest.at(kind); !list.is_null()) out.add(std::to_string(list.size()), labels + fmt::format(",kind=\"{}\"", kind));
    }
  });
  out.begin("control_requests_total", "counter", "Control requests served for a guest.");
  each_guest([&](Shown guest, const std::string& labels) { out.add(guest.at("requests"), labels); });
  out.begin("protocol_errors_total", "counter", "Bytes of a guest that made no sense.");
  each_guest([&](Shown guest, const std::string& labels) { out.add(guest.at("protocol_errors"), labels); });
  if (state.at("guests").size() != 0)
    for (const auto& counter : (*state.at("guests").begin()).at("counters").items()) {
      const std::string& name = counter.key();
      out.begin("qp_" + name + "_total", "counter", "Sum over the queue pairs of a guest, those that are gone too.");
      each_guest([&](Shown guest, const std::string& labels) { out.add(guest.at("counters").at(name.c_str()), labels); });
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
    for (const auto& [name, counters] : state.at("cache").items()) out.add(Shown(counters).at(what), fmt::format("cache=\"{}\"", name));
  }
  for (const char* what : {"turns", "sleeps", "doorbells"}) {
    out.begin(fmt::format("shard_{}_total", what), "counter", "Of a thread that runs the engine.");
    for (const Shown shard : state.at("shards")) out.add(shard.at(what), fmt::format("shard=\"{}\"", shard.at("shard").text()));
  }
  return out.take();
}

}  // namespace vrdma::cli
