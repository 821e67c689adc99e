// Events through pipes that are full, or that nobody reads any more.
#include "vmkernel_svc/events.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>
#include <thread>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/eventfd_signal.hpp"

using namespace vrdma;
using namespace vrdma::svc;

namespace {

struct World {
  Config config;
  control::ServicePage service_page{};
  Shard shard{config, service_page};
  ControlDesk desk{shard};
  vmci::Segment page = *vmci::Segment::create("test-page", sizeof(control::ServicePage), vmci::HandedOut::read_only);
  Guest* guest = nullptr;
  std::uint32_t context = 0;
  vmci::UniqueFd events;  // the guest's end

  World() {
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep, given;
    const auto attached = desk.attach(control::AttachRequest{}, AttachInfo{{0, ::getuid(), ::getgid()}, {}, {}}, page.fd(), descriptors, keep);
    REQUIRE(attached.has_value());
    guest = shard.fabric().guests.at(attached->guest).get();
    context = desk.on(*guest, control::OpenContextRequest{}, given)->context;
    events = std::move(given.at(0));
    REQUIRE(::fcntl(events.get(), F_SETFL, O_NONBLOCK) == 0);
    ::signal(SIGPIPE, SIG_IGN);  // the server blocks it in the shard's thread
  }
};

// The same guest as a process of a machine with four vectors, and a CQ that reports to a channel with vector 3.
struct MachineWorld : World {
  std::shared_ptr<Interrupts> interrupts = std::make_shared<Interrupts>();
  vmci::UniqueFd pipe;
  control::ChannelReply channel{};
  control::EventRing* ring = nullptr;
  control::CqShared shared{};
  CompletionQueue cq{};
  std::uint32_t arms = 0;

  MachineWorld() {
    for (int i = 0; i < 4; ++i) interrupts->emplace_back(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    guest->machine = std::make_unique<InMachine>(InMachine{"one", 0, 0, interrupts});
    std::vector<vmci::UniqueFd> given;
    channel = *desk.on(*guest, control::CreateChannelRequest{context, 3}, given);
    pipe = std::move(given.at(0));
    ring = guest->arena.segment().at<control::EventRing>(std::uint64_t{channel.ring} * control::ring_unit_bytes);
    cq.handle = Handle{77};
    cq.guest = guest;
    cq.channel = guest->channels.at(channel.handle).get();
    cq.shared = &shared;
  }
  void complete() {
    std::atomic_ref(shared.arm).store(++arms << 2 | control::arm_next);
    raise_if_armed(cq, false);
  }
  // How often each vector was rung since the last time.
  std::vector<std::uint64_t> rung() const {
    std::vector<std::uint64_t> counts;
    for (const auto& interrupt : *interrupts) {
      std::uint64_t count = 0;
      counts.push_back(::read(interrupt.get(), &count, sizeof(count)) == sizeof(count) ? count : 0);
    }
    return counts;
  }
};
using Counts = std::vector<std::uint64_t>;

#if defined(__x86_64__)
// A thread of which the kernel refuses io_submit(2) for a while, as it does where it lacks memory for the request. For ever: the thread has
// to end.
class Refusing {
 public:
  static inline thread_local int refusals = 0;  // of the next calls

  Refusing() {
    struct sigaction action {};
    action.sa_sigaction = &refuse;
    action.sa_flags = SA_SIGINFO;
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_submit, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[3])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, passes, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{std::size(filter), filter};
    works_ = ::sigaction(SIGSYS, &action, &before_) == 0 && ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
             ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
  }
  explicit operator bool() const { return works_; }

 private:
  static constexpr unsigned passes = 0x7654321;  // as a fourth argument, which nobody looks at

  static void refuse(int, siginfo_t*, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const int error = errno;
    if (refusals > 0) {
      --refusals;
      registers[REG_RAX] = -EAGAIN;
    } else {
      const long result = ::syscall(SYS_io_submit, registers[REG_RDI], registers[REG_RSI], registers[REG_RDX], passes);
      registers[REG_RAX] = result < 0 ? -errno : result;
    }
    errno = error;
  }

  struct sigaction before_ {};
  bool works_;
};
#endif

bool signals_work() {
  if (!can_signal_eventfds()) MESSAGE("SKIPPED: no asynchronous I/O here");
  return can_signal_eventfds();
}

}  // namespace

TEST_CASE("What a full pipe did not take comes when there is room, also where the shard always has something to do and never sleeps") {
  World world;
  constexpr std::uint32_t count = 10'000;  // a pipe holds 4096
  for (std::uint32_t i = 0; i < count; ++i) raise_async(*world.guest, world.context, 1, Handle{i});
  CHECK(world.guest->events_held);
  std::uint32_t next = 0;
  for (const std::uint64_t until = vmci::monotonic_ns() + 60'000'000'000; next < count && vmci::monotonic_ns() < until;) {
    control::AsyncRecord record;
    if (::read(world.events.get(), &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record)))
      REQUIRE(record.handle == next++);
    else
      world.shard.turn();
  }
  CHECK(next == count);
  CHECK_FALSE(world.guest->events_held);
}

TEST_CASE("What nobody can read any more is not kept") {
  World world;
  for (std::uint32_t i = 0; i < 5000; ++i) raise_async(*world.guest, world.context, 1, Handle{i});
  CHECK(world.guest->events_held);
  world.events.reset();
  CHECK_FALSE(flush_events(*world.guest));
  raise_async(*world.guest, world.context, 1, Handle{1});
  CHECK_FALSE(world.guest->events_held);
}

TEST_CASE("A channel with an interrupt of its machine has its events in a ring, and the machine is interrupted once until it looks") {
  if (!signals_work()) return;
  MachineWorld world;
  REQUIRE(world.channel.ring != 0);
  vmci::EventRingReader reader(world.ring);
  world.complete();
  world.complete();
  CHECK(world.rung() == Counts{0, 0, 0, 1});
  std::vector<std::uint32_t> sequences;
  const auto take = [&] { reader.take([&](const control::CompletionRecord& record) {
    CHECK(record.cq == world.cq.handle.value);
    sequences.push_back(record.arm_sequence);
  }); };
  take();
  CHECK(sequences == std::vector<std::uint32_t>{1, 2});
  world.complete();
  CHECK(world.rung() == Counts{0, 0, 0, 1});
  pollfd records{world.pipe.get(), POLLIN, 0};
  CHECK(::poll(&records, 1, 0) == 0);

  // What finds no room comes later, in order.
  for (int i = 0; i < 300; ++i) world.complete();
  CHECK(world.guest->events_held);
  for (int i = 0; i < 10 && sequences.size() < 303; ++i) take(), flush_events(*world.guest);
  REQUIRE(sequences.size() == 303);
  for (std::uint32_t i = 0; i < 303; ++i) CHECK(sequences[i] == i + 1);
  CHECK_FALSE(flush_events(*world.guest));

  Tenant& tenant = *world.guest->tenant;
  CHECK(tenant.queue_bytes != 0);
  world.desk.detach(*world.guest);
  CHECK(tenant.queue_bytes == 0);
  CHECK(::poll(&records, 1, 0) == 1);  // its end
}

TEST_CASE("A machine that stands still finds nothing new in its rings, and is interrupted again when it goes on") {
  if (!signals_work()) return;
  MachineWorld world;
  for (std::uint32_t i = 0; i < control::event_records + 1; ++i) world.complete();
  CHECK(world.guest->events_held);
  vmci::EventRingReader reader(world.ring);
  std::uint32_t taken = 0;
  reader.take([&](const control::CompletionRecord&) { ++taken; });
  CHECK(taken == control::event_records);
  world.rung();
  world.shard.freeze(*world.guest);
  CHECK_FALSE(flush_events(*world.guest));
  CHECK(!reader.interrupt_due());
  CHECK(world.rung() == Counts{0, 0, 0, 0});
  world.shard.thaw(*world.guest);
  CHECK(world.rung() == Counts{0, 0, 0, 1});
  CHECK_FALSE(flush_events(*world.guest));  // held no more: it has room
  CHECK(reader.interrupt_due());
  CHECK(world.rung() == Counts{0, 0, 0, 1});
}

TEST_CASE("Only the vectors that a machine has to lend are taken, and only of machines") {
  MachineWorld world;
  std::vector<vmci::UniqueFd> given;
  for (const std::uint32_t vector : {vm::link_vector + 1, 4u, 0xffffffffu})
    CHECK(world.desk.on(*world.guest, control::CreateChannelRequest{world.context, vector}, given).error() == Errno{EINVAL});
  CHECK(world.desk.on(*world.guest, control::CreateChannelRequest{world.context, 0}, given)->ring == 0);
  World host;
  CHECK(host.desk.on(*host.guest, control::CreateChannelRequest{host.context, control::interrupt_wanted}, given)->ring == 0);
}

TEST_CASE("Whoever fills an eventfd that blocks keeps nobody waiting who signals it") {
  if (!signals_work()) return;
  const vmci::UniqueFd event(::eventfd(0, EFD_CLOEXEC));  // as a hostile QEMU may leave it
  const std::uint64_t most = ~std::uint64_t{0} - 1;
  REQUIRE(::write(event.get(), &most, sizeof(most)) == sizeof(most));
  ::alarm(60);  // ends the test if it does wait
  for (int i = 0; i < 1000; ++i) CHECK(signal_eventfd(event.get()));
  ::alarm(0);
  std::uint64_t count = 0;
  REQUIRE(::read(event.get(), &count, sizeof(count)) == sizeof(count));
  CHECK(count >= most);
  for (int i = 0; i < 1000; ++i) CHECK(signal_eventfd(event.get()));
  REQUIRE(::read(event.get(), &count, sizeof(count)) == sizeof(count));
  CHECK(count == 1000);
}

#if defined(__x86_64__)
TEST_CASE("A machine that the kernel had no room to interrupt is interrupted as soon as it has") {
  if (!signals_work()) return;
  bool tried = false;
  std::thread([&] {
    const Refusing refusing;
    if (!refusing) return;
    tried = true;
    MachineWorld world;
    REQUIRE(world.channel.ring != 0);
    Refusing::refusals = 1;  // tried again at once
    world.complete();
    CHECK(world.rung() == Counts{0, 0, 0, 1});
    CHECK_FALSE(world.guest->events_held);

    vmci::EventRingReader reader(world.ring);
    reader.take([](const control::CompletionRecord&) {});
    Refusing::refusals = 1000;
    world.complete();
    CHECK(world.rung() == Counts{0, 0, 0, 0});
    CHECK(world.guest->events_held);
    CHECK(flush_events(*world.guest));
    Refusing::refusals = 0;
    CHECK_FALSE(flush_events(*world.guest));
    CHECK(world.rung() == Counts{0, 0, 0, 1});

    // Also when it goes on after it stood still.
    Refusing::refusals = 1000;
    interrupt_again(*world.guest);
    CHECK(world.guest->events_held);
    Refusing::refusals = 0;
    CHECK_FALSE(flush_events(*world.guest));
    CHECK(world.rung() == Counts{0, 0, 0, 1});
  }).join();
  if (!tried) MESSAGE("SKIPPED: no filter of system calls here");
}
#endif
