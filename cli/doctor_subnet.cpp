#include "cli/doctor_subnet.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace vrdma::cli {

namespace {

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

}  // namespace

std::vector<Finding> examine_subnet(const nlohmann::json& state) {
  const nlohmann::json us = state.value("subnet", nlohmann::json());
  if (!us.is_object() || us.at("may_give") != true) return {};
  const char* const see = "see \"vrdma show hosts\", and \"When it does not work\" in docs/subnet.md";
  const auto problem = us.at("problem").get<std::string>(), leader = us.at("leader").get<std::string>();
  const auto& others = us.at("others");
  std::size_t count = 0;
  const std::string who = unreached(others, count), lease = fmt::format("new programs get LIDs for {} s more", us.at("lease_s").get<std::int64_t>());
  if (!problem.empty()) return {{Finding::Level::problem, "subnet", fmt::format("{}; {}", problem, lease), see}};
  if (leader.empty()) return {{Finding::Level::note, "subnet", fmt::format("nobody leads it, or who does is not reached{}{}: {}", who.empty() ? "" : "; nor is ", who, lease), see}};
  const std::string led = leader == us.at("name") ? "this host leads it" : leader + " leads it";
  if (count != 0) return {{Finding::Level::note, "subnet", fmt::format("{}, and {} of {} other hosts cannot be reached: {}", led, count, others.size(), who), see}};
  return {{Finding::Level::ok, "subnet", fmt::format("{}, and the other hosts ({}) are reached; {}", led, others.size(), lease), ""}};
}

}  // namespace vrdma::cli
