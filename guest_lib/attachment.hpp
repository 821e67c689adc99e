// This process's attachment to the host service: its arena, the service page, the control channel, and the tables that lead
// from the handles in events to objects. All contexts of a process share one.
//
//   Attachment::current()  finds or makes it; a new one after the service died and in a fork's child.
//
// Any thread. Objects keep their attachment alive by a shared_ptr, so that a late verb on a dead device finds its rings
// mapped. In a fork's child the parent's attachment is marked inherited: its rings are not mapped there (MADV_DONTFORK) and
// its descriptors closed.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "guest_lib/control.hpp"
#include "guest_lib/copier.hpp"
#include "guest_lib/direct/rooms.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/attached_parts.hpp"
#include "vmci_channel/memcheck.hpp"

namespace vrdma::guest {

struct Cq;
struct Qp;
struct Srq;

// Where the service listens: $VRDMA_SOCKET, else $XDG_RUNTIME_DIR/vrdma/vrdmad.sock where that exists and both folders are this user's, else under /run. Whoever
// listens there can have all memory of this process: after su, or sudo -E, the runtime folder is another user's, and a set-uid program's environment its caller's.
std::string service_socket_path();
// A connection to it. Errors as PacketSocket::connect; EACCES: in the user's own folder somebody else listens.
Result<vmci::PacketSocket> connect_to_service(int timeout_ms = vmci::attach_within_ms);
// Says on standard error why the service at `path` does not serve this process, and what to do: one sentence, once per process.
void complain(const std::string& path, Errno error);
// The same where it serves the process, and there is no device for it all the same.
void complain_of_device(Errno error);

class Attachment : public std::enable_shared_from_this<Attachment> {
 public:
  // The attachment of this process, made if there is none, or none that works. Errors as connect(2) and the service's own.
  static Result<std::shared_ptr<Attachment>> current();
  // The same, but nullptr instead of making one.
  static std::shared_ptr<Attachment> existing();

  template <control::Request R>
  Result<ReplyBody<R>> call(const RequestBody<R>& body, int timeout_ms = ControlChannel::for_ever) {
    return channel_.call<R>(body, timeout_ms);
  }
  template <control::Request R>
  Result<ReplyBody<R>> call_after(control::Request first, std::span<const std::byte> first_body, const RequestBody<R>& body) {
    return channel_.call_after<R>(first, first_body, body);
  }
  template <control::Request R>
  Result<SocketReply<R>> call_on_socket(const RequestBody<R>& body, std::span<const int> descriptors = {}) {
    return channel_.call_on_socket<R>(body, descriptors);
  }

  Liveness& liveness() { return liveness_; }
  const Doorbell& doorbell() const { return doorbell_; }
  std::uint64_t requests_sent() const { return channel_.requests_sent(); }
  std::uint32_t guest() const { return guest_; }
  std::uint16_t service_minor() const { return page_->minor; }
  bool in_machine() const { return in_machine_; }  // of a virtual machine, served by its agent: memory is pinned where it is
  bool offers(std::uint16_t minor_on_hosts, std::uint16_t minor_in_machines) const { return service_minor() >= (in_machine_ ? minor_in_machines : minor_on_hosts); }
  // Another one when the machine has stood still, and the service was told (on a host always 0): our clocks may have lost time against the
  // service's. Pairs with the compare_exchange of MachinePort::renew_generation.
  std::uint64_t machine_generation() const { return std::atomic_ref(const_cast<std::uint64_t&>(page_->machine_generation)).load(std::memory_order_acquire); }
  // The machine's device, of whose BAR memory is lent instead (control::attach_in_bar); else -1.
  int bar() const { return bar_.get(); }
  std::uint64_t ordinal() const { return ordinal_; }  // among all attachments of this process, from 1

  DirectRooms& direct_rooms() { return direct_rooms_; }

  // What the device, port and GID queries answer: asked again only when the service says that it changed.
  Result<control::DeviceReply> device();

  // The queue pair, or the T, that a reply placed in the arena; EPROTO where it would not lie wholly inside.
  Result<vmci::QueuePairView> queue_pair_at(std::uint64_t offset, const vmci::QueuePairGeometry& geometry) const;
  template <class T>
  Result<T*> at(std::uint64_t offset) const {
    if (offset > arena_.bytes() || sizeof(T) > arena_.bytes() - offset || offset % alignof(T) != 0) return Errno{EPROTO};
    vmci::memcheck::show(arena_.data() + offset, sizeof(T));
    return reinterpret_cast<T*>(arena_.data() + offset);
  }

  // Handle → object, for events. Held while an event is being counted on its object.
  std::mutex& objects_mutex() { return objects_mutex_; }
  std::unordered_map<std::uint32_t, Cq*> cqs;
  std::unordered_map<std::uint32_t, Qp*> qps;
  std::unordered_map<std::uint32_t, Srq*> srqs;

  // Registrations are two requests, the extents and the key: one thread at a time.
  std::mutex& registration_mutex() { return registration_mutex_; }
  std::uint32_t window_backing = 0;  // the service's number of this process's memory window; 0: not announced. Under that mutex
  // Before memory that no file backs is registered, under that mutex: asks how the service reaches it, and starts the thread that
  // copies where it cannot. Errors as the request's and pthread_create's.
  Status prepare_process_memory();
  bool process_memory_known() const { return process_memory_known_; }  // that was done; under that mutex

  // In a fork's child, before anything else runs there.
  void become_inherited();

  Attachment(vmci::PacketSocket socket, const control::AttachReply& reply, vmci::AttachedParts parts, vmci::UniqueFd bar);

 private:
  static Result<std::shared_ptr<Attachment>> attach(const std::string& path);

  vmci::Mapping arena_;
  vmci::Mapping page_mapping_;
  const control::ServicePage* page_;
  OwnFd doorbell_fd_;
  std::uint32_t guest_;
  bool in_machine_;
  OwnFd bar_;
  const std::uint64_t ordinal_ = next_ordinal();
  Liveness liveness_;
  Doorbell doorbell_;
  ControlChannel channel_;

  static std::uint64_t next_ordinal();

  std::mutex device_mutex_;
  bool device_known_ = false;
  control::DeviceReply device_{};

  DirectRooms direct_rooms_;
  std::mutex objects_mutex_;
  std::mutex registration_mutex_;
  bool process_memory_known_ = false;
  std::uint64_t probe_ = 0;  // what the service must find here to be sure that it sees this process's memory
  std::unique_ptr<Copier> copier_;  // last: its thread uses the rest
};

}  // namespace vrdma::guest
