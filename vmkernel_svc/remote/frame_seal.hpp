// The protection of frames in one direction of one connection: AES-128-GCM under a key that the two hosts' handshake made for it. What
// is not encrypted is authenticated just so. The nonce counts frames, so that none passes for another, or comes twice.
//
// The cipher is intel-ipsec-mb's where the build has found that, and OpenSSL's elsewhere; what goes over the wire is the same.
#pragma once

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
  using Nonce = std::array<std::byte, nonce_bytes>;

  enum class Way { seal, open };
  // It and seal() throw std::runtime_error where the library has no such cipher, or no memory.
  FrameSeal(std::span<const std::byte, secret_bytes> secret, Way way);
  FrameSeal(FrameSeal&&) noexcept;
  ~FrameSeal();

  // The tag of head and body. `encrypted` (nullptr: the body goes as it is) gets as many bytes as the body has.
  Tag seal(Bytes head, Bytes body, std::byte* encrypted);
  // False: it is not what the other side sealed next. `decrypt`: the body becomes what it was, in place.
  bool open(Bytes head, std::span<std::byte> body, bool decrypt, const Tag& tag);

  std::uint64_t sealed_bytes() const { return bytes_; }

  class Cipher;

 private:
  Nonce next_nonce();

  std::unique_ptr<Cipher> cipher_;
  Nonce nonce_;
  std::uint64_t count_ = 0, bytes_ = 0;
};

// One key in one direction. Each library's file defines it; FrameSeal knows the rest.
class FrameSeal::Cipher {
 public:
  static std::unique_ptr<Cipher> make(std::span<const std::byte, key_bytes> key, Way way);
  virtual ~Cipher() = default;
  virtual Tag seal(const Nonce& nonce, Bytes head, Bytes body, std::byte* encrypted) = 0;
  virtual bool open(const Nonce& nonce, Bytes head, std::span<std::byte> body, bool decrypt, const Tag& tag) = 0;
};

}  // namespace vrdma::remote
