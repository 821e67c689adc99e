#include "tests/conformance/child.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

namespace vrdma::conformance {
namespace {

struct Process {
  int orders_fd = -1;
  Peer* peer = nullptr;  // null when the test is solo
  Place* place = nullptr;
  double timeout_scale = 1.0;
  std::atomic<bool> ended{false};
};
Process process;

std::vector<std::string>& notes() {
  thread_local std::vector<std::string> stack;
  return stack;
}

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void report(Verdict verdict, const std::string& text) {
  Report packet{};
  packet.verdict = verdict;
  std::memcpy(packet.text, text.data(), std::min(text.size(), sizeof(packet.text) - 1));
  while (::send(process.orders_fd, &packet, sizeof(packet), MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

// The first thread to end the process speaks for it; the others wait to be taken down.
[[noreturn]] void end(Verdict verdict, const std::string& text) {
  if (process.ended.exchange(true)) {
    for (;;) ::pause();
  }
  report(verdict, text);
  if (process.peer && verdict != Verdict::peer_ended) process.peer->tell_ended();
  ::_exit(0);
}

}  // namespace

void fail(const char* file, int line, const std::string& what) {
  std::string out = text(base_name(file), ":", line, ": ", what);
  for (const std::string& note : notes()) out += "\n      at " + note;
  end(Verdict::failed, out);
}

void skip(const std::string& reason) { end(Verdict::skipped, reason); }

std::string errno_name(int error) {
  if (error == 0) return "0 (success)";
  const char* name = ::strerrorname_np(error);
  return name ? name : std::to_string(error);
}

std::string hex(std::uint64_t value) {
  char out[24];
  std::snprintf(out, sizeof(out), "0x%llx", static_cast<unsigned long long>(value));
  return out;
}

void expect_null(const char* file, int line, const char* what, const void* pointer, int error, int wanted) {
  if (pointer) fail(file, line, text(what, ": succeeded, expected NULL and ", errno_name(wanted)));
  if (error != wanted) fail(file, line, text(what, ": NULL and ", errno_name(error), ", expected ", errno_name(wanted)));
}

void Note::push(std::string note) { notes().push_back(std::move(note)); }
Note::~Note() { notes().pop_back(); }

std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

void mark_place(const char* file, int line, const char* what) {
  if (!process.place) return;
  std::snprintf(process.place->text, sizeof(process.place->text), "%s:%d: %s", base_name(file), line, what);
}

Deadline::Deadline(double seconds)
    : end_(std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(
               std::chrono::duration<double>(seconds * process.timeout_scale))) {}

int Deadline::left_ms() const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<long long>(left.count() + 1, 0, 1'000'000));
}

void pause_and_check_peer() {
  ::sched_yield();
  thread_local unsigned turns = 0;
  if (process.peer && ++turns % 64 == 0) process.peer->check();
}

void Peer::check_size(std::size_t got, std::size_t wanted, Where where) {
  if (got != wanted) {
    fail(where.file_name(), where.line(),
         text("the roles are out of step: received ", got, " bytes, expected ", wanted));
  }
}

void Peer::write(Header header, std::span<const std::byte> bytes) {
  if (fd_ < 0) fail(__FILE__, __LINE__, "a solo test has no peer");
  std::vector<std::byte> packet(sizeof(header) + bytes.size());
  std::memcpy(packet.data(), &header, sizeof(header));
  if (!bytes.empty()) std::memcpy(packet.data() + sizeof(header), bytes.data(), bytes.size());
  while (::send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) end(Verdict::peer_ended, "the other process is gone");
    fail(__FILE__, __LINE__, text("cannot send to the other process: ", errno_name(errno)));
  }
}

bool Peer::pull_locked() {
  std::byte packet[64 * 1024];
  const ssize_t n = ::recv(fd_, packet, sizeof(packet), MSG_DONTWAIT);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    end(Verdict::peer_ended, "the other process is gone");
  }
  if (n < static_cast<ssize_t>(sizeof(Header))) end(Verdict::peer_ended, "the other process is gone");
  Frame frame;
  std::memcpy(&frame.header, packet, sizeof(Header));
  if (frame.header.kind == Kind::ended) end(Verdict::peer_ended, "the other process ended the test");
  frame.bytes.assign(packet + sizeof(Header), packet + n);
  inbox_.push_back(std::move(frame));
  return true;
}

Peer::Frame Peer::next(const char* what, Where where) {
  if (fd_ < 0) fail(where.file_name(), where.line(), "a solo test has no peer");
  mark_place(where.file_name(), where.line(), what);
  // Longer than any wait inside a test: the side that waits for the device is the one to report.
  const Deadline deadline(55.0);
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (!inbox_.empty() || pull_locked()) {
        Frame frame = std::move(inbox_.front());
        inbox_.pop_front();
        return frame;
      }
    }
    if (deadline.passed()) fail(where.file_name(), where.line(), text("gave up: ", what));
    pollfd waiting{fd_, POLLIN, 0};
    ::poll(&waiting, 1, std::min(deadline.left_ms(), 200));
  }
}

void Peer::check() {
  if (fd_ < 0) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  while (pull_locked()) {
  }
}

void Peer::barrier(Where where) {
  const std::uint32_t number = ++barriers_;
  write({Kind::barrier, number}, {});
  const Frame frame = next("waiting at a barrier", where);
  if (frame.header.kind != Kind::barrier || frame.header.number != number) {
    fail(where.file_name(), where.line(),
         text("the roles are out of step: at barrier ", number, ", the other side sent ",
              frame.header.kind == Kind::data ? "data" : "another barrier"));
  }
}

void Peer::send_bytes(std::span<const std::byte> bytes) {
  EXPECT(bytes.size() <= 60 * 1024);
  write({Kind::data, 0}, bytes);
}

std::vector<std::byte> Peer::receive_bytes(Where where) {
  Frame frame = next("waiting for a value from the other role", where);
  if (frame.header.kind != Kind::data) {
    fail(where.file_name(), where.line(),
         "the roles are out of step: waiting for a value, the other side is at a barrier");
  }
  return std::move(frame.bytes);
}

void Peer::tell_ended() noexcept {
  const Header header{Kind::ended, 0};
  if (fd_ >= 0) (void)::send(fd_, &header, sizeof(header), MSG_NOSIGNAL | MSG_DONTWAIT);
}

int child_main(const ChildArguments& arguments) {
  process.orders_fd = arguments.orders_fd;
  process.timeout_scale = arguments.settings.timeout_scale;
  void* page = ::mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE, MAP_SHARED, arguments.place_fd, 0);
  process.place = page == MAP_FAILED ? nullptr : static_cast<Place*>(page);
  Peer peer(arguments.peer_fd);
  process.peer = &peer;

  Order order{};
  for (;;) {
    const ssize_t n = ::recv(arguments.orders_fd, &order, sizeof(order), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n != static_cast<ssize_t>(sizeof(order))) return 0;
    const Test& test = registry().at(order.test_index);
    // A test that may take longer may wait longer.
    process.timeout_scale = arguments.settings.timeout_scale * std::max(1.0, test.options.timeout_s / 60.0);
    mark_place(test.file, 0, "the body has begun");
    Run run(arguments.is_a, order.seed, arguments.settings, peer);
    try {
      test.body(run);
    } catch (const std::exception& error) {
      fail(test.file, 0, text("the test body threw: ", error.what()));
    }
    mark_place(test.file, 0, "the body has ended");
    report(Verdict::passed, "");
  }
}

}  // namespace vrdma::conformance
