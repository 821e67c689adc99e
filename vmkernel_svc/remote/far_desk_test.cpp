// What a queue pair hears that is connected to another host for a second time: by records that the test brings, and with a carrier that keeps
// what is sent.
#include <doctest/doctest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "vmkernel_svc/control/test_service.hpp"
#include "vmkernel_svc/remote/link_head.hpp"

namespace vrdma::svc::test {
namespace {

using control::Request;
using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::QpState;
using engine::QpType;

constexpr remote::HostId far_host = 7;
constexpr std::uint16_t far_lid = 500;
constexpr std::uint32_t far_qpn = 0x77;

class OneHost final : public remote::Directory {
 public:
  remote::LidRange ours() const override { return {1, 100}; }
  std::optional<remote::HostId> host_of(std::uint16_t lid) const override { return lid == far_lid ? std::optional(far_host) : std::nullopt; }
  std::vector<remote::LidHolder> holders() const override { return {{far_host, {far_lid, far_lid}}}; }
  std::shared_ptr<const remote::PeerHost> host(remote::HostId id) const override { return id == far_host ? peer_ : nullptr; }
  std::shared_ptr<const remote::PeerHost> host_named(std::string_view name) const override { return name == peer_->name ? peer_ : nullptr; }
  void when_changed(std::function<void()>) override {}

 private:
  std::shared_ptr<const remote::PeerHost> peer_ = std::make_shared<remote::PeerHost>(remote::PeerHost{far_host, "far", "127.0.0.1", 1, {}, true});
};

class KeepingCarrier final : public remote::Carrier {
 public:
  std::deque<FarFramePtr> arrivals;
  std::vector<FarFramePtr> sent;

  void send(FarFramePtr frame) override { sent.push_back(std::move(frame)); }
  bool turn() override { return false; }
  void flush() override {}
  bool anything_waiting() const override { return !arrivals.empty(); }
  std::uint64_t next_wake_ns() const override { return ~std::uint64_t{0}; }
  int descriptor() const override { return never_.get(); }
  FarFramePtr receive() override {
    if (arrivals.empty()) return nullptr;
    FarFramePtr frame = std::move(arrivals.front());
    arrivals.pop_front();
    return frame;
  }
  std::shared_ptr<remote::Gauge> gauge(remote::HostId) override { return gauge_; }
  const remote::CarrierCounters& counters() const override { return counters_; }
  std::string name() const override { return "test"; }
  bool dials(remote::HostId) const override { return true; }
  void set_bypass(remote::HostId, remote::Bypass*) override {}
  void bypass_has_room(remote::HostId) override {}
  bool takes_more() const override { return true; }
  void bypassed(remote::HostId, const remote::Bypass&, std::uint64_t, std::uint64_t, FarFramePtr) override {}
  bool encrypts(remote::HostId) const override { return false; }
  std::string disagreement(remote::HostId) const override { return ""; }

 private:
  vmci::UniqueFd never_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::shared_ptr<remote::Gauge> gauge_ = std::make_shared<remote::Gauge>();
  remote::CarrierCounters counters_;
};

struct World : TestService {
  explicit World(QpType type_in) : type(type_in) {
    auto made = std::make_unique<KeepingCarrier>();
    carrier = made.get();
    carrier->gauge(far_host)->connected = true;
    shard.join(std::make_shared<OneHost>(), std::move(made));
    const auto context = desk.on(*guest, control::OpenContextRequest{}, events_);
    REQUIRE(context.has_value());
    control::CreateQpRequest request{};
    request.context = context->context;
    request.pd = ask<Request::create_pd>(*guest, {request.context, 0}).handle;
    request.send_cq = request.recv_cq = ask<Request::create_cq>(*guest, {request.context, 64, 0, 0}).cq;
    request.type = static_cast<std::uint32_t>(type);
    request.max_send_wr = request.max_recv_wr = request.max_send_sge = request.max_recv_sge = 1;
    qp = guest->qps.at(ask<Request::create_qp>(*guest, request).qp).get();
  }

  void begin_session(std::uint64_t number, std::uint64_t features) {
    session = number;
    auto news = frame_of(FarKind::news, 0);
    news->record().bytes = features;
    come(std::move(news));
  }
  void connect() {
    for (std::uint32_t state = 1; state <= 3; ++state) {
      control::ModifyQpRequest modify{};
      modify.qp = qp->handle.value;
      modify.mask = qp_attr_state | engine::transition_masks(type, static_cast<QpState>(state - 1), static_cast<QpState>(state)).required;
      auto& a = modify.attributes;
      a.state = state;
      a.path_mtu = 3;
      a.dest_qp_num = far_qpn;
      a.access_flags = 15;
      a.path.dlid = far_lid;
      a.path.port_num = a.port_num = 1;
      a.max_rd_atomic = a.max_dest_rd_atomic = 1;
      ask<Request::modify_qp>(*guest, modify);
    }
  }
  void reset() {
    control::ModifyQpRequest modify{};
    modify.qp = qp->handle.value;
    modify.mask = qp_attr_state;
    ask<Request::modify_qp>(*guest, modify);
  }
  // A connection of the far queue pair, and a WRITE of no bytes in it.
  void write_comes(std::uint32_t epoch) {
    auto opens = frame_of(FarKind::open, epoch, sizeof(engine::FarOpen));
    engine::FarOpen said{};
    said.path.dlid = guest->lid;
    said.guid = said.lid = far_lid;
    said.link_layer = control::link_layer_infiniband;
    said.type = static_cast<std::uint8_t>(type);
    said.timeout = 14, said.retry_cnt = 7, said.rnr_retry = 7, said.path_mtu = 3;
    said.dest_qp_num = qp->core.qpn.value;
    said.pkey = 0xffff;
    std::memcpy(opens->payload(), &said, sizeof(said));
    come(std::move(opens));
    auto request = frame_of(FarKind::request, epoch);
    request->record().opcode = static_cast<std::uint8_t>(WrOpcode::rdma_write);
    come(std::move(request));
  }
  void close_comes(std::uint32_t epoch) { come(frame_of(FarKind::close, epoch)); }
  void mark_comes(std::uint64_t number, std::uint8_t flags) {
    auto mark = frame_of(FarKind::mark, 0);
    mark->record().bytes = number;
    mark->record().flags = flags;
    come(std::move(mark));
  }
  std::uint64_t received() const { return qp->core.counters.received_messages; }
  std::vector<FarRecord> sent(FarKind kind) const {
    std::vector<FarRecord> records;
    for (const auto& frame : carrier->sent)
      if (frame->record().kind == kind) records.push_back(frame->record());
    return records;
  }

  const QpType type;
  KeepingCarrier* carrier;
  Guest* const guest = attach();
  QueuePair* qp;
  std::uint64_t session = 0;

 private:
  FarFramePtr frame_of(FarKind kind, std::uint32_t epoch, std::uint32_t payload_bytes = 0) const {
    auto frame = FarFrame::make(payload_bytes);
    frame->host = far_host;
    frame->session = session;
    FarRecord& record = frame->record();
    record.kind = kind;
    record.connection = far_qpn;
    record.epoch = epoch;
    record.payload_bytes = payload_bytes;
    return frame;
  }
  void come(FarFramePtr frame) {
    carrier->arrivals.push_back(std::move(frame));
    for (int turn = 0; turn < 4; ++turn) shard.turn();
  }
  std::vector<vmci::UniqueFd> events_;  // read ends that stay open
};

TEST_CASE("A queue pair that is connected anew hears nothing that was sent to it before, whenever that comes") {
  for (const QpType type : {QpType::rc, QpType::uc}) {
    CAPTURE(static_cast<int>(type));
    World world(type);
    world.begin_session(1, remote::link_features);
    world.connect();
    world.write_comes(1);
    CHECK(world.received() == 1);
    CHECK(world.sent(FarKind::mark).empty());  // a first life pays nothing
    world.close_comes(1);
    world.reset();
    world.connect();
    const auto asked = world.sent(FarKind::mark);
    REQUIRE(asked.size() == 1);
    CHECK(asked[0].flags == 0);
    world.write_comes(2);
    world.close_comes(2);
    world.write_comes(3);  // who opened that has not been reset since
    CHECK(world.received() == 1);
    CHECK(world.sent(FarKind::answer).size() == 1);
    world.mark_comes(asked[0].bytes, engine::far_back);
    CHECK(world.received() == 2);
    const auto answers = world.sent(FarKind::answer);
    REQUIRE(answers.size() == 2);
    CHECK(answers[1].epoch == 3);
    CHECK(answers[1].status == static_cast<std::uint8_t>(WcStatus::success));
  }
}

TEST_CASE("A mark that was sent before the last RESET is none for the connection after it") {
  World world(QpType::uc);
  world.begin_session(1, remote::link_features);
  for (int life = 0; life < 4; ++life) world.connect(), world.reset();
  world.connect();
  const auto asked = world.sent(FarKind::mark);
  REQUIRE(asked.size() == 1);  // one at a time, however many lives there are
  world.write_comes(1);
  world.mark_comes(asked[0].bytes, engine::far_back);
  CHECK(world.received() == 0);
  const auto again = world.sent(FarKind::mark);
  REQUIRE(again.size() == 2);
  world.close_comes(1);
  world.write_comes(2);
  world.mark_comes(again[1].bytes, engine::far_back);
  CHECK(world.received() == 1);
  CHECK(world.sent(FarKind::answer).back().epoch == 2);
}

TEST_CASE("A host that begins anew is not waited for, nor one that knows nothing of marks; a mark of its own it has back") {
  World world(QpType::uc);
  world.begin_session(1, remote::link_features);
  world.connect(), world.reset(), world.connect();
  REQUIRE(world.sent(FarKind::mark).size() == 1);
  world.begin_session(2, remote::link_features);
  world.write_comes(1);
  CHECK(world.received() == 1);
  world.mark_comes(17, 0);
  const auto marks = world.sent(FarKind::mark);
  REQUIRE(marks.size() == 2);
  CHECK(marks[1].flags == engine::far_back);
  CHECK(marks[1].bytes == 17);
  const auto malformed = world.shard.fabric().far->malformed();
  world.mark_comes(17, engine::far_back);  // nobody has sent it
  CHECK(world.shard.fabric().far->malformed() == malformed + 1);

  world.begin_session(3, remote::link_features & ~remote::link_knows_marks);
  world.reset(), world.connect();
  CHECK(world.sent(FarKind::mark).size() == 2);
  world.write_comes(1);
  CHECK(world.received() == 2);
}

}  // namespace
}  // namespace vrdma::svc::test
