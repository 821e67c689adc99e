// Ports without a world: memory in vectors, a clock that stands still until told, and real rings and lanes. The engine's unit
// tests and the simulation run on them. One thread.
//
// A copy may be made to pend (copy_pends): it is then carried out by finish_copy(), as a worker would. One that the queue pair has given up or
// called off meanwhile ends without a trace, unless the worker was at it already (begin_copy): late writes are the point.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "vmkernel_svc/engine/far_marks.hpp"
#include "vmkernel_svc/engine/far_responder.hpp"

namespace vrdma::engine::test {
class TestPorts;
}
namespace vrdma::engine {
template <>
struct FarLimits<test::TestPorts> {
  static constexpr std::uint32_t part_bytes = 256;
  static constexpr std::uint64_t window_bytes = 1024;
  static constexpr std::uint32_t window_messages = 6;
};
}  // namespace vrdma::engine

namespace vrdma::engine::test {

// Other hosts, in tests that have any (test_hosts.hpp). Hosts are named by number.
class TestNetwork {
 public:
  virtual ~TestNetwork() = default;
  virtual std::optional<std::uint32_t> host_of(std::uint16_t lid) = 0;
  virtual void send(Qp<TestPorts>& qp, FarFramePtr frame) = 0;
  virtual void say(StandIn<TestPorts>& stand_in, FarFramePtr frame) = 0;
  virtual bool has_room(std::uint32_t from, std::uint32_t to) = 0;
  virtual std::uint64_t session(std::uint32_t from, std::uint32_t of) = 0;
  virtual bool connected(std::uint32_t here, std::uint32_t host) = 0;
  virtual std::uint64_t silent_ns(std::uint32_t here, std::uint32_t host) = 0;
  virtual std::uint32_t epoch() = 0;
  virtual void connected_again(Qp<TestPorts>& qp) = 0;
  virtual bool waits_for_mark(StandIn<TestPorts>& stand_in) = 0;
  virtual void answer(StandIn<TestPorts>& stand_in, WcStatus status) = 0;
  virtual void send_datagram(Qp<TestPorts>& qp, const Request& request, const UdOperand& ud, std::uint32_t qkey) = 0;
};

// Also in builds without assertions: what the engine owes its ports.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "the engine broke its contract with the ports: %s\n", what);
  std::abort();
}

struct TestRegion {
  std::uint32_t pd = 0;
  std::uint32_t access = 0;
  std::uint64_t iova = 0;
  std::uint64_t bytes = 0;
  std::byte* memory = nullptr;
  std::uint64_t generation = 0;  // 0: gone
  std::uint32_t jobs = 0;        // copies under way on it: it cannot go
};

class TestPorts {
 public:
  using Qp = engine::Qp<TestPorts>;
  using Srq = engine::Srq<TestPorts>;

  struct Job {
    Place to, from;
    std::uint64_t bytes = 0;
    Qp* owner = nullptr;  // nullptr: given up
    MemoryStatus status = MemoryStatus::pending;
    std::optional<std::uint64_t> add = {};  // it is a FETCH_AND_ADD, …
    std::uint64_t old_value = 0;            // … and this is what it found
    std::vector<std::byte> source = {};  // of a copy out of the engine's memory, which may be gone when a given-up job ends
    bool begun = false;             // the worker is at it
    std::uint64_t called_off_ns = 0;  // 0: not
    const Qp *of = nullptr, *receiver = nullptr;  // of one that was called off: whose buffers it may still be at
  };
  struct QpPort {
    std::uint32_t pd = 0;
    std::uint16_t lid = 1;
    std::uint32_t host = 0;
    engine::StandIn<TestPorts>* stand_in = nullptr;  // of a stand-in's core
    FarMark mark;
    std::uint64_t wake_ns = 0;  // 0: no timer
    bool runnable = false;
    std::shared_ptr<Job> job;
    std::vector<AsyncEvent> events;
    std::uint32_t completions_max = 0;       // of its lanes together; 0: no limit but the lanes'
    std::uint32_t completions_unpolled = 0;
    bool overran = false;
  };
  struct SrqPort {
    std::uint32_t pd = 0;
    std::uint32_t posted = 0;
    std::uint32_t limit_events = 0;
  };

  // --- the world, set up by the test --------------------------------------------------------------------------
  std::uint64_t time_ns = 1;
  std::map<std::uint32_t, TestRegion> regions;  // by key
  std::map<std::uint32_t, Qp*> queue_pairs;     // by QPN
  std::map<Gid, std::vector<Qp*>> groups;
  std::vector<std::shared_ptr<Job>> jobs;       // pending copies, also given-up ones
  std::function<bool(const Qp&, std::uint64_t bytes)> copy_pends = [](const Qp&, std::uint64_t) { return false; };
  bool atomics_pend = false;  // FETCH_AND_ADD likewise
  bool others_go_first = false;  // what pends has not been begun, and comes nearer to its turn
  std::function<void(Qp&, Direction, const Cqe&, CqeState)> on_completion = [](Qp&, Direction, const Cqe&, CqeState) {};
  std::function<void(Qp&)> on_state_changed = [](Qp&) {};
  std::uint64_t copies = 0;
  TestNetwork* network = nullptr;
  static constexpr std::uint64_t last_step_max_ns = 2'000'000'000;

  std::uint32_t add_region(TestRegion region) {
    region.generation = next_generation_++;
    regions[next_key_] = region;
    return next_key_++;
  }
  bool remove_region(std::uint32_t key) {
    const auto found = regions.find(key);
    if (found == regions.end() || found->second.jobs != 0) return false;
    regions.erase(found);
    return true;
  }

  void begin_copy(std::size_t index) {
    if (jobs[index]->called_off_ns == 0) jobs[index]->begun = true;
  }
  // A worker has done `jobs[index]`.
  void finish_copy(std::size_t index) {
    const std::shared_ptr<Job> job = jobs[index];
    jobs.erase(jobs.begin() + static_cast<std::ptrdiff_t>(index));
    if (TestRegion* region = region_of(job->to)) --region->jobs;
    if (TestRegion* region = region_of(job->from)) --region->jobs;
    if (job->called_off_ns != 0 && (!job->begun || job->to.kind == Place::Kind::engine)) {
      job->status = MemoryStatus::destination_fault;
      if (job->owner != nullptr) job->owner->port.runnable = true;
      return;
    }
    const Place from = job->source.empty() ? job->from : Place::in_engine(job->source.data());
    job->status = job->add ? add_to(job->to, *job->add, job->old_value) : move(job->to, from, job->bytes);
    if (job->owner != nullptr) job->owner->port.runnable = true;
  }

  // --- what the engine asks for -------------------------------------------------------------------------------
  std::optional<Place> find(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    return find_in(qp.port.pd, key, address, bytes, access);
  }
  std::optional<Place> find_receive(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes) {
    return find_in(qp.srq != nullptr ? qp.srq->port.pd : qp.port.pd, key, address, bytes, access_local_write);
  }

  MemoryStatus copy(Qp& qp, const Place& to, const Place& from, std::uint64_t bytes) {
    require(bytes != 0 && bytes <= slice_bytes, "a copy moves 1 to slice_bytes bytes");
    ++copies;
    if (qp.port.job) {
      Job& job = *qp.port.job;
      require(same(job.to, to) && same(job.from, from) && job.bytes == bytes, "a pending copy is repeated exactly");
      const MemoryStatus status = job.status;
      if (status != MemoryStatus::pending) qp.port.job.reset();
      return status;
    }
    if (copy_pends(qp, bytes)) {
      if (!resolves(to, bytes)) return MemoryStatus::destination_fault;
      if (!resolves(from, bytes)) return MemoryStatus::source_fault;
      qp.port.job = std::make_shared<Job>(Job{to, from, bytes, &qp});
      if (TestRegion* region = region_of(to)) ++region->jobs;
      if (TestRegion* region = region_of(from)) ++region->jobs;
      if (from.kind == Place::Kind::engine) {
        const auto* memory = reinterpret_cast<const std::byte*>(from.address);
        qp.port.job->source.assign(memory, memory + bytes);
      }
      jobs.push_back(qp.port.job);
      return MemoryStatus::pending;
    }
    return move(to, from, bytes);
  }
  bool moved_up(Qp&) { return others_go_first; }
  MemoryStatus fetch_and_add(Qp& qp, const Place& place, std::uint64_t add, std::uint64_t& old_value) {
    if (qp.port.job) {
      const MemoryStatus status = qp.port.job->status;
      old_value = qp.port.job->old_value;
      if (status != MemoryStatus::pending) qp.port.job.reset();
      return status;
    }
    if (!atomics_pend) return add_to(place, add, old_value);
    if (!resolves(place, 8)) return MemoryStatus::destination_fault;
    qp.port.job = std::make_shared<Job>();
    qp.port.job->to = place;
    qp.port.job->owner = &qp;
    qp.port.job->add = add;
    if (TestRegion* region = region_of(place)) ++region->jobs;
    jobs.push_back(qp.port.job);
    return MemoryStatus::pending;
  }
  MemoryStatus compare_and_swap(Qp&, const Place& place, std::uint64_t compare, std::uint64_t swap, std::uint64_t& old_value) {
    std::byte* memory = resolve(place, 8);
    if (memory == nullptr) return MemoryStatus::destination_fault;
    std::memcpy(&old_value, memory, 8);
    if (old_value == compare) std::memcpy(memory, &swap, 8);
    return MemoryStatus::done;
  }
  void cut_off(Qp& qp) {
    if (!qp.port.job || qp.port.job->called_off_ns != 0) return;
    Job& job = *qp.port.job;
    job.called_off_ns = time_ns;
    job.of = &qp;
    job.receiver = qp.accepted_by;
  }
  std::uint64_t last_step_ns(Qp& qp) {
    const bool any = std::ranges::any_of(jobs, [&](const auto& job) {
      return job->begun && job->called_off_ns != 0 && time_ns - job->called_off_ns < last_step_max_ns && (job->of == &qp || job->receiver == &qp);
    });
    return any ? 1'000'000 : 0;
  }
  void abandon(Qp& qp) {
    cut_off(qp);
    if (!qp.port.job) return;
    qp.port.job->owner = nullptr;
    qp.port.job.reset();
  }

  bool complete(Qp& qp, Direction direction, const Cqe& cqe, const CqeState& state) {
    if (qp.port.stand_in != nullptr) return network->answer(*qp.port.stand_in, state.status), true;
    if (qp.port.completions_max != 0 && qp.port.completions_unpolled >= qp.port.completions_max) {
      qp.port.overran = true;
      return false;
    }
    ++qp.port.completions_unpolled;
    (direction == Direction::send ? qp.send_lane : qp.receive_lane).push(cqe, pack(state));
    on_completion(qp, direction, cqe, state);
    return true;
  }
  void event(Qp& qp, AsyncEvent event) { qp.port.events.push_back(event); }
  void srq_limit(Srq& srq) { ++srq.port.limit_events; }
  std::uint32_t srq_posted(Srq& srq) { return srq.port.posted; }
  void srq_wanted(Srq&) {}
  bool immediate_follows(Qp&) { return false; }
  void state_changed(Qp& qp) {
    qp.port.runnable = true;
    on_state_changed(qp);
  }
  void await_receive(Qp&, Qp&) {}
  std::uint64_t now_ns() { return time_ns; }
  void wake_at(Qp& qp, std::uint64_t ns) { qp.port.wake_ns = ns; }

  Qp* peer(Qp& qp) {
    const auto host = network != nullptr ? network->host_of(qp.attributes.path.dlid) : std::nullopt;
    if (!host || *host == qp.port.host) return by_address(qp, qp.attributes.dest_qp_num, qp.attributes.path.dlid);
    if (qp.far == nullptr && qp.port.stand_in == nullptr) {
      qp.far = std::make_unique<FarHalf>();
      qp.far->host = *host;
      qp.far->epoch = network->epoch();
    }
    return nullptr;
  }
  Qp* datagram_peer(Qp& qp, const UdOperand& ud) { return by_address(qp, ud.remote_qpn, ud.dlid); }
  Qp* multicast_peer(Qp& qp, const UdOperand& ud, std::uint32_t& from) {
    Gid gid;
    std::memcpy(gid.data(), ud.dgid, 16);
    const auto group = groups.find(gid);
    if (group == groups.end()) return nullptr;
    Qp* next = nullptr;
    for (Qp* const member : group->second)
      if (member->port.host == qp.port.host && member->qpn.value >= from && (next == nullptr || member->qpn.value < next->qpn.value)) next = member;
    if (next != nullptr) from = next->qpn.value;
    return next;
  }
  bool leads_back(Qp& receiver, Qp& sender) { return receiver.attributes.path.dlid == sender.port.lid; }
  bool write_grh(Qp&, Qp&, const UdOperand& ud, std::uint32_t, std::byte* bytes) {
    const bool global = (ud.route_flags & route_global) != 0;
    std::memset(bytes, global ? 0x60 : 0, grh_bytes);
    return global;
  }
  std::uint16_t lid(Qp& qp) { return qp.port.lid; }
  std::uint8_t sl(Qp&, const UdOperand& ud) { return ud.sl; }

  // --- other hosts --------------------------------------------------------------------------------------------
  void far_send(Qp& qp, FarFramePtr frame) { network->send(qp, std::move(frame)); }
  bool far_room(Qp& qp) { return network->has_room(qp.port.host, qp.far->host); }
  std::uint64_t far_session(Qp& qp) { return network->session(qp.port.host, qp.far->host); }
  bool far_connected(Qp& qp) { return network->connected(qp.port.host, qp.far->host); }
  std::uint64_t far_silent_ns(Qp& qp) { return network->silent_ns(qp.port.host, qp.far->host); }
  void far_describe(Qp& qp, FarOpen& open) {
    const QpAttributes& a = qp.attributes;
    open = {a.path, 0, 0, qp.port.lid, static_cast<std::uint8_t>(qp.type), a.timeout, a.retry_cnt, a.rnr_retry,
            static_cast<std::uint8_t>(a.path_mtu), 0, a.dest_qp_num, 0, {}};
  }
  std::uint32_t far_epoch() { return network->epoch(); }
  void far_connected_again(Qp& qp) {
    if (network != nullptr) network->connected_again(qp);
  }
  bool far_waits_for_mark(engine::StandIn<TestPorts>& stand_in) { return network->waits_for_mark(stand_in); }
  void far_datagram(Qp& qp, const Request& request, const UdOperand& ud, std::uint32_t qkey) {
    if (network != nullptr && qp.port.stand_in == nullptr) network->send_datagram(qp, request, ud, qkey);
  }
  void far_say(engine::StandIn<TestPorts>& stand_in, FarFramePtr frame, bool) { network->say(stand_in, std::move(frame)); }
  bool far_room(engine::StandIn<TestPorts>& stand_in) { return network->has_room(stand_in.core.port.host, stand_in.host); }
  void far_asked(engine::StandIn<TestPorts>&) {}
  void far_speaks_for(engine::StandIn<TestPorts>& lane, const FarDatagram& head) { lane.core.port.lid = head.lid; }
  bool stands_still(Qp&) { return false; }
  bool is_awaited(Qp&) { return false; }
  void announce() {}
  void count_malformed() { require(false, "what a requester sends makes sense"); }

 private:
  static bool same(const Place& a, const Place& b) {
    return a.kind == b.kind && a.region == b.region && a.generation == b.generation && a.address == b.address;
  }

  std::optional<Place> find_in(std::uint32_t pd, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    require(bytes != 0, "keys of empty buffers are not looked up");
    const auto found = regions.find(key.value);
    if (found == regions.end()) return std::nullopt;
    const TestRegion& region = found->second;
    const std::uint64_t offset = address - region.iova;
    if (region.pd != pd || (region.access & access) != access || address < region.iova || offset > region.bytes ||
        bytes > region.bytes - offset)
      return std::nullopt;
    return Place{Place::Kind::registered, key.value, region.generation, offset};
  }

  TestRegion* region_of(const Place& place) {
    if (place.kind == Place::Kind::engine) return nullptr;
    const auto found = regions.find(place.region);
    return found == regions.end() || found->second.generation != place.generation ? nullptr : &found->second;
  }
  bool resolves(const Place& place, std::uint64_t bytes) { return resolve(place, bytes) != nullptr; }
  std::byte* resolve(const Place& place, [[maybe_unused]] std::uint64_t bytes) {
    if (place.kind == Place::Kind::engine) return reinterpret_cast<std::byte*>(place.address);
    TestRegion* const region = region_of(place);
    if (region == nullptr) return nullptr;
    require(place.address <= region->bytes && bytes <= region->bytes - place.address, "what find() granted is not left");
    return region->memory + place.address;
  }
  MemoryStatus add_to(const Place& place, std::uint64_t add, std::uint64_t& old_value) {
    std::byte* memory = resolve(place, 8);
    if (memory == nullptr) return MemoryStatus::destination_fault;
    std::memcpy(&old_value, memory, 8);
    const std::uint64_t sum = old_value + add;
    std::memcpy(memory, &sum, 8);
    return MemoryStatus::done;
  }
  MemoryStatus move(const Place& to, const Place& from, std::uint64_t bytes) {
    std::byte* const destination = resolve(to, bytes);
    const std::byte* const source = resolve(from, bytes);
    if (source == nullptr) return MemoryStatus::source_fault;
    if (destination == nullptr) return MemoryStatus::destination_fault;
    std::memmove(destination, source, bytes);
    return MemoryStatus::done;
  }

  Qp* by_address(const Qp& from, std::uint32_t qpn, std::uint16_t lid_wanted) {
    const auto found = queue_pairs.find(qpn);
    const bool there = found != queue_pairs.end() && found->second->port.lid == lid_wanted && found->second->port.host == from.port.host;
    return there ? found->second : nullptr;
  }

  std::uint32_t next_key_ = 0x100;
  std::uint64_t next_generation_ = 1;
};
static_assert(PortsFor<TestPorts> && StandInPortsFor<TestPorts>);

}  // namespace vrdma::engine::test
