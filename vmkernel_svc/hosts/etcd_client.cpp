#include "vmkernel_svc/hosts/etcd_client.hpp"

#include <fmt/format.h>
#include <openssl/ssl.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl.hpp>
#include <memory>
#include <stdexcept>

namespace vrdma::hosts {

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;
using asio::ip::tcp;
using nlohmann::json;
using Stream = beast::ssl_stream<beast::tcp_stream>;

constexpr std::uint64_t reply_bytes_max = 16u << 20;

// One request and its answer.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  using Done = std::function<void(const json* reply, const std::string& why)>;
  Exchange(asio::io_context& io, asio::ssl::context& tls, EtcdEndpoint to, std::uint64_t patience_ms, const std::string& path, const std::string& body, Done done)
      : resolver_(io), stream_(io, tls), to_(std::move(to)), done_(std::move(done)) {
    request_ = fmt::format("POST {} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{}", path, to_.host, to_.port,
                           body.size(), body);
    parser_.body_limit(reply_bytes_max);
    tcp().expires_after(std::chrono::milliseconds(patience_ms));  // all of it
  }

  void start() {
    resolver_.async_resolve(to_.host, to_.port, [self = shared_from_this()](const error_code& error, const tcp::resolver::results_type& found) {
      if (error) return self->fail(error);
      self->tcp().async_connect(found, [self](const error_code& refused, const tcp::endpoint&) {
        if (refused) return self->fail(refused);
        self->to_.tls ? self->shake_hands() : self->talk(self->tcp());
      });
    });
  }

 private:
  beast::tcp_stream& tcp() { return stream_.next_layer(); }

  void shake_hands() {
    // The name by which it was asked for, or the address, is what its certificate must be for.
    X509_VERIFY_PARAM* const wanted = ::SSL_get0_param(stream_.native_handle());
    if (::X509_VERIFY_PARAM_set1_ip_asc(wanted, to_.host.c_str()) != 1 &&
        (::SSL_set1_host(stream_.native_handle(), to_.host.c_str()) != 1 || ::SSL_set_tlsext_host_name(stream_.native_handle(), to_.host.c_str()) != 1))
      return fail(boost::asio::error::invalid_argument);
    stream_.async_handshake(asio::ssl::stream_base::client, [self = shared_from_this()](const error_code& error) {
      if (error) return self->fail(error);
      self->talk(self->stream_);
    });
  }

  template <class Layer>
  void talk(Layer& layer) {
    asio::async_write(layer, asio::buffer(request_), [self = shared_from_this(), &layer](const error_code& error, std::size_t) {
      if (error) return self->fail(error);
      http::async_read(layer, self->buffer_, self->parser_, [self](const error_code& failed, std::size_t) {
        if (failed) return self->fail(failed);
        self->take(self->parser_.get());
      });
    });
  }

  void take(const http::response<http::string_body>& response) {
    const json reply = json::parse(response.body(), nullptr, false);
    if (response.result() == http::status::ok && reply.is_object()) return done_(&reply, "");
    const auto error = reply.is_object() ? reply.find("error") : reply.end();
    const std::string said = reply.is_object() && error != reply.end() && error->is_string() ? error->get<std::string>().substr(0, 200) : "";
    done_(nullptr, fmt::format("it answers {} {}", response.result_int(), said));
  }
  void fail(const error_code& error) { done_(nullptr, error == beast::error::timeout ? "no answer" : error.message()); }

  tcp::resolver resolver_;
  Stream stream_;
  const EtcdEndpoint to_;
  const Done done_;
  std::string request_;  // a text: what of Beast writes a request takes 14 s to compile
  http::response_parser<http::string_body> parser_;
  beast::flat_buffer buffer_;
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
