// The interrupts of the machine's device that are lent to completion channels, one to each while there are any; for the others the link
// carries their events. An interrupt that comes late, for whoever had the vector before, is one too many for the next: it looks, and
// finds nothing. One thread.
#pragma once

#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace vrdma::agent {

class Vectors {
 public:
  // A vector, until it goes out of scope; `number` 0: none.
  class Lease {
   public:
    Lease() = default;
    Lease(Vectors& from, std::uint32_t number) : from_(&from), number_(number) {}
    Lease(Lease&& other) noexcept : from_(other.from_), number_(std::exchange(other.number_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(from_, other.from_);
      std::swap(number_, other.number_);
      return *this;
    }
    ~Lease() {
      if (number_ != 0) from_->free_.push_back(number_);
    }
    std::uint32_t number() const { return number_; }

   private:
    Vectors* from_ = nullptr;
    std::uint32_t number_ = 0;
  };

  // first > 0; end: one past the last.
  Vectors(std::uint32_t first, std::uint32_t end) {
    for (std::uint32_t vector = end; vector > first; --vector) free_.push_back(vector - 1);
  }
  Vectors(const Vectors&) = delete;
  Vectors& operator=(const Vectors&) = delete;

  // One below `limit`.
  Lease lend(std::uint32_t limit) {
    for (auto at = free_.rbegin(); at != free_.rend(); ++at) {
      if (*at >= limit) continue;
      const std::uint32_t number = *at;
      free_.erase(std::next(at).base());
      return Lease(*this, number);
    }
    return {};
  }

 private:
  std::vector<std::uint32_t> free_;
};

}  // namespace vrdma::agent
