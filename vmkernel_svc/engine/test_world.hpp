// A host with guests for tests: queue pairs with real rings and lanes, a guest's side to post and poll them, memory to register,
// and a runner that runs whatever is runnable. What decides an outcome is left to the test.
#pragma once

#include <array>
#include <span>

#include "vmkernel_svc/engine/qp_state.hpp"
#include "vmkernel_svc/engine/test_ports.hpp"

namespace vrdma::engine::test {

struct SendSpec {
  std::uint64_t wr_id = 0;
  WrOpcode opcode = WrOpcode::send;
  std::uint8_t flags = wr_signaled;
  std::uint32_t imm = 0;
  std::vector<Sge> sges{};
  std::vector<std::byte> inline_data{};  // with wr_inline
  RemoteOperand remote{};
  UdOperand ud{};
};
struct ReceiveSpec {
  std::uint64_t wr_id = 0;
  std::vector<Sge> sges{};
};
struct Completion {
  std::uint64_t wr_id;
  WcStatus status;
  WcOpcode opcode;
  std::uint8_t flags;
  std::uint32_t byte_len, imm, src_qp, position;
};

struct alignas(64) Slot {
  std::byte bytes[slot_bytes];
};

inline void write_receive(vmci::RecordWriter& writer, const ReceiveSpec& spec, std::uint32_t record_slots) {
  writer.write(receive_wqe_payload_offset, std::as_bytes(std::span(spec.sges)));
  writer.publish(spec.wr_id, 0, pack(WqeControl{WrOpcode::receive, 0, static_cast<std::uint16_t>(spec.sges.size())}),
                 record_slots);
}

class TestQp {
 public:
  TestQp(TestPorts& ports, QpType type, std::uint32_t qpn, std::uint32_t depth, TestPorts::Srq* srq)
      : ports_(ports), send_slots_(std::bit_ceil((depth + 1) * send_wqe_slots_max)),
        receive_slots_(std::bit_ceil((depth + 1) * receive_wqe_slots_max)), send_entries_(std::bit_ceil(depth)),
        receive_entries_(std::bit_ceil(srq != nullptr ? srq->max_wr * 2 : depth)) {
    core.qpn = Qpn{qpn};
    core.type = type;
    core.srq = srq;
    core.send_ring = {data(send_slots_), size(send_slots_)};
    core.receive_ring = {data(receive_slots_), size(receive_slots_)};
    core.receive_record_slots = receive_wqe_slots_max;
    core.send_lane = {send_entries_.data(), static_cast<std::uint32_t>(send_entries_.size())};
    core.receive_lane = {receive_entries_.data(), static_cast<std::uint32_t>(receive_entries_.size())};
    if (type == QpType::ud) core.datagram = std::make_unique<std::byte[]>(grh_bytes + limits::mtu_max_bytes);
    send_writer = {data(send_slots_), size(send_slots_)};
    receive_writer = {data(receive_slots_), size(receive_slots_)};
    send_reader_ = {send_entries_.data(), static_cast<std::uint32_t>(send_entries_.size())};
    receive_reader_ = {receive_entries_.data(), static_cast<std::uint32_t>(receive_entries_.size())};
    ports_.queue_pairs[qpn] = &core;
  }
  TestQp(const TestQp&) = delete;
  ~TestQp() { ports_.queue_pairs.erase(core.qpn.value); }

  void post(const SendSpec& spec) {
    const bool is_inline = (spec.flags & wr_inline) != 0;
    const auto payload = is_inline ? std::span<const std::byte>(spec.inline_data) : std::as_bytes(std::span(spec.sges));
    const auto operand = core.type == QpType::ud ? std::as_bytes(std::span(&spec.ud, 1)) : std::as_bytes(std::span(&spec.remote, 1));
    send_writer.write(sizeof(RecordHead), operand);
    send_writer.write(send_wqe_payload_offset, payload);
    const auto count = static_cast<std::uint16_t>(is_inline ? spec.inline_data.size() : spec.sges.size());
    send_writer.publish(spec.wr_id, spec.imm, pack(WqeControl{spec.opcode, spec.flags, count}),
                        send_wqe_slots(static_cast<std::uint32_t>(payload.size())));
    core.port.runnable = true;
  }
  void post(const ReceiveSpec& spec) {
    write_receive(receive_writer, spec, receive_wqe_slots_max);
    if (core.state == QpState::err) core.port.runnable = true;  // needs_doorbell
  }
  std::optional<Completion> poll(Direction direction) {
    vmci::LaneReader& reader = direction == Direction::send ? send_reader_ : receive_reader_;
    const Cqe* entry = reader.next();
    if (entry == nullptr) return std::nullopt;
    const CqeState state = unpack_cqe_state(entry->state & ~control_phase_bit);
    const Completion completion{entry->wr_id,  state.status,    state.opcode,  state.flags,
                                entry->byte_len, entry->imm_data, entry->src_qp, entry->queue_position};
    reader.pop();
    --core.port.completions_unpolled;
    if (direction == Direction::send)
      send_writer.set_freed(completion.position);
    else if (core.srq == nullptr)
      receive_writer.set_freed(receive_writer.freed() + receive_wqe_slots_max);
    return completion;
  }

  TestPorts::Qp core;
  vmci::RecordWriter send_writer, receive_writer;

 private:
  static std::byte* data(std::vector<Slot>& slots) { return slots.front().bytes; }
  static std::uint32_t size(const std::vector<Slot>& slots) { return static_cast<std::uint32_t>(slots.size()); }

  TestPorts& ports_;
  std::vector<Slot> send_slots_, receive_slots_;
  std::vector<Cqe> send_entries_, receive_entries_;
  vmci::LaneReader send_reader_, receive_reader_;
};

class TestSrq {
 public:
  TestSrq(std::uint32_t max_wr, std::uint32_t pd) : slots_(std::bit_ceil((max_wr + 1) * receive_wqe_slots_max)) {
    core.ring = {slots_.front().bytes, static_cast<std::uint32_t>(slots_.size())};
    core.record_slots = receive_wqe_slots_max;
    core.max_wr = max_wr;
    core.port.pd = pd;
    writer = {slots_.front().bytes, static_cast<std::uint32_t>(slots_.size())};
  }
  TestSrq(const TestSrq&) = delete;
  void post(const ReceiveSpec& spec) {
    writer.set_freed(core.ring.position());
    write_receive(writer, spec, receive_wqe_slots_max);
    ++core.port.posted;
  }

  TestPorts::Srq core;
  vmci::RecordWriter writer;

 private:
  std::vector<Slot> slots_;
};

constexpr PortLimits test_limits{16, 16, 5, 16, false, 0xffff};
constexpr std::uint32_t all_access =
    access_local_write | access_remote_any;

inline QpAttributes connection(std::uint32_t dest_qpn, std::uint16_t dlid) {
  QpAttributes a{};
  a.path_mtu = 3;
  a.rq_psn = a.sq_psn = 0xfffffe;  // wraps soon
  a.dest_qp_num = dest_qpn;
  a.access_flags = all_access;
  a.path.dlid = dlid;
  a.path.port_num = a.port_num = 1;
  a.max_rd_atomic = a.max_dest_rd_atomic = 4;
  a.min_rnr_timer = 12;
  a.timeout = 14;
  a.retry_cnt = 3;
  a.rnr_retry = 3;
  a.qkey = 0x1111;
  return a;
}

class TestWorld {
 public:
  TestQp& add(QpType type, std::uint32_t pd = 1, std::uint16_t lid = 1, TestPorts::Srq* srq = nullptr, std::uint32_t depth = 32) {
    qps.push_back(std::make_unique<TestQp>(ports, type, next_qpn_++, depth, srq));
    qps.back()->core.port.pd = pd;
    qps.back()->core.port.lid = lid;
    return *qps.back();
  }
  bool modify(TestQp& qp, QpState to, const QpAttributes& wanted_in, std::uint32_t extra_mask = 0) {
    auto& core = qp.core;
    core.attributes.state = static_cast<std::uint32_t>(core.state);
    const QpState before = core.state;
    QpAttributes wanted = wanted_in;
    wanted.state = static_cast<std::uint32_t>(to);
    const std::uint32_t mask = qp_attr_state | transition_masks(core.type, before, to).required | extra_mask;
    if (!engine::modify(core.type, core.attributes, wanted, mask, test_limits)) return false;
    core.state = to;
    if (to == QpState::reset)
      engine.reset(core, qp.send_writer.position(), qp.receive_writer.position());
    else
      engine.entered(core, before);
    if (to != QpState::reset) core.port.runnable = true;
    return true;
  }
  void bring_up(TestQp& qp, const QpAttributes& attributes, QpState until = QpState::rts) {
    for (const QpState next : {QpState::init, QpState::rtr, QpState::rts})
      if (next <= until && !modify(qp, next, attributes)) std::abort();
  }
  void connect(TestQp& a, TestQp& b) {
    bring_up(a, connection(b.core.qpn.value, b.core.port.lid));
    bring_up(b, connection(a.core.qpn.value, a.core.port.lid));
  }

  // Runs what is runnable until nothing is; time stands still.
  void settle(Budget turn = {1 << 20, 64}) {
    for (bool more = true; more;) {
      more = false;
      for (auto& qp : qps) {
        if (!qp->core.port.runnable) continue;
        Budget budget = turn;
        qp->core.port.runnable = engine.run(qp->core, budget) == Progress::worked;
        more = true;
      }
    }
  }
  // Lets time pass, timer by timer.
  void pass(std::uint64_t ns) {
    const std::uint64_t until = ports.time_ns + ns;
    for (;;) {
      settle();
      std::uint64_t next = until;
      for (auto& qp : qps)
        if (qp->core.port.wake_ns != 0) next = std::min(next, std::max(qp->core.port.wake_ns, ports.time_ns));
      ports.time_ns = next;
      bool fired = false;
      for (auto& qp : qps)
        if (qp->core.port.wake_ns != 0 && qp->core.port.wake_ns <= ports.time_ns) {
          qp->core.port.wake_ns = 0;
          fired = qp->core.port.runnable = true;
        }
      if (!fired && ports.time_ns >= until) return;
    }
  }

  struct Memory {
    std::vector<std::byte> bytes;
    std::uint32_t key;
    std::uint64_t iova;
    Sge sge(std::uint64_t offset, std::uint32_t length) const { return {iova + offset, length, key}; }
    RemoteOperand remote(std::uint64_t offset, std::uint64_t compare_add = 0, std::uint64_t swap = 0) const {
      return {iova + offset, compare_add, swap, key, 0};
    }
  };
  Memory& memory(std::size_t bytes, std::uint32_t pd = 1, std::uint32_t access = all_access, std::byte fill = std::byte{0}) {
    memories.push_back(std::make_unique<Memory>());
    Memory& m = *memories.back();
    m.bytes.assign(bytes, fill);
    m.iova = 0x10000 * memories.size() * 0x1000;
    m.key = ports.add_region({pd, access, m.iova, bytes, m.bytes.data()});
    return m;
  }
  static void fill(Memory& m, std::uint8_t seed) {
    for (std::size_t i = 0; i < m.bytes.size(); ++i) m.bytes[i] = static_cast<std::byte>(seed + i * 7 + (i >> 8));
  }

  TestPorts ports;
  Engine<TestPorts> engine{ports};
  std::vector<std::unique_ptr<TestQp>> qps;
  std::vector<std::unique_ptr<Memory>> memories;

 private:
  std::uint32_t next_qpn_ = 0x11;
};

}  // namespace vrdma::engine::test
