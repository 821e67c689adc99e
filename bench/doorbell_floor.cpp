// The floor of event mode in machines: what doorbells and interrupts cost by themselves, over an ivshmem device that nobody else uses.
//   doorbell_floor host SOCKET SOCKET          on the host: is the ivshmem server of two machines, until SIGTERM; "ready" when it listens
//   doorbell_floor echo PCI-ADDRESS SECONDS    in a machine: rings, and sleeps until the host has rung back; the whole round trip
//   doorbell_floor relay PCI-ADDRESS SECONDS   likewise, until the host has rung the other machine, and that one back by the host
//   doorbell_floor answer PCI-ADDRESS          in the other machine, until SIGTERM; "ready" when it waits
// In a machine the device is vfio's, as vrdma-guestd's is. Nobody polls; nothing but the doorbells is passed on. Prints a JSON object.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "figures.hpp"
#include "vmci_channel/descriptor_passing.hpp"
#include "guest_agent/vfio.hpp"

namespace {

using vmci::UniqueFd;

constexpr std::int64_t host_peer = 0, machine_peer = 1;
// The vectors of a device: the host rings back, or passes it on to the other machine; machines are interrupted by the first.
constexpr std::uint32_t to_self = 0, to_other = 1, vectors = 2;
constexpr off_t bar_bytes = 64 << 10;  // less than vrdma's, so that vrdma-guestd leaves the device alone
constexpr std::size_t doorbell_word = 12 / sizeof(std::uint32_t);
constexpr std::size_t samples_max = 200'000;

[[noreturn]] void fail(const char* what) {
  std::perror(("doorbell_floor: " + std::string(what)).c_str());
  std::exit(1);
}

UniqueFd must(int fd, const char* what) {
  if (fd < 0) fail(what);
  return UniqueFd(fd);
}

// Both ends of all doorbells sleep in read(2).
void take_ring(int event) {
  std::uint64_t count;
  if (::read(event, &count, sizeof(count)) != sizeof(count)) fail("read of a doorbell");
}

void ring(int event) {
  const std::uint64_t one = 1;
  if (::write(event, &one, sizeof(one)) != sizeof(one)) fail("write of a doorbell");
}

// --- the host ------------------------------------------------------------------------------------------------------

// One message of the ivshmem protocol (QEMU, docs/specs/ivshmem-spec): a number, perhaps with a descriptor.
void tell(int socket, std::int64_t number, int descriptor = -1) {
  if (!vmci::send_with_descriptors(socket, std::as_bytes(std::span(&number, 1)), std::span(&descriptor, descriptor >= 0 ? 1 : 0))) fail("sendmsg to QEMU");
}

struct Machine {
  UniqueFd listener, qemu, bar;
  std::array<UniqueFd, vectors> rung, interrupts;

  explicit Machine(const char* path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (std::strlen(path) >= sizeof(address.sun_path)) errno = ENAMETOOLONG, fail(path);
    std::strcpy(address.sun_path, path);
    listener = must(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
    if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 || ::listen(listener.get(), 1) != 0) fail(path);
    bar = must(::memfd_create("doorbell_floor", MFD_CLOEXEC), "memfd_create");
    if (::ftruncate(bar.get(), bar_bytes) != 0) fail("ftruncate");
    for (auto* const events : {&rung, &interrupts})
      for (UniqueFd& event : *events) event = must(::eventfd(0, EFD_CLOEXEC), "eventfd");
  }

  void introduce() {
    constexpr std::int64_t protocol_version = 0, shared_memory = -1;
    qemu = must(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC), "accept");
    tell(qemu.get(), protocol_version);
    tell(qemu.get(), machine_peer);
    tell(qemu.get(), shared_memory, bar.get());
    for (const UniqueFd& event : rung) tell(qemu.get(), host_peer, event.get());
    for (const UniqueFd& event : interrupts) tell(qemu.get(), machine_peer, event.get());
  }
};

[[noreturn]] void serve(const char* first, const char* second) {
  std::array<Machine, 2> machines{Machine(first), Machine(second)};
  std::puts("ready");
  std::fflush(stdout);
  for (Machine& machine : machines) machine.introduce();
  for (;;) {
    std::array<pollfd, 2 * vectors> rung;
    for (std::size_t i = 0; i < rung.size(); ++i) rung[i] = {machines[i / vectors].rung[i % vectors].get(), POLLIN, 0};
    if (::poll(rung.data(), rung.size(), -1) < 0) fail("poll");
    for (std::size_t i = 0; i < rung.size(); ++i) {
      if ((rung[i].revents & POLLIN) == 0) continue;
      take_ring(rung[i].fd);
      const std::size_t from = i / vectors, to = i % vectors == to_self ? from : 1 - from;
      ring(machines[to].interrupts[to_self].get());
    }
  }
}

// --- a machine -----------------------------------------------------------------------------------------------------

class Device {
 public:
  explicit Device(const std::string& address) : vfio_(taken(address)), registers_(static_cast<volatile std::uint32_t*>(vfio_.map_bar(0).memory)) {
    interrupt_ = vfio_.interrupt(to_self);
    if (!interrupt_ || ::fcntl(interrupt_.get(), F_SETFL, ::fcntl(interrupt_.get(), F_GETFL) & ~O_NONBLOCK) != 0) fail("fcntl");
  }
  void ring(std::uint32_t vector) { registers_[doorbell_word] = static_cast<std::uint32_t>(host_peer) << 16 | vector; }
  void wait() { take_ring(interrupt_.get()); }

 private:
  static std::string taken(const std::string& address) {
    std::string folder = "/sys/bus/pci/devices/" + address;
    if (!vrdma::agent::VfioDevice::available(folder)) errno = ENODEV, fail(("vfio and " + address).c_str());
    return folder;
  }
  vrdma::agent::VfioDevice vfio_;
  volatile std::uint32_t* registers_;
  UniqueFd interrupt_;
};

void measure(const std::string& what, const std::string& address, double seconds) {
  Device device(address);
  const std::uint32_t vector = what == "echo" ? to_self : to_other;
  bench::Samples samples(seconds, samples_max);
  while (samples.more()) {
    const std::uint64_t before = vmci::cycles();
    device.ring(vector);
    device.wait();
    samples.add(vmci::cycles() - before);
  }
  bench::print("doorbell-" + what, samples.json());
}

[[noreturn]] void answer(const std::string& address) {
  Device device(address);
  std::puts("ready");
  std::fflush(stdout);
  for (;;) device.wait(), device.ring(to_other);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "host" && argc == 4) serve(argv[2], argv[3]);
  if (what == "answer" && argc == 3) answer(argv[2]);
  const double seconds = argc == 4 ? std::atof(argv[3]) : 0;
  if ((what == "echo" || what == "relay") && seconds > 0 && seconds <= 60) {
    ::alarm(300);  // a doorbell that is lost ends here
    return measure(what, argv[2], seconds), 0;
  }
  std::fprintf(stderr, "usage: doorbell_floor host SOCKET SOCKET | echo|relay PCI-ADDRESS SECONDS (at most 60) | answer PCI-ADDRESS\n");
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "doorbell_floor: %s\n", error.what());
  return 1;
}
