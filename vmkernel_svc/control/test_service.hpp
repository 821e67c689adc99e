// A service without threads and sockets, for tests of what it answers to guests. One thread.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <vector>

#include "vmkernel_svc/control/desk.hpp"

namespace vrdma::svc::test {

struct TestService {
  explicit TestService(Config wanted = {}) : config(with_small_arenas(std::move(wanted))), page(*vmci::Segment::create("service-test", sizeof(control::ServicePage), vmci::HandedOut::read_only)) {}
  ~TestService() {
    while (!shard.fabric().guests.empty()) desk.detach(*shard.fabric().guests.begin()->second);
  }

  Guest* attach() {
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep;
    const auto attached = desk.attach(control::AttachRequest{}, AttachInfo{{0, 1000, 1000}, {}, vmci::GivenFd(vmci::UniqueFd(::dup(page.fd())))}, page.fd(), descriptors, keep);
    REQUIRE(attached.has_value());
    Guest* const guest = shard.fabric().guest(GuestId{attached->guest});
    REQUIRE(guest != nullptr);
    return guest;
  }

  Config config;
  control::ServicePage service_page{};
  Shard shard{config, service_page};
  ControlDesk desk{shard};
  vmci::Segment page;

 private:
  static Config with_small_arenas(Config config) {
    config.arena_bytes = 16 << 20;
    return config;
  }
};

}  // namespace vrdma::svc::test
