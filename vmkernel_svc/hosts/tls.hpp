// TLS 1.3 between hosts: both show a certificate of the subnet's authority, or nothing is said.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "vmkernel_svc/hosts/certificates.hpp"

namespace vrdma::hosts {

using TlsStream = boost::asio::ssl::stream<boost::asio::ip::tcp::socket>;

// The credentials of one process; shared by its connections, not changed afterwards.
class Tls {
 public:
  // Throws std::runtime_error with a message for a person.
  Tls(const Identity& us, X509Ptr authority);
  static std::shared_ptr<Tls> of_host(const Folder& folder);

  // A connection that notes in `refused` why it does not believe the other side.
  std::unique_ptr<TlsStream> stream(boost::asio::ip::tcp::socket socket, std::shared_ptr<std::string> refused);
  const CertificateInfo& us() const { return us_; }

 private:
  boost::asio::ssl::context context_;
  X509Ptr authority_;
  CertificateInfo us_;
};

// What a connection does, compiled once for all who use one: Asio would instantiate it again for each handler that it is given.
using TlsDone = std::function<void(const boost::system::error_code& error, std::size_t bytes)>;
void shake_hands(TlsStream& stream, boost::asio::ssl::stream_base::handshake_type side, std::function<void(const boost::system::error_code& error)> done);
void read_all(TlsStream& stream, boost::asio::mutable_buffer into, TlsDone done);
void read_some(TlsStream& stream, boost::asio::mutable_buffer into, TlsDone done);
void write_all(TlsStream& stream, boost::asio::const_buffer from, TlsDone done);

// Of a connection whose handshake is over.
CertificateInfo certificate_of_peer(TlsStream& stream);
// 32 bytes that only the two ends of this connection know (RFC 8446, 7.5).
std::array<std::byte, 32> exported_key(TlsStream& stream);
// What an error means; `refused` as of stream().
std::string explain(const boost::system::error_code& error, const std::string& refused);

}  // namespace vrdma::hosts
