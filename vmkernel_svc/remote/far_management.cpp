#include "vmkernel_svc/remote/far_management.hpp"

#include <cstring>

#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/link_head.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

FarManagement::FarManagement(FarDesk& desk, Shard& shard) : desk_(desk), shard_(shard) { shard.fabric().management->use(this); }
FarManagement::~FarManagement() { shard_.fabric().management->use(nullptr); }

void FarManagement::new_session(remote::HostId host, std::uint64_t features) {
  if ((features & remote::link_knows_mads) != 0) knowing_.insert(host);
  else knowing_.erase(host);
}

bool FarManagement::arrived(remote::HostId host, engine::FarFrame& frame) {
  MadMessage head;
  const std::size_t bytes = frame.record().payload_bytes;
  if (bytes < sizeof(head) + control::mad_bytes || bytes > sizeof(head) + control::mad_bytes_max) return false;
  std::memcpy(&head, frame.payload(), sizeof(head));
  if (head.qpn > 1 || !desk_.is_of(host, head.guid, head.from, control::link_layer_infiniband)) return false;
  for (std::uint16_t& pkey : head.pkeys)
    if (pkey != 0) pkey = desk_.judged(host, pkey);
  const mad::Mad mad({reinterpret_cast<const std::uint8_t*>(frame.payload()) + sizeof(head), bytes - sizeof(head)});
  desk_.later([host, head, mad](Shard& shard) { shard.fabric().management->arrived(host, head, mad); });
  return true;
}

std::optional<std::uint32_t> FarManagement::host_of(std::uint16_t lid) {
  const auto host = desk_.directory().host_of(lid);
  return host && knowing_.contains(*host) && desk_.is_connected(*host) && desk_.has_room_for_answers(*host) ? host : std::nullopt;
}

void FarManagement::tell(std::uint32_t host, const MadMessage& head, std::span<const std::uint8_t> mad) {
  if (!desk_.has_room_for_answers(host)) return;  // it does not read what it has asked for, and is lost as on any wire
  auto frame = engine::FarFrame::make(static_cast<std::uint32_t>(sizeof(head) + mad.size()));
  frame->record().kind = engine::FarKind::mad;
  frame->record().payload_bytes = static_cast<std::uint32_t>(sizeof(head) + mad.size());
  std::memcpy(frame->payload(), &head, sizeof(head));
  std::memcpy(frame->payload() + sizeof(head), mad.data(), mad.size());
  desk_.send_to(host, std::move(frame));
}

}  // namespace vrdma::svc
