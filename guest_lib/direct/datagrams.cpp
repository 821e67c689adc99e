#include "guest_lib/direct/datagrams.hpp"

#include <algorithm>
#include <cstring>

#include "guest_lib/objects.hpp"
#include "vmci_channel/arch.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::guest {

namespace {

constexpr int inbox_tries = 128;                      // pauses for who is inside, some microseconds
constexpr std::uint32_t datagrams_inside = 8;         // then others come by
constexpr std::uint64_t ask_again_ns = 100'000'000, ask_again_max_ns = 10'000'000'000;  // for an address that led nowhere, twice as late each time
constexpr std::size_t paths_max = 4096;               // then all are forgotten
constexpr std::size_t adds_between_looks = 64;        // at paths that are over

}  // namespace

// --- one path ---------------------------------------------------------------------------------------------------

DatagramPath::DatagramPath(std::shared_ptr<DirectRoom> room_in, std::shared_ptr<OwnFd> channel_in, const DirectConnection::Ends& ends,
                           const DatagramSource& source)
    : reach{std::move(room_in)}, channel_(std::move(channel_in)), claim_(ends.claim), peer_channel_(ends.peer_channel),
      ports_(claim_.stores(), ends.own, ends.peer, ends.sent, ends.received, far_, ends.receive.consume_completions(), ends.shared, source), engine_(ports_) {
  far_.type = engine::QpType::ud;
  far_.qpn = Qpn{ends.peer_qpn};
  far_.receive_ring = vmci::RecordReader(ends.receive_records.produce(), ends.receive_records.geometry().produce_slots);
  far_.receive_lane = vmci::LaneWriter(ends.receive.consume_completions(), ends.receive.geometry().consume_entries);
  far_.receive_record_slots = ends.receive_record_slots;
}

bool DatagramPath::enter(std::uint32_t own_keys) {
  // The service has it for a turn, others for some datagrams.
  for (int tries = 0; claim_.stop() || !claim_.enter(); ++tries) {
    if (tries == inbox_tries || claim_.over()) return false;
    vmci::cpu_relax();
  }
  VRDMA_CRASH_POINT("direct.guest.inbox_claimed");
  take_over();
  if (own_keys != own_keys_seen_) ports_.forget_keys();
  own_keys_seen_ = own_keys;
  if (!ports_.owes_turn()) return true;
  claim_.leave();
  return false;
}

// From another poster, or the service, where it stands.
void DatagramPath::take_over() {
  const direct::Direction& direction = claim_.direction();
  if (direction.handouts != handouts_seen_) {
    handouts_seen_ = direction.handouts;
    ports_.forget_keys();
    far_.attributes.qkey = direction.terms.qkey;
  }
  far_.receive_lane.skip_to(claim_.positions().receive_lane);
  step_back();
}

void DatagramPath::step_back() {
  const direct::Positions& at = claim_.positions();
  far_.state = engine::QpState::rts;
  far_.inbound.active = false;
  far_.counters.dropped = 0;
  far_.counters.received_messages = at.received_messages, far_.counters.received_bytes = at.received_bytes;
  if (ports_.shares()) receive_head_ = at.receive_head;
  else far_.receive_ring.skip_to(at.receive_head);
}

void DatagramPath::record() {
  direct::Positions& at = claim_.next_positions();
  at.send_head = at.send_lane = at.psn = 0;
  at.sent_messages = at.sent_bytes = at.read_messages = at.read_bytes = at.atomics = 0;
  at.receive_head = ports_.shares() ? receive_head_ = ports_.taken(receive_head_) : far_.receive_ring.position();
  at.receive_lane = far_.receive_lane.position();
  at.received_messages = far_.counters.received_messages, at.received_bytes = far_.counters.received_bytes;
  VRDMA_CRASH_POINT("direct.guest.before_inbox_record");
  claim_.publish_positions();
  VRDMA_CRASH_POINT("direct.guest.inbox_recorded");
}

bool DatagramPath::deliver(DirectPorts::Qp& near, const ibv_send_wr& wr, std::uint8_t flags, const UdOperand& address, std::uint32_t qkey) {
  const engine::OpcodeRule& rule = engine::opcode_rules[wr.opcode];
  const std::uint64_t bytes = wr.sg_list->length;
  if (bytes == 0 || bytes > engine::datagram_bytes_max(near.attributes) || qkey != far_.attributes.qkey || far_.receive_record_slots != 1) return false;
  ports_.begin();
  engine::Place from = engine::Place::in_engine(reinterpret_cast<const void*>(wr.sg_list->addr));
  if ((flags & wr_inline) == 0 && !ports_.find(from, Key{wr.sg_list->lkey}, wr.sg_list->addr, bytes, engine::access_local_read)) return false;
  engine::Place to;
  std::uint64_t receive_id = 0;
  for (int tries = 0;; ++tries, ports_.seek_receive()) {
    Sge buffer{};
    if (!next_receive(far_.receive_ring, true, receive_id, buffer) || buffer.bytes < engine::grh_bytes + bytes) return false;
    if (!ports_.find_receive(to, buffer, engine::grh_bytes + bytes)) return false;
    if (ports_.take_turn(receive_id)) break;
    if (!ports_.turn_lost() || tries == DirectConnection::turns_lost_max) return false;
  }
  const bool has_grh = ports_.source().has_grh;
  if (has_grh) {
    std::byte grh[engine::grh_bytes];
    ports_.write_grh(near, far_, address, engine::ud_packet_bytes(static_cast<std::uint32_t>(bytes), rule.has_imm), grh);
    if (ports_.copy(near, to, engine::Place::in_engine(grh), sizeof(grh)) != engine::MemoryStatus::done) return false;
  }
  if (ports_.copy(near, to + engine::grh_bytes, from, bytes) != engine::MemoryStatus::done) return false;
  Cqe cqe{};
  cqe.wr_id = receive_id;
  cqe.byte_len = static_cast<std::uint32_t>(bytes + engine::grh_bytes);
  cqe.imm_data = rule.has_imm ? wr.imm_data : 0;
  cqe.src_qp = near.qpn.value;
  cqe.slid = ports_.source().lid;
  cqe.sl = ports_.sl(near, address);
  const auto told = static_cast<std::uint8_t>(engine::receive_flags((flags & wr_solicited) != 0, rule) | (has_grh ? wc_grh : 0));
  ports_.complete(far_, engine::Direction::receive, cqe, {WcStatus::success, rule.receive_opcode, told});
  if (ports_.given_up()) return false;
  far_.receive_ring.advance(1);
  far_.counters.received_messages += 1, far_.counters.received_bytes += bytes;
  record();
  return true;
}

bool DatagramPath::run(DirectPorts::Qp& near) {
  engine::Budget budget{2 * static_cast<std::int64_t>(limits::mtu_max_bytes), 1};  // never spent before it is over
  ports_.begin();
  engine_.run(near, budget);
  if (ports_.given_up() || ports_.dropped() || engine_.busy(near)) {
    engine::leave_responder(near);
    step_back();
    return false;
  }
  record();
  return true;
}

void DatagramPath::leave() {
  if (const bool received = ports_.take_received(), solicited = ports_.take_solicited(); received) {
    vmci::store_load_fence();  // as DirectConnection::tell
    // The service looks for an event that could not be raised now and then (DirectDesk::look).
    tell_peer(claim_, ports_.received_at(), peer_channel_, solicited);
  }
  VRDMA_CRASH_POINT("direct.guest.told");
  claim_.leave();
  VRDMA_CRASH_POINT("direct.guest.left");
}

// --- the send queue ---------------------------------------------------------------------------------------------

DatagramSender::DatagramSender(std::shared_ptr<DirectRoom> room, const DirectConnection::Ends& own)
    : room_(std::move(room)), claim_(own.claim), sent_(own.sent), own_channel_(own.own_channel) {
  near_.type = engine::QpType::ud;
  near_.state = engine::QpState::rts;
  near_.qpn = Qpn{own.qpn};
  near_.send_ring = vmci::RecordReader(own.send.produce(), own.send.geometry().produce_slots);
  near_.send_lane = vmci::LaneWriter(own.send.consume_completions(), own.send.geometry().consume_entries);
  near_.datagram.reset(new std::byte[engine::grh_bytes + limits::mtu_max_bytes]);
}

void DatagramSender::take_over() {
  const direct::Direction& direction = claim_.direction();
  handouts_seen_ = direction.handouts;
  near_.attributes.path_mtu = direction.terms.path_mtu;
  near_.attributes.qkey = direction.terms.qkey;
  near_.send_lane.skip_to(claim_.positions().send_lane);
  step_back();
}

void DatagramSender::step_back() {
  const direct::Positions& at = claim_.positions();
  near_.state = engine::QpState::rts;
  near_.operation.stage = engine::Operation::Stage::none;
  near_.operation.copy_pending = near_.send_queue_lost = false;
  near_.counters.sent_messages = at.sent_messages, near_.counters.sent_bytes = at.sent_bytes;
  near_.send_ring.skip_to(at.send_head);
  near_.send_psn = Psn{at.psn & psn_mask};
}

void DatagramSender::record() {
  direct::Positions& at = claim_.next_positions();
  at.receive_head = at.receive_lane = 0;
  at.read_messages = at.read_bytes = at.atomics = at.received_messages = at.received_bytes = 0;
  at.send_head = near_.send_ring.position();
  at.send_lane = near_.send_lane.position();
  at.psn = near_.send_psn.value;
  at.sent_messages = near_.counters.sent_messages, at.sent_bytes = near_.counters.sent_bytes;
  VRDMA_CRASH_POINT("direct.guest.before_record");
  claim_.publish_positions();
  VRDMA_CRASH_POINT("direct.guest.recorded");
}

bool DatagramSender::carry_out(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags) {
  const UdOperand operand = ud_operand(wr);
  DatagramPath* const path = path_to(operand);
  // Those before it come first; and who wants the claim gets it between two datagrams.
  if (path == nullptr || wr.num_sge != 1 || near_.send_ring.position() != queue.writer().position() || claim_.stop() || !inside(*path)) return false;
  if (!path->deliver(near_, wr, flags, operand, qkey_of(operand))) return note_failure(*path), false;

  // From here on it is done. Its slot is taken before its completion can be polled.
  queue.pass(wr.wr_id);
  near_.send_ring.skip_to(queue.writer().position());
  near_.send_psn = advance(near_.send_psn, engine::packets(wr.sg_list->length, near_.attributes.path_mtu));
  near_.counters.sent_messages += 1, near_.counters.sent_bytes += wr.sg_list->length;
  if ((flags & wr_signaled) != 0) {
    Cqe cqe{};
    cqe.wr_id = wr.wr_id;
    cqe.byte_len = wr.sg_list->length;
    cqe.queue_position = near_.send_ring.position();
    path->complete(near_, cqe, {WcStatus::success, engine::opcode_rules[wr.opcode].send_opcode, 0});
    any_sent_ |= path->take_sent();
  }
  record();
  return true;
}

bool DatagramSender::run_queue() {
  for (int turns_lost = 0; !near_.send_ring.empty();) {
    if (claim_.stop()) return false;
    const auto& wqe = *reinterpret_cast<const SendWqe*>(near_.operation.wqe);
    std::uint32_t slots = 0;
    if (near_.send_ring.peek(near_.operation.wqe, send_wqe_slots_max, slots) != vmci::RecordReader::Peek::ready) return false;
    DatagramPath* const path = path_to(wqe.ud);
    if (path == nullptr || !inside(*path)) return false;
    const bool done = path->run(near_);
    any_sent_ |= path->take_sent();
    if (!done) {
      step_back();
      note_failure(*path);
      if (path->turn_lost() && ++turns_lost < DirectConnection::turns_lost_max) continue;
      return false;
    }
    turns_lost = 0;
    record();
  }
  return true;
}

bool DatagramSender::leave() {
  leave_inbox();
  if (std::exchange(any_sent_, false)) {
    vmci::store_load_fence();  // as DirectConnection::tell
    if (!sent_.is_hot()) vmci::ReadyBitmap(&sent_.cq->ready).set(sent_.lane);
    own_event_due_ |= own_channel_;
  }
  claim_.leave();
  return true;
}

// --- paths ------------------------------------------------------------------------------------------------------

std::size_t DatagramSender::AddressHash::operator()(const Address& address) const {
  std::uint64_t mixed = 0;
  for (const std::uint64_t word : address) mixed = (mixed ^ word) * 0x9e3779b97f4a7c15u, mixed ^= mixed >> 29;
  return mixed;
}

DatagramSender::Address DatagramSender::address_of(const UdOperand& operand) {
  static_assert(offsetof(UdOperand, remote_qpn) == 0 && offsetof(UdOperand, dlid) == 8 && sizeof(UdOperand) == sizeof(Address));
  UdOperand path = operand;
  set_flow_label(path, 0);  // that is the message's
  return {path.remote_qpn, word_of(path, 1), word_of(path, 2), word_of(path, 3)};
}

void DatagramSender::look_at(const ibv_send_wr& wr) { path_to(ud_operand(wr)); }

// Multicast is the service's.
DatagramPath* DatagramSender::path_to(const UdOperand& operand) {
  const Address address = address_of(operand);
  std::uint64_t difference = 0;  // not array's operator: it may compare memory, wide
  for (std::size_t i = 0; i < address.size(); ++i) difference |= address[i] ^ last_address_[i];
  if (last_ == nullptr || difference != 0) {
    const auto found = paths_.find(address);
    if (found == paths_.end()) {
      if (operand.remote_qpn != multicast_qpn.value) want(operand);
      return nullptr;
    }
    last_ = &found->second;
    last_address_ = address;
  }
  if (last_->path == nullptr && vmci::monotonic_ns() >= last_->ask_again_ns) want(operand);
  return last_->path.get();
}

void DatagramSender::want(const UdOperand& operand) {
  const auto same = [&](const UdOperand& other) { return address_of(other) == address_of(operand); };
  if (wanted_count_ < wanted_.size() && std::none_of(wanted_.begin(), wanted_.begin() + wanted_count_, same)) wanted_[wanted_count_++] = operand;
}

bool DatagramSender::inside(DatagramPath& path) {
  if (inside_ == &path && !path.stop() && ++inside_for_ <= datagrams_inside) [[likely]] return true;
  leave_inbox();
  if (!path.enter(handouts_seen_)) {
    if (path.over()) {  // asked for anew when it is needed next
      if (unmapped_ == &path) unmapped_ = nullptr;
      any_over_ = true;
      paths_.erase(last_address_);
      last_ = nullptr;
    }
    return false;
  }
  inside_ = &path;
  inside_for_ = 1;
  return true;
}

void DatagramSender::leave_inbox() {
  if (DatagramPath* const left = std::exchange(inside_, nullptr)) left->leave();
}

void DatagramSender::note_failure(DatagramPath& path) {
  if (path.has_unmapped()) unmapped_ = &path;
}

void DatagramSender::add(const UdOperand& address, std::unique_ptr<DatagramPath> path) {
  // What is over holds its receiver's memory mapped.
  if (std::exchange(any_over_, false) || paths_.size() % adds_between_looks == 0)
    std::erase_if(paths_, [](const auto& known) { return known.second.path != nullptr && known.second.path->over(); });
  if (paths_.size() >= paths_max) std::erase_if(paths_, [](const auto& known) { return known.second.path == nullptr; });
  if (paths_.size() >= paths_max) paths_.clear();
  last_ = nullptr;
  Known& known = paths_[address_of(address)];
  known.path = std::move(path);
  known.patience_ns = std::clamp(2 * known.patience_ns, ask_again_ns, ask_again_max_ns);
  known.ask_again_ns = vmci::monotonic_ns() + known.patience_ns;
}

// IBA 10.2.5: the top bit of the Q_Key in a work request asks for the queue pair's own.
std::uint32_t DatagramSender::qkey_of(const UdOperand& operand) const {
  return (operand.remote_qkey & 0x80000000u) != 0 ? near_.attributes.qkey : operand.remote_qkey;
}

}  // namespace vrdma::guest
