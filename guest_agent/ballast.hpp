// Memory that is held for nothing but that the kernel hands out other memory. It gives what was plugged into a machine (DIMMs) to whoever
// asks, and of the file that is the machine's RAM only when that is used up: nobody can ask for pages of the one or the other. So one
// takes what there is, gives back what may be lent, and is then given that.
//
// The kernel may take it back at any time, instead of ending a program (MADV_FREE): its contents are nothing. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "guest_agent/frames.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

class Ballast {
 public:
  using MayLend = std::function<bool(const vm::Run&)>;
  static constexpr std::uint64_t block_bytes = 8 << 20;

  // bytes_max: of what is held, whatever the machine has.
  explicit Ballast(std::uint64_t bytes_max) : bytes_max_(bytes_max) {}

  // A block more; what of it may be lent is given back: so many bytes. Before that `take` is called: whatever the kernel does in between may
  // free a page of the other memory, which is the next to be handed out. ENOMEM: the machine would not have `wanted_bytes` left then, and a
  // reserve beside; nothing is called. As Pagemap::runs().
  Result<std::uint64_t> grow(std::uint64_t wanted_bytes, const MayLend& may_lend, const std::function<void()>& take = [] {});
  void release() { blocks_.clear(), held_bytes_ = 0; }
  std::uint64_t held_bytes() const { return held_bytes_; }

 private:
  struct Unmap {
    void operator()(std::byte* block) const;
  };
  std::uint64_t bytes_max_;
  std::uint64_t held_bytes_ = 0;
  std::vector<std::unique_ptr<std::byte, Unmap>> blocks_;
};

}  // namespace vrdma::agent
