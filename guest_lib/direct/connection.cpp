#include "guest_lib/direct/connection.hpp"

namespace vrdma::guest {

DirectConnection::DirectConnection(const Ends& ends)
    : claim_(ends.claim), peer_channel_(ends.peer_channel), own_channel_(ends.own_channel),
      ports_(claim_.stores(), ends.own, ends.peer, ends.sent, ends.received, far_, ends.receive.consume_completions(), ends.shared), engine_(ports_) {
  const auto& send = ends.send.geometry();
  const auto& receive = ends.receive.geometry();
  near_.type = far_.type = ends.type;
  near_.state = far_.state = engine::QpState::rts;
  near_.qpn = Qpn{ends.qpn};
  far_.qpn = Qpn{ends.peer_qpn};
  near_.attributes.dest_qp_num = ends.peer_qpn;
  far_.attributes.dest_qp_num = ends.qpn;
  near_.send_ring = vmci::RecordReader(ends.send.produce(), send.produce_slots);
  near_.send_lane = vmci::LaneWriter(ends.send.consume_completions(), send.consume_entries);
  far_.receive_ring = vmci::RecordReader(ends.receive_records.produce(), ends.receive_records.geometry().produce_slots);
  far_.receive_lane = vmci::LaneWriter(ends.receive.consume_completions(), receive.consume_entries);
  far_.receive_record_slots = ends.receive_record_slots;
}

void DirectConnection::take_over() {
  const direct::Direction& direction = claim_.direction();
  handouts_seen_ = direction.handouts;
  ports_.forget_keys();
  near_.attributes.path_mtu = direction.terms.path_mtu;
  near_.attributes.max_rd_atomic = static_cast<std::uint8_t>(direction.terms.max_rd_atomic);
  far_.attributes.access_flags = direction.terms.remote_access;
  far_.attributes.max_dest_rd_atomic = static_cast<std::uint8_t>(direction.terms.max_dest_rd_atomic);
  const direct::Positions& at = claim_.positions();
  near_.send_lane.skip_to(at.send_lane);
  far_.receive_lane.skip_to(at.receive_lane);
  step_back();
}

void DirectConnection::step_back() {
  const direct::Positions& at = claim_.positions();
  engine::leave_responder(near_);
  near_.state = far_.state = engine::QpState::rts;
  near_.operation.stage = engine::Operation::Stage::none;
  near_.operation.copy_pending = near_.send_queue_lost = far_.inbound.active = false;
  far_.counters.dropped = 0;
  near_.counters.sent_messages = at.sent_messages, near_.counters.sent_bytes = at.sent_bytes;
  near_.counters.read_messages = at.read_messages, near_.counters.read_bytes = at.read_bytes;
  near_.counters.atomics = at.atomics;
  near_.send_ring.skip_to(at.send_head);
  if (ports_.shares()) receive_head_ = at.receive_head;
  else far_.receive_ring.skip_to(at.receive_head);
  near_.send_psn = Psn{at.psn & psn_mask};
}

bool DirectConnection::run_queue() {
  for (int turns_lost = 0; !near_.send_ring.empty();) {
    if (claim_.stop() || ports_.owes_turn()) return false;
    engine::Budget budget{static_cast<std::int64_t>(direct::message_bytes_max) + 1, 1};
    far_.expected_psn = near_.send_psn;
    ports_.begin();
    engine_.run(near_, budget);
    if (ports_.given_up() || ports_.dropped() || engine_.busy(near_)) {
      step_back();
      if (ports_.turn_lost() && ++turns_lost < turns_lost_max) continue;
      return false;
    }
    turns_lost = 0;
    record();
  }
  return true;
}

}  // namespace vrdma::guest
