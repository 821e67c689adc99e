#include "vmkernel_svc/hosts/state.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "vmkernel_svc/hosts/certificates.hpp"
#include "vmkernel_svc/hosts/subnet_file.hpp"

using namespace vrdma::hosts;

namespace {

struct TemporaryFolder {
  std::filesystem::path path;
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "vrdma-state-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

Host host(const std::string& name, LidRange lids) { return {name, "10.0.0.1", 28250, 28251, 0, lids, "ab", 0}; }

std::string refusal_of(const std::filesystem::path& file) {
  try {
    load_subnet(file);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("LidsAreGivenRoundTheWholeRangeAndNeverTwice") {
  State state;
  state.begin(1);
  for (int i = 0; i < 3; ++i) state.put(host(fmt::format("h{}", i), *state.allocate(16000)));
  CHECK_FALSE(state.allocate(16000));
  const auto rest = state.allocate(1150);
  REQUIRE(rest);
  CHECK(rest->first == 48001);
  CHECK(rest->last == lid_max);
  state.put(host("rest", *rest));
  CHECK_FALSE(state.allocate(1));
  state.remove("h1");
  CHECK_FALSE(state.allocate(1));  // they rest
  state.end_rest("ab");
  const auto again = state.allocate(16000);
  REQUIRE(again);
  CHECK(again->first == 16001);
  CHECK(state.holder(48001)->name == "rest");
  CHECK(state.holder(16001) == nullptr);
}

TEST_CASE("FortyNineThousandLidsAreAssignedSavedAndReloaded") {
  const TemporaryFolder folder;
  const auto began = std::chrono::steady_clock::now();
  const std::clock_t began_cpu = std::clock();
  SubnetFile file;
  State& state = file.memory.consensus.state;
  state.begin(1);
  for (int i = 0; i < 49'000; ++i) state.put(host(fmt::format("h{}", i), *state.allocate(1)));
  save_subnet(folder.path / "subnet.json", file);
  const SubnetFile again = load_subnet(folder.path / "subnet.json");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  MESSAGE("49 000 LIDs of as many hosts, assigned, saved and reloaded: " << took.count() << " s, of which this program ran "
                                                                               << static_cast<double>(std::clock() - began_cpu) / CLOCKS_PER_SEC << " s");
  CHECK(again.memory.consensus.state.hosts() == state.hosts());
  CHECK(again.memory.consensus.state.id() == state.id());
}

TEST_CASE("AChangeIsCutOutAndAddedElsewhere") {
  State here, there;
  here.begin(1);
  here.put(host("a", {1, 10}));
  here.put(host("b", {11, 20}));
  REQUIRE(there.apply(here.since({})));
  const StateId then = there.id();
  here.begin(1);
  here.remove("a");
  here.put(host("c", {21, 30}));
  const Delta delta = here.since(then);
  CHECK(delta.hosts.size() == 1);
  REQUIRE(there.apply(delta));
  CHECK(there.hosts() == here.hosts());
  CHECK(there.removed() == here.removed());
  CHECK_FALSE(there.is_free({1, 1}));
  CHECK_FALSE(there.apply(delta));  // it does not start here any more
  Delta clash = here.since(here.id());
  clash.hosts.push_back(host("d", {30, 31}));
  CHECK_FALSE(there.apply(clash));
  CHECK(there.find("d") == nullptr);
}

TEST_CASE("ACertificateIsRevokedWithoutAHostAndWhatRestsGoesOnResting") {
  State here, there;
  here.begin(1);
  here.put(host("a", {1, 10}));
  REQUIRE(there.apply(here.since({})));
  const StateId then = there.id();
  here.begin(1);
  here.revoke("cd", "b");
  here.remove("a");
  here.revoke("ab", "a");  // it was the certificate of the one that was removed
  CHECK_FALSE(here.is_free({1, 10}));
  REQUIRE(there.apply(here.since(then)));
  CHECK(there.removed() == here.removed());
  CHECK(there.removed().contains("cd"));
  there.end_rest("cd");
  CHECK_FALSE(there.is_free({1, 10}));
  there.end_rest("ab");
  CHECK(there.is_free({1, 10}));
}

TEST_CASE("AFileThatIsNotSoundIsRefusedWithItsNameAndTheReason") {
  const TemporaryFolder folder;
  const auto file = folder.path / "subnet.json";
  CHECK(load_subnet(file).memory.lids == no_lids);
  const auto write = [&](const std::string& text) { std::ofstream(file) << text; };
  write("{");
  CHECK(refusal_of(file).find("is damaged") != std::string::npos);
  write("");
  CHECK(refusal_of(file).find(file.string() + ": is damaged") == 0);
  CHECK(read_file(file) == "");
  CHECK_THROWS_WITH_AS(read_file(folder.path), doctest::Contains("cannot be read"), std::runtime_error);
  write(R"({"format":9})");
  CHECK(refusal_of(file).find("its format is 9") != std::string::npos);
  const std::string start = R"({"format":1,"lids":[1,8],"serial":"ab","term":1,"voted_for":"","managers":[],"state":{"from":[0,0],"to":[1,1],"next_id":3,"next_lid":9,"removed":[],"hosts":[)";
  const std::string a = R"({"name":"a","address":"10.0.0.1","port":1,"carrier_port":2,"id":1,"lids":[1,8],"serial":"ab","changed":1})";
  const std::string b = R"({"name":"b","address":"10.0.0.2","port":1,"carrier_port":2,"id":2,"lids":[5,9],"serial":"cd","changed":1})";
  write(start + a + "," + b + "]}}");
  const std::string why = refusal_of(file);
  CHECK(why.find(file.string()) == 0);
  CHECK(why.find("two hold the same LIDs: \"a\" has LIDs 1-8 and \"b\" 5-9") != std::string::npos);
  write(start + a + "]}}");
  CHECK(refusal_of(file) == "");
  CHECK(load_subnet(file).memory.consensus.state.find("a")->lids.last == 8);
}
