#include "vmkernel_svc/packet_desk.hpp"

#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>
#include <new>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/show.hpp"

namespace vrdma::svc {

using namespace control;

namespace {

template <class Body>
bool body_of(const std::vector<std::byte>& packet, Body& body) {
  if (packet.size() < sizeof(Head) + sizeof(Body)) return false;
  std::memcpy(&body, packet.data() + sizeof(Head), sizeof(Body));
  return true;
}

// To a socket that stays whose it is: to answer takes no descriptor, as there may be none. Who asks waits for an answer: whoever can have none is
// hung up on. And whoever reads none gets no further descriptors: what is under way the kernel counts as ours, up to our limit of open files.
void send_reply(int socket, const Head& request, int status, std::span<const std::byte> body = {},
                std::span<const int> descriptors = {}) {
  std::vector<std::byte> packet(sizeof(Head) + body.size());
  Head head{};
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.record.control = (request.record.control & control_user_mask) | reply_bit;
  head.source_context = host_context;
  head.source_port = control_port;
  head.sequence = request.sequence;
  head.status = status;
  std::memcpy(packet.data(), &head, sizeof(head));
  if (!body.empty()) std::memcpy(packet.data() + sizeof(head), body.data(), body.size());
  constexpr std::uint64_t unread_bytes_max = 4096;  // as the kernel counts: some four answers, of which a guest has one at a time
  const bool leaves_unread = !descriptors.empty() && vmci::unread_bytes(socket) > unread_bytes_max;
  const Status sent = leaves_unread ? Status(Errno{EBUSY}) : vmci::send_with_descriptors(socket, packet, descriptors);
  if (sent || socket < 0) return;  // none: Shard::expel() has hung up
  ::shutdown(socket, SHUT_RDWR);
  if (value(sent.error()) == EPIPE || value(sent.error()) == ECONNRESET) return;  // it has hung up itself
  static constinit log::Sparing sparing;
  sparing.warn("a guest is hung up on, as {}", leaves_unread ? "it does not read what it is answered" : fmt::format("no answer can be sent to it: {}", std::strerror(value(sent.error()))));
}

template <class Body>
void send_result(int socket, const Head& request, const Result<Body>& result,
                 std::span<const int> descriptors = {}) {
  if (!result) return send_reply(socket, request, value(result.error()));
  send_reply(socket, request, 0, std::as_bytes(std::span(&*result, 1)), descriptors);
}

std::string why_refused(int error, const Fabric& fabric, uid_t uid) {
  const auto found = fabric.tenants.find(uid);
  if (error == EDQUOT && found != fabric.tenants.end()) {
    const Tenant& tenant = found->second;
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    const auto has = fmt::format("the user has {} of {} guests and {} of {} descriptors", tenant.guests, tenant.quota.guests, tenant.descriptors, tenant.quota.descriptors);
    if (fabric.config.one_user)
      return fmt::format("{}, three quarters of the open files of this private service: their limit is {}, that of the first program by vrdma run (ulimit -Hn); begin where it is higher", has, files.rlim_cur);
    return fmt::format("{}: raise \"quota\" in the configuration, or the limit of {} open files under which this service was started (ulimit -Hn), of which a user may take a quarter", has, files.rlim_cur);
  }
  const char* const remedy = error == EFBIG    ? ": raise this service's limit of file sizes (ulimit -f)"
                             : error == ENOMEM ? ": raise this service's limit of address space (ulimit -v) or memory, or lower \"arena_bytes\""
                             : error == EMFILE ? ": raise this service's limit of open files (ulimit -n)"
                             : error == EADDRNOTAVAIL ? ": no LID is left, or the subnet has leased none yet (vrdma show hosts)"
                                               : "";
  return fmt::format("{}{}", std::strerror(error), remedy);
}

}  // namespace

void PacketDesk::refuse(const vmci::PacketSocket& socket, const Head& head, int status) { send_reply(socket.fd(), head, status); }

std::optional<AttachRequest> PacketDesk::attach_request(const vmci::PacketSocket& socket, const Head& head,
                                                        const std::vector<std::byte>& packet) {
  AttachRequest request{};
  if (!body_of(packet, request) || request.magic != magic) return refuse(socket, head, EPROTO), std::nullopt;
  if (request.major == version_major) return request;
  static constinit log::Sparing sparing;
  sparing.warn("a guest speaks version {}.{} of the channel, this service {}.{}: refused", request.major, request.minor, version_major, version_minor);
  AttachReply mine{};
  mine.major = version_major;
  mine.minor = version_minor;
  send_reply(socket.fd(), head, EPROTONOSUPPORT, std::as_bytes(std::span(&mine, 1)));
  return std::nullopt;
}

std::uint32_t PacketDesk::attach(const vmci::PacketSocket& socket, const Head& head, const AttachRequest& request, AttachInfo info) {
  std::vector<int> descriptors;
  std::vector<vmci::UniqueFd> keep;
  const uid_t uid = info.credentials.uid;
  const pid_t pid = info.credentials.pid;
  static constinit log::Sparing attached{log::Sparing::lines_of_ordinary_life}, refused;
  const auto reply = desk_.attach(request, std::move(info), service_page_fd_, descriptors, keep);
  if (reply)
    attached.info("{} (uid {}, pid {}) attached as context {}, LID {}", reply->name, uid, pid, reply->guest, shard_.fabric().guests[reply->guest]->lid);
  else
    refused.warn("a guest (uid {}, pid {}) was refused: {}", uid, pid, why_refused(value(reply.error()), shard_.fabric(), uid));
  send_result(socket.fd(), head, reply, descriptors);
  return reply ? reply->guest : 0;
}

void PacketDesk::answer_how_reached(std::uint32_t guest_id, const Head& head, bool by_service) {
  Guest* const found = shard_.fabric().guest(GuestId{guest_id});
  if (found == nullptr) return;
  Guest& guest = *found;
  std::vector<vmci::UniqueFd> segment;
  const bool is_known = guest.copier != nullptr;  // it asks again
  const auto reply = desk_.reach(guest, by_service, segment);
  static constinit log::Sparing out_of_reach{log::Sparing::lines_of_ordinary_life};
  if (reply && !by_service && !is_known)
    out_of_reach.info("{} (uid {}, pid {}): its memory is out of reach here; a thread of the program copies what cannot be mapped", guest.name,
                 guest.credentials.uid, guest.credentials.pid);
  std::vector<int> descriptors;
  for (const auto& fd : segment) descriptors.push_back(fd.get());
  send_result(guest.socket.get(), head, reply, descriptors);
}

void PacketDesk::answer(const vmci::PacketSocket& socket, std::uint32_t guest_id, const Head& head,
                        const std::vector<std::byte>& packet, std::vector<vmci::GivenFd> descriptors, std::optional<PinnedPages> memory,
                        std::optional<Viewer> viewer, std::weak_ptr<const void> connection, std::shared_ptr<vmci::Closer> closer) try {
  const Request request = request_of(head);
  if (request == Request::show) return show_.ask(socket, head, viewer ? *viewer : Viewer::at(socket), std::move(connection), std::move(closer));
  if (request == Request::set_direct) {
    SetDirectRequest body{};
    if (!body_of(packet, body)) return refuse(socket, head, EINVAL);
    return send_result(socket.fd(), head, shard_.direct().set(body, Viewer::at(socket)));
  }
  if (request == Request::query_link_layer)
    return send_result<LinkLayerReply>(socket.fd(), head, LinkLayerReply{shard_.fabric().config.link_layer == "ethernet" ? link_layer_ethernet : link_layer_infiniband, 0});
  if (!ControlDesk::may_begin(request)) return refuse(socket, head, ENOMEM);
  Guest* const found = shard_.fabric().guest(GuestId{guest_id});
  if (found == nullptr) return refuse(socket, head, ENOTCONN);
  Guest& guest = *found;
  std::vector<vmci::UniqueFd> give;
  const auto reply_with = [&](const auto& result) {
    std::vector<int> fds;
    for (const auto& fd : give) fds.push_back(fd.get());
    send_result(socket.fd(), head, result, fds);
  };
  // Of a request that needs nothing but its body.
  const auto reply_to = [&](auto body, const auto& carry_out) {
    if (!body_of(packet, body)) return refuse(socket, head, EINVAL);
    reply_with(carry_out(body));
  };
  switch (request) {
    case Request::add_backing: {
      AddBackingRequest body{};
      if (!body_of(packet, body) || descriptors.size() != 1) return refuse(socket, head, EINVAL);
      auto file = descriptors.front().take_memory();
      if (!file) return refuse(socket, head, EPERM);
      return reply_with(desk_.on(guest, body, std::move(*file)));
    }
    case Request::add_pinned: {
      AddPinnedRequest body{};
      if (!body_of(packet, body) || !memory) return refuse(socket, head, guest.machine ? EINVAL : EOPNOTSUPP);
      return reply_with(desk_.on(guest, body, std::move(*memory)));
    }
    case Request::remove_backing: {
      RemoveBackingRequest body{};
      if (!body_of(packet, body)) return refuse(socket, head, EINVAL);
      const auto removed = desk_.on(guest, body);
      return send_reply(socket.fd(), head, removed ? 0 : value(removed.error()));
    }
    case Request::open_context:
      return reply_to(OpenContextRequest{}, [&](const auto& body) { return desk_.on(guest, body, give); });
    case Request::create_channel:
      return reply_to(CreateChannelRequest{}, [&](const auto& body) { return desk_.on(guest, body, give); });
    case Request::open_xrcd:
      return reply_to(OpenXrcdRequest{}, [&](const auto& body) { return desk_.on(guest, body, descriptors); });
    case Request::cm_open:
      return reply_with(desk_.on_cm_open(guest, give));
    case Request::mad_open:
      return reply_with(desk_.on_mad_open(guest, give));
    case Request::reach_process: {
      ReachProcessRequest body{};
      if (!body_of(packet, body)) return refuse(socket, head, EINVAL);
      if (guest.machine && memory) {
        auto segment = memory->segment();
        if (!segment || segment->bytes() < copying::segment_bytes) return refuse(socket, head, segment ? EINVAL : value(segment.error()));
        guest.machine->copier_segment = std::move(*segment);
      }
      // Answered when the guest's worker knows, if the guest is still there; never waited for.
      const auto answer = [this, guest_id, head](bool by_service) { answer_how_reached(guest_id, head, by_service); };
      if (const auto asked = desk_.ask_how_reached(guest, body, answer); !asked) refuse(socket, head, value(asked.error()));
      return;
    }
    case Request::queue_pair_alloc:
      return reply_to(QueuePairAllocRequest{}, [&](const auto& body) { return shard_.fabric().vmci.alloc(guest, body, give); });
    case Request::queue_pair_attach:
      return reply_to(QueuePairAttachRequest{}, [&](const auto& body) { return shard_.fabric().vmci.attach(guest, body, give); });
    case Request::open_direct:
      return reply_to(OpenDirectRequest{}, [&](const auto& body) { return shard_.direct().open(guest, body, give); });
    case Request::open_shared_receives:
      return reply_to(OpenDirectRequest{}, [&](const auto& body) { return shard_.direct().open_shared_receives(guest, body); });
    case Request::open_path:
      return reply_to(OpenPathRequest{}, [&](const auto& body) { return shard_.direct().open(guest, body, give); });
    case Request::open_backing:
      return reply_to(OpenBackingRequest{}, [&](const auto& body) { return shard_.direct().open(guest, body, give); });
    case Request::open_process:
      return reply_to(OpenProcessRequest{}, [&](const auto& body) { return shard_.direct().open(guest, body); });
    default:
      return refuse(socket, head, EOPNOTSUPP);
  }
} catch (const std::bad_alloc&) {
  refuse(socket, head, ENOMEM);
}

}  // namespace vrdma::svc
