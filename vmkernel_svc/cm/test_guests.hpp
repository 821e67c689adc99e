// Hosts and guests for the tests of the connection manager, without a service: a Fabric whose guests are put in by hand, and the guests'
// part, which is to take the record out of a pipe when it is told that the last event went. Hosts are joined by a wire that is read when
// the test says so.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <rdma/rdma_user_cm.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <initializer_list>
#include <map>
#include <memory>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/fabric.hpp"

template <class T>
struct doctest::StringMaker<vrdma::Result<T>> {
  static String convert(const vrdma::Result<T>& result) { return result.has_value() ? String("ok") : doctest::toString(vrdma::value(result.error())); }
};

namespace vrdma::svc::test {

using control::CmAddress;
using control::CmEvent;
using control::CmId;

inline CmAddress v4(std::uint8_t a, std::uint8_t b, std::uint8_t c, std::uint8_t d, std::uint16_t port = 0) { return {AF_INET, port, 0, {a, b, c, d}}; }
inline CmAddress v6(std::uint8_t last, std::uint16_t port = 0) {
  CmAddress out{AF_INET6, port, 0, {0x20, 0x01, 0x0d, 0xb8}};
  out.ip[15] = last;
  return out;
}
inline CmAddress any_v4(std::uint16_t port) { return v4(0, 0, 0, 0, port); }
inline CmAddress any_v6(std::uint16_t port) { return {AF_INET6, port, 0, {}}; }
inline CmAddress any_gid(std::uint16_t port, std::uint16_t space = RDMA_PS_TCP, std::uint16_t pkey = hosts::pkey_default) {
  return {AF_IB, port, CmAddress::ib_scope(pkey, space), {}};
}

enum class Hosts { one, two };  // that the guests of a test are on

struct TestHost {
  Config config;
  Shards shards{1};
  Fabric fabric{config, shards};

  TestHost() { ::signal(SIGPIPE, SIG_IGN); }  // the server blocks it in the shard's thread
  ConnectionManager& cm() { return *fabric.cm; }
  Guest& put(uid_t uid, std::uint32_t link_layer = control::link_layer_infiniband) {
    static std::uint32_t last_id = 2;
    auto guest = std::make_unique<Guest>();
    guest->id = GuestId{++last_id};
    guest->name = "guest-" + std::to_string(last_id);
    const auto [tenant, is_new] = fabric.tenants.try_emplace(uid);
    if (is_new) tenant->second.uid = uid, tenant->second.quota = config.quota, tenant->second.pkeys[0] = hosts::pkey_default;
    guest->tenant = &tenant->second;
    guest->credentials = {0, uid, 0};  // of no process, whose network namespace would be looked at
    guest->lid = static_cast<std::uint16_t>(last_id);
    guest->link_layer = link_layer;
    guest->minor = control::version_minor;
    assign_addresses(*guest);
    return *(fabric.guests[last_id] = std::move(guest));
  }
};

constexpr std::uint32_t no_event = ~0u;

class TestGuest {
 public:
  // In that network namespace, which has these addresses.
  TestGuest(TestHost& host, std::uint64_t network, std::initializer_list<CmAddress> addresses, uid_t uid = 1000,
            std::uint32_t link_layer = control::link_layer_infiniband)
      : host_(&host), guest_(&host.put(uid, link_layer)) {
    control::CmPlaceRequest place{};
    place.network = network;
    place.count = static_cast<std::uint32_t>(addresses.size());
    std::copy(addresses.begin(), addresses.end(), place.addresses);
    REQUIRE(cm().place(*guest_, place));
    channel = open();
  }
  TestGuest(const TestGuest&) = delete;
  ~TestGuest() { leave(); }

  ConnectionManager& cm() const { return host_->cm(); }
  Guest& guest() const { return *guest_; }
  Tenant& tenant() const { return *guest_->tenant; }
  CmAddress mapped(std::uint16_t port = 0) const { return v4(0xc6, 0x12, static_cast<std::uint8_t>(guest_->lid >> 8), static_cast<std::uint8_t>(guest_->lid), port); }

  CmAddress gid(std::uint16_t port, std::uint16_t space = RDMA_PS_TCP, std::uint16_t pkey = hosts::pkey_default) const {
    return {AF_IB, port, CmAddress::ib_scope(pkey, space), guest_->gids[0].gid};
  }

  void leave() {
    if (guest_ == nullptr) return;
    cm().leave(*guest_);
    host_->fabric.guests.erase(std::exchange(guest_, nullptr)->id.value);
  }

  std::uint32_t channel;  // the first one
  std::uint32_t open() {
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
    const auto opened = cm().open(*guest_, vmci::UniqueFd(ends[1]));
    REQUIRE(opened);
    pipes_[opened->channel].reset(ends[0]);
    return opened->channel;
  }
  void close(std::uint32_t handle) {
    REQUIRE(cm().close(*guest_, handle));
    pipes_.erase(handle);
  }
  // How many records are in the pipe.
  int records(std::uint32_t handle) const {
    int bytes = 0;
    REQUIRE(::ioctl(pipes_.at(handle).get(), FIONREAD, &bytes) == 0);
    return bytes / static_cast<int>(sizeof(control::AsyncRecord));
  }
  void take_record(std::uint32_t handle) {
    control::AsyncRecord record;
    REQUIRE(::read(pipes_.at(handle).get(), &record, sizeof(record)) == sizeof(record));
  }
  const std::map<std::uint32_t, vmci::UniqueFd>& pipes() const { return pipes_; }

  CmId create(std::uint16_t port_space = RDMA_PS_TCP, std::uint32_t on = 0) {
    const auto made = cm().create(*guest_, {on != 0 ? on : channel, port_space, 2, ++last_uid});
    REQUIRE(made);
    return {made->id, on != 0 ? on : channel};
  }
  std::uint64_t last_uid = 1000;
  void destroy(const CmId& id) {
    const auto gone = cm().destroy(*guest_, id);
    REQUIRE(gone);
    if (gone->last != 0) take_record(id.channel);
  }
  CmEvent take(std::uint32_t from = 0) {
    if (from == 0) from = channel;
    const int before = records(from);
    const auto taken = cm().take_event(*guest_, from);
    REQUIRE(taken);
    CHECK(before == static_cast<int>(taken->found));
    if (taken->last != 0) take_record(from);
    CmEvent out = taken->event;
    if (taken->found == 0) out.event = no_event;
    return out;
  }
  // The next event is that one, of that identifier.
  CmEvent expect(std::uint32_t event, const CmId& id, std::int32_t status = 0) {
    const CmEvent taken = take(id.channel);
    CHECK(taken.event == event);
    CHECK(taken.id == id.id);
    CHECK(taken.status == status);
    return taken;
  }
  bool hears_nothing(std::uint32_t from = 0) { return take(from).event == no_event; }

  int bind(const CmId& id, const CmAddress& address) { return error_of(cm().bind(*guest_, {id, address})); }
  int listen(const CmId& id) { return error_of(cm().listen(*guest_, {id, 0, 0})); }
  CmId listener(const CmAddress& at, std::uint16_t port_space = RDMA_PS_TCP) {
    const CmId id = create(port_space);
    REQUIRE(bind(id, at) == 0);
    REQUIRE(listen(id) == 0);
    return id;
  }
  int resolve(const CmId& id, const CmAddress& to, const CmAddress& from = {}, bool is_local = false) {
    return error_of(cm().resolve_address(*guest_, {id, from, to, is_local, 1000}));
  }
  int connect(const CmId& id, const control::CmParameters& parameters = {}) { return error_of(cm().connect(*guest_, {id, parameters})); }
  int accept(const CmId& id, std::uint64_t uid, const control::CmParameters& parameters = {}) {
    return error_of(cm().accept(*guest_, {id, uid, 1, 0, parameters}));
  }
  int ready(const CmId& id) { return error_of(cm().accept(*guest_, {id, 0, 0, 0, {}})); }
  int disconnect(const CmId& id) { return error_of(cm().disconnect(*guest_, id)); }
  CmState state(const CmId& id) const { return cm().identifiers().at(id.id)->state; }
  const CmIdentifier& at(const CmId& id) const { return *cm().identifiers().at(id.id); }

  template <class T>
  static int error_of(const Result<T>& result) {
    return result ? 0 : value(result.error());
  }

 private:
  TestHost* host_;
  Guest* guest_;
  std::map<std::uint32_t, vmci::UniqueFd> pipes_;  // read ends
};

// Two hosts, 1 and 2 to each other. What one tells waits on the wire.
class TestWire {
 public:
  TestWire(TestHost& one, TestHost& two) : ends_{{*this, 1}, {*this, 2}}, hosts_{&one, &two} {
    one.cm().use(&ends_[0]);
    two.cm().use(&ends_[1]);
  }
  TestWire(const TestWire&) = delete;
  ~TestWire() {
    for (TestHost* const host : hosts_) host->cm().use(nullptr);
  }
  bool carry_one() {
    if (waiting.empty()) return false;
    Letter letter = std::move(waiting.front());
    waiting.pop_front();
    letter.message.is_local = 0;  // as FarCm has it
    hosts_[letter.to - 1]->cm().arrived(3 - letter.to, letter.message);
    return true;
  }
  void carry_all() {
    while (carry_one()) continue;
  }
  void lose() {
    waiting.clear();
    hosts_[0]->cm().lost(2);
    hosts_[1]->cm().lost(1);
  }

  struct Letter {
    std::uint32_t to;
    CmMessage message;
  };
  std::deque<Letter> waiting;
  bool is_up = true;
  std::uint64_t silent_ns = 0;  // both ends

 private:
  struct End final : ConnectionManager::Post {
    TestWire& wire;
    std::uint32_t self;
    End(TestWire& wire_in, std::uint32_t self_in) : wire(wire_in), self(self_in) {}
    void tell(std::uint32_t host, const CmMessage& message) override {
      if (wire.is_up && host == 3 - self) wire.waiting.push_back({host, message});
    }
    std::vector<std::uint32_t> who_may_have(const CmAddress&) override { return wire.is_up ? std::vector<std::uint32_t>{3 - self} : std::vector<std::uint32_t>{}; }
    std::uint64_t silent_ns(std::uint32_t) override { return wire.silent_ns; }
  };
  End ends_[2];
  TestHost* hosts_[2];
};

}  // namespace vrdma::svc::test
