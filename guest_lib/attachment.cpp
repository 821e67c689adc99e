#include "guest_lib/attachment.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "guest_lib/process.hpp"
#include "guest_lib/segment_mapping.hpp"
#include "guest_lib/show_device.hpp"
#include "vmci_channel/gvisor.hpp"
#include "vmci_channel/own_folder.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

using vmci::Mapping;
using vmci::UniqueFd;
using vmci::Writable;

namespace {

constexpr const char* host_socket = "/run/vrdma/vrdmad.sock";

// The private service's; empty: there is none of this user's.
std::string private_socket_path() {
  const char* const run = secure_getenv("XDG_RUNTIME_DIR");
  if (run == nullptr || *run == '\0') return {};
  struct stat status;
  if (::stat(run, &status) != 0 || status.st_uid != ::geteuid()) return {};
  const std::string folder = std::string(run) + "/vrdma";
  std::string path = folder + "/vrdmad.sock";
  return vmci::is_own_folder(folder) && ::access(path.c_str(), F_OK) == 0 ? path : std::string();
}

struct Place {
  std::string path;
  bool is_private;
};
Place service_place() {
  if (const char* path = secure_getenv("VRDMA_SOCKET"); path != nullptr && *path != '\0') return {path, false};
  if (std::string path = private_socket_path(); !path.empty()) return {std::move(path), true};
  return {host_socket, false};
}

}  // namespace

std::string service_socket_path() { return service_place().path; }

Result<vmci::PacketSocket> connect_to_service(int timeout_ms) {
  const Place place = service_place();
  auto socket = vmci::PacketSocket::connect(place.path, timeout_ms);
  if (socket && place.is_private && !vmci::is_own_or_roots(*socket)) return Errno{EACCES};
  return socket;
}

namespace {

// The first of the calls without which no device is opened that a filter of seccomp keeps from this program; null: none of them. Each is asked for
// what the kernel refuses by another error, or what does nothing; sockets for those of this domain, as filters look at it.
const char* forbidden_call() {
  constexpr struct {
    const char* name;
    long number, first, second, third;
  } needed[] = {{"socket", SYS_socket, AF_UNIX, -1, 0},
                {"connect", SYS_connect, -1, 0, 0},
                {"sendmsg", SYS_sendmsg, -1, 0, 0},
                {"recvmsg", SYS_recvmsg, -1, 0, 0},
                {"fcntl", SYS_fcntl, -1, F_GET_SEALS, 0},
                {"madvise", SYS_madvise, 0, 0, MADV_DONTFORK},
                {"eventfd2", SYS_eventfd2, 0, -1, 0},
                {"epoll_create1", SYS_epoll_create1, -1, 0, 0},
                {"epoll_ctl", SYS_epoll_ctl, -1, EPOLL_CTL_DEL, -1}};
  for (const auto& call : needed)
    if (::syscall(call.number, call.first, call.second, call.third, 0) < 0 && (errno == ENOSYS || errno == EPERM)) return call.name;
  return nullptr;
}

std::string remedy(int error) {
  if (error == ENOSYS || error == EPERM)
    if (const char* const call = vmci::runs_under_gvisor() ? nullptr : forbidden_call(); call != nullptr)
      return std::string("a filter of system calls (seccomp) keeps ") + call + " from this program (docs/containers.md says which it needs)";
  if (vmci::runs_under_gvisor()) return "gVisor shares no memory with the host: programs in it cannot be served (docs/containers.md)";
  switch (error) {
    case ENOENT:
    case ECONNREFUSED:
      return "start vrdmad, or use \"vrdma run\"";
    case EACCES:
    case EPERM:
      return "the socket's permissions, or the service's configuration, do not admit this user";
    case ETIMEDOUT:
      return "it listens and does not answer: it is stopped, or this machine is overloaded";
    case EAFNOSUPPORT:
      return "this program may have no Unix sockets: its unit's RestrictAddressFamilies needs AF_UNIX";
    case ENAMETOOLONG:
      return "choose a VRDMA_SOCKET of at most 107 characters";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n) of this program, or that under which vrdmad was started";
    case ENOMEM:
      return "raise the limit of address space (ulimit -v) of this program, or the limits under which vrdmad was started; in a virtual machine, what vrdma-guestd says";
    case EFBIG:
      return "raise the limit of file sizes under which vrdmad was started (ulimit -f)";
    case EDQUOT:
      return "the service has as many programs of this user as its quota, or its limit of open files, allows; its log says which";
    case EADDRNOTAVAIL:
      return "no LID is left, or the subnet has leased none to this host yet: vrdma show hosts";
    default:
      return "the log of vrdmad says more";
  }
}

std::uint32_t wished_link_layer() {
  const char* wish = std::getenv("VRDMA_LINK_LAYER");
  const std::string_view text = wish == nullptr ? "" : wish;
  if (text == "ib" || text == "infiniband") return control::link_layer_infiniband;
  if (text == "ethernet") return control::link_layer_ethernet;
  return control::link_layer_default;
}

// A value that means nothing, which is passed over: said once.
void complain_of_environment() {
  static std::atomic<bool> looked{false};
  if (looked.exchange(true, std::memory_order_relaxed)) return;
  const auto check = [](const char* variable, std::initializer_list<std::string_view> known, const char* words) {
    const char* const value = std::getenv(variable);
    if (value == nullptr || *value == '\0' || std::find(known.begin(), known.end(), value) != known.end()) return;
    std::fprintf(stderr, "vrdma: %s is \"%s\", which means nothing: it must be %s\n", variable, value, words);
  };
  check("VRDMA_LINK_LAYER", {"ib", "infiniband", "ethernet"}, "ib or ethernet");
  check("VRDMA_PARTIAL_PAGES", {"move", "stay"}, "move or stay");
  check("VRDMA_PRIVATE_PAGES", {"stay"}, "stay, or not there");
}

// A part of the BAR of a virtual machine's device, which begins at the descriptor's position.
Result<Mapping> map_lent(const UniqueFd& bar, std::uint64_t bytes, Writable writable) {
  const off_t at = ::lseek(bar.get(), 0, SEEK_CUR);
  if (at < 0) return last_error();
  auto mapping = Mapping::map(bar.get(), static_cast<std::uint64_t>(at), bytes, writable);
  if (!mapping) return mapping;
  if (Status kept = keep_private(*mapping); !kept) return kept.error();
  return mapping;
}

// A program that tries again and again is told once.
bool first_complaint() {
  static std::atomic<bool> said{false};
  return !said.exchange(true, std::memory_order_relaxed);
}

void complain_of_version(const std::string& path, const control::AttachReply& reply) {
  if (!first_complaint()) return;
  std::fprintf(stderr,
               "vrdma: the host service at %s speaks version %u.%u of the channel, this library %u.%u: use the libvrdma that "
               "belongs to this vrdmad\n",
               path.c_str(), reply.major, reply.minor, control::version_major, control::version_minor);
}

}  // namespace

void complain(const std::string& path, Errno error) {
  if (!first_complaint()) return;
  const char* name = strerrorname_np(value(error));
  std::fprintf(stderr, "vrdma: cannot reach the host service at %s (%s): %s\n", path.c_str(), name != nullptr ? name : std::strerror(value(error)),
               remedy(value(error)).c_str());
}

void complain_of_device(Errno error) {
  if (!first_complaint()) return;
  const char* name = strerrorname_np(value(error));
  std::fprintf(stderr, "vrdma: cannot open vrdma0 (%s): %s\n", name != nullptr ? name : std::strerror(value(error)), remedy(value(error)).c_str());
}

Result<std::shared_ptr<Attachment>> Attachment::attach(const std::string& path) {
  auto socket = connect_to_service();
  if (!socket) return socket.error();
  VRDMA_CRASH_POINT("guest.attach.connected");
  complain_of_environment();

  control::AttachRequest request{};
  request.magic = control::magic;
  request.major = control::version_major;
  request.minor = control::version_minor;
  request.link_layer = wished_link_layer();
  request.pid = static_cast<std::uint32_t>(::getpid());
  if (const char* name = std::getenv("VRDMA_NAME"); name != nullptr) std::snprintf(request.name, sizeof(request.name), "%s", name);

  control::AttachReply reply{};
  auto descriptors = exchange_packet(*socket, {.kind = control::Request::attach, .body = std::as_bytes(std::span(&request, 1))},
                                     std::as_writable_bytes(std::span(&reply, 1)));
  if (value(descriptors.has_error() ? descriptors.error() : Errno{0}) == EPROTONOSUPPORT || (descriptors && reply.major != control::version_major)) {
    complain_of_version(path, reply);
    return Errno{EPROTONOSUPPORT};
  }
  if (!descriptors) return descriptors.error();
  VRDMA_CRASH_POINT("guest.attach.answered");
  const bool in_bar = (reply.flags & control::attach_in_bar) != 0;
  auto parts = vmci::AttachedParts::map(reply, *descriptors, in_bar ? map_lent : map_segment);
  if (!parts) return parts.error();
  VRDMA_CRASH_POINT("guest.attach.mapped");
  return std::make_shared<Attachment>(std::move(*socket), reply, std::move(*parts), in_bar ? std::move((*descriptors)[0]) : UniqueFd());
}

std::uint64_t Attachment::next_ordinal() {
  static std::atomic<std::uint64_t> made = 0;
  return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

Attachment::Attachment(vmci::PacketSocket socket, const control::AttachReply& reply, vmci::AttachedParts parts, UniqueFd bar)
    : arena_(std::move(parts.arena)),
      page_mapping_(std::move(parts.page)),
      page_(reinterpret_cast<const control::ServicePage*>(page_mapping_.data())),
      doorbell_fd_(std::move(parts.doorbell)),
      guest_(reply.guest),
      in_machine_((reply.flags & control::attach_in_machine) != 0),
      bar_(std::move(bar)),
      liveness_(page_),
      doorbell_(parts.ready_words, &page_->shards[reply.shard].sleeping, doorbell_fd_.get(), liveness_),
      channel_(std::move(socket), std::move(parts.wake), parts.rings, guest_, doorbell_, liveness_) {}

namespace {

// A failure costs nothing but the common address. No longer than for the attachment itself: the process's mutex is held.
void share_address(Attachment& attachment, Process& process) {
  if (attachment.service_minor() < control::minor_of_sharing) return;
  auto& secret = process.address_secret;
  if (secret == std::remove_reference_t<decltype(secret)>{} &&
      ::getrandom(secret.data(), secret.size(), GRND_NONBLOCK) != static_cast<ssize_t>(secret.size()))
    return secret.fill(0);
  (void)attachment.call<control::Request::share_address>({secret}, vmci::attach_within_ms);
}

}  // namespace

Result<std::shared_ptr<Attachment>> Attachment::current() {
  Process& process = Process::instance();
  std::lock_guard lock(process.mutex);
  if (process.attachment && !process.attachment->liveness().gone()) return process.attachment;
  process.watch_forks();
  const std::string path = service_socket_path();
  auto made = attach(path);
  if (!made) {
    complain(path, made.error());
    return made.error();
  }
  OwnProcess::settle_in_own_memory();
  process.remember(*made);
  share_address(**made, process);
  process.attachment = *made;
  return *made;
}

std::shared_ptr<Attachment> Attachment::existing() {
  Process& process = Process::instance();
  std::lock_guard lock(process.mutex);
  return process.attachment && !process.attachment->liveness().gone() ? process.attachment : nullptr;
}

Result<control::DeviceReply> Attachment::device() {
  if (liveness_.inherited()) return Errno{EIO};
  std::lock_guard lock(device_mutex_);
  const std::uint32_t now =
      std::atomic_ref(const_cast<std::uint32_t&>(page_->device_generation)).load(std::memory_order_acquire);
  if (device_known_ && device_.generation == now) return device_;
  auto reply = call<control::Request::query_device>({});
  if (!reply) return reply.error();
  device_ = *reply;
  device_known_ = true;
  show_device_in_paths(device_);
  return device_;
}

Result<vmci::QueuePairView> Attachment::queue_pair_at(std::uint64_t offset, const vmci::QueuePairGeometry& geometry) const {
  if (!std::has_single_bit(geometry.produce_slots) || geometry.produce_slots < 2 || (geometry.consume_entries != 0 && !std::has_single_bit(geometry.consume_entries)) ||
      !vmci::lies_inside(arena_.bytes(), offset, geometry.total_bytes()))
    return Errno{EPROTO};
  vmci::memcheck::show(arena_.data() + offset, geometry.total_bytes());
  return vmci::QueuePairView(arena_.data() + offset, geometry);
}

Status Attachment::prepare_process_memory() {
  if (process_memory_known_) return copier_ ? copier_->start() : ok();
  if (::syscall(SYS_getrandom, &probe_, sizeof(probe_), GRND_NONBLOCK) != sizeof(probe_)) probe_ = vmci::cycles() * 0x9e3779b97f4a7c15u;
  auto reply = call_on_socket<control::Request::reach_process>({reinterpret_cast<std::uintptr_t>(&probe_), probe_});
  // An older service tries what it can, and says nothing.
  if (!reply && value(reply.error()) != EOPNOTSUPP) return reply.error();
  const bool by_service = !reply || reply->body.way == control::reach_by_service;
  if (!by_service && reply->descriptors.size() != (bar_ ? 2 : 1)) return vmci::not_brought(reply->descriptors);
  if (by_service) return process_memory_known_ = true, ok();
  auto segment = (bar_ ? map_lent : map_segment)(reply->descriptors[0], copying::segment_bytes, Writable::yes);
  if (!segment) return segment.error();
  Mapping word;
  if (bar_) {
    reply->descriptors[0].reset();  // the kernel copies nothing to a BAR by its descriptor
    auto mapped = map_segment(reply->descriptors[1], sizeof(std::uint32_t), Writable::yes);
    if (!mapped) return mapped.error();
    word = std::move(*mapped);
  }
  copier_ = std::make_unique<Copier>(std::move(*segment), std::move(reply->descriptors[0]), std::move(word), doorbell_, reply->body.doorbell, liveness_);
  process_memory_known_ = true;
  return copier_->start();
}

void Attachment::become_inherited() {
  liveness_.mark_inherited();
  std::construct_at(&objects_mutex_);  // a thread of the parent's may have held it
  if (copier_) copier_->abandon();
  direct_rooms_.abandon();
  channel_.abandon();
  doorbell_fd_.reset();
  bar_.reset();
  arena_.abandon();
  page_mapping_.abandon();
}

}  // namespace vrdma::guest
