// Pins what lies in shared memory and on the channel: a change here is a change of the protocol's version.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "vrdma/direct.hpp"
#include "vrdma/queue_layout.hpp"
#include "vrdma/control.hpp"
#include "vrdma/copy_ring.hpp"
#include "vrdma/wire.hpp"

using namespace vrdma;

#define PIN(type, member, offset) static_assert(offsetof(type, member) == (offset))

PIN(RecordHead, tag, 0);
PIN(RecordHead, control, 8);
PIN(RecordHead, word, 12);
PIN(Sge, address, 0);
PIN(Sge, bytes, 8);
PIN(Sge, lkey, 12);
PIN(RemoteOperand, address, 0);
PIN(RemoteOperand, compare_add, 8);
PIN(RemoteOperand, swap, 16);
PIN(RemoteOperand, rkey, 24);
PIN(UdOperand, remote_qpn, 0);
PIN(UdOperand, remote_qkey, 4);
PIN(UdOperand, dlid, 8);
PIN(UdOperand, sl, 10);
PIN(UdOperand, route_flags, 11);
PIN(UdOperand, sgid_index, 12);
PIN(UdOperand, hop_limit, 13);
PIN(UdOperand, traffic_class, 14);
PIN(UdOperand, dgid, 16);
PIN(SendWqe, remote, 16);
PIN(SendWqe, ud, 16);
PIN(Cqe, wr_id, 0);
PIN(Cqe, byte_len, 8);
PIN(Cqe, imm_data, 12);
PIN(Cqe, src_qp, 16);
PIN(Cqe, slid, 20);
PIN(Cqe, sl, 22);
PIN(Cqe, queue_position, 24);
PIN(Cqe, state, 28);
static_assert(slot_bytes == 64 && record_slots_max == 64 && send_wqe_payload_offset == 48 && receive_wqe_payload_offset == 16);
static_assert(control_phase_bit == 0x80000000u && control_slots_shift == 25 && control_slots_mask == 0x3f &&
              control_user_mask == 0x01ffffffu);

PIN(vmci::CreatorCursor, consumed, 0);
PIN(vmci::CreatorCursor, produced_count, 4);
PIN(vmci::CreatorCursor, waiting, 8);
PIN(vmci::AttacherCursor, consumed, 0);
PIN(vmci::AttacherCursor, needs_doorbell, 4);
PIN(vmci::QueuePairHeader, attacher, 128);
PIN(vmci::ReadyWords, words, 128);
static_assert(sizeof(vmci::QueuePairHeader) == 256 && sizeof(vmci::ReadyWords) == 2176 && sizeof(vmci::QueuePairGeometry) == 16);

PIN(control::Head, source_context, 16);
PIN(control::Head, source_port, 20);
PIN(control::Head, sequence, 24);
PIN(control::Head, status, 28);
static_assert(control::magic == 0x4d445256 && control::version_major == 2 && control::host_context == 2 &&
              control::control_port == 28249 && control::reply_bit == 0x10000 && control::body_bytes_max == 4064);
PIN(control::AttachRequest, magic, 0);
PIN(control::AttachRequest, major, 4);
PIN(control::AttachRequest, minor, 6);
PIN(control::AttachRequest, link_layer, 8);
PIN(control::AttachRequest, pid, 12);
PIN(control::AttachRequest, name, 16);
PIN(control::AttachReply, guest, 4);
PIN(control::AttachReply, arena_bytes, 8);
PIN(control::AttachReply, control_offset, 16);
PIN(control::AttachReply, control_geometry, 24);
PIN(control::AttachReply, doorbell_offset, 40);
PIN(control::AttachReply, shard, 48);
PIN(control::AttachReply, service_pid, 52);
PIN(control::AttachReply, name, 56);
PIN(control::AttachReply, service_version, 88);
PIN(control::CqShared, arm, 0);
PIN(control::CqShared, hot, 4);
PIN(control::CqShared, poller, 20);
PIN(control::CqShared, wants_stamps, 24);
PIN(control::CqShared, consumed, 64);
PIN(control::CqShared, offers_ended, 72);
PIN(control::CqShared, ready, 128);
PIN(control::ServicePage, device_generation, 8);
PIN(control::ServicePage, shard_count, 12);
PIN(control::ServicePage, alive_mutex, 64);
PIN(control::ServicePage, shards, 128);
static_assert(sizeof(control::AttachRequest) == 48 && sizeof(control::AttachReply) == 120 && sizeof(control::Extent) == 32 &&
              sizeof(control::StageExtentsRequest) == 3848 && sizeof(control::RegMrRequest) == 32 &&
              sizeof(control::ReregMrRequest) == 40 && sizeof(control::CreateQpRequest) == 48 && sizeof(control::CreateXrcQpRequest) == 56 && sizeof(control::OpenXrcdRequest) == 24 &&
              sizeof(control::CqShared) == 2304 && sizeof(control::GidEntry) == 24 && sizeof(control::QueueReply) == 32);

static_assert(sizeof(control::QueuePairAllocRequest) == 32 && sizeof(control::QueuePairAttachRequest) == 16 &&
              sizeof(control::QueuePairReply) == 32 && sizeof(control::QueuePairNotice) == 32 &&
              sizeof(control::BindPortRequest) == 8 && control::datagram_bit == 0x20000 && control::notice_offer == 0xff01 &&
              control::notice_attached == 0xff02 && control::notice_detached == 0xff03);

PIN(copying::Job, operand, 16);
PIN(copying::Job, compare, 24);
PIN(copying::Job, slot, 32);
PIN(copying::Job, range_count, 36);
PIN(copying::Answer, value, 16);
PIN(copying::Header, service, 128);
PIN(copying::ServiceCursor, answers_taken, 4);
static_assert(copying::slot_count == 16 && copying::bounce_bytes == 65536 && copying::ranges_max == 29 && copying::job_slots == 256 &&
              copying::answer_slots == 32 && copying::answers_offset == 256 && copying::jobs_offset == 2304 &&
              copying::bounce_offset == 32768 && sizeof(control::ReachProcessRequest) == 16 && sizeof(control::ReachProcessReply) == 8);

PIN(vmci::AttacherCursor, direct_offer, 8);
PIN(direct::Direction, stop, 8);
PIN(direct::Direction, handouts, 12);
PIN(direct::Direction, current, 16);
PIN(direct::Direction, claimed_arm, 20);
PIN(direct::Direction, terms, 24);
PIN(direct::Direction, taking, 64);
PIN(direct::Terms, qkey, 16);
PIN(direct::Direction, positions, 128);
PIN(direct::Turns, limit, 8);
PIN(direct::Turns, passed, 128);
PIN(direct::Positions, psn, 16);
PIN(direct::Positions, sent_messages, 24);
PIN(direct::KeyEntry, file, 8);
PIN(direct::KeyEntry, address, 16);
PIN(direct::KeyRegion, address, 16);
PIN(direct::KeyRegion, backing_offset, 40);
PIN(direct::KeyTable, regions, 8 << 20);
PIN(direct::KeyTable, let_go, 20 << 20);
PIN(direct::LetGo, backings, 4);
PIN(direct::Taking, unfinished, 4);
PIN(control::CmAddress, ip, 8);
PIN(control::CmParameters, private_data, 16);
PIN(control::CmEvent, parameters, 24);
PIN(control::CmEvent, address, 296);
PIN(control::CmTakeReply, event, 16);
PIN(control::MadRegisterRequest, methods, 16);
PIN(control::MadAddress, lid, 28);
PIN(control::MadSendRequest, data, 64);
PIN(control::MadTakeReply, from, 24);
PIN(control::MadTakeReply, data, 64);
static_assert(sizeof(control::OpenDirectReply) == 104 && sizeof(control::OpenProcessReply) == 24 && sizeof(control::OpenSharedReceivesReply) == 40 &&
              sizeof(control::OpenPathRequest) == 40 && sizeof(control::OpenPathReply) == 184 && direct::claim_word(3, direct::held_by_poster) == 0x300000002 &&
              direct::claim_word(3, direct::held_by_poster, 0x123456) == 0x312345602);

TEST_CASE("Every control request has the number it has always had") {
  constexpr std::string_view names[] = {
      "",          "attach",    "add_backing",  "remove_backing", "open_context", "create_channel", "show",
      "query_device", "close_context", "destroy_channel", "create_pd", "destroy_pd", "stage_extents", "reg_mr",
      "rereg_mr",  "dereg_mr",  "create_cq",    "resize_cq",      "destroy_cq",   "create_srq",     "modify_srq",
      "query_srq", "destroy_srq", "create_qp",  "modify_qp",      "query_qp",     "destroy_qp",     "attach_mcast",
      "detach_mcast", "bind_port", "unbind_port", "queue_pair_alloc", "queue_pair_attach", "queue_pair_detach", "reach_process", "add_pinned", "open_direct", "open_backing",
      "set_direct", "open_shared_receives", "open_process", "share_address", "open_path",
      "cm_open", "cm_close", "cm_place", "cm_create_id", "cm_destroy_id", "cm_bind", "cm_resolve_address", "cm_resolve_route", "cm_listen", "cm_connect",
      "cm_accept", "cm_reject", "cm_disconnect", "cm_is_established", "cm_option", "cm_query", "cm_attributes", "cm_migrate", "cm_join", "cm_leave",
      "cm_take_event", "open_xrcd", "close_xrcd", "create_xrc_qp", "time_cq", "read_clock", "alloc_mw", "dealloc_mw", "bind_mw", "invalidate_mw", "read_counters", "cm_write_event",
      "mad_open", "mad_close", "mad_register", "mad_unregister", "mad_send", "mad_take", "query_link_layer"};
#define VRDMA_CHECK_NUMBER(name, request, reply, socket)                                       \
  REQUIRE(static_cast<std::size_t>(control::Request::name) < std::size(names));                \
  CHECK(names[static_cast<std::size_t>(control::Request::name)] == std::string_view(#name));
  VRDMA_CONTROL_REQUESTS(VRDMA_CHECK_NUMBER)
#undef VRDMA_CHECK_NUMBER
}

TEST_CASE("A send WQE has the bytes it has always had") {
  SendWqe wqe{};
  wqe.head = {0x0807060504030201, control_phase_bit | (1u << control_slots_shift) |
                                      pack(WqeControl{WrOpcode::rdma_write_with_imm, wr_signaled | wr_solicited, 3}),
              0x44332211};
  wqe.remote = {0x1817161514131211, 0x2827262524232221, 0x3837363534333231, 0x44434241, 0};
  constexpr std::array<unsigned char, 48> golden = {
      0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x01, 0x86, 0x01, 0x82, 0x11, 0x22, 0x33, 0x44,
      0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28,
      0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38, 0x41, 0x42, 0x43, 0x44, 0x00, 0x00, 0x00, 0x00};
  CHECK(std::memcmp(&wqe, golden.data(), golden.size()) == 0);
  const WqeControl back = unpack_wqe_control(wqe.head.control & control_user_mask);
  CHECK(back.opcode == WrOpcode::rdma_write_with_imm);
  CHECK(back.flags == (wr_signaled | wr_solicited));
  CHECK(back.count == 3);
}

TEST_CASE("A completion has the bytes it has always had") {
  Cqe cqe{0x0807060504030201, 0x14131211, 0x24232221, 0x34333231, 0x4241, 0x51, 0, 0x64636261,
          control_phase_bit | pack(CqeState{WcStatus::rem_access_err, WcOpcode::recv_rdma_with_imm, wc_grh | wc_with_imm})};
  constexpr std::array<unsigned char, 32> golden = {0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x11, 0x12, 0x13,
                                                    0x14, 0x21, 0x22, 0x23, 0x24, 0x31, 0x32, 0x33, 0x34, 0x41, 0x42,
                                                    0x51, 0x00, 0x61, 0x62, 0x63, 0x64, 0x0a, 0x81, 0x03, 0x80};
  CHECK(std::memcmp(&cqe, golden.data(), golden.size()) == 0);
  const CqeState back = unpack_cqe_state(cqe.state & ~control_phase_bit);
  CHECK(back.status == WcStatus::rem_access_err);
  CHECK(back.opcode == WcOpcode::recv_rdma_with_imm);
}

TEST_CASE("A queue pair's parts lie one after the other, completions 32 bytes and slots 64") {
  constexpr vmci::QueuePairGeometry verbs{16, 32, vmci::QueueKind::completions, 0};
  static_assert(verbs.produce_offset() == 256 && verbs.consume_offset() == 1280 && verbs.total_bytes() == 2304);
  constexpr vmci::QueuePairGeometry records{16, 32, vmci::QueueKind::records, 0};
  static_assert(records.total_bytes() == 256 + 1024 + 2048);
  constexpr vmci::QueuePairGeometry none{16, 32, vmci::QueueKind::none, 0};
  static_assert(none.total_bytes() == 1280);
  constexpr vmci::QueuePairGeometry bytes{16, 32, vmci::QueueKind::bytes, 0};
  static_assert(bytes.total_bytes() == 256 + 1024 + 2048);
  // The largest that 32 bits can say does not overflow.
  constexpr vmci::QueuePairGeometry huge{0xffffffff, 0xffffffff, vmci::QueueKind::records, 0};
  static_assert(huge.total_bytes() == 256 + 2 * (std::uint64_t{0xffffffff} * 64));
}
