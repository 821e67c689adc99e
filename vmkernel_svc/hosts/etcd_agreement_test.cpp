// Who leads by an etcd, when answers come late: an etcd that answers when the test says so, and a clock that the test sets.
#include "vmkernel_svc/hosts/etcd_agreement.hpp"

#include <doctest/doctest.h>

#include <deque>
#include <string>
#include <vector>

using namespace vrdma::hosts;
using nlohmann::json;

namespace {

// What was asked, in order; nothing is answered by itself.
class SlowEtcd final : public EtcdCalls {
 public:
  struct Call {
    std::string path;
    json body;
    EtcdAnswer answer;
    void with(const json& reply) const { answer(&reply, ""); }
    void refused(const std::string& why) const { answer(nullptr, why); }
  };
  void post(const std::string& path, const json& body, EtcdAnswer answer) override { calls_.push_back({path, body, std::move(answer)}); }
  Call asked(const std::string& path) {
    REQUIRE(!calls_.empty());
    Call call = std::move(calls_.front());
    calls_.pop_front();
    CHECK(call.path == "/v3/" + path);
    return call;
  }
  bool silent() const { return calls_.empty(); }

 private:
  std::deque<Call> calls_;
};

constexpr auto grant = "lease/grant", keepalive = "lease/keepalive", transaction = "kv/txn";

json lease(const std::string& id) { return {{"ID", id}, {"TTL", "3"}}; }
json renewed() { return {{"result", {{"TTL", "3"}}}}; }
// The leader's key is ours, and there is no state yet.
json won(const std::string& revision) {
  return {{"header", {{"revision", revision}}}, {"succeeded", true}, {"responses", {json::object(), {{"response_range", json::object()}}}}};
}
// It is b's: {"address":"10.0.0.2","name":"b","port":1}
json is_of_b() {
  const json key{{"value", "eyJhZGRyZXNzIjoiMTAuMC4wLjIiLCJuYW1lIjoiYiIsInBvcnQiOjF9"}, {"create_revision", "9"}};
  return {{"header", {{"revision", "9"}}}, {"responses", {{{"response_range", {{"kvs", {key}}}}}}}};
}
json written(const std::string& revision) { return {{"header", {{"revision", revision}}}, {"succeeded", true}}; }

struct Candidate {
  SlowEtcd etcd;
  std::uint64_t now_ms = 1000;
  std::vector<std::string> log, warnings;
  EtcdAgreement agreement{etcd, "p", {"a", "10.0.0.1", 1}, Timing{}, [this] { return now_ms; }, [] {}};
  void pass(std::uint64_t ms) {
    Outbox out;
    now_ms += ms;
    agreement.tick(now_ms, out);
    log.insert(log.end(), out.log.begin(), out.log.end());
    warnings.insert(warnings.end(), out.warnings.begin(), out.warnings.end());
  }
  bool leads() const { return agreement.leads(now_ms); }
  void lead() {
    pass(0);
    etcd.asked(grant).with(lease("11"));
    etcd.asked(transaction).with(won("7"));
    REQUIRE(leads());
  }
  void propose() {
    State changed = agreement.committed();
    changed.begin(agreement.term());
    Outbox out;
    agreement.propose(now_ms, std::move(changed), out);
  }
};

constexpr std::uint64_t heartbeat_ms = 1000, suspended_ms = 60'000;

}  // namespace

TEST_CASE("WhoTakesTheKeyLeadsAsLongAsItsLeaseIsRenewed") {
  Candidate host;
  host.lead();
  CHECK(host.agreement.term() == 7);
  host.pass(heartbeat_ms);
  host.etcd.asked(keepalive).with(renewed());
  host.propose();
  host.etcd.asked(transaction).with(written("8"));
  CHECK(host.agreement.committed().id().term == 7);
  host.pass(heartbeat_ms);
  host.etcd.asked(keepalive).with({{"result", json::object()}});  // no TTL: it has run out there
  CHECK_FALSE(host.leads());
}

TEST_CASE("AKeyThatWasTakenUnderALeaseThatHasRunOutSinceMakesNobodyLead") {
  Candidate host;
  host.pass(0);
  host.etcd.asked(grant).with(lease("11"));
  const auto campaign = host.etcd.asked(transaction);
  host.pass(suspended_ms);
  campaign.with(won("7"));
  CHECK(host.agreement.leader() == "");
  CHECK(host.agreement.term() == 0);
  host.pass(heartbeat_ms);
  host.etcd.asked(grant).with(lease("12"));
  host.etcd.asked(transaction).with(is_of_b());
  CHECK_FALSE(host.leads());
  CHECK(host.agreement.leader() == "b");
  host.pass(heartbeat_ms);
  host.etcd.asked(keepalive).with(renewed());
  CHECK_FALSE(host.leads());
  const auto again = host.etcd.asked(transaction);  // it goes on trying
  CHECK(again.body.at("success").at(0).at("request_put").at("lease") == "12");
}

TEST_CASE("AnAnswerAboutALeaseThatHasRunOutSinceIsNoReasonToTryWithoutOne") {
  Candidate host;
  host.lead();
  host.pass(heartbeat_ms);
  const auto renewal = host.etcd.asked(keepalive);
  host.pass(suspended_ms);
  CHECK_FALSE(host.leads());
  renewal.with(renewed());
  CHECK(host.etcd.silent());
  host.pass(heartbeat_ms);
  host.etcd.asked(grant);
}

TEST_CASE("AStateThatWasWrittenUnderALeaseThatHasRunOutSinceIsReadAgainWithTheKey") {
  Candidate host;
  host.lead();
  host.propose();
  const auto write = host.etcd.asked(transaction);
  host.pass(suspended_ms);
  write.with(written("8"));
  CHECK(host.agreement.committed().id() == StateId{});
  host.pass(heartbeat_ms);
  host.etcd.asked(grant).with(lease("12"));
  host.etcd.asked(transaction).with(won("10"));
  CHECK(host.leads());
  CHECK(host.agreement.can_propose(host.now_ms));
}

// It renews leases all the time.
TEST_CASE("AnEtcdThatIsFullIsSaidOnceUntilItTakesAKeyAgain") {
  Candidate host;
  host.pass(0);
  host.etcd.asked(grant).with(lease("11"));
  host.etcd.asked(transaction).refused("no space at one");
  for (int i = 0; i < 10; ++i) {
    host.pass(heartbeat_ms);
    host.etcd.asked(keepalive).with(renewed());
    CHECK(host.agreement.problem() != "");
    host.etcd.asked(transaction).refused(i % 2 == 0 ? "no space at two" : "no space at one");
  }
  host.pass(heartbeat_ms);
  CHECK(host.warnings == std::vector<std::string>{"no space at one", "no space at two"});
  CHECK(host.log.empty());
  host.etcd.asked(keepalive).with(renewed());
  host.etcd.asked(transaction).with(won("7"));
  CHECK(host.agreement.problem() == "");
  host.pass(heartbeat_ms);
  CHECK(host.log.size() == 2);  // of use again; and it leads
  host.etcd.asked(keepalive).refused("no answer");
  host.pass(heartbeat_ms);
  host.etcd.asked(keepalive).with(renewed());
  CHECK(host.agreement.problem() == "");  // who leads may have nothing to write for long
}
