// Fuzz target: what two processes may send to the service's socket, before and after they attach: any bytes, with any descriptors,
// through a real socket pair, and what they then do with their rings.
//
// Input: steps of one byte (bits 0–2: what, bit 3: which connection) and what the step needs:
//   0–3  a packet: request (1 byte; bit 7: the head's 32 bytes come from the input instead), descriptors (1: how many in bits
//        0–3, then one byte for each), bytes of its body (2), how many of them follow (1), they; the rest is zero
//   4    a request in the ring    5  a WQE    6  bytes anywhere in the arena
//   7    it hangs up, and another process connects
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "vmkernel_svc/fuzz_world.hpp"

namespace {

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::control;

constexpr std::uint64_t file_bytes = 64 << 10;

vmci::UniqueFd file(std::uint64_t bytes, int seals) {
  vmci::UniqueFd fd(::memfd_create("fuzz-file", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  fuzz_require(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0 && ::fcntl(fd.get(), F_ADD_SEALS, seals) == 0,
               "memfd_create works");
  return fd;
}

// What a guest may pass along: good memory first, then everything that is not.
class Descriptors {
 public:
  Descriptors() {
    add(file(file_bytes, F_SEAL_SHRINK));
    add(file(file_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
    add(file(file_bytes, 0));                               // not sealed
    add(file(0, F_SEAL_SHRINK));                            // truncated
    add(file(file_bytes, F_SEAL_SHRINK | F_SEAL_WRITE));    // cannot be mapped for writing
    add(file(std::uint64_t{1} << 40, F_SEAL_SHRINK));       // sparse, more than any quota
    add(file(file_bytes + 7, F_SEAL_SHRINK));               // not whole pages
    add(vmci::UniqueFd(::open(("/proc/self/fd/" + std::to_string(all_.front().get())).c_str(), O_RDONLY | O_CLOEXEC)));
    add(vmci::UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
    add(vmci::UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC)));
    add(vmci::UniqueFd(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    add(vmci::UniqueFd(::open("/", O_PATH | O_CLOEXEC)));
    add(vmci::UniqueFd(::eventfd(0, EFD_CLOEXEC)));
    add(vmci::UniqueFd(::epoll_create1(EPOLL_CLOEXEC)));
    int ends[2];
    fuzz_require(::pipe2(ends, O_CLOEXEC) == 0, "pipe2 works");
    add(vmci::UniqueFd(ends[0]));
    add(vmci::UniqueFd(ends[1]));
  }
  // The last number is a descriptor of the connection itself.
  int of(std::uint8_t number, int connection) const {
    const std::size_t index = number % (all_.size() + 1);
    return index < all_.size() ? all_[index].get() : connection;
  }

 private:
  void add(vmci::UniqueFd fd) {
    fuzz_require(static_cast<bool>(fd), "a descriptor to pass along can be made");
    all_.push_back(std::move(fd));
  }
  std::vector<vmci::UniqueFd> all_;
};

// One connection: the process's end, and the service's end as the server keeps it.
struct Connection {
  vmci::UniqueFd process;
  vmci::PacketSocket socket;
  std::uint32_t guest = 0;
  bool asked_to_attach = false;

  Connection() {
    int ends[2];
    fuzz_require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "socketpair works");
    process.reset(ends[0]);
    socket = vmci::PacketSocket(vmci::UniqueFd(ends[1]));
  }
};

void send(const Connection& connection, std::span<const std::byte> packet, std::span<const int> descriptors) {
  iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  (void)::sendmsg(connection.process.get(), &message, MSG_NOSIGNAL);
}

// What Server does with a readable socket, without its threads. False: it drops the connection.
bool receive(FuzzWorld& world, Connection& connection) {
  std::vector<std::byte> packet(sizeof(Head) + body_bytes_max);
  auto received = vmci::receive_given(connection.socket.fd(), packet, nullptr);
  if (!received && value(received.error()) == EAGAIN) return true;
  if (!received || received->bytes < sizeof(Head) || received->descriptors_missing) return false;
  packet.resize(received->bytes);
  Head head{};
  std::memcpy(&head, packet.data(), sizeof(head));
  if (PacketDesk::request_of(head) != Request::attach) {
    world.packets().answer(connection.socket, connection.guest, head, packet, std::move(received->descriptors));
    return true;
  }
  const auto request = PacketDesk::attach_request(connection.socket, head, packet);
  if (!request) return true;
  if (std::exchange(connection.asked_to_attach, true)) {
    PacketDesk::refuse(connection.socket, head, EISCONN);
    return true;
  }
  // No pid: this process's own memory is nobody's to write to.
  connection.guest = world.packets().attach(connection.socket, head, *request,
                                            AttachInfo{{0, guest_uid, guest_uid}, {}, vmci::GivenFd(vmci::UniqueFd(::fcntl(connection.socket.fd(), F_DUPFD_CLOEXEC, 0)))});
  return true;
}

// A guest reads its replies and uses or closes what came along.
void drain(const Connection& connection) {
  const vmci::PacketSocket mine(vmci::UniqueFd(::fcntl(connection.process.get(), F_DUPFD_CLOEXEC, 0)));
  std::vector<std::byte> packet(sizeof(Head) + body_bytes_max);
  for (;;) {
    const auto reply = mine.receive(packet);
    if (!reply || reply->bytes == 0) return;
    fuzz_require(reply->bytes >= sizeof(Head), "a reply has a head");
  }
}

void hang_up(FuzzWorld& world, const Connection& connection) {
  if (Guest* const guest = world.find(connection.guest)) world.desk().detach(*guest);
}

void step_packet(const Descriptors& known, const Connection& connection, FuzzInput& input) {
  const auto request = input.value<std::uint8_t>();
  Head head{};
  head.record.control = request & 0x7f;
  head.sequence = 1;
  if (request & 0x80) head = input.value<Head>();
  int descriptors[15];
  const std::size_t count = input.value<std::uint8_t>() & 15;
  for (std::size_t i = 0; i < count; ++i) descriptors[i] = known.of(input.value<std::uint8_t>(), connection.process.get());
  // A few bytes more than the longest packet: too long is a case, too.
  std::vector<std::byte> packet(sizeof(Head) + input.value<std::uint16_t>() % (body_bytes_max + 64));
  std::memcpy(packet.data(), &head, sizeof(head));
  const auto body = input.take(input.value<std::uint8_t>());
  std::copy_n(body.begin(), std::min(body.size(), packet.size() - sizeof(Head)), packet.begin() + sizeof(Head));
  // Contexts are the service's choice: 0 stands for the guest itself where queue pairs are offered to somebody.
  if (head.record.control == static_cast<std::uint32_t>(Request::queue_pair_alloc) || head.record.control == static_cast<std::uint32_t>(Request::queue_pair_attach))
    if (packet.size() >= sizeof(Head) + sizeof(std::uint32_t)) {
      std::uint32_t context;
      std::memcpy(&context, packet.data() + sizeof(Head), sizeof(context));
      if (context == 0) std::memcpy(packet.data() + sizeof(Head), &connection.guest, sizeof(connection.guest));
    }
  send(connection, packet, {descriptors, count});
}

std::uint32_t open_descriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<std::uint32_t>(std::distance(begin(open), end(open)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  FuzzWorld& world = FuzzWorld::instance();
  static const Descriptors known;
  FuzzInput input(data, bytes);
  const std::uint32_t before = open_descriptors();
  {
    Connection connections[2];
    for (int steps = 0; steps < 128 && !input.empty(); ++steps) {
      const auto step = input.value<std::uint8_t>();
      Connection& connection = connections[(step >> 3) & 1];
      Guest* const guest = world.find(connection.guest);
      bool keep = true;
      switch (step & 7) {
        case 4:
          if (guest != nullptr) world.step_request(*guest, input);
          break;
        case 5:
          if (guest != nullptr) world.step_work_request(*guest, input);
          break;
        case 6:
          if (guest != nullptr) world.step_scribble(*guest, input);
          break;
        case 7:
          keep = false;
          break;
        default:
          step_packet(known, connection, input);
          keep = receive(world, connection);
          drain(connection);
      }
      world.turn(2);
      if (keep) continue;
      hang_up(world, connection);
      connection = Connection();
    }
    world.turn(8);
    const auto tenant = world.shard().fabric().tenants.find(guest_uid);
    const std::uint32_t paid = tenant != world.shard().fabric().tenants.end() ? tenant->second.descriptors : 0;
    fuzz_require(open_descriptors() - before <= paid + 2 * std::size(connections),
                 "what the service holds open for a tenant counts against its quota");
    for (const Connection& connection : connections) hang_up(world, connection);
  }
  world.turn(2);
  world.check();
  fuzz_require(open_descriptors() == before, "whoever leaves leaves no descriptor behind");
  return 0;
}
