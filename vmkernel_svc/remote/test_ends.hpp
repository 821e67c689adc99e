// Two hosts of a subnet within one process, for tests: each with a carrier, at ports of 127.0.0.1.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "vmkernel_svc/remote/configured_subnet.hpp"
#include "vmkernel_svc/remote/tcp_carrier.hpp"

namespace vrdma::remote {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;

// A secret and two hosts of this machine, with ports of their own.
struct Subnet {
  std::string secret = "/tmp/vrdma-remote-test." + std::to_string(::getpid());
  svc::RemoteConfig config;

  explicit Subnet(char fill = 's') {
    write_secret(fill);
    config.secret_file = secret;
    const std::uint16_t first = port();
    for (int i = 0; i < 2; ++i) {
      svc::RemoteHost host{"h" + std::to_string(i), "127.0.0.1", static_cast<std::uint16_t>(first + i), static_cast<std::uint16_t>(1 + 100 * i),
                           static_cast<std::uint16_t>(100 + 100 * i)};
      config.hosts.push_back(host);
    }
  }
  ~Subnet() { ::unlink(secret.c_str()); }
  void write_secret(char fill) const {
    ::unlink(secret.c_str());
    const vmci::UniqueFd file(::open(secret.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    REQUIRE(::write(file.get(), std::string(40, fill).data(), 40) == 40);
  }
  // The first of two that are free: other tests of the machine have their own.
  static std::uint16_t port() {
    const auto is_free = [](int port) {
      const vmci::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const int on = 1;
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
      sockaddr_in here{};
      here.sin_family = AF_INET;
      here.sin_port = htons(static_cast<std::uint16_t>(port));
      here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&here), sizeof(here)) == 0;
    };
    for (int i = 0; i < 4000; ++i)
      if (const int port = 20000 + 2 * ((::getpid() + i) % 4000); is_free(port) && is_free(port + 1)) return static_cast<std::uint16_t>(port);
    FAIL("no free ports");
    return 0;
  }
  std::shared_ptr<ConfiguredSubnet> seen_by(std::size_t host) const {
    svc::RemoteConfig own = config;
    own.name = own.hosts[host].name;
    own.address = own.hosts[host].address;
    return std::make_shared<ConfiguredSubnet>(own);
  }
};

// A subnet in which what is known of the others changes.
class ChangingSubnet final : public Directory {
 public:
  explicit ChangingSubnet(std::shared_ptr<ConfiguredSubnet> at_first) : at_first_(std::move(at_first)) {}
  void change(const std::function<void(PeerHost&)>& how) {
    how_ = how;
    for (const auto& listener : listeners_) listener();
  }

  // Each host has another certificate now, and is no other for it.
  void renumber() {
    ++first_;
    change(how_);
  }

  LidRange ours() const override { return at_first_->ours(); }
  std::optional<HostId> host_of(std::uint16_t lid) const override {
    const auto known = at_first_->host_of(lid);
    return known ? std::optional(*known + first_) : std::nullopt;
  }
  std::vector<LidHolder> holders() const override {
    auto all = at_first_->holders();
    for (auto& holder : all) holder.host += first_;
    return all;
  }
  std::shared_ptr<const PeerHost> host(HostId id) const override { return id < first_ ? nullptr : changed(at_first_->host(id - first_)); }
  std::shared_ptr<const PeerHost> host_named(std::string_view name) const override { return changed(at_first_->host_named(name)); }
  void when_changed(std::function<void()> call) override { listeners_.push_back(std::move(call)); }

 private:
  std::shared_ptr<const PeerHost> changed(const std::shared_ptr<const PeerHost>& host) const {
    if (!host) return nullptr;
    auto now = std::make_shared<PeerHost>(*host);
    now->id += first_;
    how_(*now);
    return now;
  }
  std::shared_ptr<ConfiguredSubnet> at_first_;
  HostId first_ = 0;
  std::function<void(PeerHost&)> how_ = [](PeerHost&) {};
  std::vector<std::function<void()>> listeners_;
};

struct End {
  std::uint64_t session = 0;
  HostId far = 0;  // its number of the other one
  std::unique_ptr<TcpCarrier> carrier;

  End(const Subnet& subnet, std::size_t host, bool encrypt = false) : End(subnet, host, subnet.seen_by(host), encrypt) {}
  End(const Subnet& subnet, std::size_t host, std::shared_ptr<Directory> directory, bool encrypt = false)
      : carrier(std::make_unique<TcpCarrier>(
            TcpCarrier::Place{subnet.config.hosts[host].name, subnet.config.hosts[host].address, subnet.config.hosts[host].port, encrypt}, std::move(directory))) {
    ::signal(SIGPIPE, SIG_IGN);  // the server blocks it in the shard's thread
  }
  // The next that comes, while the other end is driven, too; news is noted and passed on. nullptr: nothing within `patience`.
  FarFramePtr next(End& other, std::chrono::seconds patience = std::chrono::seconds(60)) {
    const auto until = std::chrono::steady_clock::now() + patience;
    for (;;) {
      other.carrier->turn();
      carrier->turn();
      if (auto frame = carrier->receive()) {
        if (frame->record().kind == FarKind::news) session = frame->session;
        return frame;
      }
      if (std::chrono::steady_clock::now() > until) return nullptr;
    }
  }
  void await_session(End& other) {
    const auto news = next(other);
    REQUIRE(news != nullptr);
    REQUIRE(news->record().kind == FarKind::news);
    CHECK(news->record().bytes == link_features);
  }
  void send(std::uint32_t number, std::uint32_t bytes, std::uint64_t in_session) {
    auto frame = FarFrame::make(bytes);
    frame->record().kind = FarKind::request;
    frame->record().message = number;
    frame->record().payload_bytes = bytes;
    for (std::uint32_t i = 0; i < bytes; ++i) frame->payload()[i] = static_cast<std::byte>(number * 31 + i);
    frame->host = far;
    frame->session = in_session;
    carrier->gauge(far)->queued_bytes += static_cast<std::int64_t>(frame->whole_bytes());
    carrier->send(std::move(frame));
  }
  void expect(std::uint32_t number, End& other) {
    const auto frame = next(other);
    REQUIRE(frame != nullptr);
    REQUIRE(frame->record().kind == FarKind::request);
    REQUIRE(frame->record().message == number);
    REQUIRE(frame->session == session);
    for (std::uint32_t i = 0; i < frame->record().payload_bytes; ++i)
      if (frame->payload()[i] != static_cast<std::byte>(number * 31 + i)) FAIL("byte ", i, " of record ", number);
  }
};

// Carries bytes between the one that dials and its host, and spoils them as told: a bit is changed, or the connection ends.
class Middle {
 public:
  explicit Middle(std::uint16_t to) : to_(to), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in here = at(0);
    socklen_t bytes = sizeof(here);
    REQUIRE(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&here), bytes) == 0);
    REQUIRE(::listen(listener_.get(), 8) == 0);
    REQUIRE(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&here), &bytes) == 0);
    port_ = ntohs(here.sin_port);
  }
  std::uint16_t port() const { return port_; }
  // change: the last byte of what passes next becomes another one.
  void turn(bool change = false) {
    if (vmci::UniqueFd came(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); came) {
      vmci::UniqueFd there(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const sockaddr_in to = at(to_);
      REQUIRE(::connect(there.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0);
      ends_[0] = std::move(came), ends_[1] = std::move(there);
      stuck_[0] = stuck_[1] = false;
    }
    for (int side = 0; side < 2 && ends_[0]; ++side) {
      char bytes[16384];
      if (stuck_[side] || held_[side]) continue;
      const std::size_t room = side == 0 ? narrow_room() : sizeof(bytes);
      if (room == 0) continue;
      const ssize_t got = ::recv(ends_[side].get(), bytes, std::min(room, sizeof(bytes)), MSG_DONTWAIT);
      if (got < 0) continue;
      if (got == 0) return cut();
      if (static_cast<std::size_t>(got) > passes_max_[side]) {
        stuck_[side] = true;
        continue;
      }
      passed_ += static_cast<std::uint64_t>(got);
      if (side == 0) narrow_passed_ += static_cast<std::size_t>(got);
      if (std::exchange(change, false)) bytes[got - 1] ^= 1;
      for (ssize_t sent = 0; sent < got;) {
        const ssize_t now = ::send(ends_[1 - side].get(), bytes + sent, static_cast<std::size_t>(got - sent), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (now < 0 && errno != EAGAIN) return cut();
        if (now < 0) driven_();
        sent += std::max<ssize_t>(now, 0);
      }
    }
  }
  void cut() { ends_[0].reset(), ends_[1].reset(); }
  std::uint64_t passed() const { return passed_; }
  // Of what one of them says at once (side 0: the one who dials): more is lost, and, as on a TCP connection, nothing that comes after it on this
  // connection passes.
  void pass_at_most(std::size_t bytes, int side = 0) { passes_max_[side] = bytes; }
  // What the one who dials says passes no faster; 0: as fast as it can.
  void be_narrow(std::size_t bytes_each_second) {
    narrow_ = bytes_each_second;
    narrow_passed_ = 0;
    narrow_since_ = std::chrono::steady_clock::now();
  }
  // Nothing that one of them says passes until it may again; their kernels acknowledge what is there.
  void hold(int side, bool held) { held_[side] = held; }
  int segment_bytes() const {
    int bytes = 0;
    socklen_t size = sizeof(bytes);
    REQUIRE(::getsockopt(ends_[0].get(), IPPROTO_TCP, TCP_MAXSEG, &bytes, &size) == 0);
    return bytes;
  }
  void when_full(std::function<void()> drive) { driven_ = std::move(drive); }

 private:
  std::size_t narrow_room() const {
    if (narrow_ == 0) return ~std::size_t{0};
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - narrow_since_;
    const auto all = static_cast<std::size_t>(passed.count() * static_cast<double>(narrow_));
    return all - std::min(all, narrow_passed_);
  }
  static sockaddr_in at(std::uint16_t port) {
    sockaddr_in made{};
    made.sin_family = AF_INET;
    made.sin_port = htons(port);
    made.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return made;
  }
  std::uint16_t to_, port_ = 0;
  vmci::UniqueFd listener_, ends_[2];
  std::uint64_t passed_ = 0;
  std::size_t passes_max_[2] = {~std::size_t{0}, ~std::size_t{0}};
  bool stuck_[2] = {}, held_[2] = {};
  std::size_t narrow_ = 0, narrow_passed_ = 0;
  std::chrono::steady_clock::time_point narrow_since_;
  std::function<void()> driven_ = [] {};
};

// The first host finds the second behind a middle.
struct CuttablePair {
  Subnet subnet;
  End other{subnet, 1};
  Middle middle{subnet.config.hosts[1].port};
  End one{behind_the_middle(subnet, middle), 0};

  static const Subnet& behind_the_middle(Subnet& subnet, const Middle& middle) {
    subnet.config.hosts[1].port = middle.port();
    return subnet;
  }

  // Two minutes from the pair's beginning are for all.
  template <class Done>
  void drive_until(const Done& done) {
    while (!done()) {
      REQUIRE(std::chrono::steady_clock::now() < until);
      one.carrier->turn(), middle.turn(), other.carrier->turn();
    }
  }
  const std::chrono::steady_clock::time_point until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
};

}  // namespace vrdma::remote
