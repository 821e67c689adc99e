// A virtual machine without a processor: connects to the service as QEMU does, has a file for its RAM, and speaks the link as its
// agent does; or has only the file that is a plain machine's link. Physical pages are given out in an order that scatters them. One
// thread; what is wrong with it is the caller's choice.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "vmci_channel/segment.hpp"
#include "vmci_channel/vm_link.hpp"
#include "vrdma/control.hpp"

namespace vrdma::test {

class FakeMachine {
 public:
  // ram: a file that is there, of whole pages; high_bytes of it count as lying above 4 GiB. seed: another one for each machine
  // that a service sees, since the boot numbers come from it.
  // Without a file its RAM is nobody's affair, and what it lends is of the BAR.
  // link: ivshmem.sock, or link.bar.
  // vectors: of its device, as vm.json says.
  FakeMachine(const std::string& link, const std::string& ram, std::uint64_t seed, std::uint64_t high_bytes = 0, std::uint32_t vectors = vm::fixed_vectors)
      : random_(seed), high_bytes_(high_bytes), vectors_(vectors) {
    if (link.ends_with(".bar"))
      open_bar(link);
    else
      connect(link);
    in_bar = ram.empty();
    ram_fd_.reset(in_bar ? ::fcntl(bar_fd_.get(), F_DUPFD_CLOEXEC, 0) : ::open(ram.c_str(), O_RDWR | O_CLOEXEC));
    ram_bytes_ = static_cast<std::uint64_t>(::lseek(ram_fd_.get(), 0, SEEK_END));
    for (std::uint64_t page = in_bar ? vm::bar_bytes / vm::page_bytes : 0; page < ram_bytes_ / vm::page_bytes; ++page) free_.push_back(page);
    std::shuffle(free_.begin(), free_.end(), random_);
  }
  ~FakeMachine() {
    if (bar_ != nullptr) ::munmap(bar_, vm::bar_bytes);
  }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  bool connected() const { return bar_ != nullptr; }
  // Its QEMU ends; another one goes on with what is in the RAM file and the BAR.
  void end() { qemu_.reset(); }
  void come_back(const std::string& ivshmem_socket) { connect(ivshmem_socket); }
  std::byte* bar() const { return bar_; }
  vm::LinkHeader& header() const { return *reinterpret_cast<vm::LinkHeader*>(bar_); }
  // Another one than when its session began: the service knows the session no more.
  std::uint64_t service_epoch() const { return std::atomic_ref(header().service.service_epoch).load(std::memory_order_acquire); }
  vmci::VmLinkEnd& link() { return *link_; }
  void ring(std::uint32_t vector) const {
    if (service_events_[vector])
      add(service_events_[vector].get(), 1);
    else if (vector == vm::doorbell_vector)
      std::atomic_ref(header().agent.doorbells).fetch_add(1, std::memory_order_release);
  }

  // Whoever interrupts it by write(2) waits for ever: a QEMU has the service's own descriptions.
  void clog() const {
    for (std::uint32_t i = 0; i < vectors_; ++i) {
      const int event = machine_events_[i].get();
      const std::uint64_t most = ~std::uint64_t{0} - 1;
      std::uint64_t count;
      ::fcntl(event, F_SETFL, O_NONBLOCK);
      [[maybe_unused]] const auto emptied = ::read(event, &count, sizeof(count));
      [[maybe_unused]] const auto filled = ::write(event, &most, sizeof(most));
      ::fcntl(event, F_SETFL, 0);
    }
  }

  // Rings so often that nobody else can, who waits until it is read.
  void flood(std::uint32_t vector) const { add(service_events_[vector].get(), ~std::uint64_t{0} - 1); }

  // How often it was interrupted since the last time.
  std::uint64_t take_interrupts(std::uint32_t vector) const {
    pollfd event{machine_events_[vector].get(), POLLIN, 0};
    std::uint64_t count = 0;
    if (::poll(&event, 1, 0) == 1) [[maybe_unused]] const auto got = ::read(event.fd, &count, sizeof(count));
    return count;
  }

  std::uint64_t plugged_bytes = 0;  // of memory beside the file, from 4 GiB on
  static constexpr int patience_ms = 60'000;  // with what comes; what does not come is waited for by call_patience_ms

  // The service takes nothing over from the session before. False: it does not answer.
  bool begin_session(int timeout_ms = patience_ms) {
    auto& mine = header().agent;
    std::atomic_ref(mine.boot).store(0, std::memory_order_release);
    link_.emplace(bar_, vmci::VmLinkEnd::Who::agent);
    frames_.clear();
    next_connection_ = 1;
    const std::uint64_t boot = random_() | 1;
    std::atomic_ref(mine.boot).store(boot, std::memory_order_release);
    ring(vm::link_vector);
    accepted_ = false;
    return accepted_ = wait([&] { return std::atomic_ref(header().service.accepted).load(std::memory_order_acquire) == boot; }, timeout_ms);
  }
  // Greets; what the service says to it. EIO: nothing.
  int greet(std::uint64_t proof_offset = 0, int timeout_ms = patience_ms) {
    page_ = take_pages(1).front();
    vm::Hello hello{vm::version_major, vm::version_minor, in_bar ? vm::hello_bar : 0, high_bytes_ + plugged_bytes, physical(page_), random_() | 1, "fake", ram_bytes_ - high_bytes_};
    write_ram(page_ * vm::page_bytes + proof_offset, &hello.proof, sizeof(hello.proof));
    link_->send(vm::Frame::hello, 0, hello);
    const auto frame = await(vm::Frame::welcome, 0, timeout_ms);
    if (!frame || frame->body.size() != sizeof(welcome)) return EIO;
    std::memcpy(&welcome, frame->body.data(), sizeof(welcome));
    return welcome.status;
  }

  struct Frame {
    vm::FrameHead head;
    std::vector<std::byte> body;
  };
  std::optional<Frame> await(vm::Frame kind, std::uint32_t connection, int timeout_ms = patience_ms) {
    std::optional<Frame> found;
    wait([&] {
      const auto at = std::find_if(frames_.begin(), frames_.end(), [&](const Frame& frame) {
        return frame.head.kind == static_cast<std::uint16_t>(kind) && frame.head.connection == connection;
      });
      if (at == frames_.end()) return false;
      found = std::move(*at);
      frames_.erase(at);
      return true;
    }, timeout_ms);
    return found;
  }
  bool has(vm::Frame kind, std::uint32_t connection) const {
    return std::any_of(frames_.begin(), frames_.end(), [&](const Frame& frame) {
      return frame.head.kind == static_cast<std::uint16_t>(kind) && frame.head.connection == connection;
    });
  }
  // Whether the service has read all that was sent.
  bool all_taken() const {
    const auto* const cursors = reinterpret_cast<const vmci::ByteCursor*>(bar_ + vm::queues_offset);  // the agent's, the service's
    return link_->unsent_bytes() == 0 && cursors[0].produced == vmci::ByteSide::load(cursors[1].consumed, std::memory_order_acquire);
  }
  void beat() const { std::atomic_ref(header().agent.heartbeat).fetch_add(1, std::memory_order_relaxed); }
  // Sends what waits, takes what has come, until the condition holds.
  template <class Condition>
  bool wait(const Condition& holds, int timeout_ms = patience_ms) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
      if (accepted_) {
        if (link_->flush()) ring(vm::link_vector);
        link_->receive([this](const vm::FrameHead& head, std::span<const std::byte> body) { frames_.push_back({head, {body.begin(), body.end()}}); });
      }
      if (holds()) return true;
      if (heart_beats) beat();
      if (std::chrono::steady_clock::now() > until) return false;
      pollfd event{machine_events_[vm::link_vector].get(), POLLIN, 0};
      ::poll(&event, 1, 5);
      std::uint64_t count;
      if (event.revents & POLLIN) [[maybe_unused]] const auto got = ::read(event.fd, &count, sizeof(count));
    }
  }

  // --- memory: pages of the RAM file, or of the BAR

  std::vector<std::uint64_t> take_pages(std::size_t count) {
    std::vector<std::uint64_t> taken(free_.end() - static_cast<std::ptrdiff_t>(std::min(count, free_.size())), free_.end());
    free_.resize(free_.size() - taken.size());
    return taken;
  }
  void give_back(const std::vector<std::uint64_t>& pages) { free_.insert(free_.end(), pages.begin(), pages.end()); }
  // What a processor of the machine would call a page of the file.
  std::uint64_t physical(std::uint64_t page) const {
    const std::uint64_t low_pages = (ram_bytes_ - high_bytes_) / vm::page_bytes;
    return page < low_pages ? page : page - low_pages + (std::uint64_t{1} << 32) / vm::page_bytes;
  }
  vmci::Mapping map(const std::vector<std::uint64_t>& pages) const {
    std::vector<vmci::Mapping::Part> parts;
    for (const std::uint64_t page : pages) parts.push_back({ram_fd_.get(), page * vm::page_bytes, vm::page_bytes});
    auto mapping = vmci::Mapping::gather(parts);
    return mapping ? std::move(*mapping) : vmci::Mapping();
  }
  void lend(std::uint32_t connection, std::uint32_t segment, const std::vector<std::uint64_t>& pages) {
    std::vector<vm::Run> runs;
    for (const std::uint64_t page : pages) runs.push_back({physical(page), 1});
    for (std::size_t at = 0; at < runs.size(); at += vm::runs_per_frame) {
      const auto part = std::span(runs).subspan(at, std::min<std::size_t>(vm::runs_per_frame, runs.size() - at));
      link_->send(vm::Frame::segment, connection, std::as_bytes(part), segment);
    }
  }
  void write_ram(std::uint64_t offset, const void* bytes, std::size_t count) const {
    [[maybe_unused]] const auto written = ::pwrite(ram_fd_.get(), bytes, count, static_cast<off_t>(offset));
  }
  void read_ram(std::uint64_t offset, void* bytes, std::size_t count) const {
    [[maybe_unused]] const auto read = ::pread(ram_fd_.get(), bytes, count, static_cast<off_t>(offset));
  }
  std::uint64_t ram_bytes() const { return ram_bytes_; }
  std::uint64_t service_page() const { return page_; }

  // --- processes

  std::uint32_t open(std::uint32_t uid = 1000) {
    const std::uint32_t connection = next_connection_++;
    link_->send(vm::Frame::open, connection, vm::Open{uid, uid, 100 + connection, 0});
    return connection;
  }
  // One packet of a process and its answer; status: of the answer, EIO where none comes. first_stream: of the pipes that begin with it.
  template <control::Request R>
  std::optional<typename control::Message<R>::ReplyBody> call(std::uint32_t connection, const typename control::Message<R>::RequestBody& body) {
    std::vector<std::byte> packet(sizeof(control::Head) + sizeof(body));
    control::Head head{};
    head.record.control = static_cast<std::uint32_t>(R);
    head.sequence = ++sequence_;
    std::memcpy(packet.data(), &head, sizeof(head));
    std::memcpy(packet.data() + sizeof(head), &body, sizeof(body));
    link_->send(vm::Frame::packet, connection, packet);
    status = EIO;
    const auto reply = await(vm::Frame::reply, connection, call_patience_ms);
    if (!reply || reply->body.size() < sizeof(head)) return {};
    std::memcpy(&head, reply->body.data(), sizeof(head));
    status = head.status;
    if (status != 0) return {};
    first_stream = reply->head.item;
    typename control::Message<R>::ReplyBody answer{};  // an empty one is not sent
    std::memcpy(static_cast<void*>(&answer), reply->body.data() + sizeof(head), std::min(sizeof(answer), reply->body.size() - sizeof(head)));
    return answer;
  }

  bool heart_beats = true;
  bool in_bar = false;  // as its agent greets
  int call_patience_ms = patience_ms;
  vm::Welcome welcome{};
  int status = 0;
  std::uint32_t first_stream = 0;

 private:
  // One that is full is as good as rung. It is left blocking, as a hostile machine would.
  static void add(int eventfd, std::uint64_t count) {
    ::fcntl(eventfd, F_SETFL, O_NONBLOCK);
    [[maybe_unused]] const auto written = ::write(eventfd, &count, sizeof(count));
    ::fcntl(eventfd, F_SETFL, 0);
  }
  void connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    qemu_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(qemu_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return;
    const auto [version, no_fd] = message();
    const auto [id, none] = message();
    auto [marker, bar] = message();
    if (version != 0 || id != vm::machine_peer || marker != -1) return;
    for (auto& event : service_events_) event = message().second;
    for (std::uint32_t i = 0; i < vectors_; ++i) machine_events_[i] = message().second;
    if (bar_ != nullptr) return;  // it is the same memory
    bar_fd_.reset(::fcntl(bar.get(), F_DUPFD_CLOEXEC, 0));
    void* const at = ::mmap(nullptr, vm::bar_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, bar.get(), 0);
    if (at != MAP_FAILED) bar_ = static_cast<std::byte*>(at);
  }
  void open_bar(const std::string& path) {
    bar_fd_.reset(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    void* const at = ::mmap(nullptr, vm::bar_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, bar_fd_.get(), 0);
    if (at != MAP_FAILED) bar_ = static_cast<std::byte*>(at);
  }
  std::pair<std::int64_t, vmci::UniqueFd> message() const {
    std::int64_t number = -2;
    iovec data{&number, sizeof(number)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    int fd = -1;
    if (::recvmsg(qemu_.get(), &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) == sizeof(number))
      if (const cmsghdr* const head = CMSG_FIRSTHDR(&message); head != nullptr && head->cmsg_type == SCM_RIGHTS) std::memcpy(&fd, CMSG_DATA(head), sizeof(fd));
    return {number, vmci::UniqueFd(fd)};
  }

  std::mt19937_64 random_;
  std::uint64_t high_bytes_, ram_bytes_ = 0, page_ = 0;
  std::uint32_t vectors_;
  vmci::UniqueFd ram_fd_, bar_fd_, qemu_;
  vmci::UniqueFd service_events_[vm::fixed_vectors], machine_events_[vm::vectors_max];
  std::byte* bar_ = nullptr;
  std::optional<vmci::VmLinkEnd> link_;
  bool accepted_ = false;  // before that, the service's cursor is of the session before
  std::deque<Frame> frames_;
  std::vector<std::uint64_t> free_;
  std::uint32_t next_connection_ = 1, sequence_ = 0;
};

}  // namespace vrdma::test
