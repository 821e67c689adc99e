// One side of a queue pair between two contexts: the memory, the doorbell, and the right to leave. Streams are made of it; a
// program with a protocol of its own over shared memory may use it bare.
// Any thread may create one; afterwards its parts have their own rules (byte_queue.hpp, doorbell_pair.hpp).
#pragma once

#include <bit>

#include "vmci_channel/byte_queue.hpp"
#include "vmci_channel/context.hpp"
#include "vmci_channel/control_exchange.hpp"
#include "vmci_channel/doorbell_pair.hpp"

namespace vmci {

using QueuePairHandle = vrdma::control::QueuePairHandle;

class QueuePair {
 public:
  // Offers a new one to `peer`, a port that takes them. notice_port: a port bound here that is told of attach and detach, or 0.
  // ECONNREFUSED: nobody takes queue pairs there; EAGAIN: too many wait; EACCES; EDQUOT; EINVAL: sizes that are no powers of two.
  static vrdma::Result<QueuePair> alloc(std::shared_ptr<Context> context, Address peer, std::uint64_t produce_bytes,
                                        std::uint64_t consume_bytes, std::uint32_t notice_port = 0) {
    vrdma::control::QueuePairAllocRequest request{peer.context, peer.port, notice_port, 0, produce_bytes, consume_bytes};
    auto made = context->call_on_socket<vrdma::control::Request::queue_pair_alloc>(request);
    if (!made) return made.error();
    return adopt(std::move(context), std::move(*made), End::creator);
  }
  // ENOENT: it is not, or no longer, offered to this context.
  static vrdma::Result<QueuePair> attach(std::shared_ptr<Context> context, QueuePairHandle handle, std::uint32_t notice_port = 0) {
    auto got = context->call_on_socket<vrdma::control::Request::queue_pair_attach>({handle, notice_port, 0});
    if (!got) return got.error();
    return adopt(std::move(context), std::move(*got), End::attacher);
  }
  QueuePair(QueuePair&&) noexcept = default;
  QueuePair& operator=(QueuePair&& other) noexcept {
    detach();
    context_ = std::move(other.context_);
    memory_ = std::move(other.memory_);
    doorbell_ = std::move(other.doorbell_);
    reply_ = other.reply_;
    end_ = other.end_;
    return *this;
  }
  ~QueuePair() { detach(); }

  QueuePairHandle handle() const { return reply_.handle; }
  Address peer() const { return {reply_.peer_context, reply_.peer_port}; }
  const QueuePairGeometry& geometry() const { return reply_.geometry; }
  std::byte* memory() const { return memory_.data(); }
  ByteSide side() const { return ByteSide::of(memory_.data(), reply_.geometry, end_); }
  const DoorbellEnd& doorbell() const { return doorbell_; }

  // The other side sees a hang-up and, if it wants them, a notice. The memory stays mapped until the destructor.
  void detach() {
    if (!context_) return;
    doorbell_.close();
    (void)context_->call<vrdma::control::Request::queue_pair_detach>(reply_.handle);  // EINVAL: the other side was first
    context_.reset();
  }

 private:
  QueuePair(std::shared_ptr<Context> context, Mapping memory, UniqueFd doorbell, const vrdma::control::QueuePairReply& reply, End end)
      : context_(std::move(context)), memory_(std::move(memory)), doorbell_(std::move(doorbell)), reply_(reply), end_(end) {}

  template <class SocketReply>
  static vrdma::Result<QueuePair> adopt(std::shared_ptr<Context> context, SocketReply reply, End end) {
    const auto& geometry = reply.body.geometry;
    const auto give_up = [&](vrdma::Errno error) {
      (void)context->template call<vrdma::control::Request::queue_pair_detach>(reply.body.handle);
      return error;
    };
    if (reply.descriptors.size() != 2) return give_up(not_brought(reply.descriptors));
    const auto good = [](std::uint64_t slots) {
      return std::has_single_bit(slots) && slots * vrdma::slot_bytes <= vrdma::control::queue_bytes_max;
    };
    if (geometry.consume_kind != QueueKind::bytes || !good(geometry.produce_slots) ||
        !good(geometry.consume_entries))
      return give_up(vrdma::Errno{EPROTO});
    const auto sealed = sealed_bytes(reply.descriptors[0].get());
    if (!sealed || *sealed < geometry.total_bytes()) return give_up(vrdma::Errno{EPROTO});
    auto memory = Mapping::map(reply.descriptors[0].get(), 0, geometry.total_bytes(), Writable::yes);
    if (!memory) return give_up(memory.error());
    return QueuePair(std::move(context), std::move(*memory), std::move(reply.descriptors[1]), reply.body, end);
  }

  std::shared_ptr<Context> context_;
  Mapping memory_;
  DoorbellEnd doorbell_;
  vrdma::control::QueuePairReply reply_{};
  End end_ = End::attacher;
};

}  // namespace vmci
