// What a hostile guest owns: a context with everything that verbs know, its queue pairs connected to one another, and a raw
// writer into each of their queues. Made by honest requests, so that what follows meets live objects. One thread.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "tests/hostile/intruder.hpp"

namespace vrdma::hostile {

inline constexpr std::uint32_t all_access = 0xf;

struct Memory {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t backing = backing_process;
  std::uint32_t mr = 0, key = 0;
  int fd = -1;
};

struct OwnedQp {
  CreateQpReply made{};
  std::uint32_t type = 2;
  vmci::RecordWriter sends, receives;
};

class Property {
 public:
  explicit Property(Intruder& intruder) : in_(intruder) {}
  ~Property() {
    for (auto& memory : memories) {
      if (in_.in_machine()) break;  // the machine's
      ::munmap(memory.address, memory.bytes);
      if (memory.fd >= 0) ::close(memory.fd);
    }
  }
  Property(const Property&) = delete;
  Property& operator=(const Property&) = delete;

  // False where a step failed: somebody scribbled, or a quota is used up.
  bool make(std::uint32_t depth = 32) {
    std::vector<vmci::UniqueFd> given;
    const auto opened = in_.call_on_socket<Request::open_context>({}, {}, &given);
    if (!opened || given.empty()) return false;
    context = opened->context;
    pipes.push_back(std::move(given.front()));
    const auto made_channel = in_.call_on_socket<Request::create_channel>({context, in_.in_machine() ? vm::fixed_vectors : 0}, {}, &given);
    if (!made_channel || given.empty()) return false;
    channel = made_channel->handle;
    pipes.push_back(std::move(given.front()));
    const auto domain = in_.call<Request::create_pd>({context, 0});
    if (!domain) return false;
    pd = domain->handle;
    for (int i = 0; i < 2; ++i) {
      const auto cq = in_.call<Request::create_cq>({context, depth * 8, i == 0 ? channel : 0, 0});
      if (!cq) return false;
      cqs.push_back(*cq);
    }
    const auto shared = in_.call<Request::create_srq>({context, pd, depth, 4, 1, 0});
    if (!shared) return false;
    srq = *shared;
    srq_writer = vmci::RecordWriter(view(srq.queue).produce(), srq.queue.geometry.produce_slots);
    for (const std::uint32_t type : {2u, 2u, 3u, 3u, 4u, 2u, 2u}) {
      OwnedQp qp;
      qp.type = type;
      const bool by_srq = qps.size() >= 5;
      const auto made =
          in_.call<Request::create_qp>({context, pd, cqs[0].cq, cqs[qps.size() % 2].cq, by_srq ? srq.srq : 0, type, depth, depth, 4, 4, 64, 0});
      if (!made) return false;
      qp.made = *made;
      qp.sends = vmci::RecordWriter(view(made->send).produce(), made->send.geometry.produce_slots);
      qp.receives = vmci::RecordWriter(view(made->receive).produce(), made->receive.geometry.produce_slots);
      qps.push_back(qp);
    }
    const auto device = in_.call<Request::query_device>({});
    if (!device) return false;
    lid = device->lid;
    for (const auto& [a, b] : {std::pair{0, 1}, {2, 3}, {4, 4}, {5, 6}})
      if (!connect(qps[static_cast<std::size_t>(a)], qps[static_cast<std::size_t>(b)].made.qpn) ||
          (a != b && !connect(qps[static_cast<std::size_t>(b)], qps[static_cast<std::size_t>(a)].made.qpn)))
        return false;
    return true;
  }

  bool connect(const OwnedQp& qp, std::uint32_t peer, std::uint8_t timeout = 8) {
    ModifyQpRequest request{};
    request.qp = qp.made.qp;
    auto& a = request.attributes;
    a.access_flags = all_access;
    a.port_num = a.path.port_num = 1;
    a.path_mtu = 3;
    a.dest_qp_num = peer;
    a.path.dlid = lid;
    a.max_rd_atomic = a.max_dest_rd_atomic = 4;
    a.min_rnr_timer = 1;
    a.timeout = timeout;
    a.retry_cnt = a.rnr_retry = 7;
    a.qkey = 0x1111;
    const bool ud = qp.type == 4, rc = qp.type == 2;
    const auto to = [&](std::uint32_t state, std::uint32_t mask) {
      a.state = state;
      request.mask = qp_attr_state | mask;
      return in_.call<Request::modify_qp>(request).has_value();
    };
    return to(1, qp_attr_pkey_index | qp_attr_port | (ud ? qp_attr_qkey : qp_attr_access_flags)) &&
           to(2, ud ? 0u : qp_attr_av | qp_attr_path_mtu | qp_attr_dest_qpn | qp_attr_rq_psn |
                               (rc ? qp_attr_max_dest_rd_atomic | qp_attr_min_rnr_timer : 0u)) &&
           to(3, qp_attr_sq_psn | (rc ? qp_attr_timeout | qp_attr_retry_cnt | qp_attr_rnr_retry | qp_attr_max_qp_rd_atomic : 0u));
  }

  bool change_state(const OwnedQp& qp, std::uint32_t state) {
    ModifyQpRequest request{};
    request.qp = qp.made.qp;
    request.mask = qp_attr_state;
    request.attributes.state = state;
    request.send_position = qp.sends.position();
    request.receive_position = qp.receives.position();
    return in_.call<Request::modify_qp>(request).has_value();
  }

  // fd: -1 for memory of the process alone; else it is offered as a backing, and kept.
  Memory* add(std::uint64_t bytes, int fd, std::uint64_t registered_bytes = 0) {
    if (registered_bytes == 0) registered_bytes = bytes;
    if (in_.in_machine()) {
      Memory memory{nullptr, bytes};
      memory.address = in_.lend(bytes, memory.backing);
      if (fd >= 0) ::close(fd);
      if (memory.address == nullptr) return nullptr;
      memories.push_back(memory);
      return enter(memories.back(), registered_bytes);
    }
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) {
      if (fd >= 0) ::close(fd);
      return nullptr;
    }
    if (fd < 0) reach();
    Memory memory{static_cast<std::byte*>(at), bytes, backing_process, 0, 0, fd};
    memories.push_back(memory);
    Memory& kept = memories.back();
    if (fd >= 0) {
      const auto added = in_.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&fd, 1));
      if (!added) return nullptr;
      kept.backing = added->backing;
    }
    return enter(kept, registered_bytes);
  }
  // What no file backs can be registered from here on, however it is reached.
  void reach() {
    if (std::exchange(reached, true) || in_.in_machine()) return;
    const std::uint64_t probe = 0x0123456789abcdef;
    std::vector<vmci::UniqueFd> given;
    (void)in_.call_on_socket<Request::reach_process>({reinterpret_cast<std::uint64_t>(&probe), probe}, {}, &given);
  }
  Memory* enter(Memory& kept, std::uint64_t registered_bytes) {
    StageExtentsRequest stage{};
    stage.count = stage.clear_first = 1;
    const auto address = reinterpret_cast<std::uint64_t>(kept.address);
    stage.extents[0] = {address, registered_bytes, 0, kept.backing, 0};
    if (!in_.call<Request::stage_extents>(stage)) return nullptr;
    const auto registered = in_.call<Request::reg_mr>({pd, all_access, address, registered_bytes, address});
    if (!registered) return nullptr;
    kept.mr = registered->handle;
    kept.key = registered->key;
    return &kept;
  }
  // Memory that its owner cuts off when it likes.
  static int loose_file(std::uint64_t bytes, unsigned flags = 0) {
    const int fd = ::memfd_create("hostile", MFD_CLOEXEC | flags);
    if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return ::close(fd), -1;
    return fd;
  }
  static int sealed_file(std::uint64_t bytes, unsigned flags = 0) {
    const int fd = loose_file(bytes, MFD_ALLOW_SEALING | flags);
    if (fd >= 0 && ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) return ::close(fd), -1;
    return fd;
  }

  vmci::QueuePairView view(const QueueReply& queue) const { return {in_.arena() + queue.offset, queue.geometry}; }

  // A send WQE as it is; the ring's writer is told that everything is free: a queue that the service does not empty is overwritten.
  void send(OwnedQp& qp, WqeControl control, std::span<const Sge> sges, const RemoteOperand& remote, std::uint32_t slots = 0) {
    std::byte wqe[send_wqe_slots_max * slot_bytes] = {};
    std::memcpy(wqe + sizeof(RecordHead), &remote, sizeof(remote));
    const auto payload = std::as_bytes(sges);
    std::ranges::copy(payload.first(std::min(payload.size(), sizeof(wqe) - send_wqe_payload_offset)), wqe + send_wqe_payload_offset);
    if (slots == 0) slots = send_wqe_slots(static_cast<std::uint32_t>(sges.size_bytes()));
    qp.sends.set_freed(qp.sends.position());
    qp.sends.write(sizeof(RecordHead), std::span(wqe).subspan(sizeof(RecordHead), std::min<std::size_t>(slots, send_wqe_slots_max) * slot_bytes - sizeof(RecordHead)));
    qp.sends.publish(0x77, 0, pack(control), slots);
    in_.ring(qp.made.doorbell);
  }
  void receive(vmci::RecordWriter& writer, std::uint32_t record_slots, std::span<const Sge> sges, WqeControl control) {
    std::byte wqe[16 * slot_bytes] = {};
    std::ranges::copy(std::as_bytes(sges), wqe + receive_wqe_payload_offset);
    writer.set_freed(writer.position());
    writer.write(sizeof(RecordHead), std::span(wqe).subspan(sizeof(RecordHead), record_slots * slot_bytes - sizeof(RecordHead)));
    writer.publish(0x88, 0, pack(control), record_slots);
  }

  std::uint32_t context = 0, channel = 0, pd = 0;
  std::uint16_t lid = 0;
  std::vector<CreateCqReply> cqs;
  CreateSrqReply srq{};
  vmci::RecordWriter srq_writer;
  std::vector<OwnedQp> qps;
  std::deque<Memory> memories;  // addresses stay
  std::vector<vmci::UniqueFd> pipes;  // async, completion: read by nobody but raid_events()
  bool reached = false;               // it has asked how

 private:
  Intruder& in_;
};

}  // namespace vrdma::hostile
