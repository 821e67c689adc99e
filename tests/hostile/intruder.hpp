// The channel as a guest without libvrdma speaks it: real enough to own objects, and free to write anything anywhere the
// service lets a guest write. Used by hostile_guest.cpp only; one thread. Nothing here checks what the service would check:
// that is the point.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <time.h>

#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/machine/fake_machine.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vrdma/control.hpp"

namespace vrdma::hostile {

using namespace control;

inline std::uint64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t any() { return engine_(); }
  std::uint32_t below(std::uint64_t limit) { return static_cast<std::uint32_t>(engine_() % limit); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }
  // Numbers at which checks go wrong: edges of widths and signs, small ones, and anything.
  std::uint64_t nasty() {
    switch (below(6)) {
      case 0: return below(4);
      case 1: return (std::uint64_t{1} << below(64)) - below(3);
      case 2: return ~std::uint64_t{0} - below(4096);
      case 3: return 0x7fffffffu + below(3);
      case 4: return below(1u << 16);
      default: return any();
    }
  }
  void fill(std::span<std::byte> bytes) {
    for (auto& byte : bytes) byte = static_cast<std::byte>(engine_());
  }
  template <class T>
  auto& of(T& list) {
    return list[below(list.size())];
  }

 private:
  std::mt19937_64 engine_;
};

class Intruder {
 public:
  // Attached, or not: then attached() says so.
  Intruder(const std::string& path, const char* name) {
    auto socket = vmci::PacketSocket::connect(path);
    if (!socket) return;
    socket_ = std::move(*socket);
    AttachRequest request{};
    request.magic = magic;
    request.major = version_major;
    request.minor = version_minor;
    std::strncpy(request.name, name, sizeof(request.name) - 1);
    std::vector<vmci::UniqueFd> fds;
    const auto reply = call_on_socket<Request::attach>(request, {}, &fds);
    if (!reply || fds.size() != 4) return;
    auto arena = vmci::Mapping::map(fds[0].get(), 0, reply->arena_bytes, vmci::Writable::yes);
    if (!arena) return;
    descriptors_ = std::move(fds);
    take(*reply, std::move(*arena));
  }
  // A process of a virtual machine, which has greeted the service.
  Intruder(test::FakeMachine& machine, const char* name) : machine_(&machine), connection_(machine.open()) {
    const auto pages = machine.take_pages(machine.welcome.arena_bytes / vm::page_bytes);
    lent_.push_back(pages);
    auto arena = machine.map(pages);
    if (!arena) return;
    machine.lend(connection_, vm::segment_arena, pages);
    AttachRequest request{};
    request.magic = magic;
    request.major = version_major;
    request.minor = version_minor;
    std::strncpy(request.name, name, sizeof(request.name) - 1);
    if (const auto reply = call_on_socket<Request::attach>(request)) take(*reply, std::move(arena));
  }
  ~Intruder() {
    if (machine_ == nullptr) return;
    machine_->link().send(vm::Frame::close, connection_, std::span<const std::byte>{});
    machine_->await(vm::Frame::closed, connection_, 1000);
    for (const auto& pages : lent_) machine_->give_back(pages);
  }
  Intruder(const Intruder&) = delete;
  Intruder& operator=(const Intruder&) = delete;

  bool attached() const { return static_cast<bool>(arena_); }
  // In a machine: memory of its RAM, registered where it is. Not even an honest backing: nothing.
  std::byte* lend(std::uint64_t bytes, std::uint32_t& backing) {
    const auto pages = machine_->take_pages(bytes / vm::page_bytes);
    lent_.push_back(pages);
    memory_.push_back(machine_->map(pages));
    if (!memory_.back()) return nullptr;
    machine_->lend(connection_, ++segment_, pages);
    const auto address = reinterpret_cast<std::uint64_t>(memory_.back().data());
    const auto added = call_on_socket<Request::add_pinned>({address, bytes, 0, segment_});
    if (!added) return nullptr;
    backing = added->backing;
    return memory_.back().data();
  }
  bool in_machine() const { return machine_ != nullptr; }
  bool expelled() {
    if (machine_ != nullptr) return machine_->wait([&] { return machine_->has(vm::Frame::closed, connection_); }, 0);
    pollfd state{socket_.fd(), 0, 0};
    return ::poll(&state, 1, 0) == 1 && (state.revents & (POLLHUP | POLLERR)) != 0;
  }

  void ring(std::uint32_t member) {
    doorbell_words().set(member);
    if (machine_ != nullptr) return machine_->ring(vm::doorbell_vector);
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(descriptors_[2].get(), &one, sizeof(one));
  }

  // One record in the control ring, as it is. False: no room within a second, or expelled.
  bool put(std::uint32_t user_control, std::uint32_t word, std::span<const std::byte> after_head, std::uint32_t slots) {
    const std::uint64_t until = now_ms() + 1000;
    while (!requests_.has_room(slots)) {
      requests_.set_freed(std::atomic_ref(control_.header().attacher.consumed).load(std::memory_order_acquire));
      if (expelled() || now_ms() > until) return false;
    }
    if (!after_head.empty()) requests_.write(sizeof(RecordHead), after_head);
    requests_.publish(address_of(host_context, control_port), word, user_control, slots);
    ring(0);
    return true;
  }

  template <Request R>
  std::optional<typename Message<R>::ReplyBody> call(const typename Message<R>::RequestBody& body) {
    std::byte bytes[sizeof(Head) + sizeof(body)] = {};
    Head head{};
    head.sequence = ++sequence_;
    std::memcpy(bytes, &head, sizeof(head));
    std::memcpy(bytes + sizeof(head), &body, sizeof(body));
    const auto slots = static_cast<std::uint32_t>((sizeof(bytes) + slot_bytes - 1) / slot_bytes);
    if (!put(static_cast<std::uint32_t>(R), sizeof(body), std::span(bytes).subspan(sizeof(RecordHead)), slots)) return {};
    alignas(64) std::byte record[record_slots_max * slot_bytes];
    for (const std::uint64_t until = now_ms() + 2000; now_ms() < until && !expelled();) {
      std::uint32_t got = 0;
      const auto peek = replies_.peek(record, record_slots_max, got);
      if (peek == vmci::RecordReader::Peek::malformed) return {};  // scribbled over
      if (peek == vmci::RecordReader::Peek::empty) {
        ::sched_yield();
        continue;
      }
      replies_.advance(got);
      std::atomic_ref(control_.header().creator.consumed).store(replies_.position(), std::memory_order_release);
      std::memcpy(&head, record, sizeof(head));
      if (head.sequence != sequence_) continue;
      last_status = head.status;
      if (head.status != 0) return {};
      typename Message<R>::ReplyBody reply{};
      std::memcpy(static_cast<void*>(&reply), record + sizeof(head), std::min(sizeof(reply), got * slot_bytes - sizeof(head)));
      return reply;
    }
    return {};
  }

  // Takes answers nobody waits for, so that the service finds room for more.
  void drain_replies() {
    alignas(64) std::byte record[record_slots_max * slot_bytes];
    std::uint32_t got = 0;
    while (replies_.peek(record, record_slots_max, got) == vmci::RecordReader::Peek::ready) replies_.advance(got);
    std::atomic_ref(control_.header().creator.consumed).store(replies_.position(), std::memory_order_release);
  }

  template <Request R>
  std::optional<typename Message<R>::ReplyBody> call_on_socket(const typename Message<R>::RequestBody& body,
                                                               std::span<const int> descriptors = {},
                                                               std::vector<vmci::UniqueFd>* given = nullptr) {
    if (machine_ != nullptr) {
      const auto answer = machine_->call<R>(connection_, body);
      last_status = machine_->status;
      if (given != nullptr) given->clear(), given->emplace_back();  // a stream, that is
      return answer;
    }
    std::byte packet[sizeof(Head) + sizeof(body)] = {};
    Head head{};
    head.record.control = static_cast<std::uint32_t>(R);
    head.sequence = ++sequence_;
    std::memcpy(packet, &head, sizeof(head));
    std::memcpy(packet + sizeof(head), &body, sizeof(body));
    if (!socket_.send(packet, descriptors)) return {};
    std::byte answer[sizeof(Head) + body_bytes_max];
    for (;;) {
      auto received = socket_.receive(answer, 2000);
      if (!received || received->bytes < sizeof(head)) return {};
      std::memcpy(&head, answer, sizeof(head));
      if (head.sequence != sequence_) continue;
      last_status = head.status;
      if (head.status != 0) return {};
      typename Message<R>::ReplyBody reply{};
      std::memcpy(static_cast<void*>(&reply), answer + sizeof(head), std::min(sizeof(reply), received->bytes - sizeof(head)));
      if (given != nullptr) *given = std::move(received->descriptors);
      return reply;
    }
  }

  std::byte* arena() const { return arena_.data(); }
  const AttachReply& info() const { return info_; }
  const vmci::QueuePairView& control() const { return control_; }
  vmci::PacketSocket& socket() { return socket_; }
  // In the order of AttachReply: arena, service page, doorbell, wake.
  int descriptor(std::size_t index) const { return descriptors_[index].get(); }
  vmci::ReadyBitmap doorbell_words() const {
    return vmci::ReadyBitmap(reinterpret_cast<vmci::ReadyWords*>(arena_.data() + info_.doorbell_offset));
  }

  int last_status = 0;

 private:
  void take(const AttachReply& reply, vmci::Mapping arena) {
    info_ = reply;
    arena_ = std::move(arena);
    control_ = vmci::QueuePairView(arena_.data() + info_.control_offset, info_.control_geometry);
    requests_ = vmci::RecordWriter(control_.produce(), info_.control_geometry.produce_slots);
    replies_ = vmci::RecordReader(control_.consume_records(), info_.control_geometry.consume_entries);
  }

  vmci::PacketSocket socket_;
  test::FakeMachine* machine_ = nullptr;
  std::uint32_t connection_ = 0, segment_ = vm::segment_first;
  std::vector<std::vector<std::uint64_t>> lent_;
  std::deque<vmci::Mapping> memory_;
  AttachReply info_{};
  vmci::Mapping arena_;
  std::vector<vmci::UniqueFd> descriptors_;
  vmci::QueuePairView control_;
  vmci::RecordWriter requests_;
  vmci::RecordReader replies_;
  std::uint32_t sequence_ = 0;
};

}  // namespace vrdma::hostile
