#include "vmci_channel/vm_link.hpp"

#include <cstring>

namespace vmci {

using vrdma::vm::Frame;
using vrdma::vm::FrameHead;

namespace {
ByteSide side_of(std::byte* bar, VmLinkEnd::Who who) {
  return ByteSide::of(bar + vrdma::vm::queues_offset, vrdma::vm::queues, who == VmLinkEnd::Who::agent ? End::creator : End::attacher);
}
ByteSide zeroed(const ByteSide& side) {
  std::memset(static_cast<void*>(side.mine), 0, sizeof(*side.mine));
  return side;
}
}  // namespace

VmLinkEnd::VmLinkEnd(std::byte* bar, Who who) : writer_(zeroed(side_of(bar, who))), reader_(side_of(bar, who)) {}

void VmLinkEnd::send(Frame kind, std::uint32_t connection, std::span<const std::byte> body, std::uint32_t item, std::uint16_t flags) {
  const FrameHead head{static_cast<std::uint32_t>(body.size()), static_cast<std::uint16_t>(kind), flags, connection, item};
  const auto head_bytes = std::as_bytes(std::span(&head, 1));
  out_.insert(out_.end(), head_bytes.begin(), head_bytes.end());
  out_.insert(out_.end(), body.begin(), body.end());
}

bool VmLinkEnd::flush() {
  bool sent = false;
  while (out_sent_ < out_.size()) {
    const std::size_t went = writer_.write(std::span(out_).subspan(out_sent_));
    if (went == 0) break;
    out_sent_ += went;
    sent = true;
  }
  if (out_sent_ == out_.size()) out_.clear(), out_sent_ = 0;
  // What is behind us does not pile up while the other side reads slowly.
  if (out_sent_ > (1 << 20)) out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_sent_)), out_sent_ = 0;
  broken_ |= writer_.broken();
  return sent;
}

bool VmLinkEnd::receive(const Handler& handler, int frames_max) {
  for (; frames_max > 0 && !broken_; --frames_max) {
    FrameHead head{};
    const auto fill = [this](std::size_t wanted) {  // in_ grows to `wanted` bytes, if they are there
      const std::size_t had = in_.size();
      if (had >= wanted) return true;
      in_.resize(wanted);
      in_.resize(had + reader_.read(std::span(in_).subspan(had)));
      return in_.size() == wanted;
    };
    if (!fill(sizeof(head))) break;
    std::memcpy(&head, in_.data(), sizeof(head));
    if (head.bytes > vrdma::vm::frame_bytes_max) {
      broken_ = true;
      break;
    }
    if (!fill(sizeof(head) + head.bytes)) break;
    const std::vector<std::byte> frame = std::exchange(in_, {});
    handler(head, std::span(frame).subspan(sizeof(head)));
  }
  broken_ |= reader_.broken();
  return !broken_;
}

}  // namespace vmci
