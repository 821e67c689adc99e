// NETLINK_RDMA for programs that ask the kernel which devices there are (rdma(8) of iproute2), where it knows of none: their socket is one
// of NETLINK_USERSOCK, which every kernel has and processes may use between themselves; what is sent to the kernel by it is answered
// here, at once, from the synthetic tree. Binding, reading and waiting are the kernel's own. Source: <rdma/rdma_netlink.h>.
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <pthread.h>
#include <rdma/rdma_netlink.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "guest_lib/netlink_answer.hpp"
#include "guest_lib/next_function.hpp"
#include "guest_lib/own_fd.hpp"
#include "guest_lib/paths.hpp"
#include "guest_lib/rdma_resources.hpp"
#include "guest_lib/synthetic_tree.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma {
namespace {

using Socket = int(int, int, int);
using Send = ssize_t(int, const void*, std::size_t, int);
using SendTo = ssize_t(int, const void*, std::size_t, int, const sockaddr*, socklen_t);
using SendMsg = ssize_t(int, const msghdr*, int);

constinit NextFunction<Socket> next_socket{"socket"};
constinit NextFunction<Send> next_send{"send"};
constinit NextFunction<SendTo> next_sendto{"sendto"};
constinit NextFunction<SendMsg> next_sendmsg{"sendmsg"};

__attribute__((constructor)) void look_up_all() {
  next_socket.get();
  next_send.get();
  next_sendto.get();
  next_sendmsg.get();
}

// Whether this process has opened such a socket: all that sending costs where it has not.
constinit std::atomic<bool> opened{false};

constexpr std::size_t request_bytes_max = 4096;
constexpr std::uint16_t nldev_type(std::uint16_t command) { return static_cast<std::uint16_t>((RDMA_NL_NLDEV << 10) + command); }

// Past our own interposers: what the kernel itself has.
bool kernel_has_devices() {
  const vmci::UniqueFd folder(static_cast<int>(::syscall(SYS_openat, AT_FDCWD, "/sys/class/infiniband", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
  alignas(dirent64) std::byte entries[1024];
  const long bytes = folder ? ::syscall(SYS_getdents64, folder.get(), entries, sizeof(entries)) : 0;
  for (long at = 0; at < bytes;) {
    const auto& entry = *reinterpret_cast<const dirent64*>(entries + at);
    if (entry.d_name[0] != '.') return true;
    at += entry.d_reclen;
  }
  return false;
}

std::optional<SyntheticDevice> device_at(std::size_t index) {
  SyntheticName name;
  SyntheticDevice device;
  if (!list_synthetic("/sys/class/infiniband", index, name) || !find_synthetic_device(name.text, device)) return std::nullopt;
  return device;
}

void put_device(NetlinkAnswer& answer, const SyntheticDevice& device, std::uint32_t index) {
  answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_DEV_INDEX, index);
  answer.put(RDMA_NLDEV_ATTR_DEV_NAME, device.name);
  answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);  // how many
  answer.put(RDMA_NLDEV_ATTR_FW_VERSION, device.firmware);
  answer.put<std::uint64_t>(RDMA_NLDEV_ATTR_NODE_GUID, device.node_guid);
  answer.put<std::uint64_t>(RDMA_NLDEV_ATTR_SYS_IMAGE_GUID, device.sys_image_guid);
  answer.put<std::uint8_t>(RDMA_NLDEV_ATTR_DEV_NODE_TYPE, 1);  // a channel adapter (IBA 14.2.5.3)
  answer.put(RDMA_NLDEV_ATTR_DEV_PROTOCOL, device.ethernet ? "roce" : "ib");
}

void put_port(NetlinkAnswer& answer, const SyntheticDevice& device, std::uint32_t index) {
  answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_DEV_INDEX, index);
  answer.put(RDMA_NLDEV_ATTR_DEV_NAME, device.name);
  answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  if (!device.ethernet) {
    std::uint64_t subnet_prefix;
    ::memcpy(&subnet_prefix, device.gids[0].raw, sizeof(subnet_prefix));
    answer.put<std::uint64_t>(RDMA_NLDEV_ATTR_CAP_FLAGS, capabilities_of(device));
    answer.put<std::uint64_t>(RDMA_NLDEV_ATTR_SUBNET_PREFIX, be64toh(subnet_prefix));
    answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_LID, device.lid);
    answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_SM_LID, device.sm_lid);
    answer.put<std::uint8_t>(RDMA_NLDEV_ATTR_LMC, 0);
  }
  answer.put<std::uint8_t>(RDMA_NLDEV_ATTR_PORT_STATE, device.state);
  answer.put<std::uint8_t>(RDMA_NLDEV_ATTR_PORT_PHYS_STATE, device.physical_state);
  const char* const interface = device.gids[0].netdev;
  const std::uint32_t interface_index = interface[0] != '\0' ? ::if_nametoindex(interface) : 0;
  answer.put<std::uint32_t>(RDMA_NLDEV_ATTR_NDEV_INDEX, interface_index != 0 ? interface_index : synthetic_netdev_index);
  answer.put(RDMA_NLDEV_ATTR_NDEV_NAME, interface_index != 0 ? interface : synthetic_netdev);
}

// The number in a request's attribute.
constexpr std::uint32_t absent = ResourceQuestion::absent;
std::uint32_t wanted(const std::byte* attributes, std::size_t bytes, std::uint16_t which) {
  while (bytes >= NLA_HDRLEN) {
    nlattr head;
    ::memcpy(&head, attributes, sizeof(head));
    if (head.nla_len < NLA_HDRLEN || head.nla_len > bytes) break;
    std::uint32_t value;
    if ((head.nla_type & NLA_TYPE_MASK) == which && head.nla_len == NLA_HDRLEN + sizeof(value)) {
      ::memcpy(&value, attributes + NLA_HDRLEN, sizeof(value));
      return value;
    }
    const std::size_t whole = std::min<std::size_t>(NLA_ALIGN(head.nla_len), bytes);
    attributes += whole, bytes -= whole;
  }
  return absent;
}

// What is sent at a time.
using Datagram = std::vector<std::byte>;
bool put(int socket, std::uint32_t port, const Datagram& datagram, int flags) {
  sockaddr_nl to{};
  to.nl_family = AF_NETLINK;
  to.nl_pid = port;
  return ::syscall(SYS_sendto, socket, datagram.data(), datagram.size(), flags, &to, sizeof(to)) >= 0;
}

// What a socket has no room for yet, sent by a thread while the program reads, as the kernel goes on with a dump. By another socket: one that
// waits to send to itself would be there for ever, and this one ends when that one is closed.
class Rest {
 public:
  // 0, or an errno.
  static int send(std::uint32_t port, std::vector<Datagram> answers, std::size_t sent) {
    vmci::UniqueFd socket(static_cast<int>(::syscall(SYS_socket, AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_USERSOCK)));
    if (!socket) return errno;
    std::unique_ptr<Rest> rest(new Rest{std::move(socket), port, std::move(answers), sent});
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, stack_bytes);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool made = pthread_create(&thread, &attributes, &main, rest.get()) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!made) return ENOBUFS;
    return rest.release(), 0;
  }

 private:
  static constexpr std::size_t stack_bytes = 256 << 10;

  Rest(vmci::UniqueFd socket, std::uint32_t port, std::vector<Datagram> answers, std::size_t sent)
      : socket_(std::move(socket)), port_(port), answers_(std::move(answers)), sent_(sent) {}
  static void* main(void* self) {
    const std::unique_ptr<Rest> rest(static_cast<Rest*>(self));
    while (rest->sent_ < rest->answers_.size() && put(rest->socket_.get(), rest->port_, rest->answers_[rest->sent_], 0)) ++rest->sent_;
    return nullptr;
  }

  const OwnFd socket_;
  const std::uint32_t port_;
  const std::vector<Datagram> answers_;
  std::size_t sent_;
};

// One request of a socket's, and its port. The socket answers itself: the program may have no second descriptor left.
class Reply {
 public:
  Reply(const nlmsghdr& request, int socket, std::uint32_t port) : request_(request), socket_(socket), port_(port) {}

  bool dump() const { return (request_.nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP; }
  bool asks_for(std::uint16_t command) const { return request_.nlmsg_type == nldev_type(command); }
  NetlinkAnswer begin() const {
    NetlinkAnswer answer(request_, port_);
    answer.begin(request_.nlmsg_type, dump() ? NLM_F_MULTI : 0);
    return answer;
  }
  void add(const NetlinkAnswer& answer) { answers_.emplace_back(answer.data(), answer.data() + answer.bytes()); }
  // After what there is to say, if anything: 0, or an errno. Everything is sent now, or will be; else an errno.
  int end(int error) {
    NetlinkAnswer last(request_, port_);
    if (error == 0 && dump()) last.end(NLMSG_DONE, 0);
    else if (error != 0 || (request_.nlmsg_flags & NLM_F_ACK) != 0) last.end(NLMSG_ERROR, -error);
    if (last.bytes() != 0) add(last);
    std::size_t sent = 0;
    while (sent < answers_.size() && put(socket_, port_, answers_[sent], MSG_DONTWAIT)) ++sent;
    if (sent == answers_.size()) return 0;
    return errno == EAGAIN ? Rest::send(port_, std::move(answers_), sent) : errno;
  }

 private:
  const nlmsghdr request_;
  const int socket_;
  const std::uint32_t port_;
  std::vector<Datagram> answers_;
};

constinit std::atomic<ResourceSource*> resource_source{nullptr};

// A device's index is its place in the tree.
int answer_devices(Reply& reply, std::uint32_t one, std::uint32_t wanted_port) {
  const bool ports = reply.asks_for(RDMA_NLDEV_CMD_PORT_GET);
  const bool all = reply.dump() && !ports;  // a dump of ports is one of a device's
  if (ports && !reply.dump() && wanted_port != 1) return EINVAL;
  bool found = false;
  std::uint32_t index = 0;
  for (auto device = device_at(index); device; device = device_at(++index)) {
    if (!all && index != one) continue;
    found = true;
    NetlinkAnswer about = reply.begin();
    (ports ? put_port : put_device)(about, *device, index);
    reply.add(about);
  }
  return found || reply.dump() ? 0 : EINVAL;
}

// Sends what the kernel would answer to the socket, which has that port: 0, or an errno.
int answer(const nlmsghdr& request, const std::byte* attributes, std::size_t attribute_bytes, int socket, std::uint32_t port) {
  Reply reply(request, socket, port);
  const auto number = [&](std::uint16_t attribute) { return wanted(attributes, attribute_bytes, attribute); };
  if (reply.asks_for(RDMA_NLDEV_CMD_SYS_GET) && !reply.dump()) {
    NetlinkAnswer about = reply.begin();
    about.put<std::uint8_t>(RDMA_NLDEV_SYS_ATTR_NETNS_MODE, 1);  // shared
    about.put<std::uint8_t>(RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK, 1);
    reply.add(about);
    return reply.end(0);
  }
  const std::uint32_t index = number(RDMA_NLDEV_ATTR_DEV_INDEX);
  if (reply.asks_for(RDMA_NLDEV_CMD_GET) || reply.asks_for(RDMA_NLDEV_CMD_PORT_GET))
    return reply.end(answer_devices(reply, index, number(RDMA_NLDEV_ATTR_PORT_INDEX)));
  ResourceSource* const source = resource_source.load(std::memory_order_acquire);
  if (source == nullptr || RDMA_NL_GET_CLIENT(request.nlmsg_type) != RDMA_NL_NLDEV) return reply.end(EOPNOTSUPP);
  const auto device = index == absent ? std::nullopt : device_at(index);
  if (!device) return reply.end(EINVAL);
  const auto begin = [&] {
    NetlinkAnswer about = reply.begin();
    about.put<std::uint32_t>(RDMA_NLDEV_ATTR_DEV_INDEX, index);
    about.put(RDMA_NLDEV_ATTR_DEV_NAME, device->name);
    return about;
  };
  return reply.end(source({static_cast<std::uint16_t>(RDMA_NL_GET_OP(request.nlmsg_type)), reply.dump(), number},
                          {begin, [&](const NetlinkAnswer& about) { reply.add(about); }}));
}

// Whether it goes from one of our sockets to the kernel; then *port is the socket's.
bool to_kernel(int fd, const void* to, std::size_t bytes, std::uint32_t& port) {
  sockaddr_nl address;
  if (to == nullptr) {  // whom it is connected to, or by default the kernel
    socklen_t length = sizeof(address);
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 || length != sizeof(address)) return false;
  } else if (bytes == sizeof(address)) {
    ::memcpy(&address, to, sizeof(address));
  } else {
    return false;
  }
  if (address.nl_family != AF_NETLINK || address.nl_pid != 0 || address.nl_groups != 0) return false;
  int protocol = -1;
  socklen_t length = sizeof(protocol);
  if (::getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) != 0 || protocol != NETLINK_USERSOCK) return false;
  length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 || address.nl_family != AF_NETLINK) return false;
  if (address.nl_pid == 0) {  // not bound: sending would do it
    if (::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return false;
    length = sizeof(address);
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return false;
  }
  port = address.nl_pid;
  return true;
}

// 0, or the errno that sending ends with.
int take(int fd, const std::byte* messages, std::size_t bytes, std::uint32_t port) try {
  while (bytes >= NLMSG_HDRLEN) {
    nlmsghdr request;
    ::memcpy(&request, messages, sizeof(request));
    if (request.nlmsg_len < NLMSG_HDRLEN || request.nlmsg_len > bytes) return 0;
    if ((request.nlmsg_flags & NLM_F_REQUEST) != 0)
      if (const int error = answer(request, messages + NLMSG_HDRLEN, request.nlmsg_len - NLMSG_HDRLEN, fd, port); error != 0) return error;
    const std::size_t whole = std::min<std::size_t>(NLMSG_ALIGN(request.nlmsg_len), bytes);
    messages += whole, bytes -= whole;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return ENOMEM;
}

// What send(2) and sendto(2) have in common: the count, or -1 with errno. nullopt: it is not ours to answer.
std::optional<ssize_t> answered(int fd, const void* data, std::size_t bytes, const void* to, std::size_t to_bytes) {
  std::uint32_t port;
  if (!opened.load(std::memory_order_relaxed) || data == nullptr || !to_kernel(fd, to, to_bytes, port)) [[likely]] return std::nullopt;
  const int error = take(fd, static_cast<const std::byte*>(data), bytes, port);
  if (error != 0) return errno = error, -1;
  return static_cast<ssize_t>(bytes);
}

ssize_t gather(const msghdr& message, std::byte (&into)[request_bytes_max]) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < message.msg_iovlen; ++i) {
    const iovec& piece = message.msg_iov[i];
    if (piece.iov_len > sizeof(into) - bytes) return errno = EMSGSIZE, -1;
    ::memcpy(into + bytes, piece.iov_base, piece.iov_len);
    bytes += piece.iov_len;
  }
  return static_cast<ssize_t>(bytes);
}

template <class Function, class... Arguments>
auto real(NextFunction<Function>& next, long number, Arguments... arguments) {
  auto* const function = next.get();
  using Returned = decltype(function(arguments...));
  return function != nullptr ? function(arguments...) : static_cast<Returned>(::syscall(number, arguments...));
}

}  // namespace

// The service's answers come with the verbs, which link this too.
void set_resource_source(ResourceSource* source) { resource_source.store(source, std::memory_order_release); }

}  // namespace vrdma

using namespace vrdma;

VRDMA_INTERPOSE(int, socket, int domain, int type, int protocol) {
  if (domain == AF_NETLINK && protocol == NETLINK_RDMA && !kernel_has_devices()) {
    const int fd = real(next_socket, SYS_socket, AF_NETLINK, type, NETLINK_USERSOCK);
    if (fd >= 0) return opened.store(true, std::memory_order_relaxed), fd;
  }
  return real(next_socket, SYS_socket, domain, type, protocol);
}

VRDMA_INTERPOSE(ssize_t, sendto, int fd, const void* data, std::size_t bytes, int flags, const sockaddr* to, socklen_t to_bytes) {
  if (const auto done = answered(fd, data, bytes, to, to_bytes)) [[unlikely]] return *done;
  return real(next_sendto, SYS_sendto, fd, data, bytes, flags, to, to_bytes);
}

VRDMA_INTERPOSE(ssize_t, send, int fd, const void* data, std::size_t bytes, int flags) {
  if (const auto done = answered(fd, data, bytes, nullptr, 0)) [[unlikely]] return *done;
  auto* const next = next_send.get();
  return next != nullptr ? next(fd, data, bytes, flags) : static_cast<ssize_t>(::syscall(SYS_sendto, fd, data, bytes, flags, nullptr, 0));
}

VRDMA_INTERPOSE(ssize_t, sendmsg, int fd, const msghdr* message, int flags) {
  std::uint32_t port;
  if (opened.load(std::memory_order_relaxed) && message != nullptr && to_kernel(fd, message->msg_name, message->msg_namelen, port)) [[unlikely]] {
    std::byte request[request_bytes_max];
    const ssize_t bytes = gather(*message, request);
    if (bytes <= 0) return bytes;
    const int error = take(fd, request, static_cast<std::size_t>(bytes), port);
    return error == 0 ? bytes : (errno = error, -1);
  }
  return real(next_sendmsg, SYS_sendmsg, fd, message, flags);
}
