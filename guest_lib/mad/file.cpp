#include "guest_lib/mad/file.hpp"

#include <arpa/inet.h>
#include <rdma/ib_user_mad.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cstring>

#include "guest_lib/interruption.hpp"
#include "guest_lib/open_device.hpp"
#include "guest_lib/synthetic_tree.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest::mad {

using control::Request;

namespace {

// An address, either way. What takes more than a byte, but for the P_Key's index, is in network order in the kernel's form: its order is
// turned, which is the same both ways.
template <class From, class To>
void copy_address(const From& from, To& to) {
  std::memcpy(&to.gid, &from.gid, sizeof(to.gid));
  to.qpn = ntohl(from.qpn);
  to.qkey = ntohl(from.qkey);
  to.flow_label = ntohl(from.flow_label);
  to.lid = ntohs(from.lid);
  to.pkey_index = from.pkey_index;
  to.sl = from.sl;
  to.path_bits = from.path_bits;
  to.grh_present = from.grh_present;
  to.gid_index = from.gid_index;
  to.hop_limit = from.hop_limit;
  to.traffic_class = from.traffic_class;
}

ib_user_mad_hdr head_of(const control::MadTakeReply& taken, std::size_t head_bytes) {
  ib_user_mad_hdr to{};
  to.id = taken.agent;
  to.status = taken.status;
  to.length = static_cast<std::uint32_t>(head_bytes + taken.total_bytes);
  copy_address(taken.from, to);
  return to;
}

}  // namespace

File::File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in)
    : CharacterFile(std::move(attachment_in), channel_in, fd_in, makedev(character_major, management_minor)) {}

std::size_t File::head_bytes() const {
  return knows_pkey_index_.load(std::memory_order_relaxed) ? sizeof(ib_user_mad_hdr) : sizeof(ib_user_mad_hdr_old);
}

long File::write(const void* bytes, std::size_t count) {
  return as_count([&] { return send(static_cast<const std::byte*>(bytes), count); });
}

Result<long> File::send(const std::byte* from, std::size_t count) {
  const std::size_t head = head_bytes();
  if (count < head + control::mad_segment_head_bytes || count > head + control::mad_bytes_max) return Errno{EINVAL};
  ib_user_mad_hdr to{};
  std::memcpy(&to, from, head);
  control::MadSendRequest request{};
  request.by = {channel, to.id};
  copy_address(to, request.to);
  request.timeout_ms = to.timeout_ms;
  request.retries = to.retries;
  request.bytes = std::max(static_cast<std::uint32_t>(count - head), control::mad_bytes);
  std::memcpy(request.data.data(), from + head, count - head);
  if (const auto sent = attachment->call<Request::mad_send>(request); !sent) return sent.error();
  return static_cast<long>(count);
}

long File::read(void* bytes, std::size_t count) {
  if (count < head_bytes()) {
    errno = EINVAL;
    return -1;
  }
  const int errno_before = errno;
  const bool waits = blocks();
  for (;;) {
    const int readable = wait_until_readable(waits);
    if (closed.load(std::memory_order_relaxed)) return wait_for_ever(waits);
    if (readable < 0) return -1;
    const long got = as_count([&] { return receive(static_cast<std::byte*>(bytes), count); });
    if (closed.load(std::memory_order_relaxed)) return wait_for_ever(waits);
    if (got > 0) errno = errno_before;
    if (got != 0) return got;  // else another thread was quicker
  }
}

// 0: nothing is there. ENOSPC: there is no room for more than the first segment, which says how long it is, and it stays. EINVAL: not even for that, and it
// stays, too, unseen (the kernel's copy_recv_mad()).
Result<long> File::receive(std::byte* to, std::size_t count) {
  const std::size_t head = head_bytes();
  const std::size_t room = count - head;
  std::lock_guard lock(reading_);
  for (std::uint32_t offset = 0;;) {
    const auto taken = attachment->call<Request::mad_take>({channel, static_cast<std::uint32_t>(std::min<std::size_t>(room, ~0u)), offset, 0});
    if (!taken) return taken.error();
    if (taken->last != 0) take_record();
    if (taken->found == 0) return offset == 0 ? Result<long>(0) : Errno{EIO};
    if (room < std::min(taken->total_bytes, control::mad_bytes)) return Errno{EINVAL};
    if (offset == 0) {
      const ib_user_mad_hdr from = head_of(*taken, head);
      std::memcpy(to, &from, head);
    }
    if (taken->bytes > taken->data.size()) return Errno{EPROTO};
    std::memcpy(to + head + offset, taken->data.data(), std::min<std::size_t>(taken->bytes, room - std::min<std::size_t>(room, offset)));
    if (taken->total_bytes > room) return Errno{ENOSPC};
    offset += taken->bytes;
    if (offset >= taken->total_bytes) return static_cast<long>(head + taken->total_bytes);
    if (taken->bytes == 0) return Errno{EPROTO};
  }
}

Status File::register_agent(void* argument) {
  ib_user_mad_reg_req wanted;
  std::memcpy(&wanted, argument, sizeof(wanted));
  control::MadRegisterRequest request{};
  request.channel = channel;
  request.qpn = wanted.qpn;
  request.management_class = wanted.mgmt_class;
  request.class_version = wanted.mgmt_class_version;
  request.oui = std::uint32_t{wanted.oui[0]} << 16 | std::uint32_t{wanted.oui[1]} << 8 | wanted.oui[2];
  static_assert(sizeof(wanted.method_mask) == sizeof(request.methods));
  std::memcpy(request.methods, wanted.method_mask, sizeof(request.methods));
  const auto agent = attachment->call<Request::mad_register>(request);
  if (!agent) return agent.error();
  wanted.id = agent->agent;
  std::memcpy(argument, &wanted, sizeof(wanted));
  has_agents_.store(true, std::memory_order_relaxed);
  return ok();
}

Status File::register_agent_2(void* argument) {
  ib_user_mad_reg_req2 wanted;
  std::memcpy(&wanted, argument, sizeof(wanted));
  if (wanted.flags != 0) {  // there is one: to be given segments as they are
    wanted.flags = 0;
    std::memcpy(argument, &wanted, sizeof(wanted));
    return Errno{EINVAL};
  }
  if (wanted.oui > 0xffffff) return Errno{EINVAL};
  control::MadRegisterRequest request{};
  request.channel = channel;
  request.qpn = wanted.qpn;
  request.management_class = wanted.mgmt_class;
  request.class_version = wanted.mgmt_class_version;
  request.oui = wanted.oui;
  for (unsigned i = 0; i < 2; ++i) request.methods[i] = wanted.method_mask[i];
  const auto agent = attachment->call<Request::mad_register>(request);
  if (!agent) return agent.error();
  wanted.id = agent->agent;
  std::memcpy(argument, &wanted, sizeof(wanted));
  if (!has_agents_.exchange(true, std::memory_order_relaxed)) knows_pkey_index_.store(true, std::memory_order_relaxed);
  return ok();
}

int File::control(unsigned long request, void* argument) {
  return as_minus_one([&]() -> Status {
    // The number is 32 bits of what a program may pass as an int.
    switch (static_cast<std::uint32_t>(request)) {
      case IB_USER_MAD_ENABLE_PKEY:
        if (has_agents_.load(std::memory_order_relaxed)) return Errno{EINVAL};
        knows_pkey_index_.store(true, std::memory_order_relaxed);
        return ok();
      case IB_USER_MAD_REGISTER_AGENT: return argument == nullptr ? Errno{EFAULT} : register_agent(argument);
      case IB_USER_MAD_REGISTER_AGENT2: return argument == nullptr ? Errno{EFAULT} : register_agent_2(argument);
      case IB_USER_MAD_UNREGISTER_AGENT: {
        if (argument == nullptr) return Errno{EFAULT};
        std::uint32_t agent;
        std::memcpy(&agent, argument, sizeof(agent));
        const auto gone = attachment->call<Request::mad_unregister>({channel, agent});
        return gone ? ok() : Status(gone.error());
      }
      default: return Errno{ENOTTY};
    }
  });
}

void File::forgotten() {
  if (!attachment->liveness().gone()) (void)attachment->call<Request::mad_close>({channel, 0});
}

}  // namespace vrdma::guest::mad

namespace vrdma {
int open_management_datagrams(int flags) {
  using namespace guest;
  return as_count([&] {
    return CharacterFiles::instance().open<control::Request::mad_open, control::Request::mad_close>(flags, control::minor_of_mads, [](auto attachment, std::uint32_t channel, int fd) {
      return std::make_shared<mad::File>(std::move(attachment), channel, fd);
    });
  });
}
}  // namespace vrdma
