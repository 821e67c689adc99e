// Hosts between which records travel, for tests: links that keep their order, are as slow as the test says, can be cut, and lose what is on
// them when a host begins anew. One TestPorts serves them all: who is on which host is in QpPort::host.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "vmkernel_svc/engine/far_responder.hpp"
#include "vmkernel_svc/engine/test_ports.hpp"

namespace vrdma::engine::test {

class TestHosts final : public TestNetwork {
 public:
  static constexpr std::uint32_t hosts_max = 4;
  struct Link {
    std::deque<FarFramePtr> frames;
    std::uint64_t bytes = 0;
    std::uint64_t cut_since_ns = 0;  // 0: it is not
  };

  TestHosts(TestPorts& ports, Engine<TestPorts>& engine) : ports_(ports), engine_(engine), responder_(ports, engine) {
    ports_.network = this;
    for (auto& sessions : seen_) sessions.fill(1);
    for (auto& marks : marks_)
      for (FarMarks& of_host : marks) of_host.begin(true);
  }
  ~TestHosts() override {
    for (auto& [key, stand_in] : stand_ins_) engine_.abandon(stand_in->core);
    ports_.network = nullptr;
  }

  // --- the world, set up by the test --------------------------------------------------------------------------
  std::map<std::uint16_t, std::uint32_t> host_of_lid;
  std::uint64_t room_bytes = 8 << 20;  // on a link
  bool refuses_opens = false;          // as a host does that has too many stand-ins
  static constexpr std::uint64_t noticed_ns = 3'000'000'000;

  Link& link(std::uint32_t from, std::uint32_t to) { return links_[from][to]; }
  void cut(std::uint32_t from, std::uint32_t to) {
    if (link(from, to).cut_since_ns == 0) link(from, to).cut_since_ns = ports_.time_ns;
  }
  void heal(std::uint32_t from, std::uint32_t to) { link(from, to).cut_since_ns = 0; }
  bool anything_on_the_way(std::uint32_t from, std::uint32_t to) { return link(from, to).cut_since_ns == 0 && !link(from, to).frames.empty(); }

  // The next records of a link come out of it. Stand-ins that have to be run say so by their port.runnable.
  void deliver(std::uint32_t from, std::uint32_t to, std::uint32_t records) {
    std::set<TestPorts::Qp*> answered;
    for (; records > 0 && anything_on_the_way(from, to); --records) {
      Link& way = link(from, to);
      FarFramePtr frame = std::move(way.frames.front());
      way.frames.pop_front();
      way.bytes -= frame->whole_bytes();
      arrived(from, to, std::move(frame), answered);
    }
    for (TestPorts::Qp* const qp : answered) engine_.take_answers(*qp);
  }

  // The service of `host` is another one from now on; its queue pairs are gone already. The others hear of it by their link.
  void restart(std::uint32_t host) {
    ++session_[host];
    for (std::uint32_t other = 0; other < hosts_max; ++other) {
      if (other == host) continue;
      link(host, other) = {{}, 0, link(host, other).cut_since_ns};
      link(other, host) = {{}, 0, link(other, host).cut_since_ns};
      drop_stand_ins(host, other);
      seen_[host][other] = session_[other];
      auto news = FarFrame::make(0);
      news->record().kind = FarKind::news;
      news->session = session_[host];
      put(host, other, std::move(news));
      marks_[host][other].begin(true);
    }
  }

  // Runs what has something to do. False: nothing has.
  bool run_stand_ins() {
    bool any = false;
    for (auto& [key, stand_in] : stand_ins_) any |= run(*stand_in);
    return any;
  }
  template <class See>
  void for_each_stand_in(See&& see) {
    for (auto& [key, stand_in] : stand_ins_) see(*stand_in);
  }
  bool run(StandIn<TestPorts>& stand_in) {
    if (!std::exchange(stand_in.core.port.runnable, false)) return false;
    if (responder_.run(stand_in).again) stand_in.core.port.runnable = true;
    return true;
  }

  // --- what the ports ask for ---------------------------------------------------------------------------------
  std::optional<std::uint32_t> host_of(std::uint16_t lid) override {
    const auto found = host_of_lid.find(lid);
    return found == host_of_lid.end() ? std::nullopt : std::optional(found->second);
  }
  void send(TestPorts::Qp& qp, FarFramePtr frame) override {
    frame->record().connection = qp.qpn.value;
    frame->record().epoch = qp.far->epoch;
    frame->session = seen_[qp.port.host][qp.far->host];
    put(qp.port.host, qp.far->host, std::move(frame));
  }
  void say(StandIn<TestPorts>& stand_in, FarFramePtr frame) override {
    const std::uint32_t here = stand_in.core.port.host;
    frame->session = seen_[here][stand_in.host];
    put(here, stand_in.host, std::move(frame));
  }
  bool has_room(std::uint32_t from, std::uint32_t to) override { return link(from, to).bytes < room_bytes; }
  std::uint64_t session(std::uint32_t from, std::uint32_t of) override { return seen_[from][of]; }
  // A cut is noticed when nothing has been heard for a while.
  bool connected(std::uint32_t here, std::uint32_t host) override { return silent_ns(here, host) < noticed_ns; }
  std::uint64_t silent_ns(std::uint32_t here, std::uint32_t host) override {
    // What arrives one way only is not acknowledged, and soon nothing new is sent.
    const std::uint64_t here_since = link(host, here).cut_since_ns, there_since = link(here, host).cut_since_ns;
    return std::max(here_since == 0 ? 0 : ports_.time_ns - here_since, there_since == 0 ? 0 : ports_.time_ns - there_since);
  }
  std::uint32_t epoch() override { return ++last_epoch_; }
  void connected_again(TestPorts::Qp& qp) override {
    qp.port.mark = {};
    const auto host = host_of(qp.attributes.path.dlid);
    if (!host || *host == qp.port.host) return;
    qp.port.mark = {*host, marks_[qp.port.host][*host].want()};
    send_mark(qp.port.host, *host);
  }
  bool waits_for_mark(StandIn<TestPorts>& stand_in) override {
    const auto target = ports_.queue_pairs.find(stand_in.core.attributes.dest_qp_num);
    if (stand_in.core.type == QpType::ud || target == ports_.queue_pairs.end()) return false;
    const FarMark& mark = target->second->port.mark;
    return mark.host == stand_in.host && !marks_[stand_in.core.port.host][mark.host].is_back(mark.number);
  }
  void answer(StandIn<TestPorts>& stand_in, WcStatus status) override { responder_.answer(stand_in, status); }
  void send_datagram(TestPorts::Qp& qp, const Request& request, const UdOperand& ud, std::uint32_t qkey) override {
    const bool multicast = ud.remote_qpn == multicast_qpn.value;
    for (std::uint32_t host = 0; host < hosts_max; ++host) {
      if (host == qp.port.host || (!multicast && host_of(ud.dlid) != host)) continue;
      auto frame = FarFrame::make(static_cast<std::uint32_t>(sizeof(FarDatagram) + request.bytes));
      FarRecord& record = frame->record();
      record.kind = FarKind::datagram;
      record.opcode = static_cast<std::uint8_t>(request.opcode);
      record.flags = request.solicited ? far_solicited : 0;
      record.connection = qp.qpn.value;
      record.imm_data = request.imm_data;
      record.bytes = request.bytes;
      record.payload_bytes = frame->capacity();
      const FarDatagram head{ud, 0, 0, qkey, qp.port.lid, 0, {}};
      std::memcpy(frame->payload(), &head, sizeof(head));
      std::memcpy(frame->payload() + sizeof(head), qp.datagram.get() + grh_bytes, request.bytes);
      frame->session = seen_[qp.port.host][host];
      put(qp.port.host, host, std::move(frame));
    }
  }

 private:
  struct Key {
    std::uint32_t here, host, qpn;  // of the requester; that of no queue pair for the lane of its host's datagrams
    auto operator<=>(const Key&) const = default;
  };
  static constexpr std::uint32_t lane_qpn = ~0u;

  void put(std::uint32_t from, std::uint32_t to, FarFramePtr frame) {
    link(from, to).bytes += frame->whole_bytes();
    link(from, to).frames.push_back(std::move(frame));
  }

  void send_mark(std::uint32_t from, std::uint32_t to) {
    const std::uint64_t number = marks_[from][to].next();
    if (number == 0) return;
    auto frame = FarFrame::make(0);
    frame->record().kind = FarKind::mark;
    frame->record().bytes = number;
    frame->session = seen_[from][to];
    put(from, to, std::move(frame));
  }
  void mark(std::uint32_t from, std::uint32_t to, FarFramePtr frame) {
    if (frame->record().flags != far_back) {
      frame->record().flags = far_back;
      frame->session = seen_[to][from];
      return put(to, from, std::move(frame));
    }
    require(marks_[to][from].came_back(frame->record().bytes), "no marks come that were not sent");
    send_mark(to, from);
    for (auto& [key, stand_in] : stand_ins_)
      if (key.here == to && key.host == from) stand_in->core.port.runnable = true;
  }
  void arrived(std::uint32_t from, std::uint32_t to, FarFramePtr frame, std::set<TestPorts::Qp*>& answered) {
    const FarRecord& record = frame->record();
    if (record.kind == FarKind::news) {
      seen_[to][from] = frame->session;
      drop_stand_ins(to, from);
      marks_[to][from].begin(true);
      for (auto& [qpn, qp] : ports_.queue_pairs)
        if (qp->port.host == to && qp->far != nullptr && qp->far->host == from) qp->port.runnable = true;
      return;
    }
    if (frame->session != session_[to]) return;
    switch (record.kind) {
      case FarKind::open: {
        if (refuses_opens) return;
        FarOpen said;
        std::memcpy(&said, frame->payload(), sizeof(said));
        StandIn<TestPorts>& stand_in = make({to, from, record.connection});
        responder_.open(stand_in, from, record, said);
        stand_in.core.port.lid = said.lid;
        return;
      }
      case FarKind::mark: return mark(from, to, std::move(frame));
      case FarKind::answer:
      case FarKind::part: return to_requester(from, to, std::move(frame), answered);
      case FarKind::credit:
        if (record.flags != 0) return to_requester(from, to, std::move(frame), answered);
        [[fallthrough]];
      case FarKind::request:
      case FarKind::more:
      case FarKind::close: return to_stand_in({to, from, record.connection}, std::move(frame));
      case FarKind::datagram: {
        const Key key{to, from, lane_qpn};
        if (!stand_ins_.contains(key)) responder_.open_lane(make(key), from);
        StandIn<TestPorts>& lane = *stand_ins_.at(key);
        lane.queue.push_back(std::move(frame));
        lane.core.port.runnable = true;
        return;
      }
      default: require(false, "no other records are sent");
    }
  }
  StandIn<TestPorts>& make(const Key& key) {
    auto& slot = stand_ins_[key];
    if (slot) engine_.abandon(slot->core);
    slot = std::make_unique<StandIn<TestPorts>>();
    slot->core.port.host = key.here;
    slot->core.port.stand_in = slot.get();
    return *slot;
  }
  void to_requester(std::uint32_t from, std::uint32_t to, FarFramePtr frame, std::set<TestPorts::Qp*>& answered) {
    const FarRecord& record = frame->record();
    const auto found = ports_.queue_pairs.find(record.connection);
    if (found == ports_.queue_pairs.end() || found->second->port.host != to) return;
    TestPorts::Qp& qp = *found->second;
    if (qp.far == nullptr || qp.far->host != from || qp.far->epoch != record.epoch || !qp.far->opened) return;
    if (record.taken > qp.far->credited && record.taken <= qp.far->sent) qp.far->credited = record.taken;
    qp.port.runnable = true;
    if (record.kind == FarKind::credit) return;
    if (record.kind == FarKind::answer) answered.insert(&qp);
    qp.far->arrived.push_back(std::move(frame));
  }
  void to_stand_in(const Key& key, FarFramePtr frame) {
    const auto found = stand_ins_.find(key);
    if (found == stand_ins_.end() || found->second->epoch != frame->record().epoch) {
      if (frame->record().kind != FarKind::request) return;
      FarFramePtr answer = responder_.no_stand_in(frame->record());
      answer->session = seen_[key.here][key.host];
      return put(key.here, key.host, std::move(answer));
    }
    StandIn<TestPorts>& stand_in = *found->second;
    if (frame->record().kind == FarKind::close) {
      stand_in.core.port.runnable = true;
      run(stand_in);
      engine_.abandon(stand_in.core);
      stand_ins_.erase(found);
      return;
    }
    responder_.take(stand_in, std::move(frame));
    stand_in.core.port.runnable = true;
  }
  void drop_stand_ins(std::uint32_t here, std::uint32_t host) {
    for (auto one = stand_ins_.begin(); one != stand_ins_.end();) {
      if (one->first.here != here || one->first.host != host) {
        ++one;
        continue;
      }
      engine_.abandon(one->second->core);
      one = stand_ins_.erase(one);
    }
  }

  TestPorts& ports_;
  Engine<TestPorts>& engine_;
  FarResponder<TestPorts> responder_;
  std::array<std::array<Link, hosts_max>, hosts_max> links_;                     // from, to
  std::array<std::uint64_t, hosts_max> session_{1, 1, 1, 1};
  std::array<std::array<std::uint64_t, hosts_max>, hosts_max> seen_{};           // by, of
  std::array<std::array<FarMarks, hosts_max>, hosts_max> marks_;                 // by, to
  std::map<Key, std::unique_ptr<StandIn<TestPorts>>> stand_ins_;
  std::uint32_t last_epoch_ = 0;
};

}  // namespace vrdma::engine::test
