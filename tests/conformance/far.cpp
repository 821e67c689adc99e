#include "tests/conformance/far.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace vrdma::conformance {

namespace {

using Kind = Stream::Kind;

struct Head {
  std::uint32_t bytes;
  Kind kind;
};
struct Hello {
  std::uint64_t tests;  // a hash of their names
};
constexpr std::uint32_t body_bytes_max = 128 * 1024;
constexpr time_t send_seconds = 60;
constexpr double answer_seconds = 30;
constexpr std::size_t packet_bytes_max = 64 * 1024;

std::uint64_t hash_of_tests() {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const Test& test : registry())
    for (const char* c = test.name;; ++c) {
      hash = (hash ^ static_cast<unsigned char>(*c)) * 0x100000001b3u;
      if (*c == '\0') break;
    }
  return hash;
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <class T>
T value_of(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(T)) throw std::runtime_error("the other vrdma-conformance speaks otherwise");
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}
std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Takes frames until `take` has set `done`.
void await(Stream& stream, const bool& done, const std::function<void(Kind, std::span<const std::byte>)>& take, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(answer_seconds);
  for (;;) {
    stream.receive(take);
    if (done) return;
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error(text("the other machine does not say ", what));
    pollfd waiting{stream.fd(), POLLIN, 0};
    ::poll(&waiting, 1, 200);
  }
}

void greet(Stream& stream) { stream.send(Kind::hello, bytes_of(Hello{hash_of_tests()})); }

void await_greeting(Stream& stream) {
  bool greeted = false;
  await(stream, greeted, [&](Kind kind, std::span<const std::byte> body) {
    if (kind != Kind::hello) throw std::runtime_error("the other side is no vrdma-conformance");
    if (value_of<Hello>(body).tests != hash_of_tests())
      throw std::runtime_error("the other vrdma-conformance has other tests: both sides must be the same program");
    greeted = true;
  }, "which tests it has");
}

}  // namespace

Stream::Stream(Fd socket) : socket_(std::move(socket)) {
  const timeval patience{send_seconds, 0};
  const int on = 1;
  if (::setsockopt(fd(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) != 0 ||
      ::setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0)
    system_failure("setsockopt");
}

void Stream::send(Kind kind, std::span<const std::byte> body) {
  const Head head{static_cast<std::uint32_t>(body.size()), kind};
  std::vector<std::byte> frame;
  frame.reserve(sizeof(head) + body.size());
  const auto first = bytes_of(head);
  frame.insert(frame.end(), first.begin(), first.end());
  frame.insert(frame.end(), body.begin(), body.end());
  for (std::size_t sent = 0; sent < frame.size();) {
    const ssize_t n = ::send(fd(), frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::runtime_error(text("the other machine takes nothing (", errno_name(errno), ")"));
    sent += static_cast<std::size_t>(n);
  }
}

void Stream::receive(const std::function<void(Kind, std::span<const std::byte>)>& take) {
  bool fresh = false;
  for (;;) {
    std::byte part[16 * 1024];
    const ssize_t n = ::recv(fd(), part, sizeof(part), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0 && fresh) break;  // what it said last comes first; the end is found again
    if (n <= 0) throw std::runtime_error("the other machine has ended the connection");
    fresh = true;
    in_.insert(in_.end(), part, part + n);
  }
  std::size_t at = 0;
  for (Head head{}; in_.size() - at >= sizeof(head); at += sizeof(head) + head.bytes) {
    std::memcpy(&head, in_.data() + at, sizeof(head));
    if (head.bytes > body_bytes_max) throw std::runtime_error("the other side is no vrdma-conformance");
    if (in_.size() - at < sizeof(head) + head.bytes) break;
    take(head.kind, std::span(in_).subspan(at + sizeof(head), head.bytes));
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(at));
}

Passage::Passage(Fd end, Stream& stream) : end_(std::move(end)), stream_(stream) {}

void Passage::take(std::span<const std::byte> packet) {
  waiting_.emplace_back(packet.begin(), packet.end());
  push();
}

void Passage::close_after_rest() {
  closing_ = true;
  push();
}

void Passage::push() {
  while (end_ && !waiting_.empty()) {
    const auto& packet = waiting_.front();
    if (::send(end_.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return;
      waiting_.clear();  // nobody there any more, which look() finds, too
      return;
    }
    waiting_.pop_front();
  }
  if (closing_) end_.reset();
}

void Passage::look() {
  push();
  std::vector<std::byte> packet(packet_bytes_max);
  while (end_) {
    const ssize_t n = ::recv(end_.get(), packet.data(), packet.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n > 0) {
      stream_.send(Kind::packet, std::span(packet).first(static_cast<std::size_t>(n)));
      continue;
    }
    end_.reset();
    stream_.send(Kind::peer_left);
  }
}

void Passage::add_to(std::vector<pollfd>& descriptors) const {
  if (end_) descriptors.push_back({end_.get(), static_cast<short>(waiting_.empty() ? POLLIN : POLLIN | POLLOUT), 0});
}

FarRole::FarRole(Stream& stream, Fd near_end) : stream_(stream), passage_(std::move(near_end), stream) {
  // What is still under way is of the process before. Its end comes last.
  stream_.send(Kind::start);
  bool started = false;
  await(stream_, started, [&](Kind kind, std::span<const std::byte>) { started = started || kind == Kind::start; }, "that it has started a process");
}

void FarRole::order(std::uint32_t test_index, std::uint64_t seed) {
  reported_ = false;
  report_ = Report{};
  stream_.send(Kind::order, bytes_of(Order{test_index, 0, seed}));
}

void FarRole::take(Kind kind, std::span<const std::byte> body) {
  switch (kind) {
    case Kind::packet: return passage_.take(body);
    case Kind::peer_left: return passage_.close_after_rest();
    case Kind::report:
      report_ = value_of<Report>(body);
      report_.text[sizeof(report_.text) - 1] = '\0';
      reported_ = true;
      return;
    case Kind::place:
      place_ = text_of(body);
      placed_ = true;
      return;
    case Kind::gone:
      death_ = text_of(body);
      gone_ = true;
      return;
    default: throw std::runtime_error("the other vrdma-conformance speaks otherwise");
  }
}

void FarRole::look() {
  stream_.receive([this](Kind kind, std::span<const std::byte> body) { take(kind, body); });
  passage_.look();
}

void FarRole::add_to(std::vector<pollfd>& descriptors) const {
  descriptors.push_back({stream_.fd(), POLLIN, 0});
  passage_.add_to(descriptors);
}

std::string FarRole::place() {
  placed_ = false;
  stream_.send(Kind::where);
  await(stream_, placed_, [this](Kind kind, std::span<const std::byte> body) { take(kind, body); }, "where its role is");
  return place_;
}

std::unique_ptr<Stream> connect_to(const std::string& where) {
  const std::size_t colon = where.rfind(':');
  if (colon == std::string::npos) throw std::runtime_error(text("\"", where, "\" is not HOST:PORT"));
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(where.substr(0, colon).c_str(), where.substr(colon + 1).c_str(), &wanted, &found); error != 0)
    throw std::runtime_error(text("cannot find ", where, ": ", ::gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  int why = 0;
  for (const addrinfo* one = found; one; one = one->ai_next) {
    Fd socket(::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), one->ai_addr, one->ai_addrlen) != 0) {
      why = errno;
      continue;
    }
    auto stream = std::make_unique<Stream>(std::move(socket));
    greet(*stream);
    await_greeting(*stream);
    return stream;
  }
  throw std::runtime_error(text("cannot reach ", where, " (", errno_name(why), "): start vrdma-conformance --serve there"));
}

Fd listen_on(std::uint16_t& port) {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  socklen_t length = sizeof(address);
  if (!listener || ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    system_failure("listening");
  port = ntohs(address.sin_port);
  return listener;
}

namespace {

// The process of role b, and what passes to and from it.
class Played {
 public:
  Played(Stream& stream, const Settings& settings) : stream_(stream), ends_(), passage_(std::move(ends_.one), stream), role_(false, ends_.other.get(), settings) {
    ends_.other.reset();
  }
  void take(Kind kind, std::span<const std::byte> body) {
    switch (kind) {
      case Kind::order: {
        const Order order = value_of<Order>(body);
        if (order.test_index >= registry().size()) throw std::runtime_error("it orders a test that there is not");
        told_ = false;
        return role_.order(order.test_index, order.seed);
      }
      case Kind::packet: return passage_.take(body);
      case Kind::peer_left: return passage_.close_after_rest();
      case Kind::dismiss: return role_.dismiss();
      case Kind::where: return stream_.send(Kind::place, role_.place());
      default: throw std::runtime_error("it speaks otherwise");
    }
  }
  void look() {
    role_.look();
    passage_.look();  // before the verdict: the other role may wait for a packet of this one
    if (role_.reported() && !told_) stream_.send(Kind::report, bytes_of(role_.report()));
    told_ = told_ || role_.reported();
    if (role_.gone() && !ended_) stream_.send(Kind::gone, role_.death());
    ended_ = ended_ || role_.gone();
  }
  void add_to(std::vector<pollfd>& descriptors) const {
    role_.add_to(descriptors);
    passage_.add_to(descriptors);
  }

 private:
  Stream& stream_;
  PacketPair ends_;
  Passage passage_;
  RoleProcess role_;
  bool told_ = true, ended_ = false;
};

}  // namespace

int serve_roles(const Fd& listener, const Settings& settings) try {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket) system_failure("accept");
  Stream stream(std::move(socket));
  await_greeting(stream);  // it says no more before it is answered
  greet(stream);
  std::unique_ptr<Played> played;
  for (;;) {
    std::vector<pollfd> descriptors{{stream.fd(), POLLIN, 0}};
    if (played) played->add_to(descriptors);
    ::poll(descriptors.data(), descriptors.size(), 100);
    if (descriptors.front().revents != 0) {
      std::byte byte;
      if (::recv(stream.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return 0;  // it has done what it wanted
      stream.receive([&](Kind kind, std::span<const std::byte> body) {
        if (kind == Kind::start) {
          played.reset();
          stream.send(Kind::start);
          played = std::make_unique<Played>(stream, settings);
        } else if (played) {
          played->take(kind, body);
        }
      });
    }
    if (played) played->look();
  }
} catch (const std::exception& failure) {
  std::fprintf(stderr, "vrdma-conformance --serve: %s\n", failure.what());
  return 1;
}

}  // namespace vrdma::conformance
