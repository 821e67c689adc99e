// A stream of the service that ends in a pipe of a process. What a full pipe does not take waits here. One thread; never blocks.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

class Stream {
 public:
  enum class Use {
    events,  // every record counts
    wake,    // a byte more in a pipe that is full already says nothing new
  };
  static Result<Stream> make(Use use, vmci::UniqueFd& read_end);

  // Whole records of 16 bytes, or anything for Use::wake. Beyond held_bytes_max they are dropped, as the service does with
  // processes of its own host that do not read.
  void put(std::span<const std::byte> bytes);
  void end() { ended_ = true; }  // no more come
  void flush();

  int fd() const { return pipe_.get(); }  // POLLOUT: flush() is worth a try
  bool holds() const { return !held_.empty(); }
  bool over() const { return ended_ && held_.empty(); }

  bool watched = false;  // its owner's: whether a Poller has it

  static constexpr std::size_t held_bytes_max = 1 << 20;

 private:
  std::size_t write(std::span<const std::byte> bytes);

  vmci::UniqueFd pipe_;
  Use use_ = Use::events;
  std::vector<std::byte> held_;
  bool ended_ = false, unread_ = false;  // unread_: nobody has the other end any more
};

}  // namespace vrdma::agent
