#include "guest_agent/test/machine.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace vrdma::agent::test {

namespace {
template <class Word>
Word load(const Word& word) {
  return std::atomic_ref(const_cast<Word&>(word)).load(std::memory_order_acquire);
}
template <class Word>
void store(Word& word, std::type_identity_t<Word> value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}
}  // namespace

bool can_pin() {
  const auto trial = PinnedSegment::make("vrdma-trial", vm::page_bytes);
  if (!trial) MESSAGE("SKIPPED: memory cannot be pinned and translated here (root and io_uring are needed): ", std::strerror(value(trial.error())));
  return trial.has_value();
}

Machine::Machine(const MachineKind& kind) : bar_bytes_(kind.bar_bytes != 0 ? kind.bar_bytes : vm::bar_bytes) {
  if (kind.bar_bytes != 0) bar_file = *vmci::create_sealed("test-bar", kind.bar_bytes);
  const int flags = bar_file ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
  bar = static_cast<std::byte*>(::mmap(nullptr, bar_bytes_, PROT_READ | PROT_WRITE, flags, bar_file.get(), 0));
  REQUIRE(bar != MAP_FAILED);
  if (bar_file) store(header().service.flags, vm::service_lends_bar);  // seen at the agent's very beginning
  char name[] = "/tmp/vrdma-guestd-test-XXXXXX";
  REQUIRE(::mkdtemp(name) != nullptr);
  folder_ = name;
  socket = folder_ / "run" / "vrdmad.sock";
  stop_.reset(::eventfd(0, EFD_CLOEXEC));
  if (kind.has_interrupts) {
    for (auto& interrupt : interrupts) interrupt.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    kernel_doorbell.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }
  thread_ = std::thread([this, patience_ns = kind.patience_ns, link_interrupt = interrupts[vm::link_vector].get()] {
    Device device;
    device.bar = bar;
    device.bar_bytes = bar_bytes_;
    device.bar_file = bar_file.get();
    device.registers = registers;
    device.interrupt = link_interrupt;
    if (link_interrupt >= 0) {
      device.vectors = vectors;
      device.interrupt_by = [this](std::uint32_t vector) {
        interrupts[vector].reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        return vmci::UniqueFd(::fcntl(interrupts[vector].get(), F_DUPFD_CLOEXEC, 0));
      };
      device.doorbell = kernel_doorbell.get();
    }
    Options options;
    options.socket = socket;
    options.patience_ns = patience_ns;
    options.ballast_bytes_max = 64 << 20;  // of the machine that this is tested on
    try {
      Agent(device, options).run(stop_.get());
    } catch (const std::exception& error) {
      error_ = error.what();
    }
    ended.store(true);
  });
}

Machine::~Machine() {
  if (thread_.joinable()) stop();
  ::munmap(bar, bar_bytes_);
  std::filesystem::remove_all(folder_);
}

void Machine::stop_without_waiting() {
  const std::uint64_t one = 1;
  REQUIRE(::write(stop_.get(), &one, sizeof(one)) == sizeof(one));
}

void Machine::stop() {
  if (running()) stop_without_waiting();
  until("the agent leaves", [this] {
    if (begun() && load(header().service.service_epoch) != 0) accept_boot();
    return !running();
  });
  thread_.join();
}

void Machine::fail(const char* what) {
  std::fprintf(stderr, "waited in vain: %s\n", what);
  FAIL("waited in vain: ", std::string(what));
  std::abort();
}

void Machine::begin_service(std::uint64_t service_epoch) {
  auto& line = header().service;
  store(line.service_epoch, 0);
  store(line.magic, vm::magic);
  store(line.major, vm::version_major);
  store(line.minor, vm::version_minor);
  store(line.vectors, vectors);
  if (bar_file) store(line.flags, vm::service_lends_bar);
  link.reset();
  frames.clear();
  store(line.service_epoch, service_epoch);
}

bool Machine::begun() const {
  const std::uint64_t boot = load(reinterpret_cast<const vm::LinkHeader*>(bar)->agent.boot);
  return boot != 0 && boot != boot_;
}

void Machine::await_boot() {
  until("the agent begins a session", [this] { return begun(); });
}

void Machine::accept_boot() {
  boot_ = load(header().agent.boot);
  frames.clear();
  segments.clear();
  link.emplace(bar, vmci::VmLinkEnd::Who::service);
  store(header().service.accepted, boot_);
}

vm::Hello Machine::open_session(std::int32_t status) {
  // It may begin twice: once for what it has made of the service before.
  until("the agent's hello", [this] {
    if (begun()) accept_boot();
    return !frames.empty();
  });
  const auto hello = await(vm::Frame::hello).as<vm::Hello>();
  std::byte* const page = at_frame(hello.page);
  REQUIRE(page != nullptr);
  CHECK(std::memcmp(page, &hello.proof, sizeof(hello.proof)) == 0);
  vm::Welcome welcome{};
  welcome.status = status;
  welcome.major = vm::version_major;
  welcome.arena_bytes = arena_bytes;
  welcome.ram_page_bytes = vm::page_bytes;
  welcome.ram = {in_file_bytes, in_file_bytes};
  std::strcpy(welcome.name, "test");
  auto& service_page = *reinterpret_cast<control::ServicePage*>(page);
  service_page.magic = control::magic;
  send(vm::Frame::welcome, 0, welcome);
  if (status == 0) until("the agent serves", [this] { return std::filesystem::exists(socket); });
  return hello;
}

void Machine::pump() {
  if (heart_beats) store(header().service.heartbeat, load(header().service.heartbeat) + 1);
  if (!link) return;
  const bool whole = link->receive([this](const vm::FrameHead& head, std::span<const std::byte> body) {
    if (static_cast<vm::Frame>(head.kind) != vm::Frame::segment) {
      frames.push_back({head, {body.begin(), body.end()}});
      return;
    }
    auto& runs = segments[{head.connection, head.item}];
    REQUIRE(body.size() % sizeof(vm::Run) == 0);
    for (std::size_t at = 0; at < body.size(); at += sizeof(vm::Run)) {
      vm::Run run{};
      std::memcpy(&run, body.data() + at, sizeof(run));
      runs.push_back(run);
    }
  });
  if (!whole) {  // what was read while the agent began anew
    link.reset();
    return until("the agent begins a session", [this] { return begun(); });
  }
  const std::uint64_t one = 1;
  if (link->flush() && interrupts[vm::link_vector]) REQUIRE(::write(interrupts[vm::link_vector].get(), &one, sizeof(one)) == sizeof(one));
}

FrameIn Machine::await(vm::Frame kind) {
  FrameIn frame{};
  char what[64];
  std::snprintf(what, sizeof(what), "a frame of kind %u", static_cast<unsigned>(kind));
  until(what, [&] {
    for (auto at = frames.begin(); at != frames.end(); ++at) {
      if (static_cast<vm::Frame>(at->head.kind) != kind) continue;
      frame = std::move(*at);
      frames.erase(at);
      return true;
    }
    return false;
  });
  return frame;
}

Runs Machine::take_segment(std::uint32_t connection, std::uint32_t segment) {
  const auto found = segments.extract({connection, segment});
  return found.empty() ? Runs{} : found.mapped();
}

void Machine::reply(const FrameIn& packet, int status, std::span<const std::byte> body, std::uint16_t streams, std::uint32_t item) {
  control::Head head = packet.request();
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.record.control |= control::reply_bit;
  head.status = status;
  std::vector<std::byte> whole(sizeof(head) + body.size());
  std::memcpy(whole.data(), &head, sizeof(head));
  std::copy(body.begin(), body.end(), whole.begin() + sizeof(head));
  link->send(vm::Frame::reply, packet.head.connection, whole, item, streams);
  pump();
}

std::byte* Machine::at_frame(std::uint64_t page) {
  if (bar_file) return bar + page * vm::page_bytes;
  std::ifstream maps("/proc/self/maps");
  const auto self = Pagemap::of_self();
  REQUIRE(self.has_value());
  for (std::string line; std::getline(maps, line);) {
    unsigned long long first = 0, end = 0;
    if (line.find("rw-s") == std::string::npos || line.find("memfd:vrdma-") == std::string::npos) continue;
    if (std::sscanf(line.c_str(), "%llx-%llx", &first, &end) != 2) continue;
    for (; first < end; first += vm::page_bytes)
      if (const auto runs = self->runs(first, vm::page_bytes); runs && runs->front().page == page) return reinterpret_cast<std::byte*>(first);
  }
  return nullptr;
}

Process::Process(Machine& machine_) : machine(machine_) {
  machine.until("a connection", [this] {  // its socket has a name before it is listened at
    auto connected = vmci::PacketSocket::connect(machine.socket);
    if (connected) socket = std::move(*connected);
    return connected.has_value();
  });
  const FrameIn open = machine.await(vm::Frame::open);
  number = open.head.connection;
  const auto who = open.as<vm::Open>();
  CHECK(number != 0);
  CHECK(who.pid == static_cast<std::uint32_t>(::getpid()));
  CHECK(who.uid == ::getuid());
}

void Process::ask(control::Request request, std::span<const std::byte> body) {
  control::Head head{};
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.record.control = static_cast<std::uint32_t>(request);
  head.sequence = sequence++;
  std::vector<std::byte> packet(sizeof(head) + body.size());
  std::memcpy(packet.data(), &head, sizeof(head));
  std::copy(body.begin(), body.end(), packet.begin() + sizeof(head));
  REQUIRE(socket.send(packet).has_value());
}

Process::Reply Process::reply() {
  std::vector<std::byte> packet(sizeof(control::Head) + control::body_bytes_max);
  machine.until("a reply", [this] {
    pollfd waiting{socket.fd(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  });
  auto received = socket.receive(packet, 0);
  REQUIRE(received.has_value());
  REQUIRE(received->bytes >= sizeof(control::Head));
  Reply result;
  std::memcpy(&result.head, packet.data(), sizeof(result.head));
  result.body.assign(packet.begin() + sizeof(result.head), packet.begin() + static_cast<std::ptrdiff_t>(received->bytes));
  result.descriptors = std::move(received->descriptors);
  CHECK((result.head.record.control & control::reply_bit) != 0);
  return result;
}

bool Process::answered() const {
  pollfd waiting{socket.fd(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

bool Process::closed() {
  machine.until("the end of the connection", [this] {
    pollfd waiting{socket.fd(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  });
  std::vector<std::byte> packet(sizeof(control::Head) + control::body_bytes_max);
  const auto received = socket.receive(packet, 0);
  return !received || received->bytes == 0;
}

std::vector<vmci::UniqueFd> Process::attach() {
  control::AttachRequest request{};
  request.magic = control::magic;
  ask(control::Request::attach, request);
  const FrameIn packet = machine.await(vm::Frame::packet);
  control::AttachReply granted{};
  granted.arena_bytes = Machine::arena_bytes;
  granted.service_pid = 4711;
  machine.reply_with(packet, granted, 1, 1);
  Reply got = reply();
  REQUIRE(got.head.status == 0);
  REQUIRE(got.body.size() == sizeof(granted));
  std::memcpy(&granted, got.body.data(), sizeof(granted));
  CHECK(granted.flags == control::attach_in_machine);
  CHECK(granted.service_pid == 0);
  REQUIRE(got.descriptors.size() == 4);
  return std::move(got.descriptors);
}

bool nothing_forwarded(Machine& machine, Process& process) {
  process.ask(control::Request::query_device);
  return machine.await(vm::Frame::packet).request().record.control == static_cast<std::uint32_t>(control::Request::query_device);
}

std::size_t rings_open() {
  std::size_t count = 0;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += std::filesystem::read_symlink(entry.path(), gone).string().find("[io_uring]") != std::string::npos;
  return count;
}

Runs runs_at(const void* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += vm::page_bytes) static_cast<const volatile std::byte*>(memory)[at];  // into the page table
  const auto runs = Pagemap::of_self()->runs(reinterpret_cast<std::uintptr_t>(memory), bytes);
  REQUIRE(runs.has_value());
  return *runs;
}

bool same(const Runs& a, const Runs& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) { return x.page == y.page && x.pages == y.pages; });
}

bool readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

}  // namespace vrdma::agent::test
