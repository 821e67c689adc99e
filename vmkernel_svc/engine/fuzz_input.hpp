// An input of a fuzz target, taken apart from the front. What a short input lacks reads as zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace vrdma {

class FuzzInput {
 public:
  FuzzInput(const std::uint8_t* data, std::size_t bytes) : left_(reinterpret_cast<const std::byte*>(data), bytes) {}

  bool empty() const { return left_.empty(); }
  std::span<const std::byte> take(std::size_t bytes) {
    const auto part = left_.first(std::min(bytes, left_.size()));
    left_ = left_.subspan(part.size());
    return part;
  }
  template <class T>
  T value() {
    T out{};
    const auto part = take(sizeof(T));
    if (!part.empty()) std::memcpy(&out, part.data(), part.size());
    return out;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace vrdma
