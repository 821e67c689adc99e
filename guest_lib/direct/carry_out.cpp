// A request that succeeds at once, from the caller's work request to its end: what most requests are. The rules are the engine's
// (requester.hpp, responder.hpp), for one local buffer and one receive buffer; whatever else it may come to, the engine says.
#include "guest_lib/direct/connection.hpp"

namespace vrdma::guest {

// One function for each operation, so that what others need is not even asked for.
template <ibv_wr_opcode opcode>
bool DirectConnection::carry_out_as(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags) {
  constexpr engine::OpcodeRule rule = engine::opcode_rules[opcode];
  // Those before it come first; and who wants the claim gets it between two messages.
  if (wr.num_sge != 1 || !has_run(queue) || claim_.stop()) return false;
  if (rule.atomic ? wr.sg_list->length != sizeof(std::uint64_t) : wr.sg_list->length == 0) return false;
  const std::uint64_t bytes = rule.atomic ? sizeof(std::uint64_t) : wr.sg_list->length;
  ports_.begin();

  engine::Place here = engine::Place::in_engine(reinterpret_cast<const void*>(wr.sg_list->addr)), there;
  if ((flags & wr_inline) == 0) {
    if (!ports_.find(here, Key{wr.sg_list->lkey}, wr.sg_list->addr, bytes, rule.reads ? engine::access_local_write : engine::access_local_read)) return false;
  }
  if (rule.remote_access != 0) {
    const std::uint64_t address = rule.atomic ? wr.wr.atomic.remote_addr : wr.wr.rdma.remote_addr;
    if ((far_.attributes.access_flags & rule.remote_access) == 0 || (rule.atomic && address % sizeof(std::uint64_t) != 0)) return false;
    if (rule.reads && (near_.attributes.max_rd_atomic == 0 || far_.attributes.max_dest_rd_atomic == 0)) return false;
    if (!ports_.find(there, Key{rule.atomic ? wr.wr.atomic.rkey : wr.wr.rdma.rkey}, address, bytes, rule.remote_access)) return false;
  }
  std::uint64_t receive_id = 0;
  if (rule.takes_receive) {
    for (int tries = 0;; ++tries, ports_.seek_receive()) {
      Sge buffer{};
      if (far_.receive_record_slots != 1 || !next_receive(far_.receive_ring, rule.moves_to_receive, receive_id, buffer)) return false;
      if (rule.moves_to_receive) {
        if (buffer.bytes < bytes) return false;
        if (!ports_.find_receive(there, buffer, bytes)) return false;
      } else {
        ports_.name_receive(buffer);
      }
      if (ports_.take_turn(receive_id)) break;
      if (!ports_.turn_lost() || tries == turns_lost_max) return false;
    }
  }

  auto moved = engine::MemoryStatus::done;
  if (rule.atomic) {
    std::uint64_t old_value = 0;
    moved = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? ports_.fetch_and_add(near_, there, wr.wr.atomic.compare_add, old_value)
                                                  : ports_.compare_and_swap(near_, there, wr.wr.atomic.compare_add, wr.wr.atomic.swap, old_value);
    if (moved == engine::MemoryStatus::done) ports_.return_value(here, old_value);
  } else {
    moved = ports_.copy(near_, rule.reads ? here : there, rule.reads ? there : here, bytes);
  }
  if (moved != engine::MemoryStatus::done) return false;
  if (rule.takes_receive) {
    Cqe cqe{};
    cqe.wr_id = receive_id;
    cqe.byte_len = static_cast<std::uint32_t>(bytes);
    cqe.imm_data = rule.has_imm ? wr.imm_data : 0;
    cqe.src_qp = near_.qpn.value;
    ports_.complete(far_, engine::Direction::receive, cqe, {WcStatus::success, rule.receive_opcode, engine::receive_flags((flags & wr_solicited) != 0, rule)});
    if (ports_.given_up()) return false;
    far_.receive_ring.advance(1);
  }

  // From here on it is done. Its slot is taken before its completion can be polled.
  queue.pass(wr.wr_id);
  near_.send_ring.skip_to(queue.writer().position());
  const std::uint32_t packets = rule.atomic ? 1 : engine::packets(bytes, near_.attributes.path_mtu);
  near_.send_psn = advance(near_.send_psn, packets);
  if (rule.atomic) {
    ++near_.counters.atomics;
  } else if (rule.reads) {
    near_.counters.read_messages += 1, near_.counters.read_bytes += bytes;
  } else {
    near_.counters.sent_messages += 1, near_.counters.sent_bytes += bytes;
  }
  if ((flags & wr_signaled) != 0) [[likely]] {
    Cqe cqe{};
    cqe.wr_id = wr.wr_id;
    cqe.byte_len = static_cast<std::uint32_t>(bytes);
    cqe.queue_position = near_.send_ring.position();
    ports_.complete(near_, engine::Direction::send, cqe, {WcStatus::success, rule.send_opcode, 0});
  }
  record();
  return true;
}

bool DirectConnection::carry_out(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags) {
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE: return carry_out_as<IBV_WR_RDMA_WRITE>(queue, wr, flags);
    case IBV_WR_RDMA_WRITE_WITH_IMM: return carry_out_as<IBV_WR_RDMA_WRITE_WITH_IMM>(queue, wr, flags);
    case IBV_WR_SEND: return carry_out_as<IBV_WR_SEND>(queue, wr, flags);
    case IBV_WR_SEND_WITH_IMM: return carry_out_as<IBV_WR_SEND_WITH_IMM>(queue, wr, flags);
    case IBV_WR_RDMA_READ: return carry_out_as<IBV_WR_RDMA_READ>(queue, wr, flags);
    case IBV_WR_ATOMIC_CMP_AND_SWP: return carry_out_as<IBV_WR_ATOMIC_CMP_AND_SWP>(queue, wr, flags);
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return carry_out_as<IBV_WR_ATOMIC_FETCH_AND_ADD>(queue, wr, flags);
    default: return false;
  }
}

}  // namespace vrdma::guest
