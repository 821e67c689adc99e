// Registered memory as the application has it: its pages live in the window while registered, and are its own again afterwards;
// and what one service was told about files is not taken for what the next one knows.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

// Verbs that the headers here may not have yet (rdma-core 59 to 64), with their attributes as those releases lay them out.
struct ibv_buf;
struct ibv_mr_init_attr;
extern "C" {
ibv_mr* ibv_reg_mr_ex(ibv_pd* pd, ibv_mr_init_attr* attributes);
void* ibv_alloc_buf(ibv_pd* pd, std::size_t bytes, ibv_buf** buffer);
void ibv_free_buf(ibv_buf* buffer);
int ibv_export_buf_dmabuf_fd(ibv_buf* buffer);
ibv_mr* ibv_reg_buf_mr(ibv_pd* pd, ibv_buf* buffer, void* address, std::size_t bytes, int access);
int ibv_query_port_speed(ibv_context* context, std::uint32_t port, std::uint64_t* speed);
}

namespace {

constexpr std::size_t bytes = 1 << 20;
constexpr int access_rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

// The line of /proc/self/maps that describes `address`.
std::string mapping_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    char dash;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (begin <= at && at < end) return line;
  }
  return {};
}

}  // namespace

TEST_CASE("pages move when they are registered, and back with their contents when the last registration goes") {
  Service service;
  service.start();
  Device device;
  auto* const memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED);
  std::memset(memory, 7, bytes);
  for (int round = 0; round < 3; ++round) {
    ibv_mr* const first = ibv_reg_mr(device.pd, memory, bytes, access_rights);
    ibv_mr* const second = ibv_reg_mr(device.pd, memory + bytes / 2, bytes / 4, access_rights);
    REQUIRE(first != nullptr);
    REQUIRE(second != nullptr);
    const bool moved = mapping_at(memory).find("vrdma-window") != std::string::npos;
    if (!moved) MESSAGE("this process's memory does not move: " << mapping_at(memory));
    memory[round] = 1;
    CHECK(ibv_dereg_mr(first) == 0);
    if (moved) CHECK(mapping_at(memory + bytes / 2).find("vrdma-window") != std::string::npos);
    CHECK(mapping_at(memory).find("vrdma-window") == std::string::npos);
    CHECK(ibv_dereg_mr(second) == 0);
    CHECK(mapping_at(memory + bytes / 2).find("vrdma-window") == std::string::npos);
    for (std::size_t i = 0; i < bytes; ++i) REQUIRE(memory[i] == (i <= static_cast<std::size_t>(round) ? 1 : 7));
  }
  ::munmap(memory, bytes);
}

// fcntl(2): closing any descriptor of a file ends the process's record locks on it.
TEST_CASE("registering a file leaves the program its locks on it") {
  Service service;
  service.start();
  Device device;
  for (const char* folder : {"/dev/shm", "/tmp"}) {  // memory, which the service is given, and a disk's, which it may not be
    INFO(std::string(folder));
    const std::string path = std::string(folder) + "/vrdma-locks." + std::to_string(::getpid());
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    REQUIRE(file >= 0);
    ::unlink(path.c_str());
    REQUIRE(::ftruncate(file, bytes) == 0);
    struct flock whole {};
    whole.l_type = F_WRLCK;
    REQUIRE(::fcntl(file, F_SETLK, &whole) == 0);
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    REQUIRE(memory != MAP_FAILED);
    ibv_mr* const mr = ibv_reg_mr(device.pd, memory, bytes, access_rights);
    REQUIRE(mr != nullptr);
    CHECK(ibv_dereg_mr(mr) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      struct flock asked {};
      asked.l_type = F_WRLCK;
      ::_exit(::fcntl(file, F_GETLK, &asked) == 0 && asked.l_type == F_WRLCK ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    ::munmap(memory, bytes);
    ::close(file);
  }
}

TEST_CASE("a file that the last service knew is announced to the next one") {
  Service service;
  service.start();
  const int fd = ::memfd_create("shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(fd >= 0);
  REQUIRE(::ftruncate(fd, bytes) == 0);
  auto* const memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  REQUIRE(memory != MAP_FAILED);
  Device before;
  ibv_mr* const old = ibv_reg_mr(before.pd, memory, bytes, access_rights);
  REQUIRE(old != nullptr);
  service.kill_now();
  service.start();

  Device after;  // while what was registered with the dead service still is
  CqPtr cq = make_cq(after);
  QpPtr requester = make_qp(after, cq.get()), responder = make_qp(after, cq.get());
  connect(requester.get(), responder->qp_num);
  connect(responder.get(), requester->qp_num);
  ibv_mr* mr = ibv_reg_mr(after.pd, memory, bytes, access_rights);
  REQUIRE(mr != nullptr);
  CHECK(ibv_dereg_mr(old) == 0);
  after.memory[0] = 'x';
  REQUIRE(post_write(requester.get(), after.sge(), reinterpret_cast<std::uintptr_t>(memory), mr->rkey) == 0);
  CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(memory[0] == 'x');
  CHECK(ibv_dereg_mr(mr) == 0);
  ::munmap(memory, bytes);
  ::close(fd);
}

TEST_CASE("a memfd that is sealed against writing is registered: peers read what is in it, and write by what was mapped before") {
  constexpr int seal_write = 0x0008, seal_future_write = 0x0010;  // of linux/fcntl.h; the latter Linux 5.1
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr requester = make_qp(device, cq.get()), responder = make_qp(device, cq.get());
  connect(requester.get(), responder->qp_num, {}, IBV_ACCESS_REMOTE_READ);
  connect(responder.get(), requester->qp_num, {}, IBV_ACCESS_REMOTE_READ);
  const int seals[] = {seal_write, seal_future_write};
  for (const int seal : seals) {
    const int fd = ::memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(::ftruncate(fd, bytes) == 0);
    REQUIRE(::pwrite(fd, "s", 1, 0) == 1);
    const bool writes = seal == seal_future_write;
    char* memory = static_cast<char*>(writes ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : nullptr);
    REQUIRE(::fcntl(fd, F_ADD_SEALS, seal) == 0);
    if (!writes) memory = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0));
    REQUIRE(memory != MAP_FAILED);
    ibv_mr* const mr = ibv_reg_mr(device.pd, memory, bytes, IBV_ACCESS_REMOTE_READ | (writes ? access_rights : 0));
    REQUIRE(mr != nullptr);
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    ibv_sge sge = device.sge(1);
    ibv_send_wr read{};
    read.sg_list = &sge;
    read.num_sge = 1;
    read.opcode = IBV_WR_RDMA_READ;
    read.send_flags = IBV_SEND_SIGNALED;
    read.wr.rdma = {address, mr->rkey};
    ibv_send_wr* bad = nullptr;
    device.memory[0] = 0;
    REQUIRE(ibv_post_send(requester.get(), &read, &bad) == 0);
    CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
    CHECK(device.memory[0] == 's');
    if (writes) {
      device.memory[0] = 'x';
      REQUIRE(post_write(requester.get(), device.sge(1), address, mr->rkey) == 0);
      CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
      CHECK(memory[0] == 'x');
    }
    CHECK(ibv_dereg_mr(mr) == 0);
    ::munmap(memory, bytes);
    ::close(fd);
  }
}

TEST_CASE("memory of ibv_alloc_buf is registered within its bounds, and ibv_reg_mr_ex takes addresses, iovas and such buffers") {
  Service service;
  service.start();
  Device device;
  ibv_buf* buffer = nullptr;
  auto* const memory = static_cast<char*>(ibv_alloc_buf(device.pd, bytes, &buffer));
  REQUIRE(memory != nullptr);
  ibv_mr* const part = ibv_reg_buf_mr(device.pd, buffer, memory + 4096, bytes - 4096, access_rights);
  REQUIRE(part != nullptr);
  CHECK(part->length == bytes - 4096);
  CHECK(ibv_export_buf_dmabuf_fd(buffer) == -1);
  CHECK(errno == ENODATA);
  CHECK(ibv_reg_buf_mr(device.pd, buffer, memory + 4096, bytes, access_rights) == nullptr);
  CHECK(errno == EINVAL);

  struct {
    std::size_t length;
    int access;
    std::uint64_t mask, iova;
    void* address;
    int fd;
    std::uint64_t fd_offset;
    void* dmah;
    ibv_buf* buffer;
  } wanted{bytes, access_rights, 1 | 2 | 32, 0x1000'0000, memory, -1, 0, nullptr, buffer};
  const auto registered = [&] { return ibv_reg_mr_ex(device.pd, reinterpret_cast<ibv_mr_init_attr*>(&wanted)); };
  ibv_mr* const whole = registered();
  REQUIRE(whole != nullptr);
  CHECK(whole->addr == memory);
  wanted.length = bytes + 1;
  CHECK(registered() == nullptr);
  CHECK(errno == EINVAL);
  wanted.mask = 2 | 4;  // a dma-buf
  CHECK(registered() == nullptr);
  CHECK(errno == EOPNOTSUPP);
  wanted.mask = 1;
  CHECK(registered() == nullptr);
  CHECK(errno == EINVAL);

  CHECK(ibv_dereg_mr(whole) == 0);
  CHECK(ibv_dereg_mr(part) == 0);
  ibv_free_buf(buffer);
  std::uint64_t speed = 0;
  CHECK(ibv_query_port_speed(device.context, 1, &speed) == 0);
  CHECK(speed == 1000);
  CHECK(ibv_query_port_speed(device.context, 2, &speed) == EINVAL);
}
