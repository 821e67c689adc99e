// On processors with wide vectors it takes a third of OpenSSL 3.0's time for large frames, and a sixth for small ones.
#define NO_COMPAT_IMB_API_053  // else names of OpenSSL's become macros
#include <intel-ipsec-mb.h>
#include <openssl/crypto.h>

#include <stdexcept>
#include <string>

#include "vmkernel_svc/remote/frame_seal.hpp"

namespace vrdma::remote {

namespace {

// The library's functions for this processor; kept for the process, and not written once it is made.
const IMB_MGR& functions() {
  static const IMB_MGR* const made = [] {
    IMB_MGR* const manager = alloc_mb_mgr(0);
    if (manager == nullptr) throw std::runtime_error("intel-ipsec-mb: out of memory");
    init_mb_mgr_auto(manager, nullptr);
    if (const int why = imb_get_errno(manager); why != 0) throw std::runtime_error(std::string("intel-ipsec-mb: ") + imb_get_strerror(why));
    return manager;
  }();
  return *made;
}

}  // namespace

class IpsecMbCipher final : public FrameSeal::Cipher {
 public:
  explicit IpsecMbCipher(std::span<const std::byte, FrameSeal::key_bytes> key) : functions_(functions()) { functions_.gcm128_pre(key.data(), &key_); }
  ~IpsecMbCipher() override { OPENSSL_cleanse(&key_, sizeof(key_)); }

  FrameSeal::Tag seal(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head, FrameSeal::Bytes body, std::byte* encrypted) override {
    if (encrypted == nullptr) return tag_of(nonce, head, body);
    begin(nonce, head);
    functions_.gcm128_enc_update(&key_, &state_, out(encrypted), in(body.data()), body.size());
    FrameSeal::Tag tag;
    functions_.gcm128_enc_finalize(&key_, &state_, out(tag.data()), tag.size());
    return tag;
  }

  bool open(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head, std::span<std::byte> body, bool decrypt, const FrameSeal::Tag& tag) override {
    FrameSeal::Tag expected;
    if (decrypt) {
      begin(nonce, head);
      functions_.gcm128_dec_update(&key_, &state_, out(body.data()), in(body.data()), body.size());
      functions_.gcm128_dec_finalize(&key_, &state_, out(expected.data()), expected.size());
    } else {
      expected = tag_of(nonce, head, body);
    }
    return CRYPTO_memcmp(expected.data(), tag.data(), tag.size()) == 0;
  }

 private:
  static const std::uint8_t* in(const std::byte* bytes) { return reinterpret_cast<const std::uint8_t*>(bytes); }
  static std::uint8_t* out(std::byte* bytes) { return reinterpret_cast<std::uint8_t*>(bytes); }

  void begin(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head) { functions_.gcm128_init(&key_, &state_, in(nonce.data()), in(head.data()), head.size()); }
  FrameSeal::Tag tag_of(const FrameSeal::Nonce& nonce, FrameSeal::Bytes head, FrameSeal::Bytes body) {
    functions_.gmac128_init(&key_, &state_, in(nonce.data()), nonce.size());
    if (!head.empty()) functions_.gmac128_update(&key_, &state_, in(head.data()), head.size());
    if (!body.empty()) functions_.gmac128_update(&key_, &state_, in(body.data()), body.size());
    FrameSeal::Tag tag;
    functions_.gmac128_finalize(&key_, &state_, out(tag.data()), tag.size());
    return tag;
  }

  const IMB_MGR& functions_;
  gcm_key_data key_;
  gcm_context_data state_;
};

std::unique_ptr<FrameSeal::Cipher> FrameSeal::Cipher::make(std::span<const std::byte, key_bytes> key, Way) {
  return std::make_unique<IpsecMbCipher>(key);
}

}  // namespace vrdma::remote
