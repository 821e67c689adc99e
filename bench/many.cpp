// Many queue pairs: how fast connections come and go, and how much a mesh of processes moves.
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "endpoint.hpp"
#include "figures.hpp"

namespace bench {

void connection_rate(const Options& options) {
  constexpr std::uint32_t batch = 32;
  Endpoint endpoint(options, 256, false);
  endpoint.barrier();
  const Clock clock;
  std::uint64_t pairs = 0;
  for (bool more = true; endpoint.agree(more); pairs += batch) {
    endpoint.disconnect(endpoint.connect(batch, {64, 64}));
    more = clock.seconds() < options.seconds;
  }
  const double seconds = clock.seconds();
  if (!options.client) return;
  char text[80];
  std::snprintf(text, sizeof(text), "\"pairs\": %lu, \"pairs_per_s\": %.6g", pairs, static_cast<double>(pairs) / seconds);
  print(options.what, text);
}

namespace {

// When all measure, by the one clock of all, and how many messages a second each has done in it.
struct Mesh {
  std::uint64_t start_ns, end_ns;
  double rates[];
};

constexpr std::uint32_t chain = 4, window = 16;  // of each queue pair: requests in a post, requests outstanding

// Posts to every peer that has room, and polls, until the time is over, but not without a few messages, however starved; and until nothing is
// outstanding. Messages a second.
double write_to_all(Endpoint& endpoint, const std::vector<ibv_qp*>& qps, const std::vector<Remote>& remotes, const Memory& memory, const Mesh& mesh) {
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data), 8, memory.mr->lkey};
  std::vector<std::uint32_t> outstanding(qps.size());
  std::uint64_t done = 0, under_way = 0, until_ns = 0;
  for (bool more = true; more || under_way != 0;) {
    const std::uint64_t now = vmci::monotonic_ns();
    if (more && now >= mesh.end_ns && done >= window) more = false, until_ns = now;
    for (std::size_t peer = 0; more && peer < qps.size(); ++peer) {
      if (outstanding[peer] + chain > window) continue;
      ibv_send_wr requests[chain]{};
      for (std::uint32_t i = 0; i < chain; ++i) {
        requests[i].wr_id = peer;
        requests[i].next = i + 1 < chain ? &requests[i + 1] : nullptr;
        requests[i].sg_list = &sge;
        requests[i].num_sge = 1;
        requests[i].opcode = IBV_WR_RDMA_WRITE;
        requests[i].send_flags = IBV_SEND_INLINE | (i + 1 == chain ? unsigned{IBV_SEND_SIGNALED} : 0u);
        requests[i].wr.rdma = {remotes[peer].address + 64 * i, remotes[peer].rkey};
      }
      endpoint.post(qps[peer], requests[0]);
      outstanding[peer] += chain, under_way += chain;
    }
    ibv_wc wc[16];
    const int got = endpoint.poll(wc, 16);
    for (int i = 0; i < got; ++i) outstanding[wc[i].wr_id] -= chain;
    const std::uint64_t completed = static_cast<std::uint64_t>(got) * chain;
    under_way -= completed;
    if (now >= mesh.start_ns && more) done += completed;
  }
  return static_cast<double>(done) * 1e9 / static_cast<double>(until_ns - mesh.start_ns);
}

// One process: `peers[i]` is a socket to process i. A byte out through `control` says that it is ready, one in that all are; likewise at the end.
void take_part(const Options& options, std::uint32_t self, const std::vector<int>& peers, int control, Mesh& mesh) {
  const auto meet = [&] {
    char byte = 1;
    if (::write(control, &byte, 1) != 1 || ::read(control, &byte, 1) != 1) fail("process %u of the mesh is alone", self);
  };
  Endpoint endpoint(options, static_cast<int>((window + 1) * options.processes), false);  // room for all, as direct mode asks
  const Memory memory = endpoint.allocate(4096);
  std::vector<ibv_qp*> qps;
  std::vector<Remote> remotes;
  // In the order of the pairs, which is the same for all: nobody waits in a circle.
  for (std::uint32_t i = 0; i < options.processes; ++i) {
    if (i == self) continue;
    endpoint.face(peers[i]);
    qps.push_back(endpoint.connect(1, {window, 1}).front());
    remotes.push_back(endpoint.exchange(memory));
  }
  meet();
  mesh.rates[self] = write_to_all(endpoint, qps, remotes, memory, mesh);
  meet();
}

// A byte from every process, then one to every process. One that has left ends us with its message.
void let_meet(const std::vector<int>& controls, Mesh* to_start, double seconds) {
  char byte;
  for (const int control : controls)
    if (::read(control, &byte, 1) != 1) fail("a process of the mesh has left");
  if (to_start != nullptr) {
    to_start->start_ns = vmci::monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e8);
    to_start->end_ns = to_start->start_ns + static_cast<std::uint64_t>(seconds * 1e9);
  }
  for (const int control : controls)
    if (::write(control, &byte, 1) != 1) fail("a process of the mesh does not listen");
}

}  // namespace

void all_to_all(const Options& options) {
  const std::uint32_t count = options.processes;
  void* const shared = ::mmap(nullptr, sizeof(Mesh) + count * sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) fail("mmap: %s", std::strerror(errno));
  Mesh& mesh = *static_cast<Mesh*>(shared);
  std::vector<std::vector<int>> sockets(count, std::vector<int>(count, -1));
  const auto pair = [](int& one, int& other) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair: %s", std::strerror(errno));
    one = ends[0], other = ends[1];
  };
  for (std::uint32_t i = 0; i < count; ++i)
    for (std::uint32_t j = i + 1; j < count; ++j) pair(sockets[i][j], sockets[j][i]);
  std::vector<int> controls(count);
  std::vector<pid_t> children;
  for (std::uint32_t i = 0; i < count; ++i) {
    int theirs;
    pair(controls[i], theirs);
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid < 0) fail("fork: %s", std::strerror(errno));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      for (std::uint32_t other = 0; other <= i; ++other) ::close(controls[other]);
      // Of the mesh only our own ends: else nobody would notice that another one has died.
      for (std::uint32_t other = 0; other < count; ++other)
        for (const int fd : sockets[other])
          if (other != i && fd >= 0) ::close(fd);
      take_part(options, i, sockets[i], theirs, mesh);
      ::_exit(0);
    }
    ::close(theirs);
    children.push_back(pid);
  }
  for (const auto& row : sockets)
    for (const int fd : row)
      if (fd >= 0) ::close(fd);
  let_meet(controls, &mesh, options.seconds);
  let_meet(controls, nullptr, 0);
  for (const pid_t child : children) {
    int status;
    if (::waitpid(child, &status, 0) != child || status != 0) fail("a process of the mesh ended badly (status %d)", status);
  }
  double sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) sum += mesh.rates[i];
  char text[80];
  std::snprintf(text, sizeof(text), "\"processes\": %u, \"mmsg_per_s\": %.6g", count, sum / 1e6);
  print(options.what, text);
}

}  // namespace bench
