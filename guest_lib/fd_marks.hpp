// A bit for each descriptor: whether it may be one of those that a call is interposed for. All that such a call on another file costs is a look
// at it; who finds it set asks what knows for certain. Hints, which pair with nothing. Any thread, signal handlers too.
#pragma once

#include <atomic>
#include <cstdint>

namespace vrdma {

class FdMarks {
 public:
  static constexpr int fds_max = 1 << 20;  // a page of zeroes is there only once it is written
  static bool has_room_for(int fd) { return fd >= 0 && fd < fds_max; }

  bool may_hold(int fd) const { return has_room_for(fd) && (words_[fd / 64].load(std::memory_order_relaxed) & bit(fd)) != 0; }
  // There is room for it.
  void set(int fd) { words_[fd / 64].fetch_or(bit(fd), std::memory_order_relaxed); }
  void clear(int fd) { words_[fd / 64].fetch_and(~bit(fd), std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t bit(int fd) { return std::uint64_t{1} << (fd % 64); }
  std::atomic<std::uint64_t> words_[fds_max / 64]{};
};

}  // namespace vrdma
