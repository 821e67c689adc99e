// The device list, and opening and closing the device.
#include "guest_lib/device.hpp"

#include <dlfcn.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/descriptors.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/operation_tables.hpp"
#include "guest_lib/provisional.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::guest {

namespace {

// libibverbs' private struct verbs_device is 712 bytes and begins with the public one; what we do not set stays zero.
struct alignas(64) DeviceStorage {
  ibv_device device;
  std::byte rest[1024 - sizeof(ibv_device)];
};

// Who was given another LD_PRELOAD than `vrdma run`'s has this library by LD_LIBRARY_PATH, behind libc if it does not link libibverbs itself.
// Verbs do not mind; librdmacm opens its device by libc's open(2) then, and is told by the kernel that there is none, or connects by TCP.
void tell_of_connections_not_served() {
  static std::atomic<bool> looked{false};
  if (looked.exchange(true, std::memory_order_relaxed) || dlsym(RTLD_NEXT, "open") != nullptr) return;
  void* const librdmacm = dlopen("librdmacm.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (librdmacm == nullptr) return;
  dlclose(librdmacm);
  std::fputs("vrdma: this program was given an LD_PRELOAD without libvrdma, which is behind the C library now: rdma_cm and rsockets do not reach it. "
             "Say LD_PRELOAD=$LD_PRELOAD:OTHER in a shell that `vrdma run` starts, not LD_PRELOAD=OTHER\n", stderr);
}

// Whether somebody listens at `path`, without waiting for a place in the queue.
Status reachable(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return Errno{ENAMETOOLONG};
  std::memcpy(address.sun_path, path.data(), path.size());
  vmci::UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return last_error();
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return ok();
  return errno == EAGAIN ? ok() : Status(last_error());  // EAGAIN: its queue is full, so it lives
}

// Somebody named a service, or us, for this program or for those that it came from.
bool was_asked_for() {
  const char* const preloaded = std::getenv("LD_PRELOAD");
  return std::getenv("VRDMA_SOCKET") != nullptr || (preloaded != nullptr && std::strstr(preloaded, "libvrdma") != nullptr);
}

// UCX, Open MPI and libfabric look for devices in every rank, RDMA or none. Where we are merely what the host has for libibverbs.so.1 (its linker's path,
// /etc/ld.so.preload), they are told nothing, as rdma-core tells nothing of an adapter that is not there. Who has us in LD_PRELOAD or a socket in
// VRDMA_SOCKET wanted this device: a sentence from each process that looks for it in vain, also from those that only probe.
bool device_present() {
  if (Attachment::existing()) return true;
  const std::string path = service_socket_path();
  const Status reached = reachable(path);
  if (!reached && was_asked_for()) complain(path, reached.error());
  return static_cast<bool>(reached);
}

struct OpenedContext {
  Provisional<control::Request::close_context> made;
  std::unique_ptr<PrivateFd> pipe;
  vmci::UniqueFd event_fd;
};
Result<OpenedContext> open_context(Attachment& attachment) {
  auto reply = attachment.call_on_socket<control::Request::open_context>({});
  if (!reply) return reply.error();
  Provisional<control::Request::close_context> made(attachment, reply->body.context);
  if (reply->descriptors.size() != 1) return vmci::not_brought(reply->descriptors);
  auto pipe = std::make_unique<PrivateFd>(std::move(reply->descriptors[0]));
  auto event_fd = make_event_fd(pipe->get());
  if (!event_fd) return event_fd.error();
  return OpenedContext{std::move(made), std::move(pipe), std::move(*event_fd)};
}

Result<ibv_context*> open_by(const std::shared_ptr<Attachment>& attachment, ibv_device* which) {
  // Asked now, so that the paths that clients look at are right before they look.
  if (auto reply = attachment->device(); !reply) return reply.error();
  auto opened = open_context(*attachment);
  if (!opened) return opened.error();
  vmci::UniqueFd command_fd(::eventfd(0, EFD_CLOEXEC));  // applications duplicate it; nothing is ever written to it
  if (!command_fd) return last_error();
  OwnNumbers::mark(command_fd.get());

  auto context = std::make_unique<Context>();
  context->attachment = attachment;
  context->handle = opened->made.handle();
  context->async_pipe = std::move(opened->pipe);
  fill_operation_tables(context->verbs);
  context->verbs.sz = sizeof(verbs_context);
  ibv_context& verbs = context->verbs.context;
  verbs.device = which;
  verbs.cmd_fd = command_fd.release();
  verbs.async_fd = opened->event_fd.release();
  verbs.num_comp_vectors = static_cast<int>(limits::comp_vectors);
  pthread_mutex_init(&verbs.mutex, nullptr);
  verbs.abi_compat = __VERBS_ABI_IS_EXTENDED;
  opened->made.keep();
  context.release();
  return &verbs;
}

Result<ibv_context*> open_device(ibv_device* which) {
  auto attachment = Attachment::current();
  if (!attachment) return attachment.error();
  auto context = open_by(*attachment, which);
  if (!context) complain_of_device(context.error());
  return context;
}

}  // namespace

ibv_device* device() {
  static constinit DeviceStorage storage{
      {{}, IBV_NODE_CA, IBV_TRANSPORT_IB, "vrdma0", "uverbs0", "/sys/class/infiniband_verbs/uverbs0", "/sys/class/infiniband/vrdma0"}, {}};
  return &storage.device;
}

Result<control::DeviceReply> Context::device() {
  auto mine = usable();
  if (!mine) return mine.error();
  return (*mine)->device();
}

Result<std::shared_ptr<Attachment>> Context::usable() {
  std::shared_ptr<Attachment> mine;
  {
    std::lock_guard lock(Process::instance().mutex);
    mine = attachment;
  }
  if (!mine->liveness().inherited()) {
    if (mine->liveness().gone()) return Errno{EIO};
    return mine;
  }
  auto fresh = Attachment::current();
  if (!fresh) return Errno{EIO};
  auto opened = open_context(**fresh);
  if (!opened) return opened.error();
  std::unique_ptr<PrivateFd> old_pipe;
  std::lock_guard lock(Process::instance().mutex);  // left before what is not kept is given back
  if (!attachment->liveness().inherited()) return attachment;  // another thread was first
  // The inherited epoll descriptor is the parent's as well: it is replaced, not altered. A child that has closed it may have its own file there.
  if (!OwnNumbers::is_marked(verbs.context.async_fd)) verbs.context.async_fd = opened->event_fd.release();
  else if (::dup3(opened->event_fd.get(), verbs.context.async_fd, O_CLOEXEC) < 0) return last_error();
  events.begin_anew();
  std::construct_at(&readers);  // none of the parent's threads is inside
  fatal_reported.store(false, std::memory_order_relaxed);
  attachment = *fresh;
  handle = opened->made.handle();
  opened->made.keep();
  old_pipe = std::exchange(async_pipe, std::move(opened->pipe));
  return attachment;
}

}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

#undef ibv_get_device_list
VRDMA_EXPORT ibv_device** ibv_get_device_list(int* count) {
  if (count != nullptr) *count = 0;
  return as_ptr([&]() -> Result<ibv_device**> {
    auto** list = static_cast<ibv_device**>(std::calloc(2, sizeof(ibv_device*)));
    if (list == nullptr) return Errno{ENOMEM};
    if (device_present()) {
      tell_of_connections_not_served();
      list[0] = device();
      if (count != nullptr) *count = 1;
    }
    return list;
  });
}

VRDMA_EXPORT void ibv_free_device_list(ibv_device** list) { std::free(list); }
VRDMA_EXPORT const char* ibv_get_device_name(ibv_device* which) { return which->name; }
VRDMA_EXPORT int ibv_get_device_index(ibv_device*) { return 0; }

VRDMA_EXPORT __be64 ibv_get_device_guid(ibv_device*) {
  __be64 guid = 0;
  as_int([&]() -> Status {
    auto attachment = Attachment::current();
    if (!attachment) return attachment.error();
    auto reply = (*attachment)->device();
    if (!reply) return reply.error();
    guid = reply->node_guid;
    return ok();
  });
  return guid;
}

VRDMA_EXPORT ibv_context* ibv_open_device(ibv_device* which) {
  return as_ptr([&] { return open_device(which); });
}

VRDMA_EXPORT int ibv_close_device(ibv_context* verbs) {
  return as_int([&]() -> Status {
    Context& context = Context::of(verbs);
    const Inside inside(context);
    Liveness& liveness = context.attachment->liveness();
    context.readers.close(liveness.inherited());
    // A dead service has forgotten it; an inherited one is the parent's.
    if (!liveness.gone()) (void)context.attachment->call<control::Request::close_context>({context.handle, 0});
    OwnNumbers::close_marked(verbs->async_fd);
    OwnNumbers::close_marked(verbs->cmd_fd);
    pthread_mutex_destroy(&verbs->mutex);
    return ok();
  });
}
