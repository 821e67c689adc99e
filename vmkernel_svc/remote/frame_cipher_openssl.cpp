#include <openssl/evp.h>

#include <stdexcept>

#include "vmkernel_svc/remote/frame_seal.hpp"

namespace vrdma::remote {

namespace {

const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
[[noreturn]] void fail() { throw std::runtime_error("OpenSSL does not seal by AES-128-GCM: out of memory?"); }

struct Free {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};

}  // namespace

class OpenSslCipher final : public FrameSeal::Cipher {
 public:
  OpenSslCipher(std::span<const std::byte, FrameSeal::key_bytes> key, FrameSeal::Way way) : context_(EVP_CIPHER_CTX_new()) {
    if (!context_ || EVP_CipherInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, raw(key.data()), nullptr, way == FrameSeal::Way::seal ? 1 : 0) != 1) fail();
  }

  FrameSeal::Tag seal(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head, FrameSeal::Bytes body, std::byte* encrypted) override {
    FrameSeal::Tag tag;
    if (!begin(nonce) || !pass(head, nullptr) || !pass(body, encrypted) || !end() ||
        EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, static_cast<int>(tag.size()), tag.data()) != 1)
      fail();
    return tag;
  }

  bool open(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head, std::span<std::byte> body, bool decrypt, const FrameSeal::Tag& tag) override {
    FrameSeal::Tag expected = tag;
    return begin(nonce) && pass(head, nullptr) && pass(body, decrypt ? body.data() : nullptr) &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, static_cast<int>(expected.size()), expected.data()) == 1 && end();
  }

 private:
  bool begin(const FrameSeal::Nonce& nonce) { return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, raw(nonce.data()), -1) == 1; }
  bool pass(FrameSeal::Bytes bytes, std::byte* out) {  // out nullptr: authenticated only
    int done = 0;
    return bytes.empty() || EVP_CipherUpdate(context_.get(), raw(out), &done, raw(bytes.data()), static_cast<int>(bytes.size())) == 1;
  }
  bool end() {
    unsigned char rest[16];
    int done = 0;
    return EVP_CipherFinal_ex(context_.get(), rest, &done) == 1;
  }

  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
};

std::unique_ptr<FrameSeal::Cipher> FrameSeal::Cipher::make(std::span<const std::byte, key_bytes> key, Way way) {
  return std::make_unique<OpenSslCipher>(key, way);
}

}  // namespace vrdma::remote
