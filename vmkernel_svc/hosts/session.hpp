// One connection to another host: TLS, hello of both sides, frames of messages, keepalive. Used on its io_context's thread only.
//
//   frame: u32 length, big endian; as many bytes of JSON
//
// Time and memory of somebody who has not shown a certificate are bounded: opening_ms for all of TLS and hello, one small frame.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/settings.hpp"
#include "vmkernel_svc/hosts/tls.hpp"

namespace vrdma::hosts {

class Session : public std::enable_shared_from_this<Session> {
 public:
  struct Events {
    std::function<void(const std::shared_ptr<Session>&)> up;                        // both have said hello
    std::function<void(const std::shared_ptr<Session>&, const Message&)> received;  // after up, without hello, ping and pong
    std::function<void(const std::shared_ptr<Session>&, const std::string& why)> down;  // once, also where it never was up
  };
  using Limits = SessionLimits;

  Session(Tls& tls, boost::asio::ip::tcp::socket socket, bool dialed, Limits limits, Events events);

  // `expected`: the name whom we dialed; empty: anybody of the subnet.
  void start(Hello ours, std::string expected);
  static constexpr const char* retirement = "another connection of the same hosts stays";
  void send(const Message& message);
  void close(const std::string& why);  // says goodbye where it can; `down` follows
  // Our wish to end it, not worth a line in the log.
  void retire() { retired_ = true, close(retirement); }

  const Hello& peer() const { return peer_; }                     // after up
  const CertificateInfo& certificate() const { return certificate_; }
  const std::array<std::byte, 32>& key() const { return key_; }
  std::string remote() const { return remote_; }                  // address and port
  std::string remote_address() const { return remote_address_; }
  bool dialed() const { return dialed_; }
  bool is_up() const { return up_ && !closed_; }
  bool retired() const { return retired_; }
  std::uint64_t route = 0;  // the service's number for it
  std::uint64_t up_ms = 0;  // since when it is up, by the service's clock

 private:
  void shake_hands();
  void read_head();
  void read_body(std::size_t bytes);
  void handle(std::string_view text);
  void greet(const Hello& hello);
  void write_next();
  void watch();
  void end(const std::string& why);

  boost::asio::any_io_executor executor_;
  std::shared_ptr<std::string> refused_ = std::make_shared<std::string>();
  std::unique_ptr<TlsStream> stream_;
  boost::asio::steady_timer timer_;
  const Limits limits_;
  Events events_;
  Hello ours_, peer_;
  CertificateInfo certificate_{};
  std::array<std::byte, 32> key_{};
  std::string expected_, remote_, remote_address_;
  bool dialed_, up_ = false, closed_ = false, ending_ = false, retired_ = false, writing_ = false, reading_ = false;
  std::string why_;
  std::array<unsigned char, 4> head_{};
  std::string body_;
  std::deque<std::string> outgoing_;
  std::size_t outgoing_bytes_ = 0;
  std::chrono::steady_clock::time_point heard_;
};

}  // namespace vrdma::hosts
