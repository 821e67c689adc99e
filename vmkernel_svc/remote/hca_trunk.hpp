// One RC QP of the HCA for all records to another host: the carrier's bypass. Records are copied into memory of the service, as many in
// one message as are there to be sent, and out of it at the other end; what goes in place has queue pairs of its own (HcaConnection).
//
// A receiver that is slow is waited for by RNR, without end: what comes is taken as the carrier takes it. Who gives up is its owner's to
// decide, as is who is told what (hca_message.hpp). Used by the shard's thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "vmkernel_svc/remote/carrier.hpp"
#include "vmkernel_svc/remote/hca_device.hpp"
#include "vmkernel_svc/remote/hca_message.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::remote {

class HcaTrunk final : public Bypass {
 public:
  // `number`: completions have number × 2 as their work request id, and 1 more for a receive. nullptr: the HCA has none to give.
  static std::unique_ptr<HcaTrunk> make(HcaDevice& device, std::uint64_t number, HostId host);
  ~HcaTrunk() override;
  HcaTrunk(const HcaTrunk&) = delete;
  HcaTrunk& operator=(const HcaTrunk&) = delete;

  HostId host() const { return host_; }
  std::uint64_t number() const { return number_; }
  const ibv_qp* physical() const { return physical_; }
  void describe(HcaMessage& message) const;  // for the other end
  bool connect(const HcaMessage& theirs);    // receives from now on
  bool connected() const { return connected_; }
  bool start(std::uint8_t ack_timeout);      // the other end is connected: sends from now on

  bool open() const override { return sending_ && !broken_; }
  bool send(std::uint64_t number, std::uint64_t acknowledged, engine::FarFrame& frame) override;
  void flush() override;

  void completed(const ibv_wc& wc);
  void fail(std::string why);
  bool deliver(Carrier& carrier);  // what has come, as long as the carrier takes more; false: there was nothing
  bool anything_waiting() const { return taken_ != received_ || broken_ || has_new_room_; }
  bool broken() const { return broken_; }  // it carries nothing any more
  const std::string& why() const { return why_; }
  bool sends_wait() const { return posted_ != sent_; }
  std::uint64_t sent() const { return sent_; }  // messages that have ended
  bool has_new_room() { return std::exchange(has_new_room_, false); }

  static constexpr std::uint32_t depth = 16;            // messages under way in either direction
  static constexpr std::uint32_t message_bytes = 65536;

 private:
  struct Head {  // before each record of a message
    std::uint64_t number, acknowledged;
    std::uint32_t bytes;  // of record and payload; the next head is at a multiple of 8
    std::uint8_t reserved[4];
  };
  static_assert(WireRecord<Head>);
  static_assert(sizeof(Head) + sizeof(engine::FarRecord) + engine::far_part_bytes <= message_bytes);

  HcaTrunk(HcaDevice& device, std::uint64_t number, HostId host) : device_(device), number_(number), host_(host) {}
  std::byte* sending(std::uint64_t message) const { return memory_.memory.get() + message % depth * message_bytes; }
  std::byte* receiving(std::uint64_t message) const { return sending(message) + std::size_t{depth} * message_bytes; }
  bool post_receive(std::uint64_t message);
  bool deliver(Carrier& carrier, const std::byte* at, std::uint32_t bytes);

  HcaDevice& device_;
  const std::uint64_t number_;
  const HostId host_;
  HcaDomain* domain_ = nullptr;
  Bounce memory_;
  ibv_qp* physical_ = nullptr;
  HcaDevice::Cq* cq_ = nullptr;
  std::uint32_t psn_ = 0;
  bool connected_ = false, sending_ = false, broken_ = false, has_new_room_ = false;
  std::string why_;
  // Messages are counted from 0, and use memory in turn.
  std::uint64_t posted_ = 0, sent_ = 0;      // the one with number posted_ is being filled …
  std::uint32_t filled_ = 0;                 // … so far
  std::uint64_t received_ = 0, taken_ = 0;
  std::array<std::uint32_t, depth> received_bytes_{};
};

}  // namespace vrdma::remote
