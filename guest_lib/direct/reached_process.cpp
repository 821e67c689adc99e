#include "guest_lib/direct/reached_process.hpp"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>

#include "guest_lib/memory/raw_file.hpp"
#include "vmci_channel/placement_copy.hpp"

namespace vrdma::guest {

namespace {

using vmci::ordered_tail_bytes;

// One call, one part after the other: the file has no way of its own to take several at once.
bool move(const vmci::ClaimedStores& stores, long number, int fd, std::uint64_t address, std::byte* memory, std::uint64_t bytes,
          ReachedProcess::Order order) {
  const std::uint64_t first = order == ReachedProcess::Order::tail_last && bytes > ordered_tail_bytes ? bytes - ordered_tail_bytes : bytes;
  const iovec parts[] = {{memory, first}, {memory + first, bytes - first}};
  long moved = 0;
  return stores.system_call(number, {fd, reinterpret_cast<long>(parts), first == bytes ? 1 : 2, static_cast<long>(address)}, moved) &&
         moved == static_cast<long>(bytes);
}

}  // namespace

// Programs close descriptors that are not theirs, and then open their own.
bool ReachedProcess::is_ours() const {
  const auto now = memory::file_id(memory_.get());
  return now && *now == id_;
}

ReachedProcess::State ReachedProcess::open(pid_t pid, std::uint64_t probe_address, std::uint64_t probe_value) {
  if (state() != State::unknown) return state();
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%d/mem", pid);
  memory_.reset(memory::raw_open(path, O_RDWR));  // by system calls, here and below: the first post that needs it is no cancellation point
  const auto id = memory::file_id(memory_.get());
  std::uint64_t found = 0;
  const bool opened = id && memory::raw_pread(memory_.get(), &found, sizeof(found), static_cast<off_t>(probe_address)) == sizeof(found) && found == probe_value;
  if (opened) id_ = *id;
  else memory_.reset();
  // P2: pairs with P1.
  state_.store(opened ? State::opened : State::refused, std::memory_order_release);
  return state();
}

void ReachedProcess::close() {
  state_.store(State::refused, std::memory_order_relaxed);
  memory_.reset();
}

bool ReachedProcess::read(std::uint64_t address, std::byte* to, std::uint64_t bytes, Order order, const vmci::ClaimedStores& stores) const {
  return is_ours() && move(stores, SYS_preadv, memory_.get(), address, to, bytes, order);
}

bool ReachedProcess::write(std::uint64_t address, const std::byte* from, std::uint64_t bytes, Order order, const vmci::ClaimedStores& stores) const {
  return is_ours() && move(stores, SYS_pwritev, memory_.get(), address, const_cast<std::byte*>(from), bytes, order);
}

}  // namespace vrdma::guest
