#include "vmkernel_svc/remote/frame_seal.hpp"

#include <algorithm>

namespace vrdma::remote {

FrameSeal::FrameSeal(std::span<const std::byte, secret_bytes> secret, Way way) : cipher_(Cipher::make(secret.first<key_bytes>(), way)) {
  std::ranges::copy(secret.last<nonce_bytes>(), nonce_.begin());
}

FrameSeal::FrameSeal(FrameSeal&&) noexcept = default;
FrameSeal::~FrameSeal() = default;

// As TLS 1.3 makes its own (RFC 8446, 5.3): the count over the secret nonce.
FrameSeal::Nonce FrameSeal::next_nonce() {
  auto nonce = nonce_;
  for (std::size_t i = 0; i < sizeof(count_); ++i) nonce[nonce_bytes - 1 - i] ^= static_cast<std::byte>(count_ >> (8 * i));
  ++count_;
  return nonce;
}

FrameSeal::Tag FrameSeal::seal(Bytes head, Bytes body, std::byte* encrypted) {
  bytes_ += head.size() + body.size();
  return cipher_->seal(next_nonce(), head, body, encrypted);
}

bool FrameSeal::open(Bytes head, std::span<std::byte> body, bool decrypt, const Tag& tag) {
  bytes_ += head.size() + body.size();
  return cipher_->open(next_nonce(), head, body, decrypt, tag);
}

}  // namespace vrdma::remote
