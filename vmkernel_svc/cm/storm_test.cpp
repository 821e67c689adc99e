// Guests of two hosts that ask for anything in any order, a third host that says anything, time that passes and a wire that is lost:
// after each step, what the connection managers keep fits together; and when all have left, nothing is kept.
#include <cstdlib>
#include <random>
#include <string>

#include "vmkernel_svc/cm/test_guests.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

namespace {

// Each step looks at everything, which takes sanitizers twenty times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VRDMA_IS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define VRDMA_IS_SANITIZED 1
#endif
#endif
#ifdef VRDMA_IS_SANITIZED
constexpr std::uint64_t steps_by_default = 30'000;
#else
constexpr std::uint64_t steps_by_default = 200'000;
#endif

constexpr std::uint32_t stranger = 9;  // a third host
constexpr std::size_t guests_max = 4, channels_max = 3, identifiers_max = 40;  // of a host; of a guest

// nullptr: all fits together.
const char* what_is_wrong(TestHost& host, const std::vector<std::unique_ptr<TestGuest>>& guests) {
  ConnectionManager& cm = host.cm();
  std::map<const Tenant*, std::pair<std::uint32_t, std::uint32_t>> due;  // objects, descriptors
  std::map<std::uint32_t, std::uint32_t> unread;
  std::map<const Guest*, std::uint32_t> written;
  std::size_t of_channels = 0;
  const auto is_there = [&](const Guest* guest) {
    for (const auto& [context, each] : host.fabric.guests)
      if (each.get() == guest) return true;
    return false;
  };
  for (const auto& [handle, channel] : cm.channels()) {
    if (channel->handle != handle || !is_there(channel->guest)) return "a channel is that of a guest that is there";
    ++due[channel->guest->tenant].first, ++due[channel->guest->tenant].second;
    if (channel->pipe.is_announced() != !channel->events.empty()) return "events that wait are announced";
    for (const std::uint32_t id : channel->identifiers)
      if (!cm.identifiers().contains(id) || cm.identifiers().at(id)->channel != channel.get()) return "a channel has its own identifiers";
    of_channels += channel->identifiers.size();
    for (const auto& [number, waiting] : channel->events.waiting()) {
      const auto member = cm.memberships().find(waiting.counted_at);
      const auto of = cm.identifiers().find(member != cm.memberships().end() ? member->second : waiting.counted_at);
      if (of == cm.identifiers().end()) return "an event is of somebody who is there";
      if (of->second->channel != channel.get()) return "an event waits where its identifier is";
      ++unread[waiting.counted_at];
      written[channel->guest] += waiting.event.event == cm_user;
    }
  }
  if (of_channels != cm.identifiers().size()) return "each identifier is its channel's";
  std::size_t memberships = 0, deadlines = 0;
  for (const auto& [id, one] : cm.identifiers()) {
    if (one->id != id || !is_there(one->guest)) return "an identifier is that of a guest that is there";
    const auto channel = cm.channels().find(one->channel->handle);
    if (channel == cm.channels().end() || channel->second.get() != one->channel) return "an identifier's channel is there";
    if (one->channel->guest != one->guest) return "an identifier's channel is its guest's";
    due[one->guest->tenant].first += 1 + static_cast<std::uint32_t>(one->memberships.size());
    memberships += one->memberships.size();
    for (const std::uint32_t handle : one->memberships)
      if (!cm.memberships().contains(handle) || cm.memberships().at(handle) != id) return "a membership is that of its identifier";
    if (one->unread != unread[id]) return "unread events are counted";
    if (one->unread > 1024 + 16) return "unread events are limited";
    if (one->deadline_ns != 0) ++deadlines;
    if (one->deadline_ns != 0 && !cm.deadlines().contains({one->deadline_ns, id})) return "a deadline is in the list";
    const bool waits = one->state == CmState::resolving || one->state == CmState::connecting || one->state == CmState::accepted || one->state == CmState::disconnecting;
    if (waits && one->deadline_ns == 0) return "who waits for an answer does not wait for ever";
    if ((one->state == CmState::resolving) == one->asked.empty()) return "who resolves has asked somebody, and nobody else has";
  }
  if (cm.memberships().size() != memberships) return "a membership is somebody's";
  if (cm.deadlines().size() != deadlines) return "a deadline names who is there";
  for (const auto& [uid, tenant] : host.fabric.tenants)
    if (tenant.objects != due[&tenant].first || tenant.descriptors != due[&tenant].second) return "what a tenant has is counted";
  for (const auto& guest : guests) {
    if (guest->guest().cm_written != written[&guest->guest()]) return "what a guest has written for itself is counted";
    for (const auto& [handle, pipe] : guest->pipes())
      if (guest->records(handle) != (cm.channels().at(handle)->events.empty() ? 0 : 1)) return "a record is in the pipe exactly while events wait";
  }
  return nullptr;
}

class Storm {
 public:
  explicit Storm(std::uint64_t seed) : random_(seed) {
    for (TestHost& host : hosts_) host.fabric.cm = std::make_unique<ConnectionManager>(host.fabric, 0xffffffff - 500);  // comes round soon
    wire_ = std::make_unique<TestWire>(hosts_[0], hosts_[1]);
  }

  void step() {
    const std::size_t which = below(2);
    TestHost& host = hosts_[which];
    auto& guests = guests_[which];
    switch (below(24)) {
      case 0:
        if (one_in(40)) come_or_go(which);
        break;
      case 1:
        if (one_in(8)) host.cm().expire(vmci::monotonic_ns() + (one_in(20) ? below(100) : below(3)) * 1'000'000'000);
        break;
      case 2:
        if (one_in(200)) wire_->lose();
        if (one_in(one_in(2) && wire_->is_up ? 200 : 20)) wire_->is_up = !wire_->is_up;
        break;
      case 3: host.cm().arrived(stranger, any_message(host)); break;
      case 4:
        if (one_in(100)) host.cm().lost(stranger);
        break;
      case 5: case 6: case 7: case 8: case 9: case 10: wire_->carry_one(); break;
      default:
        if (guests.empty()) come_or_go(which);
        else ask(host, *guests[below(guests.size())]);
    }
  }
  const char* what_is_wrong() {
    for (std::size_t i = 0; i < 2; ++i)
      if (const char* const wrong = ::what_is_wrong(hosts_[i], guests_[i])) return wrong;
    return nullptr;
  }
  void all_leave() {
    for (std::size_t i = 0; i < 2; ++i)
      while (!guests_[i].empty()) guests_[i].pop_back(), wire_->carry_all();
    // What others have called for in vain, or made up, is kept for a moment.
    for (TestHost& host : hosts_) host.cm().expire(vmci::monotonic_ns() + 1'000'000'000);
  }
  const char* what_is_left() {
    for (TestHost& host : hosts_) {
      if (!host.cm().channels().empty() || !host.cm().identifiers().empty() || !host.cm().memberships().empty() || host.cm().waits())
        return "whoever leaves leaves nothing behind";
      for (const auto& [uid, tenant] : host.fabric.tenants)
        if (tenant.objects != 0 || tenant.descriptors != 0) return "whoever leaves gives back what it had";
    }
    return nullptr;
  }
  std::map<std::uint32_t, std::uint64_t> seen;  // events, by kind

 private:
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }

  void come_or_go(std::size_t which) {
    auto& guests = guests_[which];
    if (guests.size() == guests_max || (!guests.empty() && one_in(3))) {
      const auto at = guests.begin() + static_cast<std::ptrdiff_t>(below(guests.size()));
      guests.erase(at);
      return;
    }
    const std::uint64_t network = 1 + below(2);
    const auto last = static_cast<std::uint8_t>(10 * which + network);
    guests.push_back(std::make_unique<TestGuest>(hosts_[which], network, std::initializer_list<CmAddress>{v4(10, 0, 0, last), v6(last), any_address()}, 1000 + static_cast<uid_t>(below(3)),
                                                 one_in(2) ? link_layer_infiniband : link_layer_ethernet));
    Tenant& tenant = guests.back()->tenant();
    if (tenant.guests == 0) tenant.guests = 1, tenant.pkeys = {hosts::pkey_default, static_cast<std::uint16_t>(one_in(2) ? 0x8001 : 1)};
    if (one_in(20)) tenant.pkeys[0] = static_cast<std::uint16_t>(tenant.pkeys[0] ^ 0x8000);
  }

  CmAddress any_address() {
    const auto port = static_cast<std::uint16_t>(one_in(8) ? below(65536) : one_in(4) ? 0 : 5000 + below(4));
    constexpr std::uint8_t lasts[] = {1, 2, 11, 12, 99};
    const std::uint8_t last = lasts[below(std::size(lasts))];
    switch (below(10)) {
      case 0: return any_v4(port);
      case 1: return any_v6(port);
      case 2: return v4(127, 0, 0, 1, port);
      case 3: case 4: return v6(last, port);
      case 5: {
        const auto& guests = guests_[below(2)];
        if (!guests.empty()) return guests[below(guests.size())]->mapped(port);
        return {};
      }
      case 6: {
        CmAddress out{static_cast<std::uint16_t>(below(12)), port, 0, {}};
        for (auto& byte : out.ip) byte = static_cast<std::uint8_t>(below(3));
        return out;
      }
      case 7: {
        constexpr std::uint16_t spaces[] = {RDMA_PS_TCP, RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB, 0, 7}, pkeys[] = {0xffff, 0xffff, 0x8001, 0};
        const auto& guests = guests_[below(2)];
        CmAddress out = any_gid(port, spaces[below(std::size(spaces))], pkeys[below(std::size(pkeys))]);
        if (!guests.empty() && one_in(2)) out.ip = guests[below(guests.size())]->guest().gids[0].gid;
        return out;
      }
      default: return v4(10, 0, 0, last, port);
    }
  }
  // Where somebody listens in that port space, if anybody does.
  CmAddress called_address(std::uint32_t port_space) {
    std::vector<CmAddress> at;
    for (std::size_t which = 0; which < 2; ++which)
      for (const auto& [id, one] : hosts_[which].cm().identifiers()) {
        if (one->state != CmState::listening || one->port_space != port_space) continue;
        const auto last = static_cast<std::uint8_t>(10 * which + one->network.number);
        const std::uint16_t port = one->source.port;
        if (one->source.family == AF_IB) at.push_back({AF_IB, port, one->source.scope | 0xffff, one->guest->gids[0].gid});
        else at.push_back(!one->source.is_any() ? one->source : one->source.family == AF_INET6 && one_in(2) ? v6(last, port) : v4(10, 0, 0, last, port));
      }
    return at.empty() || one_in(4) ? any_address() : at[below(at.size())];
  }
  CmParameters any_parameters() {
    CmParameters out{};
    out.private_bytes = static_cast<std::uint8_t>(one_in(4) ? below(256) : below(57));
    out.responder_resources = static_cast<std::uint8_t>(below(256));
    out.initiator_depth = static_cast<std::uint8_t>(below(256));
    out.retry_count = out.rnr_retry_count = static_cast<std::uint8_t>(below(256));
    return out;
  }
  // Mostly one of the guest's own.
  CmId any_id(TestHost& host, TestGuest& guest, CmState wanted) {
    std::vector<const CmIdentifier*> own, wanted_ones, all;
    for (const auto& [id, one] : host.cm().identifiers()) {
      all.push_back(one.get());
      if (one->guest == &guest.guest()) own.push_back(one.get());
      if (one->guest == &guest.guest() && one->state == wanted) wanted_ones.push_back(one.get());
    }
    if (all.empty() || one_in(50)) return {static_cast<std::uint32_t>(random_()), guest.channel};
    auto& from = !wanted_ones.empty() && !one_in(5) ? wanted_ones : own.empty() || one_in(30) ? all : own;
    const CmIdentifier& one = *from[below(from.size())];
    return {one.id, one_in(30) ? guest.channel : one.channel->handle};
  }
  std::uint32_t any_channel(TestGuest& guest) {
    if (one_in(40) || guest.pipes().empty()) return static_cast<std::uint32_t>(random_());
    return std::next(guest.pipes().begin(), static_cast<std::ptrdiff_t>(below(guest.pipes().size())))->first;
  }
  CmMessage any_message(TestHost& host) {
    CmMessage out{};
    out.kind = static_cast<CmKind>(1 + below(10));
    if (!host.cm().identifiers().empty() && !one_in(5))
      out.to = std::next(host.cm().identifiers().begin(), static_cast<std::ptrdiff_t>(below(host.cm().identifiers().size())))->first;
    else if (one_in(2)) out.to = static_cast<std::uint32_t>(random_());
    out.from = static_cast<std::uint32_t>(one_in(4) ? random_() : below(20));
    constexpr std::uint32_t spaces[] = {RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IPOIB, RDMA_PS_IB, 7};
    out.port_space = spaces[below(std::size(spaces))];
    out.psn = static_cast<std::uint32_t>(random_());
    out.status = static_cast<std::int32_t>(one_in(2) ? 0 : random_());
    out.ack_timeout = static_cast<std::uint32_t>(random_());
    out.port = {random_(), static_cast<std::uint32_t>(below(4)), static_cast<std::uint16_t>(random_()), static_cast<std::uint8_t>(below(6)), 0};
    out.source = any_address();
    out.destination = called_address(out.port_space);
    for (auto& pkey : out.pkeys) pkey = static_cast<std::uint16_t>(one_in(2) ? 0xffff : random_());
    out.parameters = any_parameters();
    return out;
  }

  // The guest's part is done properly: it takes the record when it is told so.
  template <class Reply>
  void gone(TestGuest& guest, std::uint32_t channel, const Result<Reply>& reply) {
    if (reply && reply->last != 0) guest.take_record(channel);
  }

  void ask(TestHost& host, TestGuest& guest) {
    ConnectionManager& cm = host.cm();
    Guest& who = guest.guest();
    const std::uint64_t uid = one_in(20) ? 0 : random_();
    std::size_t own = 0;
    for (const auto& [id, one] : cm.identifiers()) own += one->guest == &who;
    switch (below(29)) {
      case 0:
        if (guest.pipes().size() < channels_max) guest.open();
        break;
      case 1:
        if (guest.pipes().size() > 1 && one_in(20)) guest.close(any_channel_of_own(guest));
        break;
      case 2: {
        CmPlaceRequest place{};
        place.network = 1 + below(2);
        place.count = static_cast<std::uint32_t>(one_in(20) ? random_() : below(4));
        for (auto& address : place.addresses) address = any_address();
        if (one_in(50)) (void)cm.place(who, place);
        break;
      }
      case 3: case 4: case 5: {
        constexpr std::uint16_t spaces[] = {RDMA_PS_TCP, RDMA_PS_TCP, RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_UDP, RDMA_PS_IPOIB, RDMA_PS_IB, 0};
        if (own < identifiers_max) (void)cm.create(who, {any_channel(guest), spaces[below(std::size(spaces))], static_cast<std::uint16_t>(below(6)), uid});
        break;
      }
      case 6: case 7: {
        static constexpr CmState states[] = {CmState::ended, CmState::ended, CmState::bound, CmState::connecting, CmState::replied, CmState::requested, CmState::accepted,
                                             CmState::established, CmState::listening, CmState::resolving};
        if (own < identifiers_max / 4 && !one_in(4)) break;
        const CmId id = any_id(host, guest, states[below(std::size(states))]);
        gone(guest, id.channel, cm.destroy(who, id));
        break;
      }
      case 8: (void)cm.bind(who, {any_id(host, guest, CmState::idle), any_address()}); break;
      case 9: case 10: case 11: {
        const CmId id = any_id(host, guest, one_in(3) ? CmState::bound : CmState::idle);
        const auto one = cm.identifiers().find(id.id);
        const CmAddress called = called_address(one != cm.identifiers().end() ? one->second->port_space : std::uint32_t{RDMA_PS_TCP});
        (void)cm.resolve_address(who, {id, one_in(3) ? any_address() : CmAddress{}, called, static_cast<std::uint32_t>(one_in(3)),
                                       static_cast<std::uint32_t>(one_in(9) ? random_() : below(5000))});
        break;
      }
      case 12: (void)cm.resolve_route(who, any_id(host, guest, CmState::resolved)); break;
      case 13:
        if (one_in(3)) (void)cm.listen(who, {any_id(host, guest, CmState::bound), static_cast<std::uint32_t>(random_()), 0});
        break;
      case 14: case 15: (void)cm.connect(who, {any_id(host, guest, CmState::routed), any_parameters()}); break;
      case 16: case 17: (void)cm.accept(who, {any_id(host, guest, CmState::requested), uid, 1, 0, any_parameters()}); break;
      case 18: (void)cm.accept(who, {any_id(host, guest, CmState::replied), uid, 0, 0, {}}); break;
      case 19: {
        constexpr CmState states[] = {CmState::requested, CmState::replied, CmState::connecting, CmState::accepted};
        const CmState from = states[below(std::size(states))];
        if (one_in(3)) (void)cm.reject(who, {any_id(host, guest, from), static_cast<std::uint32_t>(random_()), static_cast<std::uint32_t>(one_in(9) ? random_() : below(149)), {}});
        break;
      }
      case 20: (void)cm.disconnect(who, any_id(host, guest, CmState::established)); break;
      case 21: (void)cm.established(who, any_id(host, guest, CmState::accepted)); break;
      case 22: (void)cm.set_option(who, {any_id(host, guest, CmState::idle), static_cast<std::uint32_t>(below(6)), static_cast<std::uint32_t>(below(40))}); break;
      case 23: {
        const CmId id = any_id(host, guest, CmState::established);
        (void)cm.query(who, id);
        (void)cm.attributes(who, {id, static_cast<std::uint32_t>(below(9)), 0});
        break;
      }
      case 24: {
        const CmId id = any_id(host, guest, CmState::listening);
        gone(guest, id.channel, cm.migrate(who, {id, any_channel(guest), 0}));
        break;
      }
      case 25: {
        if (cm.memberships().size() < 20) (void)cm.join(who, {any_id(host, guest, CmState::bound), uid, one_in(4) ? any_address() : v4(239, 0, 0, 1), static_cast<std::uint32_t>(below(8)), 0});
        break;
      }
      case 26: (void)cm.write_event(who, {any_id(host, guest, CmState::bound), one_in(9) ? cm_established : cm_user, 0, {}}); break;
      case 27: {
        if (cm.memberships().empty()) break;
        const auto one = std::next(cm.memberships().begin(), static_cast<std::ptrdiff_t>(below(cm.memberships().size())));
        const CmId id{one->first, one_in(9) ? any_channel(guest) : cm.identifiers().at(one->second)->channel->handle};
        gone(guest, id.channel, cm.leave_group(who, id));
        break;
      }
      default: {
        const std::uint32_t channel = any_channel(guest);
        for (std::uint64_t events = below(6); events > 0; --events) {
          const auto taken = cm.take_event(who, channel);
          gone(guest, channel, taken);
          if (taken && taken->found != 0) ++seen[taken->event.event];
        }
      }
    }
  }
  std::uint32_t any_channel_of_own(TestGuest& guest) {
    return std::next(guest.pipes().begin(), static_cast<std::ptrdiff_t>(below(guest.pipes().size())))->first;
  }

  std::mt19937_64 random_;
  TestHost hosts_[2];
  std::unique_ptr<TestWire> wire_;
  std::vector<std::unique_ptr<TestGuest>> guests_[2];
};

}  // namespace

TEST_CASE("Whatever guests and hosts do, what is kept of them fits together, and nothing is kept when they have left") {
  const char* const given = std::getenv("VRDMA_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  CAPTURE(seed);  // VRDMA_TEST_SEED
  const char* const count = std::getenv("VRDMA_CM_STEPS");
  const std::uint64_t steps = count != nullptr ? std::strtoull(count, nullptr, 10) : steps_by_default;
  Storm storm(seed);
  for (std::uint64_t step = 0; step < steps; ++step) {
    storm.step();
    const char* const wrong = storm.what_is_wrong();
    const std::string failed = wrong == nullptr ? "" : "not so after step " + std::to_string(step) + ": " + wrong;
    if (wrong != nullptr) FAIL(failed, ", VRDMA_TEST_SEED=", seed);
  }
  storm.all_leave();
  const char* const left = storm.what_is_left();
  if (left != nullptr) FAIL("not so: ", left, ", VRDMA_TEST_SEED=", seed);
  if (steps < 200'000) return;
  // Otherwise it has not been much of a storm.
  for (const std::uint32_t event : {cm_address_resolved, cm_address_error, cm_route_resolved, cm_connect_request, cm_connect_response, cm_unreachable, cm_rejected, cm_established,
                                    cm_disconnected, cm_timewait_exit})
    CHECK(storm.seen[event] > 0);
  std::string told;
  for (const auto& [event, times] : storm.seen) told += " " + std::to_string(event) + ":" + std::to_string(times);
  MESSAGE("events by kind:", told);
}
