// Answers control requests: creates, changes and destroys what guests ask for, within their quotas, and takes a guest and
// all it has out of the world. One member per request of the control table. Used by the shard's thread only.
#pragma once

#include <functional>
#include <optional>
#include <span>

#include "vmkernel_svc/engine/qp_state.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

struct AttachInfo {
  vmci::Credentials credentials;
  vmci::UniqueFd pidfd;
  vmci::GivenFd socket;  // a duplicate: shut down to be rid of the guest
  std::unique_ptr<InMachine> machine = {};  // a process of a virtual machine; credentials.uid is then its tenant's
  vmci::Segment arena = {};                 // that the machine lends for it
};

class ControlDesk {
 public:
  explicit ControlDesk(Shard& shard) : shard_(shard), fabric_(shard.fabric()) {}

  // A new guest; the descriptors to send along with the reply are appended to `descriptors` (owned by the guest or by `keep`).
  Result<control::AttachReply> attach(const control::AttachRequest& request, AttachInfo info, int service_page_fd,
                                      std::vector<int>& descriptors, std::vector<vmci::UniqueFd>& keep);
  // The guest has ended: it is not heard any more, and others may have its ports.
  void end(Guest& guest);
  // Takes it and what it has out of the world, for so long. False: some of it is left.
  bool detach(Guest& guest, std::uint64_t for_ns);
  void detach(Guest& guest) { detach(guest, ~std::uint64_t{0}); }
  static constexpr std::uint64_t slice_ns = 1'000'000;  // of what takes everybody's time
  control::CountersReply traffic_of(const Guest& guest) const;  // of its queue pairs, also those that are gone

  // There is memory for what such a request makes, if it makes something that stays.
  static bool may_begin(control::Request request);

  // Serves what the guest's control ring holds. False: nothing was there. A guest whose bytes make no sense is marked broken.
  bool serve(Guest& guest);

  // Requests that carry descriptors, from the socket.
  Result<control::AddBackingReply> on(Guest& guest, const control::AddBackingRequest& request, vmci::UniqueFd fd);
  Result<control::AddBackingReply> on(Guest& guest, const control::AddPinnedRequest& request, PinnedPages pages);
  Status on(Guest& guest, const control::RemoveBackingRequest& request);
  Result<control::OpenContextReply> on(Guest& guest, const control::OpenContextRequest&, std::vector<vmci::UniqueFd>& give);
  Result<control::ChannelReply> on(Guest& guest, const control::CreateChannelRequest&, std::vector<vmci::UniqueFd>& give);
  Result<control::HandleReply> on(Guest& guest, const control::OpenXrcdRequest& request, std::span<vmci::GivenFd> file);
  Result<control::CmOpenReply> on_cm_open(Guest& guest, std::vector<vmci::UniqueFd>& give);
  Result<control::MadOpenReply> on_mad_open(Guest& guest, std::vector<vmci::UniqueFd>& give);
  // How memory without a backing is to be reached: `answer`, whether by the service, comes at once or when its worker knows, never
  // where the guest goes first. Then reach() carries the decision out and makes the reply. EALREADY: asked before.
  Status ask_how_reached(Guest& guest, const control::ReachProcessRequest& request, std::function<void(bool)> answer);
  Result<control::ReachProcessReply> reach(Guest& guest, bool by_service, std::vector<vmci::UniqueFd>& give);
  // The BIND_MW or LOCAL_INV that a queue pair is at. std::nullopt: it must wait yet. Alone.
  std::optional<WcStatus> change_window(QueuePair& qp);

 private:
  template <control::Request R>
  Result<typename control::Message<R>::ReplyBody> on(Guest& guest, const typename control::Message<R>::RequestBody& request);
  template <control::Request R>
  bool dispatch(Guest& guest, std::span<const std::byte> body, std::byte* reply, std::uint32_t& reply_bytes, int& status);

  bool answer(Guest& guest, const control::Head& head, std::span<const std::byte> body);
  std::uint32_t new_backing(Guest& guest);
  std::uint32_t entries_for(std::uint32_t wanted) const;  // of a completion queue
  Result<std::vector<Piece>> pieces_of(Guest& guest, std::uint64_t address, std::uint64_t bytes);
  void release_pieces(Guest& guest, const std::vector<Piece>& pieces);
  Result<control::CreateQpReply> create(Guest& guest, const control::CreateQpRequest& request, engine::QpType type, Xrcd* xrcd);
  // Whether a target queue pair is writing to what an XRC SRQ has given it.
  bool written_by_targets(const QueuePair& completions) const;
  void leave_domain(QueuePair& qp);
  void join(QueuePair& qp);
  void leave(QueuePair& qp);
  void leave_groups(QueuePair& qp);
  void hand_over(QueuePair& from, QueuePair& heir);
  void destroy(Guest& guest, Xrcd& xrcd);
  void destroy(Guest& guest, QueuePair& qp);
  void destroy(Guest& guest, CompletionQueue& cq);
  void destroy(Guest& guest, SharedReceiveQueue& srq);
  void destroy(Guest& guest, MemoryWindow& window);
  // waiting_since_ns: since when the caller has been told EINPROGRESS; 0: it has not.
  bool must_wait_for_worker(Guest& guest, std::uint32_t slot, std::uint64_t waiting_since_ns);
  Result<control::Empty> bind(Guest& guest, QueuePair& qp, const control::BindMwRequest& request, std::uint64_t waiting_since_ns);
  Result<control::Empty> invalidate(Guest& guest, const QueuePair& qp, Key key, std::uint64_t waiting_since_ns);
  // Memory windows of a queue pair that goes, or is reset.
  void unbind_windows(QueuePair& qp);
  void leave_queue_pair(const MemoryWindow& window);
  bool destroy_region(Guest& guest, std::uint32_t handle, bool force);
  // Destroys what a guest has, or has in one context, for about so long. False: some of it is left.
  bool clear_out(Guest& guest, std::optional<std::uint32_t> context, std::uint64_t for_ns);
  void forget_context(Guest& guest, std::uint32_t context);
  engine::PortLimits limits_of(const Guest& guest) const;
  Result<std::uint64_t> carve(Guest& guest, std::uint64_t bytes);
  void uncarve(Guest& guest, std::uint64_t offset);
  void forget_channel(Guest& guest, std::uint32_t handle);
  // Whether a request that waits for somebody else may go on waiting (EINPROGRESS): not for ever.
  static bool may_wait(const Guest& guest, std::uint64_t patience_ns = usual_patience_ns);
  static bool may_wait_on(std::uint64_t waiting_since_ns, std::uint64_t patience_ns = usual_patience_ns);
  static constexpr std::uint64_t usual_patience_ns = 100'000'000;
  void connected_elsewhere() { ++fabric_.topology_generation; }
  void bring_together(const QueuePair& qp);

  Shard& shard_;
  Fabric& fabric_;
};

inline Result<control::Empty> as_reply(const Status& status) {
  if (!status) return status.error();
  return control::Empty{};
}

// What the table says, one specialization each; those of an object's kind share a file of this folder.
#define VRDMA_DECLARE(name, request, reply, socket) \
  template <>                                       \
  Result<control::reply> ControlDesk::on<control::Request::name>(Guest&, const control::request&);
VRDMA_CONTROL_REQUESTS(VRDMA_DECLARE)
#undef VRDMA_DECLARE

}  // namespace vrdma::svc
