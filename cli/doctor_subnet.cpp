#include "cli/doctor_subnet.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "vmkernel_svc/hosts/address.hpp"

namespace vrdma::cli {

namespace {

constexpr const char* see_hosts = "see \"vrdma show hosts\", and \"When it does not work\" in docs/subnet.md";

// Which other hosts are not reached, and why: a few of them.
std::string unreached(const nlohmann::json& others, std::size_t& count) {
  constexpr std::size_t named_max = 3;
  std::string text;
  count = 0;
  for (const auto& other : others) {
    if (other.at("reachable") == true || ++count > named_max) continue;
    const auto why = other.at("problem").get<std::string>();
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", other.at("name").get<std::string>(), why.empty() ? "" : " (" + why + ")");
  }
  return text + (count > named_max ? fmt::format(" and {} more", count - named_max) : "");
}

// Whether interfaces are looked at here as the service sees them.
bool is_in_our_network(int pid) {
  struct stat ours {}, its {};
  return ::stat("/proc/self/ns/net", &ours) == 0 && ::stat(fmt::format("/proc/{}/ns/net", pid).c_str(), &its) == 0 && ours.st_ino == its.st_ino;
}

}  // namespace

std::vector<Finding> examine_own_address(const nlohmann::json& state) {
  const auto address = state.at("service").value("address", "");
  if (address.empty() || !hosts::is_of_no_interface(address) || !is_in_our_network(state.at("service").value("pid", 0))) return {};
  return {{Finding::Level::problem, "address", fmt::format("{}, at which the configuration says that other hosts reach this one, is no address of this host now", address),
           "give it to an interface again, or another one to vrdmad, and to the other hosts, and restart it"}};
}

std::vector<Finding> examine_listed_hosts(const nlohmann::json& state) {
  const auto carriers = state.value("carriers", nlohmann::json::array());
  if (carriers.empty() || state.value("subnet", nlohmann::json()).is_object()) return {};
  constexpr std::size_t named_max = 3;
  std::string away;
  std::size_t count = 0;
  for (const auto& carrier : carriers)
    if (const auto its = carrier.at("state").get<std::string>(); its != "connected" && ++count <= named_max)
      away += fmt::format("{}{} ({}{}{})", away.empty() ? "" : ", ", carrier.at("host").get<std::string>(), its, carrier.value("problem", "").empty() ? "" : ": ", carrier.value("problem", ""));
  if (count > named_max) away += fmt::format(" and {} more", count - named_max);
  if (count == 0) return {{Finding::Level::ok, "hosts", fmt::format("the other hosts of the configuration ({}) are connected", carriers.size()), ""}};
  return {{Finding::Level::note, "hosts", fmt::format("{} of {} other hosts of the configuration are not connected: {}", count, carriers.size(), away),
           "\"vrdma doctor NAME\" looks at one of them"}};
}

std::vector<Finding> examine_lease(const nlohmann::json& state) {
  const nlohmann::json us = state.value("subnet", nlohmann::json());
  if (!us.is_object() || us.at("may_give") == true) return {};
  const auto leader = us.at("leader").get<std::string>();
  auto why = us.at("problem").get<std::string>();
  if (why.empty() && !leader.empty()) why = fmt::format("the lease by {} has lapsed, or has not come yet", leader);
  if (why.empty()) {
    // What each of them says is nearer to the cause than that nobody leads.
    nlohmann::json managers = nlohmann::json::array();
    bool reaches_one = us.at("manages") == true;
    for (const auto& other : us.at("others")) {
      if (other.at("manages") != true) continue;
      reaches_one |= other.at("reachable") == true;
      managers.push_back(other);
    }
    std::size_t count = 0;
    const std::string who = unreached(managers, count);
    why = std::string(count == 0    ? "no manager of the subnet is reached, or no majority of them runs"
                      : reaches_one ? "none of the managers that this host reaches leads, and it does not reach "
                                    : "no manager of the subnet is reached: ") + who;
  }
  return {{Finding::Level::problem, "lids", "new programs get no LID on this host: " + why, see_hosts}};
}

std::vector<Finding> examine_manager(const nlohmann::json& state) {
  const nlohmann::json us = state.value("subnet", nlohmann::json());
  const auto problem = us.is_object() ? us.value("manager_problem", "") : "";
  if (problem.empty()) return {};
  return {{Finding::Level::problem, "manager", problem, see_hosts}};
}

std::vector<Finding> examine_subnet(const nlohmann::json& state) {
  const nlohmann::json us = state.value("subnet", nlohmann::json());
  if (!us.is_object() || us.at("may_give") != true) return {};
  const auto problem = us.at("problem").get<std::string>(), leader = us.at("leader").get<std::string>();
  const auto& others = us.at("others");
  std::size_t count = 0;
  const std::string who = unreached(others, count), lease = fmt::format("new programs get LIDs for {} s more", us.at("lease_s").get<std::int64_t>());
  if (!problem.empty()) return {{Finding::Level::problem, "subnet", fmt::format("{}; {}", problem, lease), see_hosts}};
  if (leader.empty()) return {{Finding::Level::note, "subnet", fmt::format("nobody leads it, or who does is not reached{}{}: {}", who.empty() ? "" : "; nor is ", who, lease), see_hosts}};
  const std::string led = leader == us.at("name") ? "this host leads it" : leader + " leads it";
  if (count != 0) return {{Finding::Level::note, "subnet", fmt::format("{}, and {} of {} other hosts cannot be reached: {}", led, count, others.size(), who), see_hosts}};
  return {{Finding::Level::ok, "subnet", fmt::format("{}, and the other hosts ({}) are reached; {}", led, others.size(), lease), ""}};
}

}  // namespace vrdma::cli
