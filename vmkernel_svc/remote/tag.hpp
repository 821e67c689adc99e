// The tag of a record between two hosts: SipHash-2-4 with 128 bits (Aumasson and Bernstein, 2012), keyed by what the two share.
// It keeps others on the network from making records up or changing them; it hides nothing.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace vrdma::remote {

using Tag = std::array<std::uint64_t, 2>;

class Tagger {
 public:
  // The key's second half keys the connection's encryption where there is one; the tag takes 16 bytes.
  explicit Tagger(std::span<const std::byte, 16> key) {
    std::memcpy(&k0_, key.data(), 8);
    std::memcpy(&k1_, key.data() + 8, 8);
  }

  Tag operator()(std::span<const std::byte> bytes) const {
    State s{k0_ ^ 0x736f6d6570736575u, k1_ ^ 0x646f72616e646f6du ^ 0xee, k0_ ^ 0x6c7967656e657261u, k1_ ^ 0x7465646279746573u};
    const std::byte* at = bytes.data();
    for (std::size_t words = bytes.size() / 8; words > 0; --words, at += 8) {
      std::uint64_t word;
      std::memcpy(&word, at, 8);
      s.take(word);
    }
    std::uint64_t last = static_cast<std::uint64_t>(bytes.size()) << 56, rest = 0;
    if (const std::size_t left = bytes.size() % 8; left != 0) std::memcpy(&rest, at, left);
    s.take(last | rest);
    s.v2 ^= 0xee;
    for (int i = 0; i < 4; ++i) s.round();
    const std::uint64_t first = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    s.v1 ^= 0xdd;
    for (int i = 0; i < 4; ++i) s.round();
    return {first, s.v0 ^ s.v1 ^ s.v2 ^ s.v3};
  }

 private:
  struct State {
    std::uint64_t v0, v1, v2, v3;
    void round() {
      v0 += v1, v1 = std::rotl(v1, 13), v1 ^= v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16), v3 ^= v2;
      v0 += v3, v3 = std::rotl(v3, 21), v3 ^= v0;
      v2 += v1, v1 = std::rotl(v1, 17), v1 ^= v2, v2 = std::rotl(v2, 32);
    }
    void take(std::uint64_t word) {
      v3 ^= word;
      round(), round();
      v0 ^= word;
    }
  };
  std::uint64_t k0_, k1_;
};

}  // namespace vrdma::remote
