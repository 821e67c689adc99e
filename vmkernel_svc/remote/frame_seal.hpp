// The protection of frames in one direction of one connection: AES-128-GCM under a key that the two hosts' handshake made for it, by
// OpenSSL. What is not encrypted is authenticated just so. The nonce counts frames, so that none passes for another, or comes twice.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace vrdma::remote {

class FrameSeal {
 public:
  static constexpr std::size_t key_bytes = 16, nonce_bytes = 12, tag_bytes = 16;
  static constexpr std::size_t secret_bytes = key_bytes + nonce_bytes;
  // A key serves for so much; then the connection is made anew.
  static constexpr std::uint64_t sealed_bytes_max = std::uint64_t{1} << 38;
  using Bytes = std::span<const std::byte>;
  using Tag = std::array<std::byte, tag_bytes>;

  enum class Way { seal, open };
  FrameSeal(std::span<const std::byte, secret_bytes> secret, Way way);

  // The tag of head and body. `encrypted` (nullptr: the body goes as it is) gets as many bytes as the body has.
  Tag seal(Bytes head, Bytes body, std::byte* encrypted);
  // False: it is not what the other side sealed next. `decrypt`: the body becomes what it was, in place.
  bool open(Bytes head, std::span<std::byte> body, bool decrypt, const Tag& tag);

  std::uint64_t sealed_bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  bool next_nonce();
  bool pass(Bytes bytes, std::byte* out);  // out nullptr: authenticated only

  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  std::array<std::uint8_t, nonce_bytes> nonce_{};
  std::uint64_t count_ = 0, bytes_ = 0;
};

}  // namespace vrdma::remote
