// How a shard shares itself, and guests' workers, among those who want them at the same time: by turns that the test gives.
#include "vmkernel_svc/shard.hpp"

#include <doctest/doctest.h>
#include <signal.h>

#include <algorithm>

#include "vmkernel_svc/control/test_service.hpp"
#include "vrdma/copy_ring.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using control::Request;

namespace {

constexpr std::uint32_t all_access = 15;  // local write, remote write, read, atomic
constexpr std::uint64_t area_address = 0x10000000, area_bytes = 1 << 20;

Config copied_by_guests() {
  Config config;
  config.process_memory = "guest";
  return config;
}

struct SharedService : TestService {
  SharedService() : TestService(copied_by_guests()) { ::signal(SIGPIPE, SIG_IGN); }  // the server blocks it in the shard's thread
  std::uint64_t turns = 0;
  void turn() {
    REQUIRE(++turns < 100'000);
    shard.turn();
  }
};

// Queue pairs that write to others of the same guest.
class Writers {
 public:
  Writers(SharedService& service, std::size_t count, std::uint32_t messages_max, uid_t uid = 1000)
      : service_(service), guest(*service.attach(uid)), messages_max_(messages_max) {
    const auto context = service_.desk.on(guest, control::OpenContextRequest{}, events_);
    REQUIRE(context.has_value());
    context_ = context->context;
    pd_ = service_.ask<Request::create_pd>(guest, {context_, 0}).handle;
    cq_ = service_.ask<Request::create_cq>(guest, {context_, 32768, 0, 0}).cq;
    for (std::size_t i = 0; i < count; ++i) {
      QueuePair &one = make(), &other = make();
      connect(one, other), connect(other, one);
      queue_pairs.push_back(&one);
    }
  }

  control::RegMrReply register_area() {
    control::StageExtentsRequest extents{};
    extents.count = 1;
    extents.extents[0] = {area_address, area_bytes, 0, control::backing_process, 0};
    service_.ask<Request::stage_extents>(guest, extents);
    return service_.ask<Request::reg_mr>(guest, {pd_, all_access, area_address, area_bytes, area_address});
  }

  // messages_max WRITEs of each queue pair: of 64 bytes, or, without keys, of none. No completion tells of them.
  void post_all(std::uint32_t lkey = 0, std::uint32_t rkey = 0) {
    const Sge from{area_address, 64, lkey};
    const RemoteOperand to{area_address + area_bytes / 2, 0, 0, rkey, 0};
    const std::uint16_t sges = lkey != 0 ? 1 : 0;
    for (QueuePair* const qp : queue_pairs) {
      vmci::RecordWriter writer(qp->send_view.produce(), qp->send_view.geometry().produce_slots, qp->core.send_ring.position());
      for (std::uint32_t i = 0; i < messages_max_; ++i) {
        writer.write(sizeof(RecordHead), std::as_bytes(std::span(&to, 1)));
        writer.write(send_wqe_payload_offset, std::as_bytes(std::span(&from, sges)));
        writer.publish(i, 0, pack(WqeControl{WrOpcode::rdma_write, 0, sges}), send_wqe_slots(sges * sizeof(Sge)));
      }
      service_.shard.make_runnable(qp->core);
    }
  }

  static std::uint64_t written(const QueuePair* qp) { return qp->core.counters.sent_messages; }
  std::uint64_t written() const {
    std::uint64_t all = 0;
    for (const QueuePair* const qp : queue_pairs) all += written(qp);
    return all;
  }

 private:
  SharedService& service_;

 public:
  Guest& guest;
  std::vector<QueuePair*> queue_pairs;

 private:
  QueuePair& make() {
    control::CreateQpRequest request{};
    request.context = context_;
    request.pd = pd_;
    request.send_cq = request.recv_cq = cq_;
    request.type = static_cast<std::uint32_t>(engine::QpType::rc);
    request.max_send_wr = messages_max_;
    request.max_recv_wr = request.max_send_sge = request.max_recv_sge = 1;
    return *guest.qps.at(service_.ask<Request::create_qp>(guest, request).qp);
  }
  void connect(QueuePair& one, const QueuePair& other) {
    for (std::uint32_t state = 1; state <= 3; ++state) {
      control::ModifyQpRequest modify{};
      modify.qp = one.handle.value;
      modify.mask = qp_attr_state | engine::transition_masks(engine::QpType::rc, static_cast<engine::QpState>(state - 1), static_cast<engine::QpState>(state)).required;
      auto& a = modify.attributes;
      a.state = state;
      a.path_mtu = 3;
      a.dest_qp_num = other.core.qpn.value;
      a.access_flags = all_access;
      a.path.dlid = guest.lid;
      a.path.port_num = a.port_num = 1;
      a.max_rd_atomic = a.max_dest_rd_atomic = 1;  // and a timeout of 0: they wait for ever
      service_.ask<Request::modify_qp>(guest, modify);
    }
  }

  std::vector<vmci::UniqueFd> events_;  // read ends that stay open
  std::uint32_t messages_max_, context_ = 0, pd_ = 0, cq_ = 0;
};

// The guest's thread that copies for the service: it says that it has.
class CopyingThread {
 public:
  CopyingThread(SharedService& service, Guest& guest) : guest_(guest) {
    std::vector<vmci::UniqueFd> given;
    REQUIRE(service.desk.reach(guest, false, given).has_value());
    auto mapped = vmci::Mapping::map(guest.copier->fd(), 0, copying::segment_bytes, vmci::Writable::yes);
    REQUIRE(mapped.has_value());
    mapping_ = std::move(*mapped);
    jobs_ = vmci::RecordReader(mapping_.data() + copying::jobs_offset, copying::job_slots);
    answers_ = vmci::RecordWriter(mapping_.data() + copying::answers_offset, copying::answer_slots);
  }

  // Does those that it has been given; how many.
  std::uint64_t work() {
    std::uint64_t done = 0;
    alignas(64) std::byte record[copying::job_record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    for (; jobs_.peek(record, copying::job_record_slots_max, slots) == vmci::RecordReader::Peek::ready; ++done) {
      jobs_.advance(slots);
      RecordHead head;
      std::memcpy(&head, record, sizeof(head));
      const std::uint64_t nothing = 0;
      answers_.write(sizeof(RecordHead), std::as_bytes(std::span(&nothing, 1)));
      answers_.publish(head.tag, 0, 0, 1);
    }
    REQUIRE(guest_.copier->collect());
    return done;
  }

 private:
  Guest& guest_;
  vmci::Mapping mapping_;
  vmci::RecordReader jobs_;
  vmci::RecordWriter answers_;
};

}  // namespace

TEST_CASE("Of many queue pairs that stream into memory that a worker reaches each has its turn") {
  constexpr std::uint32_t count = 300, messages = 64;
  SharedService service;
  Writers writers(service, count, messages);
  CopyingThread copying(service, writers.guest);
  const std::uint32_t key = writers.register_area().key;
  writers.post_all(key, key);
  while (writers.written() < count * messages / 2) service.turn(), copying.work();
  const auto [least, most] = std::minmax_element(writers.queue_pairs.begin(), writers.queue_pairs.end(),
                                                 [](const auto* a, const auto* b) { return Writers::written(a) < Writers::written(b); });
  CHECK(2 * Writers::written(*least) >= Writers::written(*most));
  // And none waits for a place that nobody gives it.
  while (writers.written() < count * messages) service.turn(), copying.work();
  CHECK(writers.guest.jobs == 0);
  CHECK(writers.guest.called_for_room == 0);
  CHECK(service.shard.fabric().waiting.size() == 0);
}

TEST_CASE("A region that is streamed into by a worker is deregistered when that has done what it had") {
  for (const bool rereg : {false, true}) {
    SharedService service;
    Writers writers(service, 100, 64);
    CopyingThread copying(service, writers.guest);
    const std::uint32_t source = writers.register_area().key;
    const auto target = writers.register_area();
    writers.post_all(source, target.key);
    while (writers.written() < 200) service.turn(), copying.work();
    const std::uint64_t generation = service.shard.fabric().regions.slot(writers.guest.mrs.at(target.handle)).generation;
    const auto is_done = [&] {
      const auto mr = writers.guest.mrs.find(target.handle);
      return mr == writers.guest.mrs.end() || service.shard.fabric().regions.slot(mr->second).generation != generation;
    };
    if (rereg) service.post<Request::rereg_mr>(writers.guest, {target.handle, 4 /* its rights */, 0, all_access, 0, 0, 0});
    else service.post<Request::dereg_mr>(writers.guest, {target.handle, 0});
    writers.guest.control_held = true;
    std::uint64_t copied = 0;
    while (!is_done()) {
      service.turn();
      copied += copying.work();
      REQUIRE(copied <= jobs_max);
    }
    if (rereg) {
      CHECK_FALSE(service.shard.fabric().regions.slot(writers.guest.mrs.at(target.handle)).leaving);
      continue;
    }
    const std::uint64_t before = writers.written();
    for (int i = 0; i < 1000; ++i) service.turn(), copying.work();
    CHECK(writers.written() == before);
    for (const QueuePair* const qp : writers.queue_pairs) CHECK(qp->core.state == engine::QpState::err);
    CHECK(writers.guest.jobs == 0);
  }
}

TEST_CASE("A tenant's many messages without bytes leave another tenant its turns") {
  constexpr std::uint32_t count = 64, messages = 256;
  SharedService service;
  Writers many(service, count, messages, 1000), one(service, 1, messages, 1001);
  many.post_all(), one.post_all();
  while (one.written() < messages) service.turn();
  CHECK(many.written() < 8 * messages);
  while (many.written() < count * messages) service.turn();
}

TEST_CASE("A tenant that is alone has a turn of each of its queue pairs in a round, however many those are") {
  constexpr std::uint32_t count = 64, messages = 256;
  SharedService service;
  Writers writers(service, count, messages);
  writers.post_all();
  service.turn();
  for (const QueuePair* const qp : writers.queue_pairs) CHECK(Writers::written(qp) >= 32);
}

TEST_CASE("Guests that have been silent for long are not looked at in each turn, and are heard all the same") {
  SharedService service;
  std::vector<Guest*> guests;
  for (int i = 0; i < 20; ++i) guests.push_back(service.attach());
  const auto until_silent = [&] {
    while (service.shard.attended_guests() > 0) service.turn();
  };
  const auto ask = [&](Guest& guest) {
    const std::uint64_t served = guest.requests_served;
    service.post<Request::create_pd>(guest, {0, 0});  // refused: there is no context 0
    guest.doorbell.set(0);
    while (guest.requests_served == served) service.turn();
  };
  until_silent();
  for (Guest* const guest : guests) {
    ask(*guest);
    CHECK(service.shard.attended_guests() >= 1);
  }
  until_silent();
  // Whoever goes, or comes, takes nobody's turn away.
  for (std::size_t i = 0; i < 8; ++i) {
    service.desk.detach(*guests[i]);
    service.attach();
    CHECK(service.shard.attended_guests() == i + 1);
  }
  for (std::size_t i = 8; i < guests.size(); ++i) ask(*guests[i]);
  // And who has asked before its machine stood still has its answer when that goes on.
  until_silent();
  Guest& frozen = *guests.back();
  frozen.frozen = true;
  service.post<Request::create_pd>(frozen, {0, 0});
  frozen.doorbell.set(0);
  for (int i = 0; i < 2000; ++i) service.turn();
  const std::uint64_t served = frozen.requests_served;
  frozen.frozen = false;
  while (frozen.requests_served == served) service.turn();
}
