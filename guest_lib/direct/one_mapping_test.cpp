// Direct mode's posters, its receiver and the service's part of the claims as threads of one process over one mapping of everything, for
// ThreadSanitizer: what one writes and another reads is ordered by the words that docs/direct.md names, or is a race that it finds. (Where
// queues and memory are mapped twice, as between processes, it sees none.) Under it stores are plain, not restartable sequences; revoked
// claims, shared receive queues and events are not run here.
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "guest_lib/direct/datagrams.hpp"
#include "guest_lib/direct/rooms.hpp"
#include "guest_lib/objects.hpp"
#include "vmci_channel/claim.hpp"

namespace vrdma::guest {

void DirectRoom::abandon() {}  // of rooms.cpp, which needs an attachment

namespace {

constexpr std::uint32_t depth = 16, epoch = 3, pd = 5, key = 0x77, backing = 1;
constexpr std::uint32_t message_bytes = 512, grh_bytes = 40;
constexpr std::uint64_t file_bytes = 1 << 20;
constexpr std::uint64_t messages = 20'000;  // of each poster
constexpr unsigned all_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// Zeroed, and only taken where it is written.
template <class T>
struct Mapped {
  Mapped() : all(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) { REQUIRE(all != MAP_FAILED); }
  ~Mapped() { ::munmap(all, sizeof(T)); }
  Mapped(const Mapped&) = delete;
  T* operator->() const { return all; }
  T* all;
};

struct Queue {
  Queue() : bytes(new(std::align_val_t{128}) std::byte[geometry.total_bytes()]()), view(bytes.get(), geometry) {}
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{128}); }
  };
  static constexpr vmci::QueuePairGeometry geometry{2 * depth, 2 * depth, vmci::QueueKind::completions, 0};
  std::unique_ptr<std::byte[], Free> bytes;
  vmci::QueuePairView view;
};

// What all of them share: the room, one key that names all of one file, its only mapping.
struct World {
  World() {
    const vmci::UniqueFd file(::memfd_create("one-mapping", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(file.get(), file_bytes) == 0);
    REQUIRE(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    REQUIRE(memory.add(backing, file.get(), 0, memory.changes()).has_value());
    data = memory.around(backing, 0, file_bytes).data;
    keys->entries[direct::key_place(key, 0)] = {key, pd, direct::key_file(all_access, backing), file_bytes, address(0), 0};
    keys->regions[direct::key_place(key, 0)] = {address(0), file_bytes, 0, 0, file_bytes, 0};
  }
  std::uint64_t address(std::uint64_t offset) const { return reinterpret_cast<std::uintptr_t>(data) + offset; }
  ReachedGuest guest() { return {keys.all, &memory, &process, pd}; }
  direct::Direction& direction(std::uint32_t index) const { return room->directions[index]; }

  Mapped<direct::Room> room;
  Mapped<direct::KeyTable> keys;
  PeerMemory memory;
  ReachedProcess process;
  std::byte* data = nullptr;
};

// Whose lanes are told of by its bitmap.
control::CqShared cold_cq() {
  control::CqShared cq{};
  std::fill(std::begin(cq.hot), std::end(cq.hot), control::no_lane);
  return cq;
}

// Of the messages of one poster the bytes say which it is.
void fill(std::byte* to, std::uint32_t poster, std::uint64_t number) {
  std::uint64_t words[message_bytes / 8];
  for (auto& word : words) word = number * 8 + poster;
  std::memcpy(to, words, sizeof(words));
}

// Posts receives, polls the lane where they complete, and checks that every poster's messages come in order and whole.
class Receiver {
 public:
  Receiver(World& world, std::uint32_t posters, std::uint32_t header_bytes) : world_(world), header_bytes_(header_bytes), heard_(posters) {
    queue_.open(received.view, depth, 1, ReceiveQueue::WrIds::kept);
    lane_ = vmci::LaneReader(received.view.consume_completions(), Queue::geometry.consume_entries);
    for (std::uint32_t i = 0; i < depth; ++i) post(i);
  }
  void run() {
    for (std::uint64_t left = messages * heard_.size(); left != 0;) {
      const Cqe* const entry = lane_.next();
      if (entry == nullptr) {
        vmci::ReadyBitmap(&cq.ready).take([this](std::uint32_t) { ++told; });
        std::this_thread::yield();
        continue;
      }
      const auto place = static_cast<std::uint32_t>(std::atomic_ref(const_cast<std::uint64_t&>(entry->wr_id)).load(std::memory_order_relaxed));
      lane_.pop();
      std::uint64_t words[message_bytes / 8];
      std::memcpy(words, world_.data + at(place) + header_bytes_, sizeof(words));
      const std::uint64_t poster = words[0] % 8;
      if (poster >= heard_.size() || words[0] / 8 != heard_[poster]++) ++wrong;
      for (const auto word : words) wrong += word != words[0];
      queue_.completed(1);
      std::atomic_ref(received.view.header().creator.consumed).store(lane_.position(), std::memory_order_release);
      post(place);
      --left;
    }
  }
  std::uint64_t wrong = 0, told = 0;
  Queue received;
  control::CqShared cq = cold_cq();

 private:
  static std::uint64_t at(std::uint32_t place) { return 65536 + place * std::uint64_t{1024}; }
  void post(std::uint32_t place) {
    while (!queue_.has_room()) {
    }
    const Sge sge{world_.address(at(place)), 1024, key};
    queue_.writer().write(receive_wqe_payload_offset, std::as_bytes(std::span(&sge, 1)));
    queue_.publish(place, pack(WqeControl{WrOpcode::receive, 0, 1}));
  }

  World& world_;
  std::uint32_t header_bytes_;
  std::vector<std::uint64_t> heard_;
  ReceiveQueue queue_;
  vmci::LaneReader lane_;
};

// A send queue, its completions and their poller, of one thread. Every third message goes by the ring.
class Poster {
 public:
  Poster(World& world, std::uint32_t number) : world_(world), number_(number) {
    queue_.open(sent.view, depth);
    lane_ = vmci::LaneReader(sent.view.consume_completions(), Queue::geometry.consume_entries);
  }
  template <class Direct>
  void run(Direct& direct, ibv_ah* ah) {
    for (std::uint64_t i = 0; i < messages; ++i) {
      while (!queue_.has_room(1)) poll();
      const std::uint64_t offset = (number_ * depth + i % depth) * message_bytes;
      fill(world_.data + offset, number_, i);
      ibv_sge sge{world_.address(offset), message_bytes, key};
      ibv_send_wr wr{};
      wr.wr_id = i;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_SEND;
      if (ah != nullptr) wr.wr.ud = {ah, 1, 1};
      bool written = false, done = false;
      if (i % 3 == 0) write(i, sge, ah), written = true;
      while (!done) {
        if (!direct.enter([] { return true; })) {
          std::this_thread::yield();
          continue;
        }
        if (!written) done = direct.carry_out(queue_, wr, wr_signaled);
        else done = direct.run_queue();
        direct.leave();
        if (!done) std::this_thread::yield();  // no receive, or the service wants it
      }
    }
    while (queue_.any_outstanding()) poll();
  }

  Queue sent;
  control::CqShared cq = cold_cq();

 private:
  void poll() {
    while (const Cqe* const entry = lane_.next()) {
      queue_.completed_up_to(std::atomic_ref(const_cast<std::uint32_t&>(entry->queue_position)).load(std::memory_order_relaxed));
      lane_.pop();
    }
  }
  void write(std::uint64_t id, const ibv_sge& sge, ibv_ah* ah) {
    UdOperand operand{};
    if (ah != nullptr) operand = Ah::of(ah).route, operand.remote_qpn = operand.remote_qkey = 1;
    queue_.writer().write(offsetof(SendWqe, ud), std::as_bytes(std::span(&operand, 1)));
    queue_.writer().write(send_wqe_payload_offset, std::as_bytes(std::span(&sge, 1)));
    queue_.publish(id, 0, pack(WqeControl{WrOpcode::send, wr_signaled, 1}), 1);
  }

  World& world_;
  std::uint32_t number_;
  SendQueue queue_;
  vmci::LaneReader lane_;
};

// The service's part: takes directions and gives them away again, where they stand, until told to stop.
class Service {
 public:
  Service(World& world, std::uint32_t directions, const direct::Terms& terms) {
    for (std::uint32_t i = 0; i < directions; ++i) {
      claims_.emplace_back(&world.direction(i), epoch);
      world.direction(i).terms = terms;
      claims_.back().hand_out();
    }
  }
  void run() {
    while (!over.load(std::memory_order_relaxed)) {
      for (auto& claim : claims_) {
        if (!claim.take()) continue;
        direct::Direction& direction = claim.direction();
        const direct::Positions at = direction.positions[direction.current & 1];
        direction.current = 0;
        direction.positions[0] = at;
        ++taken;
        claim.hand_out();
      }
      std::this_thread::yield();
    }
  }
  std::atomic<bool> over{false};
  std::uint64_t taken = 0;

 private:
  std::vector<vmci::ServiceClaim> claims_;
};

DirectConnection::Ends ends_of(World& world, Poster& from, Receiver& to, std::uint32_t direction, std::uint32_t poster) {
  DirectConnection::Ends ends;
  ends.claim = vmci::PosterClaim(&world.direction(direction), epoch, poster);
  ends.own = ends.peer = world.guest();
  ends.send = from.sent.view;
  ends.receive = ends.receive_records = to.received.view;
  ends.qpn = 2, ends.peer_qpn = 1;
  ends.sent = {&from.cq, 0};
  ends.received = {&to.cq, 0};
  return ends;
}

constexpr direct::Terms terms{IBV_MTU_4096, all_access, 1, 1, 1, 0};

}  // namespace

TEST_CASE("a poster, its receiver and the service") {
  World world;
  Poster poster(world, 0);
  Receiver receiver(world, 1, 0);
  Service service(world, 1, terms);
  DirectConnection connection(ends_of(world, poster, receiver, 0, 0));
  std::thread serves([&] { service.run(); }), receives([&] { receiver.run(); });
  poster.run(connection, nullptr);
  receives.join();
  service.over = true;
  serves.join();
  CHECK(receiver.wrong == 0);
  CHECK(receiver.told > 0);
  CHECK(service.taken > 0);
}

TEST_CASE("posters of datagrams that meet at one inbox, its receiver and the service") {
  World world;
  Receiver receiver(world, 2, grh_bytes);
  Poster first(world, 0), second(world, 1);
  Service service(world, 3, terms);  // the inbox, and the send queue of each
  Ah address;
  const auto send = [&](Poster& poster, std::uint32_t number) {
    DatagramSender sender(nullptr, ends_of(world, poster, receiver, 1 + number, 0));
    UdOperand to{};
    to.remote_qpn = 1;
    sender.add(to, std::make_unique<DatagramPath>(nullptr, nullptr, ends_of(world, poster, receiver, 0, 1 + number), DatagramSource{}));
    poster.run(sender, &address.verbs);
  };
  std::thread serves([&] { service.run(); }), receives([&] { receiver.run(); }), posts([&] { send(second, 1); });
  send(first, 0);
  posts.join();
  receives.join();
  service.over = true;
  serves.join();
  CHECK(receiver.wrong == 0);
  CHECK(receiver.told > 0);
  CHECK(service.taken > 0);
}

}  // namespace vrdma::guest
