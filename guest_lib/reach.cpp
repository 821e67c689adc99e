#include "guest_lib/reach.hpp"

#include <infiniband/verbs.h>
#include <link.h>
#include <sys/auxv.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

#include "guest_lib/process.hpp"
#include "vmci_channel/page_pin.hpp"

namespace vrdma::guest {

namespace {

Result<std::uint32_t> announce_backing(int fd, std::uint64_t bytes) {
  const auto attachment = Attachment::existing();
  if (attachment == nullptr) return Errno{EIO};
  const int descriptors[] = {fd};
  auto reply = attachment->call_on_socket<control::Request::add_backing>({bytes, 0, 0}, descriptors);
  if (!reply) return reply.error();
  return reply->body.backing;
}

void withdraw_backing(std::uint32_t backing) {
  const auto attachment = Attachment::existing();
  if (attachment == nullptr) return;
  if (attachment->call_on_socket<control::Request::remove_backing>({backing, 0})) attachment->direct_rooms().forget_own(backing);
}

// Of a virtual machine's device.
Result<memory::Lent> lend(std::uint64_t bytes) {
  const auto attachment = Attachment::existing();
  if (attachment == nullptr || attachment->bar() < 0) return Errno{EIO};
  auto reply = attachment->call_on_socket<control::Request::add_pinned>({0, bytes, control::lend_pages, 0});
  if (!reply) return reply.error();
  return memory::Lent{attachment->bar(), std::uint64_t{reply->body.page} * 4096, reply->body.backing};
}

std::uint64_t service() {
  const auto attachment = Attachment::existing();
  return attachment == nullptr ? 0 : attachment->ordinal();
}

// Loaded by dlmopen(3): the program is in another namespace, whose C library is another copy, and its fork(2) calls none of our handlers.
bool is_beside_program() {
  unsigned long program = ::getauxval(AT_PHDR);
  const auto is_it = [](dl_phdr_info* object, std::size_t, void* sought) -> int {
    return reinterpret_cast<std::uintptr_t>(object->dlpi_phdr) == *static_cast<unsigned long*>(sought);
  };
  return program != 0 && ::dl_iterate_phdr(is_it, &program) == 0;  // which goes through this namespace only
}

// Never destroyed: the interposed functions may be called until the very end.
memory::MemoryManager& manager() {
  // Not on the heap: a page of that may be moving, and the manager must not write to it then.
  alignas(memory::MemoryManager) static std::byte room[sizeof(memory::MemoryManager)];
  static auto* const made = [] {
    auto* const manager = new (room) memory::MemoryManager({announce_backing, withdraw_backing, service, lend});
    const char* const private_pages = std::getenv("VRDMA_PRIVATE_PAGES");
    if ((private_pages != nullptr && std::string_view(private_pages) == "stay") || is_beside_program()) manager->keep_private_pages();
    const char* const partial_pages = std::getenv("VRDMA_PARTIAL_PAGES");
    if (partial_pages != nullptr && std::string_view(partial_pages) == "stay") manager->set_partial_pages(memory::PartialPages::stay);
    if (partial_pages != nullptr && std::string_view(partial_pages) == "move") manager->set_partial_pages(memory::PartialPages::move);
    return manager;
  }();
  return *made;
}

// The window as this attachment's service knows it, announced on first use.
Result<std::uint32_t> window_of(Attachment& attachment) {
  if (attachment.window_backing != 0) return attachment.window_backing;
  auto fd = manager().window_fd();
  if (!fd) return fd.error();
  const int descriptors[] = {*fd};
  auto reply = attachment.call_on_socket<control::Request::add_backing>({0, control::backing_window, 0}, descriptors);
  if (!reply) return reply.error();
  return attachment.window_backing = reply->body.backing;
}

// In a virtual machine: the pages are held where they are, and its agent tells the service where that is. False: they cannot be.
bool pin(Attachment& attachment, control::Extent& extent, std::vector<std::uint32_t>& pinned) {
  const auto ring = vmci::pin_pages(std::span(reinterpret_cast<const std::byte*>(extent.address), extent.bytes));
  if (!ring) return false;
  const auto reply = attachment.call_on_socket<control::Request::add_pinned>({extent.address, extent.bytes, ring->get(), 0});
  if (!reply) return false;
  extent.backing = reply->body.backing;
  extent.backing_offset = extent.address - memory::page_floor(extent.address);
  pinned.push_back(extent.backing);
  return true;
}

Result<std::vector<control::Extent>> as_the_service_knows_them(Attachment& attachment, std::vector<control::Extent> extents, bool on_demand,
                                                               std::vector<std::uint32_t>& pinned) {
  for (auto& extent : extents) {
    const bool may_pin = !on_demand && attachment.in_machine() && attachment.bar() < 0;
    if (extent.backing == control::backing_process && may_pin && pin(attachment, extent, pinned)) continue;
    if (extent.backing == control::backing_process) {
      if (const Status prepared = attachment.prepare_process_memory(); !prepared) return prepared.error();
    } else if (extent.backing == memory::window_backing) {
      auto window = window_of(attachment);
      if (!window) return window.error();
      extent.backing = *window;
    }
  }
  return extents;
}

}  // namespace

void prepare_reach() {
  std::lock_guard lock(Process::instance().mutex);  // held across a fork, which would leave the guard of the first use locked in the child
  (void)manager();
}

Result<Reached> reach(Attachment& attachment, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
  if (attachment.bar() >= 0)
    manager().move_to_lent_pages();
  else if (attachment.in_machine())
    manager().keep_in_place();
  const bool on_demand = (access & IBV_ACCESS_ON_DEMAND) != 0;
  auto registration = on_demand ? manager().add_on_demand(address, bytes) : manager().add(address, bytes, access);
  if (!registration) return registration.error();
  auto extents = as_the_service_knows_them(attachment, registration->extents, on_demand, registration->pinned);
  if (!extents) {
    unreach(std::move(*registration));
    return extents.error();
  }
  return Reached{std::move(*registration), std::move(*extents)};
}

void unreach(memory::Registration&& registration) {
  if (service() == registration.service)
    for (const std::uint32_t backing : registration.pinned) withdraw_backing(backing);
  manager().remove(std::move(registration));
}

}  // namespace vrdma::guest
