// A private vrdmad that serves one machine, a process of that machine, and what its QEMU would tell.
#pragma once

#include <linux/sockios.h>
#include <nlohmann/json.hpp>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <filesystem>
#include <thread>

#include "guest_lib/test/service_fixture.hpp"
#include "tests/machine/fake_machine.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/record_ring.hpp"

namespace vrdma::test {

namespace fs = std::filesystem;
constexpr std::uint64_t ram_bytes = 64 << 20;

struct World {
  Service service;
  fs::path folder, ram;

  enum class Kind { interrupted, plain, launched };  // plain: the device is a file; launched: and the RAM comes with a launcher
  Kind kind;

  // bar_bytes: of the BAR, where the RAM is the machine's own.
  // own_ram: the file that is the machine's RAM, where it shall be another than the one that is made here. vectors: as vm.json says; 0: it says
  // nothing, as those of older versions.
  explicit World(Kind of = Kind::interrupted, const std::string& configuration = "{}", const fs::path& own_ram = {}, std::uint32_t vectors = 0, std::uint64_t bar_bytes = 0)
      : kind(of) {
    ::umask(022);  // what others could write is not looked at
    service.start(configuration);
    folder = fs::path(std::getenv("VRDMA_SOCKET")).parent_path() / "vm";
    ram = folder / "one.ram";
    fs::create_directories(folder / "one");
    std::ofstream(ram).close();
    fs::resize_file(ram, ram_bytes);
    if (!own_ram.empty()) ram = own_ram;
    const fs::path file = folder / "one" / "vm.json";
    nlohmann::json spec = nlohmann::json::object();
    if (kind != Kind::launched && bar_bytes == 0) spec["ram"] = ram;
    if (bar_bytes != 0) spec["bar_bytes"] = bar_bytes;
    if (kind != Kind::interrupted) spec["plain"] = true;
    if (vectors != 0) spec["vectors"] = vectors;
    std::ofstream(file.string() + ".new") << spec;
    fs::rename(file.string() + ".new", file);
    eventually("the machine is served", [] { return !shown()["vms"].empty(); });  // by then all its sockets listen
  }
  ~World() {
    service.kill_now();
    // Not at once: the keeper that has lost its service takes its socket along.
    for (std::error_code error; fs::exists(folder, error); std::this_thread::yield()) fs::remove_all(folder, error);
  }
  // What `vrdma show` asks for.
  static nlohmann::json shown() {
    const auto asking = vmci::PacketSocket::connect(std::getenv("VRDMA_SOCKET"));
    REQUIRE(asking.has_value());
    control::Head head{};
    head.record.control = static_cast<std::uint32_t>(control::Request::show);
    REQUIRE(asking->send(std::as_bytes(std::span(&head, 1))).has_value());
    std::byte answer[sizeof(control::Head) + control::body_bytes_max];
    const auto received = asking->receive(answer, 60000);
    REQUIRE(received.has_value());
    REQUIRE(received->descriptors.size() == 1);
    std::string text;
    char part[4096];
    for (ssize_t got; (got = ::pread(received->descriptors[0].get(), part, sizeof(part), static_cast<off_t>(text.size()))) > 0;) text.append(part, static_cast<std::size_t>(got));
    return nlohmann::json::parse(text);
  }
  // Whether the service has a page of the machine's RAM.
  bool ram_mapped() const {
    std::ifstream maps("/proc/" + std::to_string(service.pid()) + "/maps");
    for (std::string line; std::getline(maps, line);)
      if (line.find(ram.string()) != std::string::npos) return true;
    return false;
  }
  // launcher.sock is there last.
  fs::path socket() const { return folder / "one" / (kind == Kind::interrupted ? "ivshmem.sock" : "launcher.sock"); }
  fs::path link() const { return kind == Kind::interrupted ? socket() : folder / "one" / "link.bar"; }
};

// A process of a machine with its queues mapped: enough to ask for things by the control ring.
struct Process {
  FakeMachine& machine;
  std::uint32_t connection;
  std::vector<std::uint64_t> pages;
  vmci::Mapping arena;
  std::optional<control::AttachReply> attached;

  explicit Process(FakeMachine& m) : machine(m), connection(m.open()), pages(m.take_pages(m.welcome.arena_bytes / vm::page_bytes)), arena(m.map(pages)) {
    machine.lend(connection, vm::segment_arena, pages);
    control::AttachRequest request{};
    request.magic = control::magic;
    request.major = control::version_major;
    request.minor = control::version_minor;
    attached = machine.call<control::Request::attach>(connection, request);
  }
};

// What a machine's QEMU tells.
struct Monitor {
  vmci::UniqueFd socket{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string heard;
  explicit Monitor(const World& world) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, (world.folder / "one" / "monitor.sock").c_str(), sizeof(address.sun_path) - 1);
    REQUIRE(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  }
  void says(std::string_view text) const { REQUIRE(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size())); }
  void event(const char* name) const { says(nlohmann::json{{"event", name}}.dump() + "\r\n"); }
  void migration(const char* status, std::int64_t at_s) const {
    says(nlohmann::json{{"event", "MIGRATION"}, {"data", {{"status", status}}}, {"timestamp", {{"seconds", at_s}, {"microseconds", 0}}}}.dump() + "\r\n");
  }
  // Whether the service hangs up. What it says is kept.
  bool hears_end() {
    pollfd waiting{socket.get(), POLLIN, 0};
    char part[4096];
    for (ssize_t got; ::poll(&waiting, 1, FakeMachine::patience_ms) == 1; heard.append(part, static_cast<std::size_t>(got)))
      if ((got = ::recv(socket.get(), part, sizeof(part), 0)) <= 0) return true;
    return false;
  }
  // What of the service's words follows `words`, up to the next quote; only once.
  std::string hears(const std::string& words) {
    pollfd waiting{socket.get(), POLLIN, 0};
    for (;;) {
      const auto at = heard.find(words), end = at == heard.npos ? at : heard.find('"', at + words.size());
      if (end != heard.npos) {
        const std::string rest = heard.substr(at + words.size(), end - at - words.size());
        heard.erase(0, end);
        return rest;
      }
      char part[4096];
      REQUIRE(::poll(&waiting, 1, FakeMachine::patience_ms) == 1);
      const ssize_t got = ::recv(socket.get(), part, sizeof(part), 0);
      REQUIRE(got > 0);
      heard.append(part, static_cast<std::size_t>(got));
    }
  }
  // As QEMU does between whatever else it says.
  void answers() {
    const std::string number = hears("vrdma-asked-");
    says(nlohmann::json{{"id", "vrdma-asked-" + number}, {"return", {{"status", "paused"}}}}.dump() + "\r\n");
  }
  // All that was said has been read.
  bool all_heard() const {
    int unread = 0;
    return ::ioctl(socket.get(), SIOCOUTQ, &unread) == 0 && unread == 0;
  }
  void runs_as(const char* state) const { says(nlohmann::json{{"id", "vrdma-run-state"}, {"return", {{"status", state}}}}.dump() + "\r\n"); }
};

// A process's control queue and doorbell, as it uses them once it is attached. One for each process.
class ControlQueue {
 public:
  explicit ControlQueue(Process& process)
      : process_(process), control_(process.arena.data() + process.attached->control_offset, process.attached->control_geometry),
        requests_(control_.produce(), process.attached->control_geometry.produce_slots),
        replies_(control_.consume_records(), process.attached->control_geometry.consume_entries) {}

  // The answer's status.
  template <control::Request R>
  int ask(const typename control::Message<R>::RequestBody& body, typename control::Message<R>::ReplyBody* answer = nullptr) {
    using namespace control;
    Head head{};
    head.sequence = ++sequence_;
    constexpr std::uint32_t body_bytes = std::is_empty_v<std::remove_cvref_t<decltype(body)>> ? 0 : sizeof(body);
    std::byte packet[sizeof(head) + body_bytes];
    std::memcpy(packet, &head, sizeof(head));
    if constexpr (body_bytes != 0) std::memcpy(packet + sizeof(head), &body, sizeof(body));
    requests_.write(sizeof(RecordHead), std::span<const std::byte>(packet).subspan(sizeof(RecordHead)));
    requests_.publish(address_of(host_context, control_port), body_bytes, static_cast<std::uint32_t>(R), (sizeof(packet) + slot_bytes - 1) / slot_bytes);
    vmci::ReadyBitmap(reinterpret_cast<vmci::ReadyWords*>(process_.arena.data() + process_.attached->doorbell_offset)).set(0);
    process_.machine.ring(vm::doorbell_vector);
    alignas(64) std::byte record[record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    REQUIRE(process_.machine.wait([&] { return replies_.peek(record, record_slots_max, slots) == vmci::RecordReader::Peek::ready; }));
    replies_.advance(slots);
    std::atomic_ref(control_.header().creator.consumed).store(replies_.position(), std::memory_order_release);
    std::memcpy(&head, record, sizeof(head));
    CHECK(head.sequence == sequence_);
    if (answer != nullptr) std::memcpy(static_cast<void*>(answer), record + sizeof(head), sizeof(*answer));
    return head.status;
  }

 private:
  Process& process_;
  vmci::QueuePairView control_;
  vmci::RecordWriter requests_;
  vmci::RecordReader replies_;
  std::uint32_t sequence_ = 98;
};

inline void ask_by_queues(Process& process) { CHECK(ControlQueue(process).ask<control::Request::query_device>({}) == 0); }

}  // namespace vrdma::test
