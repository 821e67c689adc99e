#include "vmkernel_svc/hosts/session.hpp"

#include <fmt/format.h>

#include <boost/asio/post.hpp>
#include <type_traits>

#include "vmkernel_svc/hosts/address.hpp"

namespace vrdma::hosts {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {
constexpr std::size_t outgoing_bytes_max = 64u << 20;
}

Session::Session(Tls& tls, asio::ip::tcp::socket socket, bool dialed, Limits limits, Events events)
    : executor_(socket.get_executor()), timer_(executor_), limits_(limits), events_(std::move(events)), dialed_(dialed), heard_(std::chrono::steady_clock::now()) {
  error_code ignored;
  const auto remote = socket.remote_endpoint(ignored);
  auto address = remote.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped()) address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  remote_address_ = address.to_string();
  remote_ = with_port(remote_address_, remote.port());
  socket.set_option(asio::ip::tcp::no_delay(true), ignored);
  stream_ = tls.stream(std::move(socket), refused_);
}

void Session::start(Hello ours, std::string expected) {
  ours_ = std::move(ours);
  expected_ = std::move(expected);
  timer_.expires_after(std::chrono::milliseconds(limits_.opening_ms));
  timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error && !self->up_) self->end(fmt::format("neither certificate nor hello within {} ms", self->limits_.opening_ms));
  });
  shake_hands();
}

void Session::shake_hands() {
  hosts::shake_hands(*stream_, dialed_ ? asio::ssl::stream_base::client : asio::ssl::stream_base::server, [self = shared_from_this()](const error_code& error) {
    if (self->closed_) return;
    if (error) return self->end(explain(error, *self->refused_));
    self->certificate_ = certificate_of_peer(*self->stream_);
    const auto& shown = self->certificate_;
    if (!host_name_error(shown.name).empty() || shown.role == Role::authority) return self->end("its certificate is not a host's");
    if (!self->expected_.empty() && shown.name != self->expected_)
      return self->end(fmt::format("the host there is \"{}\", not \"{}\": correct the list of peers", shown.name, self->expected_));
    try {
      self->key_ = exported_key(*self->stream_);
    } catch (const std::exception& failure) {
      return self->end(failure.what());
    }
    self->send(self->ours_);
    self->read_head();
  });
}

void Session::read_head() {
  reading_ = true;
  read_all(*stream_, asio::buffer(head_), [self = shared_from_this()](const error_code& error, std::size_t) {
    self->reading_ = false;
    if (self->closed_) return;
    if (error) return self->end(explain(error, *self->refused_));
    const auto& h = self->head_;
    const std::size_t bytes = std::size_t{h[0]} << 24 | std::size_t{h[1]} << 16 | std::size_t{h[2]} << 8 | h[3];
    const std::size_t most = self->up_ ? frame_bytes_max : first_frame_bytes_max;
    if (bytes == 0 || bytes > most) return self->close(fmt::format("a message of {} bytes: at most {} are taken", bytes, most));
    self->read_body(bytes);
  });
}

void Session::read_body(std::size_t bytes) {
  body_.resize(bytes);
  reading_ = true;
  read_all(*stream_, asio::buffer(body_), [self = shared_from_this()](const error_code& error, std::size_t) {
    self->reading_ = false;
    if (self->closed_) return;
    if (error) return self->end(explain(error, *self->refused_));
    self->heard_ = std::chrono::steady_clock::now();
    if (!self->ending_) self->handle(self->body_);
    if (!self->closed_) self->read_head();
  });
}

void Session::handle(std::string_view text) {
  std::string why;
  const auto message = decode(text, why);
  if (!message) return close(fmt::format("a message that is none: {}", why));
  if (const auto* goodbye = std::get_if<Goodbye>(&*message)) {
    retired_ = retired_ || goodbye->why == retirement;
    return end(goodbye->why);
  }
  if (const auto* hello = std::get_if<Hello>(&*message)) return up_ ? close("a second hello") : greet(*hello);
  if (!up_) return close("no hello first");
  if (const auto* ping = std::get_if<Ping>(&*message)) return send(Pong{ping->sequence});
  if (std::holds_alternative<Pong>(*message)) return;
  events_.received(shared_from_this(), *message);
}

void Session::greet(const Hello& hello) {
  if (hello.major != protocol_major)
    return close(fmt::format("vrdmad {} speaks version {} of the hosts' protocol, this one ({}) version {}: run the same on all hosts", hello.version, hello.major,
                             ours_.version, protocol_major));
  if (hello.name != certificate_.name) return close(fmt::format("it calls itself \"{}\", its certificate \"{}\"", hello.name, certificate_.name));
  peer_ = hello;
  up_ = true;
  timer_.cancel();
  watch();
  events_.up(shared_from_this());
}

void Session::watch() {
  timer_.expires_after(std::chrono::milliseconds(limits_.silence_ms / 4));
  timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (error || self->closed_) return;
    const auto silent = std::chrono::steady_clock::now() - self->heard_;
    if (silent >= std::chrono::milliseconds(self->limits_.silence_ms)) return self->end(fmt::format("nothing was heard of it for {} ms", self->limits_.silence_ms));
    if (silent >= std::chrono::milliseconds(self->limits_.silence_ms / 4)) self->send(Ping{});
    self->watch();
  });
}

void Session::send(const Message& message) {
  if (closed_ || ending_) return;
  std::string text = encode(message);
  const auto bytes = static_cast<std::uint32_t>(text.size());
  if (bytes > frame_bytes_max || outgoing_bytes_ + bytes > outgoing_bytes_max) return end("it does not take what it is sent");
  const char head[4] = {static_cast<char>(bytes >> 24), static_cast<char>(bytes >> 16), static_cast<char>(bytes >> 8), static_cast<char>(bytes)};
  text.insert(0, head, 4);
  outgoing_bytes_ += text.size();
  outgoing_.push_back(std::move(text));
  if (!writing_) write_next();
}

void Session::write_next() {
  writing_ = true;
  write_all(*stream_, asio::buffer(outgoing_.front()), [self = shared_from_this()](const error_code& error, std::size_t) {
    self->writing_ = false;
    if (self->closed_) return;
    // What the other side said before it hung up says more than our failed write: reading finds it.
    if (error) return self->ending_ ? self->end(self->why_) : void();
    self->outgoing_bytes_ -= self->outgoing_.front().size();
    self->outgoing_.pop_front();
    if (!self->outgoing_.empty()) return self->write_next();
    if (!self->ending_) return;
    // A connection that is closed with something unread is reset, and our goodbye with it: until the other side closes, too, what
    // it sends is read and forgotten.
    error_code ignored;
    if (self->reading_) self->stream_->lowest_layer().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    else self->end(self->why_);
  });
}

void Session::close(const std::string& why) {
  if (closed_ || ending_) return;
  if (certificate_.name.empty()) return end(why);  // in the middle of the handshake: nobody could read a goodbye
  send(Goodbye{why});
  if (closed_) return;
  ending_ = true;
  why_ = why;
  timer_.expires_after(std::chrono::milliseconds(limits_.opening_ms));  // it may not read
  timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error) self->end(self->why_);
  });
}

void Session::end(const std::string& why) {
  if (closed_) return;
  closed_ = true;
  timer_.cancel();
  error_code ignored;
  stream_->lowest_layer().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_->lowest_layer().close(ignored);
  events_.down(shared_from_this(), ending_ ? why_ : why);
  asio::post(executor_, [self = shared_from_this()] { self->events_ = {}; });  // one of them may be what called us
}

}  // namespace vrdma::hosts
