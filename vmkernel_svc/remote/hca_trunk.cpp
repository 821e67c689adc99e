#include "vmkernel_svc/remote/hca_trunk.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "vrdma/ids.hpp"

namespace vrdma::remote {

using engine::FarFrame;
using engine::FarRecord;

namespace {
constexpr std::uint64_t domain_number = ~std::uint64_t{0};  // no guest's
constexpr HcaDevice::QpWish wish{HcaTrunk::depth, HcaTrunk::depth, 1, 0};
constexpr std::uint8_t rnr_timer = 8;            // 0.16 ms (IBA table 45)
constexpr std::uint8_t retries = 7, for_ever = 7;
constexpr std::uint8_t ack_timeout_min = 14;     // 67 ms
constexpr std::uint32_t aligned(std::uint32_t bytes) { return (bytes + 7) & ~7u; }
}  // namespace

std::unique_ptr<HcaTrunk> HcaTrunk::make(HcaDevice& device, std::uint64_t number, HostId host) {
  std::unique_ptr<HcaTrunk> made(new HcaTrunk(device, number, host));
  HcaTrunk& trunk = *made;
  trunk.domain_ = device.domain(domain_number);
  if (trunk.domain_ == nullptr || !device.make_bounce(*trunk.domain_, std::size_t{2} * depth * message_bytes, trunk.memory_)) return nullptr;
  trunk.physical_ = device.create(*trunk.domain_, wish, nullptr, trunk.cq_);
  if (trunk.physical_ == nullptr) return nullptr;
  if (::getrandom(&trunk.psn_, sizeof(trunk.psn_), 0) != sizeof(trunk.psn_)) return nullptr;
  trunk.psn_ &= psn_mask;
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = device.port();
  return device.modify(trunk.physical_, a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ? std::move(made) : nullptr;
}

HcaTrunk::~HcaTrunk() {
  if (physical_ != nullptr) device_.destroy(physical_, *cq_, wish);
  if (memory_.mr != nullptr) device_.end_bounce(memory_);
  if (domain_ != nullptr) device_.release(domain_number);
}

void HcaTrunk::describe(HcaMessage& message) const {
  device_.describe(message);
  message.qpn = physical_->qp_num;
  message.count = psn_;
}

bool HcaTrunk::connect(const HcaMessage& theirs) {
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTR;
  device_.lead_to(theirs, a);
  a.rq_psn = static_cast<std::uint32_t>(theirs.count) & psn_mask;
  a.min_rnr_timer = rnr_timer;
  if (!device_.modify(physical_, a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) return false;
  for (std::uint32_t message = 0; message < depth; ++message)
    if (!post_receive(message)) return false;
  return connected_ = true;
}

bool HcaTrunk::start(std::uint8_t ack_timeout) {
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = std::max(ack_timeout, ack_timeout_min);
  a.retry_cnt = retries;
  a.rnr_retry = for_ever;
  a.sq_psn = psn_;
  return sending_ = device_.modify(physical_, a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

void HcaTrunk::fail(std::string why) {
  if (!std::exchange(broken_, true)) why_ = std::move(why);
}

// --- sending --------------------------------------------------------------------------------------------------

bool HcaTrunk::send(std::uint64_t number, std::uint64_t acknowledged, FarFrame& frame) {
  const auto bytes = static_cast<std::uint32_t>(frame.whole_bytes() - FarFrame::carrier_bytes);
  if (filled_ + sizeof(Head) + bytes > message_bytes) flush();
  if (!open() || posted_ - sent_ == depth) return false;
  std::byte* const at = sending(posted_) + filled_;
  const Head head{number, acknowledged, bytes, {}};
  std::memcpy(at, &head, sizeof(head));
  std::memcpy(at + sizeof(head), frame.whole() + FarFrame::carrier_bytes, bytes);
  filled_ = std::min(filled_ + static_cast<std::uint32_t>(sizeof(head)) + aligned(bytes), message_bytes);
  return true;
}

void HcaTrunk::flush() {
  if (filled_ == 0 || !open()) return;
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(sending(posted_)), std::exchange(filled_, 0), memory_.mr->lkey};
  ibv_send_wr request{}, *bad;
  request.wr_id = number_ * 2;
  request.sg_list = &sge;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  if (ibv_post_send(physical_, &request, &bad) != 0) return fail("its HCA takes no message");
  ++posted_;
}

// --- receiving ------------------------------------------------------------------------------------------------

bool HcaTrunk::post_receive(std::uint64_t message) {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(receiving(message)), message_bytes, memory_.mr->lkey};
  ibv_recv_wr request{}, *bad;
  request.wr_id = number_ * 2 + 1;
  request.sg_list = &sge;
  request.num_sge = 1;
  return ibv_post_recv(physical_, &request, &bad) == 0;
}

void HcaTrunk::completed(const ibv_wc& wc) {
  if (wc.status != IBV_WC_SUCCESS) return fail(std::string("its HCA said: ") + device_.explain(wc.status));
  if ((wc.wr_id & 1) == 0) {
    has_new_room_ |= posted_ - sent_++ == depth;
    return;
  }
  received_bytes_[received_++ % depth] = std::min(wc.byte_len, message_bytes);
}

bool HcaTrunk::deliver(Carrier& carrier) {
  const std::uint64_t before = taken_;
  for (; taken_ != received_ && carrier.takes_more() && !broken_; ++taken_) {
    if (!deliver(carrier, receiving(taken_), received_bytes_[taken_ % depth])) fail("what its HCA has received makes no sense");
    else if (!post_receive(taken_)) fail("its HCA takes no receive request");
  }
  return taken_ != before;
}

bool HcaTrunk::deliver(Carrier& carrier, const std::byte* at, std::uint32_t bytes) {
  while (bytes != 0) {
    Head head;
    FarRecord record;
    if (bytes < sizeof(head) + sizeof(record)) return false;
    std::memcpy(&head, at, sizeof(head));
    std::memcpy(&record, at + sizeof(head), sizeof(record));
    if (head.bytes > bytes - sizeof(head) || head.bytes < sizeof(record) || record.payload_bytes != head.bytes - sizeof(record)) return false;
    auto frame = FarFrame::make(record.payload_bytes);
    std::memcpy(frame->whole() + FarFrame::carrier_bytes, at + sizeof(head), head.bytes);
    const std::uint32_t step = std::min(static_cast<std::uint32_t>(sizeof(head)) + aligned(head.bytes), bytes);
    at += step;
    bytes -= step;
    carrier.bypassed(host_, *this, head.number, head.acknowledged, std::move(frame));
  }
  return true;
}

}  // namespace vrdma::remote
