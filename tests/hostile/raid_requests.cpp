// Garbage in what a guest asks: requests on the control ring, packets on the socket, and as much as there is of everything.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/hostile/raid.hpp"
#include "vmci_channel/test/lingering.hpp"

namespace vrdma::hostile {

// Requests whose head and body are right in size and wrong in content, or wrong in size too.
void raid_control(Raid& raid) {
  Intruder in = raid.intrude("control");
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
  ::fcntl(socket.fd(), F_SETFL, O_NONBLOCK);  // while descriptors of ours are being closed, for as long as they linger, nobody reads what we send
  ++raid.attached;
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  std::vector<vmci::test::Lingering> lingering;  // as long as this connection
  constexpr int lingering_s = 30;
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
      request.major = dice.one_in(8) ? version_major + 1 : version_major;
      std::memcpy(packet.data() + sizeof(Head), &request, sizeof(request));
    }
    std::vector<int> given(dice.one_in(4) ? dice.below(vmci::packet_descriptors_max + 1) : 0, null);
    (void)socket.send(packet, given);
    if (dice.one_in(16)) {  // a descriptor whose closing waits, with a packet that may be anything, and as short as nothing
      vmci::test::Lingering slow(lingering_s);
      if (slow && slow.pass(socket.fd(), std::span(packet).first(dice.one_in(8) ? std::min<std::size_t>(packet.size(), dice.below(sizeof(Head))) : packet.size()))) lingering.push_back(std::move(slow));
    }
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
  Intruder in = raid.intrude("flood");
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
  own.reach();
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

}  // namespace vrdma::hostile
