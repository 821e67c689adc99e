// What `vrdma doctor` says of other hosts, and of the way by which they reach this one.
#include <doctest/doctest.h>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/doctor_subnet.hpp"

using namespace vrdma::cli;
using nlohmann::json;

TEST_CASE("AnAddressThatNoInterfaceHasIsAProblem") {
  json state{{"service", {{"version", "1"}}}};
  CHECK(examine_own_address(state).empty());  // an older service says none
  for (const char* good : {"", "127.0.0.1", "0.0.0.0", "not numeric"}) {
    state["service"]["address"] = good;
    CHECK(examine_own_address(state).empty());
  }
  state["service"]["pid"] = ::getpid();
  state["service"]["address"] = "192.0.2.77";  // for documentation (RFC 5737): nobody's
  const auto found = examine_own_address(state);
  REQUIRE(found.size() == 1);
  CHECK(found[0].level == Finding::Level::problem);
  CHECK(found[0].what.find("192.0.2.77") == 0);
  state["service"]["pid"] = 0;  // nobody whose network could be looked at
  CHECK(examine_own_address(state).empty());
}

TEST_CASE("WhoGetsNoLidsIsToldWhatItsManagersSay") {
  json us{{"name", "c"}, {"may_give", false}, {"leader", ""}, {"problem", ""}, {"manages", false}, {"others", json::array()}};
  const auto said = [&] {
    const auto found = examine_lease(json{{"subnet", us}});
    REQUIRE(found.size() == 1);
    CHECK(found[0].level == Finding::Level::problem);
    return found[0].what;
  };
  CHECK(said() == "new programs get no LID on this host: no manager of the subnet is reached, or no majority of them runs");
  us["others"].push_back({{"name", "a"}, {"manages", true}, {"reachable", false}, {"problem", "your host was removed from the subnet"}});
  us["others"].push_back({{"name", "d"}, {"manages", false}, {"reachable", false}, {"problem", "no answer"}});
  CHECK(said() == "new programs get no LID on this host: no manager of the subnet is reached: a (your host was removed from the subnet)");
  us["others"].push_back({{"name", "b"}, {"manages", true}, {"reachable", true}, {"problem", ""}});
  CHECK(said() == "new programs get no LID on this host: none of the managers that this host reaches leads, and it does not reach a (your host was removed from the subnet)");
  us["leader"] = "b";
  CHECK(said() == "new programs get no LID on this host: the lease by b has lapsed, or has not come yet");
  us["problem"] = "there are no LIDs left";
  CHECK(said() == "new programs get no LID on this host: there are no LIDs left");
  us["may_give"] = true;
  CHECK(examine_lease(json{{"subnet", us}}).empty());
}

TEST_CASE("AManagerThatIsNotWellIsAProblemThoughProgramsWork") {
  json us{{"name", "a"}, {"may_give", true}, {"leader", "b"}, {"problem", ""}};
  CHECK(examine_manager(json{{"subnet", us}}).empty());  // an older service says nothing of it
  CHECK(examine_manager(json{{"subnet", nullptr}}).empty());
  us["manager_problem"] = "this manager does not have the subnet's state yet";
  const auto found = examine_manager(json{{"subnet", us}});
  REQUIRE(found.size() == 1);
  CHECK(found[0].level == Finding::Level::problem);
  CHECK(found[0].what == us["manager_problem"]);
}

TEST_CASE("OfListedHostsOneLineSaysWhichAreNotConnected") {
  json state{{"carriers", json::array()}, {"subnet", nullptr}};
  CHECK(examine_listed_hosts(state).empty());
  for (const char* name : {"b", "c", "d", "e", "f"}) state["carriers"].push_back({{"host", name}, {"state", "connected"}});
  REQUIRE(examine_listed_hosts(state).size() == 1);
  CHECK(examine_listed_hosts(state)[0].level == Finding::Level::ok);
  state["carriers"][1]["state"] = "silent";
  CHECK(examine_listed_hosts(state)[0].what == "1 of 5 other hosts of the configuration are not connected: c (silent)");
  state["carriers"][2]["problem"] = "no answer";
  for (auto& carrier : state["carriers"]) carrier["state"] = "connecting";
  CHECK(examine_listed_hosts(state)[0].what == "5 of 5 other hosts of the configuration are not connected: b (connecting), c (connecting), d (connecting: no answer) and 2 more");
  CHECK(examine_listed_hosts(state)[0].level == Finding::Level::note);
  state["subnet"] = json::object();
  CHECK(examine_listed_hosts(state).empty());  // examine_subnet() does
}
