// How two hosts know each other on a new connection: TLS 1.3 by OpenSSL, with the key that the two share (PeerHost::tag_key) as its
// pre-shared key, and an exchange of fresh keys besides. Nobody without that key gets an answer that tells him anything, or a host's time.
// What follows the handshake on the connection is frames under keys that come out of it (frame_seal.hpp), not records of TLS.
#pragma once

#include <openssl/ssl.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "vmkernel_svc/hosts/directory.hpp"
#include "vmkernel_svc/remote/frame_seal.hpp"

namespace vrdma::remote {

struct SslFree {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

class Handshake {
 public:
  // What all handshakes of a host have in common.
  class Context {
   public:
    using Find = std::function<std::shared_ptr<const PeerHost>(std::string_view name)>;
    // encrypt: whether this host wants payload encrypted, which is done where either of two wants it. `find`: who may connect.
    Context(std::string our_name, bool encrypt, Find find);

   private:
    friend class Handshake;
    static int use_key(SSL* ssl, const EVP_MD* hash, const unsigned char** identity, std::size_t* bytes, SSL_SESSION** session);
    static int find_key(SSL* ssl, const unsigned char* identity, std::size_t bytes, SSL_SESSION** session);
    static int select(SSL* ssl, const unsigned char** chosen, unsigned char* chosen_bytes, const unsigned char* offered, unsigned int bytes, void* context);

    std::string our_name_;
    bool encrypt_;
    Find find_;
    std::unique_ptr<SSL_CTX, SslFree> context_;
  };

  // On a connected, non-blocking socket. `peer`: whom we dialed; nullptr: somebody has connected to us. Throws std::runtime_error where OpenSSL
  // has no memory.
  Handshake(Context& context, int socket, std::shared_ptr<const PeerHost> peer);
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  enum class State { wants_read, wants_write, done, failed, hung_up };  // hung_up: the connection has ended, which says nothing of the key
  State go_on();
  // Once done:
  const std::shared_ptr<const PeerHost>& peer() const { return peer_; }
  bool encrypts() const;
  struct Secrets {
    std::array<std::byte, FrameSeal::secret_bytes> ours, theirs;  // of what we send, of what we receive
  };
  std::optional<Secrets> secrets();

 private:
  Context& context_;
  std::unique_ptr<SSL, SslFree> ssl_;
  std::shared_ptr<const PeerHost> peer_;
  std::string identity_;
  bool dialed_;
};

}  // namespace vrdma::remote
