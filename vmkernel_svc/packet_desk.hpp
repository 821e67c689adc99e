// Answers the packets that arrive on guests' and tools' sockets: what comes before there is a ring, or with descriptors. Who is
// connected, and what becomes of the connection, is the server's business. Every packet gets one reply.
//
// attach() and answer() are for the shard's thread; the static ones for any. Nothing here blocks: a reply that a full socket does
// not take is lost.
#pragma once

#include <optional>
#include <vector>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/show.hpp"

namespace vrdma::svc {

class PacketDesk {
 public:
  PacketDesk(Shard& shard, ControlDesk& desk, int service_page_fd) : shard_(shard), desk_(desk), show_(shard), service_page_fd_(service_page_fd) {}

  static control::Request request_of(const control::Head& head) {
    return static_cast<control::Request>(head.record.control & control_user_mask);
  }
  static void refuse(const vmci::PacketSocket& socket, const control::Head& head, int status);

  // What an attach packet asks for, if this service can serve it at all; else it has been refused.
  static std::optional<control::AttachRequest> attach_request(const vmci::PacketSocket& socket, const control::Head& head,
                                                              const std::vector<std::byte>& packet);

  // The new guest's VMCI context id; 0: refused.
  std::uint32_t attach(const vmci::PacketSocket& socket, const control::Head& head, const control::AttachRequest& request,
                       AttachInfo info);
  // Any other packet, at least a head long. guest: whose socket it is, 0 if it has not attached. memory: that its machine
  // lends. viewer: who asks, where the socket does not tell. connection: there for as long as the socket is open; closer: of copies of that.
  void answer(const vmci::PacketSocket& socket, std::uint32_t guest, const control::Head& head,
              const std::vector<std::byte>& packet, std::vector<vmci::GivenFd> descriptors, std::optional<PinnedPages> memory = {},
              std::optional<Viewer> viewer = {}, std::weak_ptr<const void> connection = {}, std::shared_ptr<vmci::Closer> closer = {});

 private:
  void answer_how_reached(std::uint32_t guest, const control::Head& head, bool by_service);

  Shard& shard_;
  ControlDesk& desk_;
  ShowDesk show_;
  int service_page_fd_;
};

}  // namespace vrdma::svc
