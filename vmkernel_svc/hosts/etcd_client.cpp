#include "vmkernel_svc/hosts/etcd_client.hpp"

#include <fmt/format.h>
#include <openssl/ssl.h>

#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <stdexcept>

#include "vmkernel_svc/hosts/tls.hpp"

namespace vrdma::hosts {

namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using asio::ip::tcp;
using nlohmann::json;

constexpr std::uint64_t reply_bytes_max = 16u << 20;

// One request and its answer. Of Beast only the parser: what of it reads and writes took 10 s to compile.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  using Done = std::function<void(const json* reply, const std::string& why)>;
  Exchange(asio::io_context& io, asio::ssl::context& tls, EtcdEndpoint to, std::uint64_t patience_ms, const std::string& path, const std::string& body, Done done)
      : resolver_(io), timer_(io, std::chrono::milliseconds(patience_ms)), stream_(io, tls), to_(std::move(to)), done_(std::move(done)) {
    request_ = fmt::format("POST {} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{}", path, to_.host, to_.port,
                           body.size(), body);
    parser_.body_limit(reply_bytes_max);
    parser_.eager(true);
  }

  void start() {
    timer_.async_wait([self = shared_from_this()](const error_code& in_time) {  // for all of it
      if (in_time) return;
      self->late_ = true;
      error_code ignored;
      self->socket().close(ignored);  // what is under way fails
    });
    resolver_.async_resolve(to_.host, to_.port, [self = shared_from_this()](const error_code& error, const tcp::resolver::results_type& found) {
      if (error || self->late_) return self->fail(error);
      asio::async_connect(self->socket(), found, [self](const error_code& refused, const tcp::endpoint&) {
        if (refused) return self->fail(refused);
        self->to_.tls ? self->shake_hands() : self->talk();
      });
    });
  }

 private:
  tcp::socket& socket() { return stream_.next_layer(); }

  void shake_hands() {
    // The name by which it was asked for, or the address, is what its certificate must be for.
    X509_VERIFY_PARAM* const wanted = ::SSL_get0_param(stream_.native_handle());
    if (::X509_VERIFY_PARAM_set1_ip_asc(wanted, to_.host.c_str()) != 1 &&
        (::SSL_set1_host(stream_.native_handle(), to_.host.c_str()) != 1 || ::SSL_set_tlsext_host_name(stream_.native_handle(), to_.host.c_str()) != 1))
      return fail(boost::asio::error::invalid_argument);
    hosts::shake_hands(stream_, asio::ssl::stream_base::client, [self = shared_from_this()](const error_code& error) {
      if (error) return self->fail(error);
      self->talk();
    });
  }

  void talk() {
    const auto written = [self = shared_from_this()](const error_code& error, std::size_t) {
      if (error) return self->fail(error);
      self->read_on();
    };
    if (to_.tls) write_all(stream_, asio::buffer(request_), written);
    else asio::async_write(socket(), asio::buffer(request_), written);
  }

  void read_on() {
    const auto read = [self = shared_from_this()](const error_code& error, std::size_t bytes) {
      error_code bad = error;
      if (!error) {
        self->unparsed_.append(self->piece_.data(), bytes);
        self->unparsed_.erase(0, self->parser_.put(asio::buffer(self->unparsed_), bad));
        if (bad == http::error::need_more) bad = {};
      } else if (error == asio::error::eof && self->parser_.got_some()) {
        bad = {};
        self->parser_.put_eof(bad);
      }
      if (bad) return self->fail(bad);
      self->parser_.is_done() ? self->take(self->parser_.get()) : self->read_on();
    };
    if (to_.tls) read_some(stream_, asio::buffer(piece_), read);
    else socket().async_read_some(asio::buffer(piece_), read);
  }

  void take(const http::response<http::string_body>& response) {
    timer_.cancel();
    const json reply = json::parse(response.body(), nullptr, false);
    if (response.result() == http::status::ok && reply.is_object()) return done_(&reply, "");
    const auto error = reply.is_object() ? reply.find("error") : reply.end();
    const std::string said = reply.is_object() && error != reply.end() && error->is_string() ? error->get<std::string>().substr(0, 200) : "";
    done_(nullptr, fmt::format("it answers {} {}", response.result_int(), said));
  }
  void fail(const error_code& error) {
    timer_.cancel();
    done_(nullptr, late_ ? "no answer" : error.message());
  }

  tcp::resolver resolver_;
  asio::steady_timer timer_;
  bool late_ = false;
  TlsStream stream_;
  const EtcdEndpoint to_;
  const Done done_;
  std::string request_;
  http::response_parser<http::string_body> parser_;
  std::array<char, 16384> piece_;
  std::string unparsed_;
};

}  // namespace

std::optional<EtcdEndpoint> etcd_endpoint(const std::string& text) {
  EtcdEndpoint endpoint;
  std::string rest;
  if (text.starts_with("http://")) rest = text.substr(7);
  else if (text.starts_with("https://")) rest = text.substr(8), endpoint.tls = true;
  const auto colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  endpoint.host = rest.substr(0, colon);
  endpoint.port = rest.substr(colon + 1);
  if (endpoint.host.front() == '[' && endpoint.host.back() == ']') endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  const bool port = !endpoint.port.empty() && endpoint.port.size() <= 5 && endpoint.port.find_first_not_of("0123456789") == std::string::npos;
  if (!port || endpoint.host.empty() || endpoint.host.find_first_of("/?#@ []") != std::string::npos) return std::nullopt;
  return endpoint;
}

EtcdClient::EtcdClient(asio::io_context& io, const EtcdSettings& settings, std::uint64_t patience_ms) : io_(io), patience_ms_(patience_ms) {
  for (const auto& text : settings.endpoints) endpoints_.push_back(*etcd_endpoint(text));
  tls_.set_verify_mode(asio::ssl::verify_peer);
  const auto use = [](const std::string& file, const char* what, const error_code& error) {
    if (error) throw std::runtime_error(fmt::format("etcd: the {} {} is no good ({})", what, file, error.message()));
  };
  error_code error;
  if (settings.ca_file.empty()) tls_.set_default_verify_paths(error);
  else tls_.load_verify_file(settings.ca_file, error);
  use(settings.ca_file, "authority's certificate", error);
  if (settings.certificate_file.empty()) return;
  tls_.use_certificate_chain_file(settings.certificate_file, error);
  use(settings.certificate_file, "certificate", error);
  tls_.use_private_key_file(settings.key_file, asio::ssl::context::pem, error);
  use(settings.key_file, "key", error);
}

void EtcdClient::post(const std::string& path, const json& body, EtcdAnswer answer) {
  const std::size_t at = next_ % endpoints_.size();
  const EtcdEndpoint& to = endpoints_[at];
  std::make_shared<Exchange>(io_, tls_, to, patience_ms_, path, body.dump(),
                             [this, at, answer = std::move(answer), where = to.host + ":" + to.port](const json* reply, const std::string& why) {
                               if (reply == nullptr && next_ == at) next_ = (at + 1) % endpoints_.size();  // another one, next time
                               answer(reply, why.empty() ? "" : fmt::format("the etcd at {}: {}", where, why));
                             })
      ->start();
}

}  // namespace vrdma::hosts
