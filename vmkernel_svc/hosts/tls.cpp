#include "vmkernel_svc/hosts/tls.hpp"

#include <fmt/format.h>
#include <openssl/ssl.h>

#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <ctime>
#include <stdexcept>

namespace vrdma::hosts {

namespace ssl = boost::asio::ssl;

Tls::Tls(const Identity& us, X509Ptr authority) : context_(ssl::context::tls), authority_(std::move(authority)), us_(describe(us.certificate.get())) {
  SSL_CTX* const raw = context_.native_handle();
  const bool good = SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION) == 1 && SSL_CTX_use_certificate(raw, us.certificate.get()) == 1 &&
                    SSL_CTX_use_PrivateKey(raw, us.key.get()) == 1 && X509_STORE_add_cert(SSL_CTX_get_cert_store(raw), authority_.get()) == 1;
  if (!good) throw std::runtime_error(fmt::format("OpenSSL takes neither this host's certificate nor its key (\"{}\")", us_.name));
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_verify_depth(raw, 1);
  // Every connection begins with both certificates: nothing is resumed.
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(raw, 0);
  SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
}

std::shared_ptr<Tls> Tls::of_host(const Folder& folder) { return std::make_shared<Tls>(load_host(folder), load_certificate(folder / "ca.pem")); }

std::unique_ptr<TlsStream> Tls::stream(boost::asio::ip::tcp::socket socket, std::shared_ptr<std::string> refused) {
  auto stream = std::make_unique<TlsStream>(std::move(socket), context_);
  stream->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  stream->set_verify_callback([refused = std::move(refused), authority = authority_.get()](bool good, ssl::verify_context& context) {
    X509* const shown = X509_STORE_CTX_get0_cert(context.native_handle());
    if (good || shown == nullptr || !refused->empty()) return good;
    *refused = refusal(shown, authority, std::time(nullptr));
    if (refused->empty())
      *refused = fmt::format("the certificate of \"{}\": {}", describe(shown).name, X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.native_handle())));
    return false;
  });
  return stream;
}

void shake_hands(TlsStream& stream, ssl::stream_base::handshake_type side, std::function<void(const boost::system::error_code& error)> done) {
  stream.async_handshake(side, std::move(done));
}
void read_all(TlsStream& stream, boost::asio::mutable_buffer into, TlsDone done) { boost::asio::async_read(stream, into, std::move(done)); }
void read_some(TlsStream& stream, boost::asio::mutable_buffer into, TlsDone done) { stream.async_read_some(into, std::move(done)); }
void write_all(TlsStream& stream, boost::asio::const_buffer from, TlsDone done) { boost::asio::async_write(stream, from, std::move(done)); }

CertificateInfo certificate_of_peer(TlsStream& stream) {
  const X509Ptr certificate(SSL_get1_peer_certificate(stream.native_handle()));
  return certificate ? describe(certificate.get()) : CertificateInfo{};
}

std::array<std::byte, 32> exported_key(TlsStream& stream) {
  constexpr char label[] = "EXPORTER-vrdma-records";
  std::array<std::byte, 32> key{};
  if (SSL_export_keying_material(stream.native_handle(), reinterpret_cast<unsigned char*>(key.data()), key.size(), label, sizeof(label) - 1, nullptr, 0, 0) != 1)
    throw std::runtime_error("TLS gives no key for records");
  return key;
}

std::string explain(const boost::system::error_code& error, const std::string& refused) {
  if (!refused.empty()) return refused;
  // Alerts of TLS 1.3 arrive after our half of the handshake: what we read then is why the other side hung up.
  const std::string text = error.message();
  if (text.find("alert certificate expired") != std::string::npos) return "the other host refuses our certificate: it has expired (by its clock)";
  if (text.find("alert unknown ca") != std::string::npos || text.find("alert decrypt error") != std::string::npos)
    return "the other host refuses our certificate: it is of another subnet (another authority)";
  if (text.find("alert certificate required") != std::string::npos) return "the other host wants a certificate";
  if (text.find("certificate") != std::string::npos && text.find("alert") != std::string::npos) return "the other host refuses our certificate (" + text + ")";
  if (text.find("wrong version number") != std::string::npos || text.find("http request") != std::string::npos)
    return "what is there does not speak TLS 1.3";
  if (error == boost::asio::error::eof || error == boost::asio::ssl::error::stream_truncated) return "the other side hung up";
  return text;
}

}  // namespace vrdma::hosts
