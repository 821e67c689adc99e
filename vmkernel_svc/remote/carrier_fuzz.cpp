// Fuzz target: what comes on a carrier's connection after a real handshake. The input is what the far end says, frame by frame: some
// as they are, some with a tag that is right, so that what lies behind the tag is reached. Frames that are in order must arrive as
// they were sent; at the first that is not, the connection must break.
//
//     input   encrypted u8, then   kind u8, bytes u16, that many bytes
//     kind    0: these bytes   1: a head and a body, tagged   2: the same, its length in the head put right   (mod 3)
#include <sys/socket.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "vmkernel_svc/remote/tcp_connection.hpp"

using namespace vrdma;
using namespace vrdma::remote;

namespace {

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "carrier_fuzz: %s\n", what);
  std::abort();
}

std::shared_ptr<const PeerHost> host(const char* name) { return std::make_shared<const PeerHost>(PeerHost{0, name, "127.0.0.1", 1, {}, true}); }

struct Far {  // the end that is played by the input
  vmci::UniqueFd socket;
  FrameSeal seal;
};

// A connection in the state `open`, and its other end.
std::pair<std::unique_ptr<TcpConnection>, Far> connect(bool encrypted) {
  static const auto known = [](std::string_view) { return host("far"); };
  static Handshake::Context ours("near", false, known), plain("far", false, known), crypt("far", true, known);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) wrong("no sockets");
  auto connection = std::make_unique<TcpConnection>(ours, vmci::UniqueFd(ends[0]), nullptr, 0);
  vmci::UniqueFd socket(ends[1]);
  Handshake handshake(encrypted ? crypt : plain, socket.get(), host("near"));
  while (handshake.go_on() != Handshake::State::done) connection->go_on();
  const auto secrets = handshake.secrets();
  connection->go_on();
  if (!secrets || connection->state() != TcpConnection::State::open || connection->encrypts() != encrypted) wrong("the handshake failed");
  return {std::move(connection), Far{std::move(socket), FrameSeal(secrets->ours, FrameSeal::Way::seal)}};
}

struct Frame {
  LinkHead head{};
  std::vector<std::byte> body;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const bool encrypted = (data[0] & 1) != 0;
  auto [connection, far] = connect(encrypted);
  std::vector<Frame> good;  // that must arrive
  bool spoiled = false;
  std::size_t arrived = 0;
  const auto take = [&, &taker = *connection] {
    for (;;) {
      LinkHead head;
      std::int64_t budget = 1 << 20;
      const auto frame = taker.receive(head, budget);
      if (!frame && (!taker.has_unread() || taker.state() == TcpConnection::State::broken)) return;
      if (!frame) continue;
      if (arrived == good.size()) wrong("a frame that was not sent");
      const Frame& sent = good[arrived++];
      if (frame->whole_bytes() != sizeof(head) + sent.body.size() || std::memcmp(frame->whole() + sizeof(head), sent.body.data(), sent.body.size()) != 0 ||
          std::memcmp(&head, &sent.head, tagged_head_bytes) != 0)
        wrong("a frame is not as it was sent");
    }
  };
  for (std::size_t at = 1; at + 3 <= bytes;) {
    const std::uint8_t kind = data[at] % 3;
    const std::size_t wanted = data[at + 1] | static_cast<std::size_t>(data[at + 2]) << 8;
    const std::size_t count = std::min(wanted, bytes - at - 3);
    const std::uint8_t* const said = data + at + 3;
    at += 3 + count;
    const auto* const bytes_said = reinterpret_cast<const std::byte*>(said);
    std::vector<std::byte> whole(bytes_said, bytes_said + count);
    if (kind == 0) {
      spoiled |= count != 0;  // no bytes of the input's own can bear the tag of what comes next
    } else {
      Frame frame;
      std::memcpy(&frame.head, said, std::min(count, tagged_head_bytes));
      if (count > tagged_head_bytes) frame.body.assign(whole.begin() + tagged_head_bytes, whole.end());
      if (kind == 2) frame.head.bytes = static_cast<std::uint32_t>(frame.body.size());
      std::uint32_t payload = 0;
      const bool has_record = frame.body.size() >= sizeof(engine::FarRecord);
      if (has_record) std::memcpy(&payload, frame.body.data() + offsetof(engine::FarRecord, payload_bytes), sizeof(payload));
      if (has_record && kind == 2) {
        payload = static_cast<std::uint32_t>(frame.body.size() - sizeof(engine::FarRecord));
        if ((frame.head.reserved & 1) != 0) std::memcpy(frame.body.data() + offsetof(engine::FarRecord, payload_bytes), &payload, sizeof(payload));
        else std::memcpy(&payload, frame.body.data() + offsetof(engine::FarRecord, payload_bytes), sizeof(payload));
      }
      const std::span<const std::byte> head(reinterpret_cast<const std::byte*>(&frame.head), tagged_head_bytes);
      std::vector<std::byte> body = frame.body;
      frame.head.tag = far.seal.seal(head, frame.body, encrypted ? body.data() : nullptr);
      whole.resize(sizeof(frame.head));
      std::memcpy(whole.data(), &frame.head, sizeof(frame.head));
      whole.insert(whole.end(), body.begin(), body.end());
      spoiled |= !has_record || frame.head.bytes != frame.body.size() || payload != frame.body.size() - sizeof(engine::FarRecord);
      if (!spoiled) good.push_back(std::move(frame));
    }
    for (std::size_t sent = 0; sent < whole.size() && connection->state() != TcpConnection::State::broken; take()) {
      const ssize_t now = ::send(far.socket.get(), whole.data() + sent, whole.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (now > 0) sent += static_cast<std::size_t>(now);
    }
  }
  ::shutdown(far.socket.get(), SHUT_WR);
  take();
  LinkHead head;
  std::int64_t budget = 1;
  if (connection->receive(head, budget) != nullptr || connection->state() != TcpConnection::State::broken) wrong("the end of the connection is not seen");
  if (arrived != good.size()) wrong("a frame is missing");
  const auto why = connection->why();
  if (spoiled ? why == TcpConnection::Why::none : why != TcpConnection::Why::hung_up) wrong("it broke for another reason");
  return 0;
}
