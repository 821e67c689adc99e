// What it costs to make objects, and to have them.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "endpoint.hpp"
#include "figures.hpp"

namespace bench {

namespace {

constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

char* touched(std::size_t bytes) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail("mmap of %zu bytes: %s", bytes, std::strerror(errno));
  std::memset(data, 1, bytes);
  return static_cast<char*>(data);
}

// Registers and deregisters `data`; the time of each goes into its samples.
void register_once(Endpoint& endpoint, char* data, std::size_t bytes, Samples& registering, Samples& deregistering) {
  const std::uint64_t before = vmci::cycles();
  ibv_mr* const mr = ibv_reg_mr(endpoint.pd(), data, bytes, access);
  const std::uint64_t between = vmci::cycles();
  if (mr == nullptr) fail("ibv_reg_mr of %zu bytes: %s", bytes, std::strerror(errno));
  if (ibv_dereg_mr(mr) != 0) fail("ibv_dereg_mr of %zu bytes", bytes);
  registering.add(between - before);
  deregistering.add(vmci::cycles() - between);
}

}  // namespace

void registration(const Options& options) {
  Endpoint endpoint(options, 1, false);
  {
    Samples registering(options.seconds, options.samples), deregistering(options.seconds, options.samples);
    char* const data = touched(options.bytes);
    while (registering.more() && deregistering.more()) {
      register_once(endpoint, data, options.bytes, registering, deregistering);
      std::memset(data, 2, options.bytes);  // in use again, as between two registrations of an application
    }
    print("reg-mr-same", registering.json());
    print("dereg-mr-same", deregistering.json());
    ::munmap(data, options.bytes);
  }
  Samples registering(options.seconds, options.samples), deregistering(options.seconds, options.samples);
  while (registering.more() && deregistering.more()) {
    char* const data = touched(options.bytes);
    register_once(endpoint, data, options.bytes, registering, deregistering);
    ::munmap(data, options.bytes);
  }
  print("reg-mr-fresh", registering.json());
  print("dereg-mr-fresh", deregistering.json());
}

// To RTS on a queue pair that is its own destination: all that the service has to do, and no second program to wait for.
void creation(const Options& options) {
  Endpoint endpoint(options, 256, false);
  Samples samples(options.seconds, options.samples);
  while (samples.more()) {
    const std::uint64_t before = vmci::cycles();
    ibv_qp* const qp = endpoint.create_qp({64, 64});
    endpoint.to_init(qp);
    endpoint.to_rts(qp, qp->qp_num, endpoint.lid());
    samples.add(vmci::cycles() - before);
    if (ibv_destroy_qp(qp) != 0) fail("ibv_destroy_qp");
  }
  print(options.what, samples.json());
}

void idle_pairs(const Options& options) {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigprocmask(SIG_BLOCK, &stop, nullptr);
  Endpoint endpoint(options, static_cast<int>(2 * options.idle_qps + 1), false);
  endpoint.allocate(4096);
  endpoint.connect(options.idle_qps, {options.depth, options.depth});
  endpoint.barrier();
  std::printf("ready\n");
  std::fflush(stdout);
  int number;
  sigwait(&stop, &number);
}

}  // namespace bench
