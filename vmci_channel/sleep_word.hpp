// Sleep on a word in shared memory until the other side changes it: what a thread does that has nothing else to wait for.
// Needs no descriptor, so nothing that an application could close or fill. Only for memory that both sides map on one host
// (no BAR): another substrate wakes by its own means.
//
// The sleeper announces itself, reads the word, looks whether there is something to do, then sleeps on what it read; the other
// side publishes, changes the word, then looks whether somebody sleeps. Any thread.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

namespace vmci {

// Returns when woken, when *word is not `seen`, after the time, or for no reason.
inline void sleep_on_word(std::uint32_t* word, std::uint32_t seen, std::uint64_t timeout_ns) {
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000), static_cast<long>(timeout_ns % 1'000'000'000)};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

// Never blocks, whatever the other side does with its mapping.
inline void wake_word(std::uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace vmci
