// A service without threads and sockets, for tests of what it answers to guests. One thread.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstring>
#include <type_traits>
#include <vector>

#include "vmkernel_svc/control/desk.hpp"

namespace vrdma::svc::test {

struct TestService {
  explicit TestService(Config wanted = {}) : config(with_small_arenas(std::move(wanted))), page(*vmci::Segment::create("service-test", sizeof(control::ServicePage), vmci::HandedOut::read_only)) {}
  ~TestService() {
    while (!shard.fabric().guests.empty()) desk.detach(*shard.fabric().guests.begin()->second);
  }

  Guest* attach(uid_t uid = 1000) {
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep;
    const auto attached = desk.attach(control::AttachRequest{}, AttachInfo{{0, uid, uid}, {}, vmci::GivenFd(vmci::UniqueFd(::dup(page.fd())))}, page.fd(), descriptors, keep);
    REQUIRE(attached.has_value());
    Guest* const guest = shard.fabric().guest(GuestId{attached->guest});
    REQUIRE(guest != nullptr);
    return guest;
  }

  // Puts a request into the guest's ring.
  template <control::Request R>
  void post(Guest& guest, const typename control::Message<R>::RequestBody& body) {
    const control::Head head{};
    std::vector<std::byte> record(sizeof(head) + sizeof(body));
    std::memcpy(record.data(), &head, sizeof(head));
    std::memcpy(record.data() + sizeof(head), &body, sizeof(body));
    vmci::RecordWriter writer(guest.control.produce(), guest.control.geometry().produce_slots, guest.requests.position());
    writer.write(sizeof(RecordHead), std::span<const std::byte>(record).subspan(sizeof(RecordHead)));
    writer.publish(control::address_of(control::host_context, control::control_port), sizeof(body), static_cast<std::uint32_t>(R),
                   static_cast<std::uint32_t>((record.size() + slot_bytes - 1) / slot_bytes));
  }
  // Likewise, and has it served: one that need not wait, and succeeds.
  template <control::Request R>
  typename control::Message<R>::ReplyBody ask(Guest& guest, const typename control::Message<R>::RequestBody& body) {
    vmci::RecordReader replies(guest.control.consume_records(), guest.control.geometry().consume_entries, guest.replies.position());
    post<R>(guest, body);
    desk.serve(guest);
    alignas(64) std::byte reply[record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    REQUIRE(replies.peek(reply, record_slots_max, slots) == vmci::RecordReader::Peek::ready);
    control::Head head;
    std::memcpy(&head, reply, sizeof(head));
    REQUIRE(head.status == 0);
    std::atomic_ref(guest.control.header().creator.consumed).store(guest.replies.position());
    typename control::Message<R>::ReplyBody out{};
    if (!std::is_empty_v<decltype(out)>) std::memcpy(static_cast<void*>(&out), reply + sizeof(head), sizeof(out));
    return out;
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
