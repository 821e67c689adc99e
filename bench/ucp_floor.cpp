// The floor for messages between two hosts: what four processes cost that only pass a word on, by active messages of UCX over TCP
// between the two in the middle.
//   ucp_floor DEVICE SECONDS [NETNS NETNS]     A → relay ⇒ relay → B and back; half a round trip
// The relays use the interface DEVICE, each in the network namespace given for it. All wait as ours do. Prints a JSON object.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "children.hpp"
#include "figures.hpp"
#include "vmci_channel/backoff.hpp"

namespace {

using bench::start;

constexpr std::size_t samples_max = 200'000, address_max = 4096;

struct alignas(128) Line {
  std::atomic<std::uint64_t> word;
};
struct Shared {
  Line to_relay[2], from_relay[2];  // of A and its relay, of B and its relay
  Line stop;
  Line address_bytes[2];  // published last
  char address[2][address_max];
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "ucp_floor: %s\n", what.c_str());
  std::_Exit(1);
}

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) fail(std::string(what) + ": " + ucs_status_string(status));
}

struct Relay {
  Line& out;
  bool worked = false;
};

ucs_status_t on_message(void* argument, const void*, std::size_t, void* data, std::size_t bytes, const ucp_am_recv_param_t*) {
  auto& relay = *static_cast<Relay*>(argument);
  std::uint64_t word;
  if (bytes != sizeof(word)) fail("a message of another size");
  std::memcpy(&word, data, sizeof(word));
  relay.out.word.store(word, std::memory_order_release);
  relay.worked = true;
  return UCS_OK;
}

void relay(Shared& shared, std::size_t side, const char* device, const char* netns) {
  if (netns != nullptr) {
    const int there = ::open((std::string("/run/netns/") + netns).c_str(), O_RDONLY | O_CLOEXEC);
    if (there < 0 || ::setns(there, CLONE_NEWNET) != 0) fail(std::string("cannot enter the namespace ") + netns);
    // UCX looks for devices in /sys, which shows those of the namespace that it was mounted in.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0 || ::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0)
      fail(std::string("cannot mount /sys for the namespace ") + netns);
  }
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  check(ucp_config_modify(config, "TLS", "tcp"), "TLS");
  check(ucp_config_modify(config, "NET_DEVICES", device), "NET_DEVICES");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM;
  ucp_context_h context;
  check(ucp_init(&params, config, &context), "ucp_init");
  ucp_worker_params_t worker_params{};
  ucp_worker_h worker;
  check(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
  Relay relay{shared.from_relay[side]};
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.cb = on_message;
  handler.arg = &relay;
  check(ucp_worker_set_am_recv_handler(worker, &handler), "ucp_worker_set_am_recv_handler");
  ucp_address_t* address;
  std::size_t bytes;
  check(ucp_worker_get_address(worker, &address, &bytes), "ucp_worker_get_address");
  if (bytes > address_max) fail("UCX's address is too long");
  std::memcpy(shared.address[side], address, bytes);
  shared.address_bytes[side].word.store(bytes, std::memory_order_release);
  vmci::Backoff backoff;
  while (shared.address_bytes[1 - side].word.load(std::memory_order_acquire) == 0) backoff.idle();
  ucp_ep_params_t to{};
  to.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  to.address = reinterpret_cast<const ucp_address_t*>(shared.address[1 - side]);
  ucp_ep_h endpoint;
  check(ucp_ep_create(worker, &to, &endpoint), "ucp_ep_create");

  // A word may be overwritten only after it has left UCX: there is one under way at a time, so two do.
  std::uint64_t words[2] = {}, seen = 0;
  for (std::size_t turn = 0;;) {
    relay.worked = false;
    const std::uint64_t now = shared.to_relay[side].word.load(std::memory_order_acquire);
    if (now != seen) {
      words[turn] = seen = now;
      ucp_request_param_t send{};
      const ucs_status_ptr_t request = ucp_am_send_nbx(endpoint, 0, nullptr, 0, &words[turn], sizeof(now), &send);
      if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "ucp_am_send_nbx");
      if (request != nullptr) ucp_request_free(request);
      turn = 1 - turn;
      relay.worked = true;
    }
    if (ucp_worker_progress(worker) != 0) relay.worked = true;
    if (relay.worked) backoff.reset();
    else if (shared.stop.word.load(std::memory_order_relaxed)) return;
    else backoff.idle();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0;
  if ((argc != 3 && argc != 5) || seconds <= 0 || seconds > 60) {
    std::fprintf(stderr, "usage: ucp_floor DEVICE SECONDS (at most 60) [NETNS NETNS]\n");
    return 2;
  }
  ::alarm(120);
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  Shared& shared = *static_cast<Shared*>(memory);
  const pid_t relays[] = {start([&] { relay(shared, 0, argv[1], argc == 5 ? argv[3] : nullptr); }),
                          start([&] { relay(shared, 1, argv[1], argc == 5 ? argv[4] : nullptr); })};
  const pid_t echo = start([&] {
    vmci::Backoff backoff;
    for (std::uint64_t seen = 0; shared.stop.word.load(std::memory_order_relaxed) == 0;) {
      const std::uint64_t now = shared.from_relay[1].word.load(std::memory_order_acquire);
      if (now == seen) {
        backoff.idle();
        continue;
      }
      seen = now;
      shared.to_relay[1].word.store(now, std::memory_order_release);
      backoff.reset();
    }
  });
  vmci::Backoff backoff;
  bench::Samples samples(seconds, samples_max);
  for (std::uint64_t i = 1; samples.more(); ++i) {
    const std::uint64_t before = vmci::cycles();
    shared.to_relay[0].word.store(i, std::memory_order_release);
    for (std::uint32_t looks = 0; shared.from_relay[0].word.load(std::memory_order_acquire) != i; backoff.idle())
      if (++looks % 4096 == 0)
        for (const pid_t one : relays)
          if (::waitpid(one, nullptr, WNOHANG) == one) fail("a relay ended");
    backoff.reset();
    samples.add(vmci::cycles() - before);
  }
  shared.stop.word.store(1);
  for (const pid_t one : {relays[0], relays[1], echo}) ::waitpid(one, nullptr, 0);
  bench::print("ucp-relay", samples.json(2));
  return 0;
}
