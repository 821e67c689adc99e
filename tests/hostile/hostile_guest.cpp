// A guest that means harm: attaches by raw packets, makes real objects, then writes and passes garbage, random and targeted, by
// a seed, until its time is over. One target a process:
//
//   hostile_guest SOCKET TARGET SEED SECONDS [UID]
//
// It never judges the service: hostile_test does, from outside. Exit code 0 unless it could not attach even once.
#include <linux/userfaultfd.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "tests/hostile/property.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::hostile {
namespace {

struct Raid {
  std::string path;
  Dice dice;
  std::uint64_t until_ms;
  std::uint64_t attached = 0, blows = 0;
  bool over() const { return now_ms() >= until_ms; }
};

// Something like a WQE: mostly right, with a field or two that is not.
void strike_with_wqe(Raid& raid, Property& own) {
  Dice& dice = raid.dice;
  OwnedQp& qp = dice.of(own.qps);
  Memory& memory = dice.of(own.memories);
  const auto address = reinterpret_cast<std::uint64_t>(memory.address);
  std::vector<Sge> sges(dice.one_in(8) ? dice.below(31) : 1 + dice.below(3));
  for (auto& sge : sges) {
    sge = {address + dice.below(memory.bytes), 1 + dice.below(8192), memory.key};
    if (dice.one_in(6)) sge.address = dice.nasty();
    if (dice.one_in(6)) sge.bytes = static_cast<std::uint32_t>(dice.nasty());
    if (dice.one_in(6)) sge.lkey = static_cast<std::uint32_t>(dice.nasty());
  }
  WqeControl control{static_cast<WrOpcode>(dice.below(7)), wr_signaled, static_cast<std::uint16_t>(sges.size())};
  if (dice.one_in(8)) control.opcode = static_cast<WrOpcode>(dice.below(256));
  if (dice.one_in(4)) control.flags = static_cast<std::uint8_t>(dice.below(128));
  if (dice.one_in(8)) control.count = static_cast<std::uint16_t>(dice.below(1024));
  if (control.opcode == WrOpcode::atomic_cmp_and_swp || control.opcode == WrOpcode::atomic_fetch_and_add) {
    sges.assign(1, {address + dice.below(512) * 8, 8, memory.key});
    control.count = 1;
  }
  RemoteOperand remote{address + dice.below(memory.bytes / 8) * 8, dice.any(), dice.any(), memory.key, 0};
  if (dice.one_in(6)) remote.address = dice.nasty();
  if (dice.one_in(6)) remote.rkey = static_cast<std::uint32_t>(dice.any());
  if (qp.type == 4) {
    const UdOperand ud{dice.one_in(3) ? static_cast<std::uint32_t>(dice.nasty()) : qp.made.qpn, 0x1111, own.lid, 0,
                       static_cast<std::uint8_t>(dice.below(256)), static_cast<std::uint8_t>(dice.below(256)), 0, 0, 0, {}};
    std::memcpy(&remote, &ud, sizeof(ud));
  }
  own.send(qp, control, sges, remote, dice.one_in(10) ? 1 + dice.below(64) : 0);
}

void strike_with_receive(Raid& raid, Intruder& in, Property& own) {
  Dice& dice = raid.dice;
  Memory& memory = dice.of(own.memories);
  std::vector<Sge> sges(dice.below(4), Sge{reinterpret_cast<std::uint64_t>(memory.address), 4096, memory.key});
  for (auto& sge : sges)
    if (dice.one_in(6)) sge = {dice.nasty(), static_cast<std::uint32_t>(dice.nasty()), memory.key};
  WqeControl control{WrOpcode::receive, 0, static_cast<std::uint16_t>(sges.size())};
  if (dice.one_in(12)) control = {static_cast<WrOpcode>(dice.below(256)), 0, static_cast<std::uint16_t>(dice.below(1024))};
  if (dice.one_in(3)) {
    own.receive(own.srq_writer, own.srq.queue.record_slots, sges, control);
    own.view(own.srq.queue).header().creator.produced_count += dice.one_in(8) ? static_cast<std::uint32_t>(dice.any()) : 1;
    return;
  }
  OwnedQp& qp = dice.of(own.qps);
  if (qp.made.receive.geometry.produce_slots > 2) own.receive(qp.receives, qp.made.receive.record_slots, sges, control);
  in.ring(qp.made.doorbell);
}

// Any bytes over any of its queues: headers, cursors, rings, lanes, CQs, the doorbell's words.
void strike_at_random(Raid& raid, Intruder& in, Property& own) {
  Dice& dice = raid.dice;
  std::byte noise[256];
  const std::size_t length = 1 + dice.below(sizeof(noise));
  dice.fill(std::span(noise, length));
  const auto over = [&](std::uint64_t offset, std::uint64_t bytes) {
    const std::uint64_t at = dice.below(bytes);
    std::memcpy(in.arena() + offset + at, noise, std::min<std::uint64_t>(length, bytes - at));
  };
  OwnedQp& qp = dice.of(own.qps);
  switch (dice.below(8)) {
    case 0: return over(qp.made.send.offset, qp.made.send.geometry.total_bytes());
    case 1: return over(qp.made.receive.offset, qp.made.receive.geometry.total_bytes());
    case 2: return over(own.srq.queue.offset, own.srq.queue.geometry.total_bytes());
    case 3: return over(dice.of(own.cqs).offset, sizeof(CqShared));
    case 4: return over(in.info().doorbell_offset, sizeof(vmci::ReadyWords));
    case 5: return over(qp.made.send.offset, sizeof(vmci::QueuePairHeader));
    case 6: {  // phases of a whole ring flipped
      auto* head = own.view(qp.made.send).produce();
      for (std::uint32_t i = 0; i < qp.made.send.geometry.produce_slots; ++i)
        reinterpret_cast<RecordHead*>(head + i * slot_bytes)->control ^= control_phase_bit;
      return in.ring(qp.made.doorbell);
    }
    default: {
      auto* const cq = reinterpret_cast<CqShared*>(in.arena() + dice.of(own.cqs).offset);
      cq->consumed = static_cast<std::uint32_t>(dice.nasty());
      cq->arm = static_cast<std::uint32_t>(dice.any());
      cq->hot[dice.below(hot_lanes)] = static_cast<std::uint32_t>(dice.nasty());
    }
  }
}

// Reads completions in the only way that matters to the service: says that all are taken.
void pretend_to_poll(Intruder& in, Property& own) {
  for (const auto& cq : own.cqs) reinterpret_cast<CqShared*>(in.arena() + cq.offset)->consumed += 64;
}

void raid_rings(Raid& raid) {
  Intruder in(raid.path, "rings");
  Property own(in);
  if (!in.attached() || !own.make() || own.add(1 << 20, Property::sealed_file(1 << 20)) == nullptr || own.add(1 << 16, -1) == nullptr)
    return;
  ++raid.attached;
  for (int i = 0; i < 3000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    switch (raid.dice.below(12)) {
      case 0: strike_at_random(raid, in, own); break;
      case 1: case 2: case 3: strike_with_receive(raid, in, own); break;
      case 4: in.doorbell_words().set(raid.dice.below(vmci::ready_members_max)); break;
      case 5: {  // back to life, so that later blows meet a queue pair that works
        OwnedQp& qp = raid.dice.of(own.qps);
        own.change_state(qp, 0);
        const std::size_t index = static_cast<std::size_t>(&qp - own.qps.data());
        constexpr std::size_t peer[] = {1, 0, 3, 2, 4, 6, 5};
        own.connect(qp, own.qps[raid.dice.one_in(4) ? raid.dice.below(own.qps.size()) : peer[index]].made.qpn,
                    static_cast<std::uint8_t>(raid.dice.below(32)));
        break;
      }
      case 6: pretend_to_poll(in, own); break;
      case 7:
        if (raid.dice.one_in(40)) {  // a queue pair goes, and what it was tied to with it
          in.call<Request::destroy_qp>({own.qps.back().made.qp, 0});
          if (own.qps.size() > 2) own.qps.pop_back();
        }
        [[fallthrough]];
      default: strike_with_wqe(raid, own);
    }
  }
}

// Requests whose head and body are right in size and wrong in content, or wrong in size too.
void raid_control(Raid& raid) {
  Intruder in(raid.path, "control");
  Property own(in);
  if (!in.attached() || !own.make(8) || own.add(1 << 20, Property::sealed_file(1 << 20)) == nullptr) return;
  ++raid.attached;
  Dice& dice = raid.dice;
  // Two contexts: objects of one are offered to the other, and closed under it.
  std::vector<std::uint32_t> contexts{own.context};
  if (const auto second = in.call_on_socket<Request::open_context>({})) contexts.push_back(second->context);
  for (int i = 0; i < 1500 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    std::byte body[body_bytes_max - sizeof(RecordHead)] = {};
    // Handles count up from 1: small numbers hit.
    for (std::size_t at = sizeof(Head) - sizeof(RecordHead); at + 4 <= 256; at += 4) {
      const std::uint32_t field = dice.one_in(3) ? static_cast<std::uint32_t>(dice.nasty()) : dice.below(64);
      std::memcpy(body + at, &field, 4);
    }
    const auto request = dice.one_in(20) ? static_cast<std::uint32_t>(dice.any()) & control_user_mask
                                         : dice.below(static_cast<std::uint32_t>(Request::count) + 2);
    const auto put_field = [&](std::size_t index, auto value) {
      std::memcpy(body + sizeof(Head) - sizeof(RecordHead) + index * 4, &value, sizeof(value));
    };
    switch (static_cast<Request>(request)) {
      case Request::close_context:
        if (!dice.one_in(50)) continue;
        break;
      case Request::create_qp: {
        const CreateQpRequest create{dice.of(contexts), own.pd, own.cqs[0].cq, own.cqs[1].cq, 0, 2 + dice.below(3), dice.below(64), dice.below(64), 2, 2, 0, 0};
        if (!dice.one_in(3)) put_field(0, create);
        break;
      }
      case Request::create_cq:
        if (!dice.one_in(3)) put_field(0, CreateCqRequest{dice.of(contexts), 1 + dice.below(256), dice.one_in(2) ? own.channel : 0, 0});
        break;
      case Request::create_srq:
        if (!dice.one_in(3)) put_field(0, CreateSrqRequest{dice.of(contexts), own.pd, 1 + dice.below(64), 2, 0, 0});
        break;
      case Request::create_pd:
        put_field(0, dice.of(contexts));
        break;
      case Request::stage_extents: {
        StageExtentsRequest stage{};
        stage.count = dice.one_in(6) ? static_cast<std::uint32_t>(dice.nasty()) : 1 + dice.below(3);
        stage.clear_first = dice.below(2);
        std::uint64_t at = 0x10000;
        for (auto& extent : stage.extents) {
          extent = {at, 1 + dice.below(65536), dice.below(1 << 20), dice.one_in(2) ? backing_process : own.memories[0].backing, 0};
          if (dice.one_in(8)) extent.bytes = dice.nasty();
          if (dice.one_in(8)) extent.backing_offset = dice.nasty();
          at += extent.bytes;
        }
        put_field(0, stage);
        break;
      }
      case Request::reg_mr:
        put_field(0, RegMrRequest{own.pd, dice.below(16), 0x10000, dice.one_in(3) ? dice.nasty() : 1 + dice.below(65536), dice.nasty()});
        break;
      case Request::rereg_mr:
        put_field(0, ReregMrRequest{own.memories[0].mr, dice.below(16), dice.below(8), dice.below(16), 0x10000, dice.nasty(), dice.nasty()});
        break;
      default:
        break;
    }
    const std::uint32_t slots = dice.one_in(30) ? 1 + dice.below(64) : 63;
    const std::uint32_t word = dice.one_in(60) ? static_cast<std::uint32_t>(dice.nasty()) : slots * 64 - 32;
    if (!in.put(request, word, std::span(body).first(slots * slot_bytes - sizeof(RecordHead) < sizeof(body) ? slots * slot_bytes - sizeof(RecordHead) : sizeof(body)), slots)) return;
    if (!dice.one_in(100)) in.drain_replies();
    if (dice.one_in(200)) {  // cursors of the control pair itself
      in.control().header().creator.consumed = static_cast<std::uint32_t>(dice.nasty());
      in.control().header().creator.waiting = static_cast<std::uint32_t>(dice.any());
    }
    if (dice.one_in(400)) {
      const std::uint64_t bytes = in.control().geometry().total_bytes();
      dice.fill(std::span(in.arena() + in.info().control_offset + dice.below(bytes - 128), 128));
    }
  }
}

// Packets: sizes, kinds, orders and descriptors that nobody agreed on.
void raid_socket(Raid& raid) {
  Dice& dice = raid.dice;
  auto connected = vmci::PacketSocket::connect(raid.path);
  if (!connected) return;
  const vmci::PacketSocket socket = std::move(*connected);
  ++raid.attached;
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int i = 0; i < 400 && !raid.over(); ++i, ++raid.blows) {
    std::vector<std::byte> packet(dice.one_in(3) ? dice.below(8192) : sizeof(Head) + sizeof(AttachRequest));
    dice.fill(packet);
    Head head{};
    head.record.control = dice.one_in(2) ? static_cast<std::uint32_t>(Request::attach) : dice.below(static_cast<std::uint32_t>(Request::count) + 3);
    head.sequence = static_cast<std::uint32_t>(dice.any());
    if (packet.size() >= sizeof(head)) std::memcpy(packet.data(), &head, sizeof(head));
    if (packet.size() >= sizeof(Head) + sizeof(AttachRequest) && !dice.one_in(4)) {
      AttachRequest request{};
      std::memcpy(&request, packet.data() + sizeof(Head), sizeof(request));
      request.magic = magic;
      request.major = dice.one_in(8) ? 2 : version_major;
      std::memcpy(packet.data() + sizeof(Head), &request, sizeof(request));
    }
    std::vector<int> given(dice.one_in(4) ? dice.below(vmci::packet_descriptors_max + 1) : 0, null);
    (void)socket.send(packet, given);
    if (dice.one_in(6)) {  // far too many descriptors at once
      std::vector<int> many(253, null);
      iovec part{packet.data(), packet.size()};
      std::vector<char> room(CMSG_SPACE(many.size() * sizeof(int)));
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = room.data();
      message.msg_controllen = room.size();
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(many.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), many.data(), many.size() * sizeof(int));
      ::sendmsg(socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (dice.one_in(3)) {
      std::byte answer[8192];
      while (socket.receive(answer, 0)) {
        pollfd state{socket.fd(), POLLIN, 0};
        if (::poll(&state, 1, 0) != 1 || (state.revents & POLLHUP)) break;
      }
    }
    pollfd state{socket.fd(), 0, 0};
    if (::poll(&state, 1, 0) == 1 && (state.revents & POLLHUP)) break;
  }
  ::close(null);
}

// Descriptors that are no memory, and memory that changes under the service.
void raid_descriptors(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in(raid.path, "descriptors");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  ++raid.attached;
  std::vector<int> odd;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) odd.push_back(ends[0]), ::close(ends[1]);
  odd.push_back(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  odd.push_back(::open("/", O_PATH | O_CLOEXEC));
  odd.push_back(::open("/dev/zero", O_RDWR | O_CLOEXEC));
  odd.push_back(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  const int inner = ::epoll_create1(EPOLL_CLOEXEC);
  ::epoll_ctl(inner, EPOLL_CTL_ADD, epoll, &event);
  odd.push_back(epoll), odd.push_back(inner);
  odd.push_back(in.socket().fd());
  odd.push_back(in.descriptor(1));  // the service page: sealed, but not for writing
  const int empty = Property::sealed_file(0);
  const int frozen = Property::sealed_file(1 << 16);
  if (frozen >= 0) ::fcntl(frozen, F_ADD_SEALS, F_SEAL_WRITE);
  odd.push_back(empty), odd.push_back(frozen);
  for (int fd : odd) {
    const auto added = in.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&fd, 1));
    if (!added) continue;
    StageExtentsRequest stage{};
    stage.count = stage.clear_first = 1;
    stage.extents[0] = {0x10000, 4096, dice.one_in(2) ? 0 : dice.nasty(), added->backing, 0};
    in.call<Request::stage_extents>(stage);
    in.call<Request::reg_mr>({own.pd, all_access, 0x10000, 4096, 0x10000});
    ++raid.blows;
  }
  for (int fd : odd)
    if (fd != in.socket().fd() && fd != in.descriptor(1)) ::close(fd);

  constexpr std::uint64_t bytes = 4 << 20;
  if (own.add(bytes, Property::sealed_file(bytes)) == nullptr) return;
  // Huge pages that do not exist: every touch is a bus error.
  own.add(64 << 20, Property::sealed_file(64 << 20, MFD_HUGETLB));
  // A file far larger than memory, registered here and there.
  if (const int vast = Property::sealed_file(std::uint64_t{1} << 45); vast >= 0) {
    const auto added = in.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&vast, 1));
    for (std::uint64_t i = 0; added && i < 3000 && !raid.over(); ++i, ++raid.blows) {
      StageExtentsRequest stage{};
      stage.count = stage.clear_first = 1;
      stage.extents[0] = {0x10000, 4096, i << 28, added->backing, 0};
      if (!in.call<Request::stage_extents>(stage) || !in.call<Request::reg_mr>({own.pd, all_access, 0x10000, 4096, 0x10000})) break;
    }
    ::close(vast);
  }
  for (int i = 0; i < 2000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    Memory& memory = dice.of(own.memories);
    if (memory.fd >= 0) ::fallocate(memory.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, dice.below(memory.bytes) & ~4095u, 1 << 20);
    if (memory.fd >= 0 && dice.one_in(20)) (void)!::ftruncate(memory.fd, dice.below(memory.bytes));
    if (dice.one_in(16)) {
      OwnedQp& qp = dice.of(own.qps);
      own.change_state(qp, 0);
      own.connect(qp, qp.made.qpn);
    }
    pretend_to_poll(in, own);
  }
}

// A userfaultfd that holds up the kernel too, opened before privileges go: what a guest without any does by FUSE. -1: none.
int faults = -1;

int open_userfaultfd() {
  const int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
  uffdio_api api{UFFD_API, 0, 0};
  if (fd >= 0 && ::ioctl(fd, UFFDIO_API, &api) == 0) return fd;
  std::printf("SKIP  pages that nobody supplies: userfaultfd says %s\n", std::strerror(errno));
  return -1;
}

// Memory of the process: gone, forbidden, or behind a userfaultfd that nobody answers.
void raid_memory(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in(raid.path, "memory");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  ++raid.attached;
  constexpr std::uint64_t bytes = 1 << 20;
  if (own.add(bytes, -1) == nullptr || own.add(bytes, -1) == nullptr || own.add(bytes, Property::sealed_file(bytes)) == nullptr) return;
  const uffdio_range unsupplied{reinterpret_cast<std::uint64_t>(own.memories[0].address), bytes};
  uffdio_register registration{unsupplied, UFFDIO_REGISTER_MODE_MISSING, 0};
  const bool held_up = faults >= 0 && ::ioctl(faults, UFFDIO_REGISTER, &registration) == 0;
  std::thread holder;
  if (held_up && dice.one_in(2)) {  // holds the lock of the arena's file while ranges of it come and go
    holder = std::thread([&] {
      [[maybe_unused]] const auto written = ::pwrite(in.descriptor(0), own.memories[0].address, 4096, 1 << 20);
    });
    for (int i = 0; i < 50 && !raid.over(); ++i, ++raid.blows)
      if (const auto cq = in.call<Request::create_cq>({own.context, 64, 0, 0})) (void)in.call<Request::destroy_cq>({cq->cq, 0});
  }
  if (dice.one_in(2)) {  // sleeps in the middle of it all; a child wakes it
    const pid_t self = ::getpid();
    const pid_t child = ::fork();
    if (child == 0) {
      ::usleep(200'000 + dice.below(300'000));
      ::kill(self, SIGSTOP);
      ::usleep(300'000);
      ::kill(self, SIGCONT);
      ::_exit(0);
    }
  }
  const std::uint64_t leave_ms = now_ms() + 1500;
  for (int i = 0; i < 4000 && !raid.over() && now_ms() < leave_ms && !in.expelled(); ++i, ++raid.blows) {
    strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    Memory& memory = own.memories[1];
    switch (dice.below(24)) {
      case 0: ::mprotect(memory.address + (dice.below(bytes) & ~4095u), 4096, PROT_NONE); break;
      case 1: ::mprotect(memory.address, bytes, PROT_READ | PROT_WRITE); break;
      case 2: ::munmap(memory.address + (dice.below(bytes) & ~4095u), 4096); break;
      case 3: ::mmap(memory.address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0); break;
      case 4: {
        OwnedQp& qp = dice.of(own.qps);
        own.change_state(qp, dice.one_in(2) ? 0 : 6);
        if (dice.one_in(2)) own.change_state(qp, 0), own.connect(qp, qp.made.qpn, 31);
        break;
      }
      case 5:
        if (dice.one_in(30)) in.put(static_cast<std::uint32_t>(Request::dereg_mr), 8, {}, 1);
        break;
      default: break;
    }
    pretend_to_poll(in, own);
  }
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
  if (held_up) ::ioctl(faults, UFFDIO_UNREGISTER, &unsupplied);
  if (holder.joinable()) holder.join();
}

// A thread that copies for the service as it likes: bytes that nobody wrote, answers that nobody asked for, twice, or never.
void raid_copies(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in(raid.path, "copies");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  constexpr std::uint64_t bytes = 1 << 18;
  if (own.add(bytes, -1) == nullptr || own.add(bytes, -1) == nullptr) return;
  std::uint64_t probe[2] = {dice.any(), 0};
  ReachProcessRequest ask{reinterpret_cast<std::uint64_t>(probe), ~probe[0]};  // a lie: what it sees is somebody else's memory
  if (dice.one_in(8)) ask.probe_address = dice.nasty();
  if (dice.one_in(8) && faults >= 0) {  // on a page that nobody supplies
    uffdio_register range{{reinterpret_cast<std::uint64_t>(own.memories[0].address), bytes}, UFFDIO_REGISTER_MODE_MISSING, 0};
    if (::ioctl(faults, UFFDIO_REGISTER, &range) == 0) ask.probe_address = range.range.start;
  }
  std::vector<vmci::UniqueFd> given;
  const auto reply = in.call_on_socket<Request::reach_process>(ask, {}, &given);
  if (dice.one_in(2)) (void)in.call_on_socket<Request::reach_process>(ask);
  if (!reply || reply->way != reach_by_guest || given.size() != 1) return;
  ++raid.attached;
  auto segment = vmci::Mapping::map(given[0].get(), 0, copying::segment_bytes, vmci::Writable::yes);
  if (!segment) return;
  std::byte* const base = segment->data();
  auto& header = *reinterpret_cast<copying::Header*>(base);
  vmci::RecordReader jobs(base + copying::jobs_offset, copying::job_slots);
  vmci::RecordWriter answers(base + copying::answers_offset, copying::answer_slots);
  const std::uint64_t leave_ms = now_ms() + 1500;
  const bool lazy = dice.one_in(8);  // never answers
  for (int i = 0; i < 4000 && !raid.over() && now_ms() < leave_ms && !in.expelled(); ++i, ++raid.blows) {
    if (dice.one_in(2)) strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    pretend_to_poll(in, own);
    if (dice.one_in(64)) {
      OwnedQp& qp = dice.of(own.qps);
      own.change_state(qp, 0), own.connect(qp, qp.made.qpn, 31);
    }
    header.guest.sleeping = dice.below(2);
    if (lazy) continue;
    alignas(64) std::byte record[copying::job_record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    while (jobs.peek(record, copying::job_record_slots_max, slots) == vmci::RecordReader::Peek::ready) {
      jobs.advance(slots);
      std::uint64_t number;
      std::memcpy(&number, record, sizeof(number));
      if (dice.one_in(4)) dice.fill(std::span(base + copying::bounce_offset + dice.below(copying::slot_count * copying::bounce_bytes - 64), 64));
      answers.set_freed(answers.position());  // whether they were read or not
      answers.publish(dice.one_in(800) ? dice.nasty() : number, dice.one_in(16) ? static_cast<std::uint32_t>(dice.nasty()) : 0,
                      static_cast<std::uint32_t>(dice.any()) & control_user_mask, dice.one_in(800) ? 1 + dice.below(31) : 1);
      in.ring(reply->doorbell);
    }
    if (!dice.one_in(400)) continue;
    switch (dice.below(5)) {
      case 0: dice.fill(std::span(base + dice.below(copying::bounce_offset - 256), 256)); break;
      case 1: answers.publish(dice.below(1000), 0, 0, 1); break;  // to nothing
      case 2: ::fallocate(given[0].get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, copying::segment_bytes); break;
      case 3: {
        [[maybe_unused]] const int refused = ::ftruncate(given[0].get(), 0);
        break;
      }
      default: header.service.news = header.service.answers_taken = static_cast<std::uint32_t>(dice.any());
    }
    in.ring(reply->doorbell);
  }
}

// Events that nobody reads, and the shared descriptions bent as far as they go.
void raid_events(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in(raid.path, "events");
  Property own(in);
  if (!in.attached() || !own.make(16) || own.add(1 << 16, Property::sealed_file(1 << 16)) == nullptr) return;
  ++raid.attached;
  for (std::size_t i = 0; i < 4; ++i) {
    ::fcntl(in.descriptor(i), F_SETFL, 0);
    ::fcntl(in.descriptor(i), F_SETPIPE_SZ, 4096);
  }
  for (auto& pipe : own.pipes) ::fcntl(pipe.get(), F_SETPIPE_SZ, 4096), ::fcntl(pipe.get(), F_SETFL, 0);
  ::fcntl(in.socket().fd(), F_SETFL, 0);
  ::fcntl(in.descriptor(2), F_SETFL, O_NONBLOCK);  // the doorbell: filled up without waiting for room
  for (std::uint64_t part = std::uint64_t{1} << 63; part != 0 && dice.one_in(2); part >>= 1)
    while (::write(in.descriptor(2), &part, sizeof(part)) == sizeof(part)) {
    }
  auto* const cq = reinterpret_cast<CqShared*>(in.arena() + own.cqs[0].offset);
  const Memory& memory = own.memories[0];
  const Sge sge{reinterpret_cast<std::uint64_t>(memory.address), 8, memory.key};
  const RemoteOperand remote{sge.address + 64, 0, 0, memory.key, 0};
  in.control().header().creator.waiting = 1;  // every answer writes into the wake pipe
  for (int i = 0; i < 20000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    cq->arm = static_cast<std::uint32_t>(i) << 2 | arm_next;
    pretend_to_poll(in, own);
    OwnedQp& qp = own.qps[dice.below(2)];
    own.send(qp, {WrOpcode::rdma_write, wr_signaled, 1}, std::span(&sge, 1), remote);
    if (i % 8 == 7) {  // an asynchronous event each time
      own.send(qp, {static_cast<WrOpcode>(0), 0, 1023}, std::span(&sge, 1), remote, 1);
      own.change_state(qp, 0);
      own.connect(qp, own.qps[&qp == own.qps.data() ? 1 : 0].made.qpn);
    }
  }
}

// As much as there is of everything.
void raid_flood(Raid& raid) {
  Dice& dice = raid.dice;
  const auto kind = dice.below(4);
  if (kind == 0) {  // connections that never say anything, or only one thing
    std::vector<vmci::PacketSocket> sockets;
    for (int i = 0; i < 4000 && !raid.over(); ++i, ++raid.blows) {
      auto socket = vmci::PacketSocket::connect(raid.path);
      if (!socket) break;
      ++raid.attached;
      if (dice.one_in(3)) (void)socket->send(std::vector<std::byte>(dice.below(64)));
      sockets.push_back(std::move(*socket));
    }
    for (int i = 0; i < 50 && !raid.over(); ++i) ::usleep(10'000);
    return;
  }
  if (kind == 1) {  // requests without an end on many sockets, nobody reads the answers
    std::vector<vmci::PacketSocket> sockets;
    for (int i = 0; i < 8; ++i)
      if (auto socket = vmci::PacketSocket::connect(raid.path)) sockets.push_back(std::move(*socket));
    std::byte packet[sizeof(Head)] = {};
    Head head{};
    head.record.control = static_cast<std::uint32_t>(Request::show);
    std::memcpy(packet, &head, sizeof(head));
    raid.attached += sockets.size();
    for (const std::uint64_t until = now_ms() + 1500; now_ms() < until && !raid.over();)
      for (auto& socket : sockets) {
        iovec part{packet, sizeof(packet)};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        if (::sendmsg(socket.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) ++raid.blows;
      }
    return;
  }
  Intruder in(raid.path, "flood");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  ++raid.attached;
  if (kind == 2) {
    std::uint64_t refused = 0;
    while (!raid.over() && !in.expelled() && refused < 1000) {
      ++raid.blows;
      bool made = false;
      switch (dice.below(5)) {
        case 0: made = in.call<Request::create_pd>({own.context, 0}).has_value(); break;
        case 1: made = in.call<Request::create_cq>({own.context, 4096, own.channel, 0}).has_value(); break;
        case 2: made = in.call<Request::create_srq>({own.context, own.pd, 32768, 30, 0, 0}).has_value(); break;
        case 3: made = in.call<Request::create_qp>({own.context, own.pd, own.cqs[0].cq, own.cqs[1].cq, 0, 4, 16384, 16384, 30, 30, 0, 0}).has_value(); break;
        default: made = in.call_on_socket<Request::create_channel>({own.context, 0}).has_value(); break;
      }
      if (!made) ++refused;
    }
    return;
  }
  // Descriptors into the service, and registrations of a million pieces.
  const int file = Property::sealed_file(1 << 20);
  std::uint32_t backing = 0;
  for (int i = 0; i < 3000 && !raid.over(); ++i, ++raid.blows)
    if (const auto added = in.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&file, 1))) backing = added->backing;
    else break;
  ::close(file);
  for (std::uint32_t n = 0; n < 64 && !raid.over() && !in.expelled(); ++n) {
    constexpr std::uint32_t staged = 200;
    for (std::uint32_t i = 0; i < staged && !raid.over(); ++i, ++raid.blows) {
      StageExtentsRequest stage{};
      stage.clear_first = i == 0;
      stage.count = stage_extents_max;
      for (std::uint32_t k = 0; k < stage_extents_max; ++k)
        stage.extents[k] = {0x10000u + (i * stage_extents_max + k), 1, 0, k % 2 ? backing : backing_process, 0};
      if (!in.call<Request::stage_extents>(stage)) break;
    }
    in.call<Request::reg_mr>({own.pd, all_access, 0x10000, staged * stage_extents_max, 0x10000});
  }
}

}  // namespace
}  // namespace vrdma::hostile

int main(int argc, char** argv) {
  using namespace vrdma::hostile;
  if (argc < 5) {
    std::fprintf(stderr, "usage: hostile_guest SOCKET TARGET SEED SECONDS [UID]\n");
    return 2;
  }
  const std::string_view target = argv[2];
  const std::uint64_t seed = std::strtoull(argv[3], nullptr, 0);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  faults = open_userfaultfd();
  if (argc > 5) {
    const auto uid = static_cast<uid_t>(std::strtoul(argv[5], nullptr, 0));
    if (::setgid(uid) != 0 || ::setuid(uid) != 0) return 2;
    ::prctl(PR_SET_DUMPABLE, 1);
  }
  ::signal(SIGPIPE, SIG_IGN);
  constexpr std::pair<std::string_view, void (*)(Raid&)> raids[] = {
      {"rings", raid_rings},   {"control", raid_control}, {"socket", raid_socket}, {"descriptors", raid_descriptors},
      {"memory", raid_memory}, {"copies", raid_copies}, {"events", raid_events},   {"flood", raid_flood}};
  for (const auto& [name, run] : raids) {
    if (name != target) continue;
    Raid raid{argv[1], Dice(seed), now_ms() + std::strtoull(argv[4], nullptr, 0) * 1000};
    std::uint64_t lives = 0;
    for (; !raid.over(); ++lives) run(raid);
    std::printf("%s seed %llu: %llu lives, %llu attached, %llu blows\n", argv[2], static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(lives), static_cast<unsigned long long>(raid.attached),
                static_cast<unsigned long long>(raid.blows));
    return raid.attached != 0 ? 0 : 1;
  }
  std::fprintf(stderr, "hostile_guest: no target \"%s\"\n", argv[2]);
  return 2;
}
