// Direct mode into memory that lies in no file, and is reached through its process: with a service that is stopped meanwhile.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

enum class Kind {
  moved,     // whole pages
  in_place,  // executable ones, which are not moved to the memory window
  both       // the first and the last page are registered in part, and stay; those between them move
};

class Memory {
 public:
  static constexpr std::size_t bytes = 1 << 20;
  Memory(const Device& device, Kind kind) : execute_(kind == Kind::in_place ? PROT_EXEC : 0), beside_(kind == Kind::both ? 1000 : 0) {
    map();
    mr = ibv_reg_mr(device.pd, at(0), bytes - 2 * beside_, Pair::all_access | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    REQUIRE(mr != nullptr);
  }
  ~Memory() {
    CHECK(ibv_dereg_mr(mr) == 0);
    unmap();
  }
  Memory(const Memory&) = delete;
  void map() {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* const at = ::mmap(memory_, bytes, PROT_READ | PROT_WRITE | execute_, memory_ == nullptr ? flags : flags | MAP_FIXED, -1, 0);
    REQUIRE(at != MAP_FAILED);
    memory_ = static_cast<char*>(at);
  }
  void unmap() { CHECK(::munmap(memory_, bytes) == 0); }
  char* at(std::size_t offset) const { return memory_ + beside_ + offset; }
  ibv_sge sge(std::size_t offset, std::uint32_t length) const { return {reinterpret_cast<std::uintptr_t>(at(offset)), length, mr->lkey}; }

  ibv_mr* mr = nullptr;

 private:
  int execute_;
  std::size_t beside_;
  char* memory_ = nullptr;
};

// One end's memory, of either kind.
struct Place {
  char* data;
  std::uint32_t key;
};

struct World {
  // Until messages need the service no more; false: nobody can be direct here.
  bool become_direct() {
    if (!pair.become_direct()) return false;
    for (int i = 0; i < 3; ++i) {  // each finds something that is not mapped yet
      for (const Kind kind : {Kind::moved, Kind::in_place, Kind::both}) {
        constexpr std::uint32_t half = Memory::bytes / 2;
        Place local = near(kind), remote = far(kind);
        write(local, remote, half);
        local.data += half - 4000, remote.data += half - 4000;  // their ends may be mapped apart
        write(local, remote, half - 4000);
      }
      eventually("the connection is direct again", [&] { return mode_of(pair.a.get()) == "direct"; });
    }
    return true;
  }
  Place near(Kind kind) const { return at(kind, pair.near, own, owns_in_part); }
  Place far(Kind kind) const { return at(kind, pair.far, peers, peers_in_part); }
  ibv_wc transfer(ibv_wr_opcode opcode, Place local, Place remote, std::uint32_t bytes) const {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(local.data), bytes, local.key};
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma = {reinterpret_cast<std::uintptr_t>(remote.data), remote.key};
    REQUIRE(ibv_post_send(pair.a.get(), &wr, &bad) == 0);
    return collect(pair.a_cq.get(), 1).front();
  }
  void write(Place local, Place remote, std::uint32_t bytes) const {
    CHECK(transfer(IBV_WR_RDMA_WRITE, local, remote, bytes).status == IBV_WC_SUCCESS);
  }

  Pair pair;
  Memory own{pair.device, Kind::in_place}, peers{pair.device, Kind::in_place};
  Memory owns_in_part{pair.device, Kind::both}, peers_in_part{pair.device, Kind::both};

 private:
  static Place at(Kind kind, const Pages& moved, const Memory& in_place, const Memory& in_part) {
    if (kind == Kind::moved) return {moved.at(0), moved.mr->lkey};  // its rkey, too
    const Memory& memory = kind == Kind::in_place ? in_place : in_part;
    return {memory.at(0), memory.mr->lkey};
  }
};

}  // namespace

TEST_CASE("messages between memory of every kind need no service, and touch nothing beside it") {
  Service service;
  service.start(with_direct);
  World world;
  if (!world.become_direct()) return;
  const Stopped stopped(service);
  std::mt19937_64 random(7);
  constexpr std::size_t margin = 64, span = 300'000 + 2 * margin;
  for (int round = 0; round < 400; ++round) {
    const auto bytes = static_cast<std::uint32_t>(1 + random() % (round % 8 == 0 ? 300'000 : round % 2 == 0 ? 20 : 9000));
    const auto kinds = 1 + random() % 8;  // not both moved
    Place local = world.near(Kind(kinds % 3)), remote = world.far(Kind(kinds / 3));
    for (Place* place : {&local, &remote}) place->data += random() % 2 == 0 ? random() % 5000 : Memory::bytes - 2000 - span - random() % 5000;
    const auto what = random() % 3;
    Place &from = what == 1 ? remote : local, &to = what == 1 ? local : remote;
    const char fill = static_cast<char>(round);
    std::memset(to.data, ~fill, span);
    for (std::size_t i = 0; i < bytes; ++i) from.data[i] = static_cast<char>(i * 31 + static_cast<unsigned>(round));
    to.data += margin;
    if (what == 2) {
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(to.data), bytes, to.key};
      ibv_recv_wr wr{1000u + static_cast<unsigned>(round), nullptr, &sge, 1}, *bad = nullptr;
      REQUIRE(ibv_post_recv(world.pair.b.get(), &wr, &bad) == 0);
    }
    const ibv_wr_opcode opcode = what == 0 ? IBV_WR_RDMA_WRITE : what == 1 ? IBV_WR_RDMA_READ : IBV_WR_SEND;
    CHECK(world.transfer(opcode, local, remote, bytes).status == IBV_WC_SUCCESS);
    if (what == 2) CHECK(collect(world.pair.b_cq.get(), 1).front().wr_id == 1000u + static_cast<unsigned>(round));
    REQUIRE(std::memcmp(to.data, from.data, bytes) == 0);
    for (std::size_t i = 0; i < margin; ++i) {
      REQUIRE(to.data[-1 - static_cast<std::ptrdiff_t>(i)] == static_cast<char>(~fill));
      REQUIRE(to.data[bytes + i] == static_cast<char>(~fill));
    }
  }
}

TEST_CASE("what can fail where memory is in no file is the service's: atomics, keys that do not reach so far, memory that is gone") {
  Service service;
  service.start(with_direct);
  World world;
  world.become_direct();
  std::uint64_t counter = 40, old = 0;
  for (const Kind own : {Kind::moved, Kind::in_place, Kind::both}) {
    for (const Kind peers : {Kind::moved, Kind::in_place, Kind::both}) {
      const Place local = world.near(own), remote = world.far(peers);
      std::memcpy(remote.data, &counter, sizeof(counter));
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(local.data), 8, local.key};
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.atomic = {reinterpret_cast<std::uintptr_t>(remote.data), 2, 0, remote.key};
      REQUIRE(ibv_post_send(world.pair.a.get(), &wr, &bad) == 0);
      CHECK(collect(world.pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
      std::memcpy(&old, local.data, sizeof(old));
      CHECK(old == counter);
      std::memcpy(&old, remote.data, sizeof(old));
      CHECK(old == counter + 2);
    }
  }
  Place beyond = world.far(Kind::in_place);
  beyond.data += Memory::bytes - 7;
  SUBCASE("beyond the end") { CHECK(world.transfer(IBV_WR_RDMA_WRITE, world.near(Kind::in_place), beyond, 8).status == IBV_WC_REM_ACCESS_ERR); }
  SUBCASE("before its begin") {
    Place before = world.far(Kind::in_place);
    before.data -= 1;
    CHECK(world.transfer(IBV_WR_RDMA_WRITE, world.near(Kind::in_place), before, 8).status == IBV_WC_REM_ACCESS_ERR);
  }
  SUBCASE("one's own is gone") {
    const Place local = world.near(Kind::in_place), remote = world.far(Kind::moved);
    world.own.unmap();
    CHECK(world.transfer(IBV_WR_RDMA_WRITE, local, remote, 64).status == IBV_WC_LOC_PROT_ERR);
    world.own.map();
  }
  SUBCASE("the peer's is gone") {
    const Place local = world.near(Kind::moved), remote = world.far(Kind::in_place);
    world.peers.unmap();
    CHECK(world.transfer(IBV_WR_RDMA_READ, local, remote, 64).status == IBV_WC_REM_ACCESS_ERR);
    world.peers.map();
  }
}

// Programs close all descriptors that they do not know, some of them by bare system calls, and open files that then have these numbers.
TEST_CASE("a file of the program's that has come to the number of a descriptor of ours is not written to") {
  Service service;
  service.start(with_direct);
  World world;
  if (!world.become_direct()) return;
  const std::string name = "/tmp/vrdma-direct-" + std::to_string(::getpid());
  const int file = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  REQUIRE(file >= 0);
  std::vector<int> ours;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone).string().ends_with("/mem")) ours.push_back(std::stoi(entry.path().filename()));
  }
  CHECK(ours.size() == 2);
  // A file may be too small for an address; the other one takes everything at any place.
  const int sink = ::open("/dev/null", O_RDWR);
  REQUIRE(sink >= 0);
  for (const int theirs : {file, sink}) {
    for (const int fd : ours) REQUIRE(::syscall(SYS_dup3, theirs, fd, 0) == fd);
    for (int i = 0; i < 20; ++i) {
      world.own.at(0)[0] = static_cast<char>(theirs + i);
      world.write(world.near(Kind::in_place), world.far(Kind::in_place), 4096);
      CHECK(world.peers.at(0)[0] == static_cast<char>(theirs + i));
      eventually("the connection is direct again", [&] { return mode_of(world.pair.a.get()) == "direct"; });
    }
  }
  ::close(sink);
  CHECK(std::filesystem::file_size(name) == 0);
  for (const int fd : ours) CHECK(::close(fd) == 0);
  ::close(file);
  std::filesystem::remove(name);
}

TEST_CASE("a shared queue's request whose buffer cannot be written to just then goes back, and is used once") {
  Service service;
  service.start(with_direct);
  World world;
  ibv_srq_init_attr init{};
  init.attr = {16, 1, 0};
  ibv_srq* const srq = ibv_create_srq(world.pair.device.pd, &init);
  REQUIRE(srq != nullptr);
  {
    const CqPtr a_cq = make_cq(world.pair.device, 64), b_cq = make_cq(world.pair.device, 64);
    const QpPtr a = make_qp(world.pair.device, a_cq.get()), b = make_qp(world.pair.device, b_cq.get(), 16, srq);
    connect(a.get(), b->qp_num);
    connect(b.get(), a->qp_num);
    const auto receive = [&](std::uint64_t wr_id) {
      ibv_sge sge = world.peers.sge(wr_id * 64, 64);
      ibv_recv_wr wr{wr_id, nullptr, &sge, 1}, *bad = nullptr;
      REQUIRE(ibv_post_srq_recv(srq, &wr, &bad) == 0);
    };
    const auto send = [&](std::uint64_t wr_id) {
      ibv_sge sge = world.own.sge(0, 64);
      ibv_send_wr wr{}, *bad = nullptr;
      wr.wr_id = wr_id;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_SEND;
      wr.send_flags = IBV_SEND_SIGNALED;
      REQUIRE(ibv_post_send(a.get(), &wr, &bad) == 0);
    };
    const auto arrives = [&](std::uint64_t wr_id) {
      const auto received = collect(b_cq.get(), 1).front();
      CHECK(received.status == IBV_WC_SUCCESS);
      CHECK(received.wr_id == wr_id);
      CHECK(collect(a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
    };
    for (std::uint64_t i = 0; i < 4; ++i) {
      receive(i);
      send(i);
      arrives(i);
      std::string because;
      eventually("the connection is direct, or may not be", [&] { return mode_of(a.get(), &because) == "direct" || is_apart(because); });
    }
    for (std::uint64_t i = 4; i < 8; ++i) receive(i);
    {
      const Stopped stopped(service);
      world.peers.unmap();
      send(4);
      world.peers.map();
    }
    arrives(4);
    for (std::uint64_t i = 5; i < 8; ++i) {
      send(i);
      arrives(i);
    }
    CHECK(ibv_poll_cq(b_cq.get(), 1, std::array<ibv_wc, 1>{}.data()) == 0);
  }
  CHECK(ibv_destroy_srq(srq) == 0);
}
