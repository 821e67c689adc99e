// A list of places that one message is gathered from or scattered to, with a cursor. Fixed size, no allocation.
#pragma once

#include <algorithm>

#include "vmkernel_svc/engine/ports.hpp"

namespace vrdma::engine {

class ScatterGather {
 public:
  void clear() { count_ = index_ = 0, offset_ = total_ = 0; }
  void add(const Place& place, std::uint64_t bytes) {
    if (bytes == 0) return;
    parts_[count_++] = {place, bytes};
    total_ += bytes;
  }
  void rewind() { index_ = 0, offset_ = 0; }

  std::uint64_t total_bytes() const { return total_; }
  // What lies at the cursor without a break; 0 at the end.
  std::uint64_t contiguous_bytes() const { return index_ < count_ ? parts_[index_].bytes - offset_ : 0; }
  Place here() const { return parts_[index_].place + offset_; }
  void advance(std::uint64_t bytes) {  // at most contiguous_bytes()
    offset_ += bytes;
    if (offset_ == parts_[index_].bytes) ++index_, offset_ = 0;
  }

 private:
  struct Part {
    Place place;
    std::uint64_t bytes;
  };
  std::uint32_t count_ = 0;
  std::uint32_t index_ = 0;
  std::uint64_t offset_ = 0;
  std::uint64_t total_ = 0;
  Part parts_[send_sge_max + 1];
};

}  // namespace vrdma::engine
