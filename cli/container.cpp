#include "cli/container.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/fail.hpp"
#include "cli/installed.hpp"
#include "cli/output.hpp"
#include "cli/private_service.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {

// Inside. Not where the image may have a libibverbs: only the programs that are told of it find this one.
constexpr const char* library_inside = "/usr/lib/vrdma";

struct Mount {
  std::string from, to;
};
struct Variable {
  std::string name, value;
};
struct Additions {
  std::vector<Mount> mounts;
  std::vector<Variable> environment;
};

// The shell splits what $(vrdma container) prints at blanks, podman what stands behind --mount at commas, systemd-nspawn at colons.
template <class Error = std::runtime_error>
const std::string& plain(const std::string& text, const char* instead) {
  constexpr const char* special = " \t\n,:\"\\'*?[";
  if (text.find_first_of(special) != std::string::npos)
    throw Error(fmt::format("\"{}\" cannot stand in the options of a container, because of a blank, comma, colon, quote or wildcard in it: {}", text, instead));
  return text;
}

bool is_utf8(const std::string& text) try {
  (void)nlohmann::json(text).dump();
  return true;
} catch (const nlohmann::json::type_error&) {
  return false;
}

Additions additions(const ContainerOptions& options, const std::string& socket_path, bool whole_folder) {
  const fs::path socket = fs::absolute(socket_path).lexically_normal();
  Additions all;
  const std::string inside = fmt::format("/run/vrdma/{}", socket.filename().string());
  // Of the host's folder only the socket: the links of machines are there, too, which a container's root could take for its own.
  if (whole_folder)
    all.mounts.push_back({socket.parent_path(), "/run/vrdma"});
  else
    all.mounts.push_back({socket, inside});
  all.mounts.push_back({fs::path(library_path()).parent_path(), library_inside});
  constexpr const char* other_path = "install vrdma, or let vrdmad listen, at a path without";
  for (const auto& mount : all.mounts) plain(mount.from, other_path);
  all.environment.push_back({"LD_PRELOAD", fmt::format("{}/libvrdma.so", library_inside)});
  all.environment.push_back({"VRDMA_SOCKET", plain(inside, other_path)});
  if (!options.link_layer.empty()) all.environment.push_back({"VRDMA_LINK_LAYER", options.link_layer});
  if (!options.name.empty()) all.environment.push_back({"VRDMA_NAME", plain<WrongUsage>(options.name, "give a --name without")});
  return all;
}

// CDI 0.3.0, the oldest that Debian 12's podman and docker 25 read: github.com/cncf-tags/container-device-interface, SPEC.md.
nlohmann::ordered_json specification(const Additions& all) {
  using Json = nlohmann::ordered_json;
  Json mounts = Json::array(), environment = Json::array();
  for (const auto& mount : all.mounts)
    mounts.push_back({{"hostPath", mount.from}, {"containerPath", mount.to}, {"options", {"ro", "rbind", "nosuid", "nodev"}}});
  for (const auto& variable : all.environment) environment.push_back(fmt::format("{}={}", variable.name, variable.value));
  // Each has to change something by itself, so the variables are not among the edits that they share.
  const auto device = [&](const char* name, const char* link_layer) {
    Json variables = environment;
    if (link_layer != nullptr) variables.push_back(fmt::format("VRDMA_LINK_LAYER={}", link_layer));
    return Json{{"name", name}, {"containerEdits", {{"env", variables}}}};
  };
  return {{"cdiVersion", "0.3.0"},
          {"kind", "vrdma/hca"},
          {"devices", {device("vrdma0", nullptr), device("ib", "ib"), device("ethernet", "ethernet")}},
          {"containerEdits", {{"mounts", mounts}}}};
}

void print_options(const Additions& all, bool nspawn) {
  std::string line;
  for (const auto& mount : all.mounts)
    line += nspawn ? fmt::format("--bind-ro={}:{} ", mount.from, mount.to) : fmt::format("--mount=type=bind,source={},target={},readonly ", mount.from, mount.to);
  for (const auto& variable : all.environment) line += fmt::format("{}={}={} ", nspawn ? "--setenv" : "--env", variable.name, variable.value);
  line.back() = '\n';
  print_all(line);
}

}  // namespace

int container(const ContainerOptions& options) {
  if (options.format == "cdi") {
    if (!options.link_layer.empty()) throw WrongUsage("--format cdi has a device for either link layer, ib and ethernet: choose when a container is started");
    if (!is_utf8(options.name)) throw WrongUsage("--name is not UTF-8, and cannot stand in a CDI specification, which is JSON");
    // Read whenever a container starts: of the host's service, which need not run now.
    std::string text;
    try {
      text = specification(additions(options, options.socket.empty() ? host_socket : options.socket, false)).dump(2) + "\n";
    } catch (const nlohmann::json::type_error&) {  // another path would be mounted, or none
      fail("a path that is not UTF-8 cannot stand in a CDI specification, which is JSON: choose another --socket, or a folder for the library whose name is");
    }
    print_all(text);
    return 0;
  }
  auto found = find_service(options.socket);
  if (!found && !options.socket.empty()) throw unreachable(options.socket);
  const Service service = found ? std::move(*found) : find_or_start_service();
  if (is_private(service))
    tell("vrdma: note: {} serves only processes of your user, and leaves ten seconds after the last: containers that you start without root, "
         "as their root; for others let vrdmad run as a service\n", service.path);
  print_options(additions(options, service.path, is_private(service)), options.format == "nspawn");
  return 0;
}

}  // namespace vrdma::cli
