// A small seeded generator, the same on every platform and in both processes; never std::*_distribution, whose output differs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace vrdma::conformance {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform enough for tests: in [0, bound).
  std::uint64_t below(std::uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  std::uint64_t between(std::uint64_t low, std::uint64_t high) { return low + below(high - low + 1); }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  void fill(std::span<std::byte> bytes) {
    while (bytes.size() >= 8) {
      const std::uint64_t v = next();
      std::memcpy(bytes.data(), &v, 8);
      bytes = bytes.subspan(8);
    }
    const std::uint64_t v = next();
    std::memcpy(bytes.data(), &v, bytes.size());
  }

 private:
  std::uint64_t state_;
};

}  // namespace vrdma::conformance
