// Numbers that are given again when all have been: each after all the others of its range, and never while it is taken. On the first round
// nobody is asked which are.
#pragma once

#include <cstdint>
#include <optional>

namespace vrdma::svc {

class Numbers {
 public:
  // From `first` to `last`, both among them. next: the first one to be given.
  constexpr Numbers(std::uint32_t first, std::uint32_t last, std::uint32_t next) : first_(first), last_(last), next_(next) {}
  constexpr Numbers(std::uint32_t first, std::uint32_t last) : Numbers(first, last, first) {}

  // is_taken(number). std::nullopt: so many in a row are taken.
  template <class IsTaken>
  std::optional<std::uint32_t> take(std::uint32_t tries_max, const IsTaken& is_taken) {
    for (std::uint32_t tries = 0; tries < tries_max; ++tries) {
      const std::uint32_t number = next_;
      const bool again = came_round_;
      came_round_ |= number == last_;
      next_ = number == last_ ? first_ : number + 1;
      if (!again || !is_taken(number)) return number;
    }
    return std::nullopt;
  }

 private:
  std::uint32_t first_, last_, next_;
  bool came_round_ = false;
};

}  // namespace vrdma::svc
