#include "vmkernel_svc/remote/handshake.hpp"

#include <openssl/err.h>

#include <cstring>
#include <stdexcept>

namespace vrdma::remote {

namespace {
// What follows the handshake, in the form of ALPN (RFC 7301). Another version of it has other names.
constexpr std::string_view sealed_alpn = "\x0cvrdma2-plain", encrypted_alpn = "\x0cvrdma2-crypt";

// What sessions are for: to OpenSSL the key is one, and of no use with another.
constexpr std::array<unsigned char, 5> use{'v', 'r', 'd', 'm', 'a'};

// A session of TLS 1.3 that stands for the key.
SSL_SESSION* session_of(SSL* ssl, const std::array<std::byte, 32>& key) {
  constexpr unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};
  SSL_SESSION* const session = SSL_SESSION_new();
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
  if (session != nullptr && cipher != nullptr &&
      SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, cipher) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1 &&
      SSL_SESSION_set1_id_context(session, use.data(), use.size()) == 1)
    return session;
  SSL_SESSION_free(session);
  return nullptr;
}
}  // namespace

Handshake::Context::Context(std::string our_name, bool encrypt, Find find)
    : our_name_(std::move(our_name)), encrypt_(encrypt), find_(std::move(find)), context_(SSL_CTX_new(TLS_method())) {
  SSL_CTX* const raw = context_.get();
  if (raw == nullptr || SSL_CTX_set_session_id_context(raw, use.data(), use.size()) != 1 || SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(raw, "TLS_AES_128_GCM_SHA256") != 1 ||
      SSL_CTX_set1_groups_list(raw, "X25519:P-256") != 1 || SSL_CTX_set_num_tickets(raw, 0) != 1)
    throw std::runtime_error("OpenSSL does not offer TLS 1.3 with AES-128-GCM");
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  // No certificate is trusted: the key is all that counts.
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_psk_use_session_callback(raw, use_key);
  SSL_CTX_set_psk_find_session_callback(raw, find_key);
  SSL_CTX_set_alpn_select_cb(raw, select, this);
}

int Handshake::Context::use_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, std::size_t* bytes, SSL_SESSION** session) {
  const auto& handshake = *static_cast<const Handshake*>(SSL_get_app_data(ssl));
  *session = session_of(ssl, handshake.peer_->tag_key);
  *identity = reinterpret_cast<const unsigned char*>(handshake.identity_.data());
  *bytes = handshake.identity_.size();
  return *session != nullptr ? 1 : 0;
}

int Handshake::Context::find_key(SSL* ssl, const unsigned char* identity, std::size_t bytes, SSL_SESSION** session) {
  auto& handshake = *static_cast<Handshake*>(SSL_get_app_data(ssl));
  *session = nullptr;  // and then there is no way to agree, as there are no certificates
  const auto peer = handshake.context_.find_({reinterpret_cast<const char*>(identity), bytes});
  if (peer && peer->reachable && !peer->expired) *session = session_of(ssl, peer->tag_key);
  if (*session != nullptr) handshake.peer_ = peer;
  return 1;
}

int Handshake::Context::select(SSL*, const unsigned char** chosen, unsigned char* chosen_bytes, const unsigned char* offered, unsigned int bytes, void* context) {
  const std::string_view all(reinterpret_cast<const char*>(offered), bytes);
  const std::string_view wanted = static_cast<const Context*>(context)->encrypt_ || all.find(sealed_alpn) == all.npos ? encrypted_alpn : sealed_alpn;
  const auto at = all.find(wanted);
  if (at == all.npos) return SSL_TLSEXT_ERR_ALERT_FATAL;
  *chosen = offered + at + 1;
  *chosen_bytes = static_cast<unsigned char>(wanted.size() - 1);
  return SSL_TLSEXT_ERR_OK;
}

Handshake::Handshake(Context& context, int socket, std::shared_ptr<const PeerHost> peer)
    : context_(context), ssl_(SSL_new(context.context_.get())), peer_(std::move(peer)), identity_(context.our_name_), dialed_(peer_ != nullptr) {
  if (!ssl_ || SSL_set_fd(ssl_.get(), socket) != 1) throw std::runtime_error("OpenSSL cannot make a connection: out of memory?");
  SSL_set_app_data(ssl_.get(), this);
  SSL_set_read_ahead(ssl_.get(), 0);  // what follows the handshake is not its own
  if (!dialed_) {
    SSL_set_accept_state(ssl_.get());
    return;
  }
  const std::string offered = context.encrypt_ ? std::string(encrypted_alpn) : std::string(sealed_alpn) + std::string(encrypted_alpn);
  SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>(offered.data()), static_cast<unsigned>(offered.size()));
  SSL_set_connect_state(ssl_.get());
}

Handshake::State Handshake::go_on() {
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_.get());
  if (done == 1) {
    const unsigned char* chosen = nullptr;
    unsigned int bytes = 0;
    SSL_get0_alpn_selected(ssl_.get(), &chosen, &bytes);
    return SSL_session_reused(ssl_.get()) == 1 && peer_ && bytes != 0 ? State::done : State::failed;
  }
  switch (SSL_get_error(ssl_.get(), done)) {
    case SSL_ERROR_WANT_READ: return State::wants_read;
    case SSL_ERROR_WANT_WRITE: return State::wants_write;
    case SSL_ERROR_SYSCALL: return State::hung_up;
#ifdef SSL_R_UNEXPECTED_EOF_WHILE_READING  // before OpenSSL 3 it is SSL_ERROR_SYSCALL
    case SSL_ERROR_SSL: return ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING ? State::hung_up : State::failed;
#endif
    default: return State::failed;
  }
}

bool Handshake::encrypts() const {
  const unsigned char* chosen = nullptr;
  unsigned int bytes = 0;
  SSL_get0_alpn_selected(ssl_.get(), &chosen, &bytes);
  return encrypted_alpn.substr(1) == std::string_view(reinterpret_cast<const char*>(chosen), bytes);
}

std::optional<Handshake::Secrets> Handshake::secrets() {
  constexpr char label[] = "EXPORTER-vrdma-frames";
  std::array<std::byte, 2 * FrameSeal::secret_bytes> both;
  if (SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(both.data()), both.size(), label, sizeof(label) - 1, nullptr, 0, 0) != 1)
    return std::nullopt;
  Secrets secrets;
  auto& first = dialed_ ? secrets.ours : secrets.theirs;
  auto& second = dialed_ ? secrets.theirs : secrets.ours;
  std::memcpy(first.data(), both.data(), first.size());
  std::memcpy(second.data(), both.data() + first.size(), second.size());
  return secrets;
}

}  // namespace vrdma::remote
