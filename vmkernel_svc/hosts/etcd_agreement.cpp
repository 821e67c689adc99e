#include "vmkernel_svc/hosts/etcd_agreement.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace vrdma::hosts {

namespace {

using nlohmann::json;

// The gateway's bytes are base64, its 64-bit numbers strings, and what is zero or empty is left out.
std::string to_base64(const std::string& text) {
  std::string out(4 * ((text.size() + 2) / 3) + 1, '\0');
  const int bytes = ::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()), reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  out.resize(static_cast<std::size_t>(bytes));
  return out;
}
std::string from_base64(const std::string& text) {
  std::string out(text.size() / 4 * 3 + 1, '\0');
  const int bytes = ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(out.data()), reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (bytes < 0) throw std::runtime_error("a value that is not base64");
  const auto padding = static_cast<std::size_t>(std::count(text.end() - std::min<std::ptrdiff_t>(2, static_cast<std::ptrdiff_t>(text.size())), text.end(), '='));
  out.resize(static_cast<std::size_t>(bytes) - padding);
  return out;
}
std::uint64_t number(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return 0;
  const std::string text = found->is_string() ? found->get<std::string>() : found->dump();
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) throw std::runtime_error(fmt::format("\"{}\" is no number", key));
  return value;
}
// The only pair of a range; nullptr: there is none.
const json* pair_of(const json& range) {
  const auto found = range.find("kvs");
  return found == range.end() || found->empty() ? nullptr : &found->at(0);
}
const json& answer_of(const json& reply, std::size_t index) { return reply.at("responses").at(index).at("response_range"); }

json range(const std::string& key) { return {{"request_range", {{"key", to_base64(key)}}}}; }

}  // namespace

// What does not make sense is as good as no answer; so is what comes when the lease it was asked under has run out meanwhile (this host
// was suspended, or its disk slow): another may lead by then.
void EtcdAgreement::post(const std::string& path, const json& body, std::function<void(const json& reply)> take) {
  asking_ = true;
  calls_.post("/v3/" + path, body, [this, path, lease = lease_, take = std::move(take)](const json* reply, const std::string& why) {
    asking_ = false;
    std::string problem = why;
    if (reply != nullptr && lease == lease_) {
      try {
        take(*reply);
      } catch (const std::exception& error) {
        problem = fmt::format("the etcd's answer makes no sense: {}", error.what());
      }
    }
    note(path, problem);
    news_();
  });
}

// An etcd that is full renews leases, and takes no key: what it answers to one question says nothing of another. A transaction is what all
// the others are for.
void EtcdAgreement::note(const std::string& path, const std::string& problem) {
  constexpr std::size_t said_max = 16;  // several may say each its own
  if (!problem.empty()) {
    problem_ = problem;
    failed_at_ = path;
    if (said_.size() < said_max && said_.insert(problem).second) warnings_.push_back(problem);
    return;
  }
  if (problem_.empty() || (path != "kv/txn" && (path != failed_at_ || path != "lease/keepalive"))) return;
  log_.push_back("the etcd is of use again");
  problem_.clear();
  said_.clear();
}

void EtcdAgreement::tick(std::uint64_t now_ms, Outbox& out) {
  out.log.insert(out.log.end(), log_.begin(), log_.end());
  log_.clear();
  out.warnings.insert(out.warnings.end(), warnings_.begin(), warnings_.end());
  warnings_.clear();
  if (!lease_.empty() && now_ms >= lease_until_ms_) lost("its lease at the etcd was not renewed in time");
  if (asking_) return;
  if (proposed_ && leads(now_ms) && problem_.empty()) return write();
  if (now_ms < next_ms_) return;
  next_ms_ = now_ms + timing_.heartbeat_ms;
  if (lease_.empty()) return grant();
  renew(now_ms);
}

void EtcdAgreement::lost(const std::string& why) {
  if (leader_revision_ != 0) {
    log_.push_back(fmt::format("this host leads the subnet no more: {}", why));
    leader_ = {};
  }
  leader_revision_ = 0;
  lease_.clear();
  proposed_.reset();
}

void EtcdAgreement::grant() {
  const std::uint64_t asked_ms = clock_ms_();
  post("lease/grant", {{"TTL", std::max<std::uint64_t>(2, (timing_.election_ms + 999) / 1000)}}, [this, asked_ms](const json& reply) {
    lease_ = reply.at("ID").get<std::string>();
    lease_until_ms_ = asked_ms + 1000 * number(reply, "TTL");
    campaign();
  });
}

void EtcdAgreement::renew(std::uint64_t now_ms) {
  post("lease/keepalive", {{"ID", lease_}}, [this, now_ms](const json& reply) {
    const std::uint64_t ttl_s = number(reply.at("result"), "TTL");
    if (ttl_s == 0) return lost("its lease at the etcd has run out");
    lease_until_ms_ = std::max(lease_until_ms_, now_ms + 1000 * ttl_s);
    if (leader_revision_ == 0) return campaign();
    if (proposed_) write();  // one that was not answered
  });
}

// Takes the leader's key if nobody has it; the state is read in the same step, so it is all that was ever written.
void EtcdAgreement::campaign() {
  const std::string us = json{{"name", us_.name}, {"address", us_.address}, {"port", us_.port}}.dump();
  const json free{{"key", to_base64(key("leader"))}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}};
  const json put{{"request_put", {{"key", to_base64(key("leader"))}, {"value", to_base64(us)}, {"lease", lease_}}}};
  post("kv/txn", {{"compare", {free}}, {"success", {put, range(key("state"))}}, {"failure", {range(key("leader"))}}}, [this](const json& reply) {
    if (reply.value("succeeded", false)) {
      if (!take_state(answer_of(reply, 1))) throw std::runtime_error("its state is not one of this vrdmad's");
      leader_revision_ = number(reply.at("header"), "revision");
      leader_ = us_;
      log_.push_back("this host leads the subnet, by the etcd");
      return;
    }
    const json* const holder = pair_of(answer_of(reply, 0));
    leader_ = {};
    if (holder == nullptr) return;
    const json who = json::parse(from_base64(holder->at("value").get<std::string>()));
    leader_ = {who.at("name").get<std::string>(), who.at("address").get<std::string>(), who.at("port").get<std::uint16_t>()};
    // Our own, from before we were started anew, or from an answer that was lost: it goes with its lease.
    if (leader_.name == us_.name) leader_ = {};
  });
}

bool EtcdAgreement::take_state(const json& found) {
  State state;
  const json* const pair = pair_of(found);
  if (pair != nullptr) {
    std::string why;
    const auto delta = decode_delta(from_base64(pair->at("value").get<std::string>()), why);
    if (!delta || delta->from != StateId{} || !state.apply(*delta)) return false;
  }
  committed_ = std::move(state);
  state_revision_ = pair != nullptr ? number(*pair, "mod_revision") : 0;
  return true;
}

void EtcdAgreement::propose(std::uint64_t, State changed, Outbox&) {
  proposed_ = std::move(changed);
  if (!asking_) write();
}

void EtcdAgreement::write() {
  const json ours{{"key", to_base64(key("leader"))}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", std::to_string(leader_revision_)}};
  const json known{{"key", to_base64(key("state"))}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", std::to_string(state_revision_)}};
  const json put{{"request_put", {{"key", to_base64(key("state"))}, {"value", to_base64(encode(proposed_->since({})))}}}};
  post("kv/txn", {{"compare", {ours, known}}, {"success", {put}}, {"failure", {range(key("leader")), range(key("state"))}}}, [this](const json& reply) {
    if (reply.value("succeeded", false)) {
      committed_ = std::move(*proposed_);
      proposed_.reset();
      state_revision_ = number(reply.at("header"), "revision");
      return;
    }
    const json* const holder = pair_of(answer_of(reply, 0));
    if (holder == nullptr || number(*holder, "create_revision") != leader_revision_) return lost("another has the leader's key at the etcd");
    // It was written by the try before this one, whose answer was lost: nobody else can have.
    const StateId wanted = proposed_->id();
    if (!take_state(answer_of(reply, 1)) || committed_.id() != wanted) return lost("the state at the etcd was changed by somebody else");
    proposed_.reset();
  });
}

}  // namespace vrdma::hosts
