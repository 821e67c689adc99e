#include "cli/doctor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cli/doctor_subnet.hpp"
#include "cli/host.hpp"
#include "cli/host_talk.hpp"
#include "cli/installed.hpp"
#include "cli/machine_guest.hpp"
#include "cli/output.hpp"
#include "cli/private_service.hpp"
#include "cli/query.hpp"
#include "cli/self_test.hpp"
#include "cli/service.hpp"
#include "vmkernel_svc/hosts/address.hpp"
#include "vrdma/control.hpp"
#include "vrdma/printable.hpp"

namespace vrdma::cli {

namespace {

using Level = Finding::Level;

const char* name_of(Level level) { return level == Level::ok ? "ok" : level == Level::note ? "note" : "problem"; }

// Whether connections to other hosts go by an HCA of this one. A service that serves this host alone has none to speak of.
void examine_hca(const nlohmann::json& state, std::vector<Finding>& findings) {
  const nlohmann::json hca = state.value("hca", nlohmann::json());
  if (hca.is_object()) {
    if (hca.contains("device"))
      findings.push_back({Level::ok, "hca",
                          fmt::format("{} port {} is {}: {}, MTU {}, {} connections go through it now", hca.at("device").get<std::string>(),
                                      hca.at("port").get<int>(), hca.at("state").get<std::string>(), hca.at("gid_type").get<std::string>(),
                                      hca.at("mtu").get<int>(), hca.at("connections").get<int>()),
                          ""});
    else
      findings.push_back({Level::note, "hca", fmt::format("none can be used: {}", hca.at("why").get<std::string>()),
                          "connections to other hosts go over tcp meanwhile"});
    return;
  }
  if (state.value("carriers", nlohmann::json::array()).empty()) return;
  std::string here;
  std::error_code none;
  for (std::filesystem::directory_iterator at("/sys/class/infiniband", none), end; !none && at != end; at.increment(none))
    here += (here.empty() ? "" : ", ") + at->path().filename().string();
  if (here.empty())
    findings.push_back({Level::ok, "hca", "this host has none: connections to other hosts go over tcp", ""});
  else
    findings.push_back({Level::note, "hca", fmt::format("this host has {}, and vrdmad was not told to use an HCA", here),
                        "put \"hca\": {} into its configuration, on both hosts (docs/hosts.md)"});
}

// Whether systemd knows vrdmad here: not where only a build folder has it.
bool has_unit() {
  for (const char* const folder : {"/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"})
    if (std::error_code error; std::filesystem::exists(std::filesystem::path(folder) / "vrdmad.service", error)) return true;
  return false;
}

// The service that programs would use: where, and what is wrong with it. Empty: none, and `vrdma run` would start one.
std::optional<std::string> examine_service(const std::string& wanted, std::vector<Finding>& findings) {
  const ChosenBy chosen = chosen_by(wanted);
  for (const auto& path : service_paths(wanted)) {
    const auto found = connect_to(path, chosen);
    if (!found) {
      const int error = value(found.error());
      if (chosen == ChosenBy::user)
        findings.push_back({Level::problem, "service", fmt::format("cannot reach the host service at {} ({})", path, std::strerror(error)),
                            service_remedy(error)});
      else if (error == ENAMETOOLONG)
        findings.push_back({Level::note, "service", path + " is too long for a socket: no private service can be there", "set XDG_RUNTIME_DIR to a shorter folder of yours"});
      else if (error != ENOENT && error != ECONNREFUSED)
        findings.push_back({Level::note, "service",
                            error == ESRCH     ? path + " is for the programs of another pid namespace"
                            : error == EREMOTE ? fmt::format("{} is passed over: it lies in a folder that is not one that only you can write", path)
                                               : fmt::format("{} does not admit us ({})", path, std::strerror(error)),
                            service_remedy(error)});
      continue;
    }
    try {
      const auto state = query(*found);
      const auto& service = state.at("service");
      const auto version = service.at("version").get<std::string>();
      const auto channel = service.at("channel_version").get<std::string>();
      findings.push_back({Level::ok, "service", fmt::format("{} answers: vrdmad {}, channel {}, pid {}, uid {}, {} guests in sight", path, version,
                                                            channel, service.at("pid").get<int>(), service.at("uid").get<int>(),
                                                            state.at("guests").size()), ""});
      if (!knows_user(state))
        findings.push_back({Level::note, "user",
                            "the service runs in a user namespace that does not map this user: it cannot tell it from others, so that "
                            "programs share one quota, none is direct, and \"vrdma show\" shows none",
                            "map this user there (newuidmap, or the engine's --userns), or run vrdmad outside of that namespace"});
      if (version != VRDMA_VERSION)
        findings.push_back({Level::note, "version", fmt::format("vrdmad is {}, vrdma is {}", version, VRDMA_VERSION),
                            "restart vrdmad after an upgrade"});
      if (channel != fmt::format("{}.{}", control::version_major, control::version_minor))
        findings.push_back({Level::note, "version", fmt::format("the service speaks channel {}, this vrdma {}.{}: another major is refused at attach",
                                                                channel, control::version_major, control::version_minor), "use one version of both"});
      for (const auto examine : {examine_memory_of_service, examine_scheduling_of_service})
        if (auto limit = examine(service.at("pid").get<int>())) findings.push_back(std::move(*limit));
      for (const auto examine : {examine_lease, examine_manager, examine_own_address, examine_subnet, examine_listed_hosts})
        for (auto& finding : examine(state)) findings.push_back(std::move(finding));
      examine_hca(state, findings);
    } catch (const std::exception& error) {
      findings.push_back({Level::problem, "service", error.what(), "unless it stands still, use vrdma and vrdmad of one version"});
    }
    return path;
  }
  if (chosen == ChosenBy::user) return std::nullopt;
  if (const Apart apart = apart_from_host(""); !apart.why.empty()) {
    findings.push_back({Level::problem, "agent", apart.why, apart.remedy});
    return std::nullopt;
  }
  try {
    findings.push_back({Level::note, "service", fmt::format("none is running; \"vrdma run\" starts a private one ({})", program_path("vrdmad")),
                        has_unit() ? "nothing to do, or start vrdmad for all users: systemctl start vrdmad"
                                   : "nothing to do, or start vrdmad for all users: as root, vrdmad &"});
  } catch (const std::exception& error) {
    findings.push_back({Level::problem, "service", fmt::format("none is running, and {}", error.what()), "install vrdmad"});
  }
  return std::nullopt;
}

// A virtual machine: whether programs here are guests of its host.
void examine_agent(const std::optional<std::string>& running, std::vector<Finding>& findings) {
  if (running && served_by_agent(*running))
    findings.push_back({Level::ok, "agent", "vrdma-guestd serves this machine: programs here reach its host, and the host's other machines", ""});
  else if (const Apart apart = apart_from_host(running.value_or("")); !apart.why.empty() && running)
    findings.push_back({Level::note, "agent", apart.why, apart.remedy});
  else if (apart.why.empty() && is_virtual())
    findings.push_back({Level::ok, "agent",
                        "this virtual machine has no device of vrdma's (PCI 1af4:1110): for programs here to reach its host, QEMU is started "
                        "with what \"vrdma vm add\" prints there",
                        ""});
}

// The words of an error are all that the program which tries it hands on.
const char* self_test_remedy(const std::string& error) {
  constexpr std::pair<int, const char*> known[] = {
      {EADDRNOTAVAIL, "no LID is left, or the subnet has leased none to this host: see \"vrdma show hosts\""},
      {ENOMEM,
       "raise the limit of address space (ulimit -v) here, or the limits under which vrdmad was started; in a virtual machine, what vrdma-guestd "
       "says; a private one leaves ten seconds after its last program"},
      {EFBIG,
       "vrdmad was started under a limit of file sizes (ulimit -f): start it without; a private one leaves ten seconds after its last program"},
      {EDQUOT, "the service has as much of this user as its quota allows: its log says of what, and \"quota\" in vrdmad.conf(5) is how much"},
      {EMFILE, "raise the limit of open files (ulimit -n) here, or that under which vrdmad was started"}};
  for (const auto& [number, remedy] : known)
    if (error == std::strerror(number)) return remedy;
  return "see the log of vrdmad; if it is a version mismatch, use one version of both";
}

// What to do where a service does not reach the memory of programs like this one.
std::string copies_remedy(const std::string& socket) {
  if (!std::ifstream("/proc/self/maps")) return "see \"proc\" below";
  try {
    const auto service = find_service(socket);
    if (service && !query(*service).at("service").value("sees_caller", true))
      return "it is in another pid namespace, and does not see processes here: give both one (shareProcessNamespace of a pod, the engine's --pid), "
             "or run vrdmad on the host";
  } catch (const std::exception&) {
  }
  return "run vrdmad as root or by its systemd unit, in a container with --cap-add SYS_PTRACE";
}

void examine_library(const std::string& wanted, const std::optional<std::string>& running, std::vector<Finding>& findings) {
  std::string library;
  try {
    library = library_path();
  } catch (const std::exception& error) {
    findings.push_back({Level::problem, "library", error.what(), ""});
    return;
  }
  std::optional<Service> started;
  std::string socket = running.value_or("");
  if (!running) {
    if (chosen_by(wanted) == ChosenBy::user) return;  // said already
    if (!apart_from_host("").why.empty()) return;  // likewise; and a private service would be in front of the agent's for a while
    try {
      started = find_or_start_service();
      socket = started->path;
    } catch (const std::exception& error) {
      findings.push_back({Level::problem, "self-test", error.what(), "mend that, or start vrdmad as a service"});
      return;
    }
  }
  const SelfTestResult result = self_test(library, socket);
  if (!result.failed_at.empty()) {
    findings.push_back({Level::problem, "self-test", fmt::format("{} with {}: {} failed ({})", socket, library, result.failed_at, result.error),
                        self_test_remedy(result.error)});
    return;
  }
  findings.push_back({Level::ok, "library", library + " loads", ""});
  findings.push_back({Level::ok, "self-test", "a program attached, connected a queue pair to itself and moved 8 B and 32 KiB by RDMA WRITE", ""});
  if (result.pages_path == "mapped")
    findings.push_back({Level::ok, "mapping", "registered pages are mapped into the service: copied once, at the speed of memory", ""});
  else if (result.pages_path == "pinned")
    findings.push_back({Level::ok, "mapping",
                        "registered pages are pinned where they are, and reached by the host in this machine's RAM: copied once", ""});
  else if (result.pages_path == "bar")
    findings.push_back({Level::ok, "mapping", "registered pages lie in the BAR of this machine's device, as its RAM is its own: copied once", ""});
  else if (result.pages_path == "process")
    findings.push_back({Level::note, "mapping", "registered pages are reached through the process: correct, and slower for small messages", ""});
  else if (!result.pages_path.empty())
    findings.push_back({Level::note, "mapping", "registered pages are copied by a thread of the program: correct, and slower", ""});
  if (result.small_path == "guest-copy" && served_by_agent(socket))
    findings.push_back({Level::note, "copies",
                        "slower: small memory that cannot be pinned in this machine is copied by a thread of the program", ""});
  else if (result.small_path == "guest-copy")
    findings.push_back({Level::note, "copies",
                        "slower: this service does not reach the memory of programs like this one; what cannot be mapped (small buffers, stacks) "
                        "is copied by a thread of the program",
                        copies_remedy(socket)});
}

// Messages have a connection of their own, which the service has made, or tries to. by_secret: it begins with a secret that the hosts share.
// no_session: why the subnet's hosts have no session, without which there is no such connection.
Finding look_at_carrier(const nlohmann::json& carrier, bool by_secret, const std::string& no_session) {
  const auto host = carrier.at("host").get<std::string>(), address = carrier.at("address").get<std::string>(),
             state = carrier.at("state").get<std::string>();
  if (const auto differs = carrier.value("disagreement", ""); state == "connected" && !differs.empty())
    return {Level::problem, "messages", differs + ": those to LIDs that are not their host's end nowhere",
            "give \"hosts\" in \"remote\" the same LIDs on all hosts"};
  const bool large_lost = carrier.value("small_packets", false);
  constexpr const char* measure =
      "give the interfaces the MTU of the way between the two (ping -M do -s 1472 ADDRESS fits 1500), or let ICMP's \"fragmentation needed\" through";
  if (state == "connected" && large_lost)
    return {Level::note, "messages",
            fmt::format("of programs go to {} at {} in small packets, after connections were cut again and again: large ones may be lost on the way",
                        host, address),
            measure};
  if (state == "connected") return {Level::ok, "messages", fmt::format("of programs go to {} at {}, and come from there", host, address), ""};
  const std::string what = state == "silent"
                               ? fmt::format("nothing comes from {} at {} ({} s)", host, address, carrier.at("silent_ms").get<std::uint64_t>() / 1000)
                               : fmt::format("no connection for them has come about with {} at {}", host, address);
  if (carrier.value("other_protocol", false))
    return {Level::problem, "messages", what + ": it connects to this host, and does not speak this vrdmad's protocol",
            "is an older vrdmad there? Run one version on all hosts"};
  const auto at = hosts::address_and_port(address);
  if (const auto refused = carrier.value("unauthenticated", std::uint64_t{0}); by_secret && refused != 0)
    return {Level::problem, "messages",
            fmt::format("{}: the two reach each other, and {} connections failed because the other end does not have this host's secret",
                        what, refused),
            fmt::format("copy \"secret_file\" from one host to the other; if it is the same on both, use one version of vrdmad, "
                        "and see what else is at port {}",
                        at ? at->second : 0)};
  if (large_lost)
    return {Level::problem, "messages",
            what + ": connections stand and are cut again while something is under way: large packets are lost between the two, it seems", measure};
  if (!no_session.empty()) return {Level::problem, "messages", fmt::format("{}: {}", what, no_session), "see \"vrdma show hosts\""};
  const std::string rule = fmt::format("on {}, and likewise here: nft add rule inet filter input tcp dport {} accept", host, at ? at->second : 0);
  if (const auto problem = carrier.value("problem", ""); problem == std::strerror(ECONNREFUSED))
    return {Level::problem, "messages", fmt::format("{}: {}", what, problem), fmt::format("see that vrdmad runs on {}, and that it listens where this host's configuration says that it does", host)};
  else if (problem == "no answer" && by_secret)
    return {Level::problem, "messages", fmt::format("{}: {}", what, problem),
            fmt::format("see that {} is up, at that address, and that its \"hosts\" in \"remote\" have this host at this one's: its port is closed to all others. If so, {}", host, rule)};
  else if (!problem.empty() && problem != "no answer")
    return {Level::problem, "messages", fmt::format("{}: {}", what, problem), fmt::format("correct the address or the route to it (\"ip route get {}\")", at ? at->first : address)};
  if (state != "silent" && by_secret && !carrier.value("dials", true))
    return {Level::problem, "messages", what + ": it is that host which connects to this one, and it has not",
            fmt::format("see what \"vrdma doctor\" says there of this host; where it does not answer, {}", rule)};
  return {Level::problem, "messages", what + ": programs do not reach those of that host",
          state == "silent" ? fmt::format("it was heard of before: see that its vrdmad and its machine run and do not stand still; if they do run, {}", rule) : rule};
}

bool is_at(const nlohmann::json& carrier, const std::string& target) {
  const auto one = hosts::address_and_port(carrier.at("address").get<std::string>()), other = hosts::address_and_port(target);
  return one && other && one->first == other->first;
}

// The service knows where this host is, and where those are that have names; what it does not know is taken as it is given.
std::vector<Finding> examine_way_to(const DoctorOptions& options) {
  std::string target = options.host, folder = options.folder, here, no_session;
  std::uint16_t port = 0;
  std::optional<Finding> messages;
  std::vector<Finding> findings;
  if (auto service = find_service(options.socket)) {
    const auto state = query(*service);
    if (const auto& us = state.at("subnet"); us.is_object()) {
      here = us.at("address").get<std::string>();
      port = us.at("port").get<std::uint16_t>();
      if (us.at("name") == target)
        return {{Level::problem, "host", fmt::format("\"{}\" is this host", target), "name another one: \"vrdma show hosts\" says who there is"}};
      if (folder.empty()) folder = us.at("folder").get<std::string>();
      for (const auto& other : us.at("others"))
        if (const auto address = hosts::with_port(other.at("address").get<std::string>(), other.at("port").get<std::uint16_t>()); other.at("name") == options.host || address == options.host) {
          target = address;
          if (other.at("reachable") != true) no_session = other.at("problem").get<std::string>();
        }
    }
    const auto carriers = state.value("carriers", nlohmann::json::array());
    auto its = std::ranges::find_if(carriers, [&](const auto& carrier) { return carrier.at("host") == options.host; });
    if (its == carriers.end()) its = std::ranges::find_if(carriers, [&](const auto& carrier) { return is_at(carrier, target); });
    const bool by_secret = !state.at("subnet").is_object();
    if (its != carriers.end()) messages = look_at_carrier(*its, by_secret, no_session);
    if (messages && by_secret) return {std::move(*messages)};  // by a list of hosts and a secret: there is nothing else
    for (auto& finding : examine_lease(state)) findings.push_back(std::move(finding));
  }
  for (auto& finding : examine_host(folder.empty() ? subnet_folder : folder, target, here, port)) findings.push_back(std::move(finding));
  if (messages) findings.push_back(std::move(*messages));
  return findings;
}

}  // namespace

int doctor(const DoctorOptions& options) {
  std::vector<Finding> findings;
  if (!options.host.empty()) {
    findings = examine_way_to(options);
  } else {
    const auto running = examine_service(options.socket, findings);
    examine_agent(running, findings);
    examine_library(options.socket, running, findings);
    for (auto& finding : examine_machine()) findings.push_back(std::move(finding));
  }

  int problems = 0, notes = 0;
  for (const auto& finding : findings) {
    problems += finding.level == Level::problem;
    notes += finding.level == Level::note;
  }
  if (options.json) {
    nlohmann::json out{{"problems", problems}, {"notes", notes}, {"findings", nlohmann::json::array()}};
    for (const auto& finding : findings)
      out["findings"].push_back(
          {{"level", name_of(finding.level)}, {"subject", finding.subject}, {"what", finding.what}, {"remedy", finding.remedy}});
    print_all(json_text(out));
  } else {
    std::string text;
    for (const auto& finding : findings) {
      text += fmt::format("{:8} {:12} {}\n", name_of(finding.level), finding.subject, without_controls(finding.what));
      if (!finding.remedy.empty()) text += fmt::format("{:8} {:12} → {}\n", "", "", finding.remedy);
    }
    const char* const cost = options.host.empty() ? "programs do not work" : "guests of the two hosts do not meet";
    text += problems != 0 ? fmt::format("\n{} problem{}: {} until solved\n", problems, problems == 1 ? "" : "s", cost)
                          : fmt::format("\nno problems{}\n", notes == 0 ? "" : fmt::format(", {} note{}", notes, notes == 1 ? "" : "s"));
    print_all(text);
  }
  return problems == 0 ? 0 : 1;
}

}  // namespace vrdma::cli
