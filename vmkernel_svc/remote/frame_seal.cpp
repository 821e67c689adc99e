#include "vmkernel_svc/remote/frame_seal.hpp"

#include <cstring>
#include <stdexcept>

namespace vrdma::remote {

namespace {
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
[[noreturn]] void fail() { throw std::runtime_error("OpenSSL does not offer AES-128-GCM"); }
}  // namespace

FrameSeal::FrameSeal(std::span<const std::byte, secret_bytes> secret, Way way) : context_(EVP_CIPHER_CTX_new()) {
  std::memcpy(nonce_.data(), secret.data() + key_bytes, nonce_bytes);
  if (!context_ || EVP_CipherInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, raw(secret.data()), nullptr, way == Way::seal ? 1 : 0) != 1) fail();
}

// As TLS 1.3 makes its own (RFC 8446, 5.3): the count over the secret nonce.
bool FrameSeal::next_nonce() {
  auto nonce = nonce_;
  for (std::size_t i = 0; i < sizeof(count_); ++i) nonce[nonce_bytes - 1 - i] ^= static_cast<std::uint8_t>(count_ >> (8 * i));
  ++count_;
  return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1;
}

bool FrameSeal::pass(Bytes bytes, std::byte* out) {
  bytes_ += bytes.size();
  int done = 0;
  return bytes.empty() || EVP_CipherUpdate(context_.get(), raw(out), &done, raw(bytes.data()), static_cast<int>(bytes.size())) == 1;
}

FrameSeal::Tag FrameSeal::seal(Bytes head, Bytes body, std::byte* encrypted) {
  Tag tag;
  unsigned char rest[16];
  int done = 0;
  if (!next_nonce() || !pass(head, nullptr) || !pass(body, encrypted) || EVP_CipherFinal_ex(context_.get(), rest, &done) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, tag_bytes, tag.data()) != 1)
    fail();
  return tag;
}

bool FrameSeal::open(Bytes head, std::span<std::byte> body, bool decrypt, const Tag& tag) {
  Tag expected = tag;
  unsigned char rest[16];
  int done = 0;
  return next_nonce() && pass(head, nullptr) && pass(body, decrypt ? body.data() : nullptr) &&
         EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, tag_bytes, expected.data()) == 1 &&
         EVP_CipherFinal_ex(context_.get(), rest, &done) == 1;
}

}  // namespace vrdma::remote
