// The service's end of a pipe that a guest has as a character device: one record is in it exactly while something waits to be taken, so that
// poll(2) says what it says of the kernel's. The guest takes the record out when it is told that nothing waits any more
// (guest_lib/character_files.hpp). Used by the shard's thread only.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc {

class Announced {
 public:
  Announced(vmci::UniqueFd pipe, std::uint32_t channel) : pipe_(std::move(pipe)), channel_(channel) {}

  // Something waits. The pipe holds nothing, or the record already: it has room.
  void announce() {
    if (std::exchange(is_announced_, true)) return;
    const control::AsyncRecord record{0, channel_, 0};
    [[maybe_unused]] const auto written = ::write(pipe_.get(), &record, sizeof(record));  // EPIPE: nobody reads it any more
  }
  // Nothing waits. 1: something did, and the guest, which is to be told so, takes the record out.
  std::uint32_t emptied() { return std::exchange(is_announced_, false) ? 1 : 0; }
  bool is_announced() const { return is_announced_; }

 private:
  vmci::UniqueFd pipe_;
  std::uint32_t channel_;
  bool is_announced_ = false;
};

}  // namespace vrdma::svc
