// The memory of a process through /proc/PID/mem: how a poster reaches what lies in no shareable file. A microsecond a message, where the
// service and its worker need ten, and any number beside load.
//
// The kernel allows it to whoever may trace the process. The descriptor means the memory that the process had when it was opened: once
// that has called exec or has ended, nothing is read or written any more, whoever has its number then.
//
// open() by one thread at a time; the rest by any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/claimed_stores.hpp"

namespace vrdma::guest {

class ReachedProcess {
 public:
  enum class State : std::uint8_t { unknown, opened, refused };

  ReachedProcess() = default;
  ReachedProcess(const ReachedProcess&) = delete;
  ReachedProcess& operator=(const ReachedProcess&) = delete;
  ~ReachedProcess() { close(); }
  // The process that sees itself as `pid` in this one's pid namespace, where the aligned word at `probe_address` is `probe_value`: pids are
  // used again. refused for good: it could not be opened, or is another.
  State open(pid_t pid, std::uint64_t probe_address, std::uint64_t probe_value);
  State state() const { return state_.load(std::memory_order_acquire); }  // P1: pairs with P2 in open()
  void close();  // nobody is in read() or write()

  // tail_last: somebody may look at the memory itself, so that the last 8 bytes, or all of fewer, come last (as placement_copy). That the kernel
  // copies an aligned word in one piece is what has been seen, not what it promises.
  enum class Order : bool { any, tail_last };
  // The bytes at `address` of the process to `to`, or `from` there. Both ends may fault: false, and part may have been copied. stores: where
  // the claim must hold until it begins.
  bool read(std::uint64_t address, std::byte* to, std::uint64_t bytes, Order order, const vmci::ClaimedStores& stores) const;
  bool write(std::uint64_t address, const std::byte* from, std::uint64_t bytes, Order order, const vmci::ClaimedStores& stores) const;

 private:
  bool is_ours() const;

  std::atomic<State> state_{State::unknown};
  OwnFd memory_;
  memory::FileId id_{};
};

}  // namespace vrdma::guest
