#include "guest_agent/stream.hpp"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>

namespace vrdma::agent {

Result<Stream> Stream::make(Use use, vmci::UniqueFd& read_end) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return last_error();
  Stream stream;
  (void)::fchmod(ends[0], 0622);  // who is given it, of whatever user, opens a writing end when we are gone (CharacterFile::fall_silent)
  read_end.reset(ends[0]);  // it blocks, unless its owner decides otherwise
  stream.pipe_.reset(ends[1]);
  stream.use_ = use;
  if (::fcntl(stream.pipe_.get(), F_SETFL, O_NONBLOCK) != 0) return last_error();
  return stream;
}

void Stream::put(std::span<const std::byte> bytes) {
  if (unread_) return;
  if (held_.empty()) bytes = bytes.subspan(write(bytes));
  if (unread_ || use_ == Use::wake || held_.size() + bytes.size() > held_bytes_max) return;
  held_.insert(held_.end(), bytes.begin(), bytes.end());
}

void Stream::flush() {
  const std::size_t went = write(held_);
  held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(went));
  if (unread_) held_.clear();
}

std::size_t Stream::write(std::span<const std::byte> bytes) {
  std::size_t went = 0;
  while (went < bytes.size()) {
    // A pipe takes all of up to PIPE_BUF bytes or nothing: no record comes in two parts.
    const ssize_t got = ::write(pipe_.get(), bytes.data() + went, std::min<std::size_t>(bytes.size() - went, PIPE_BUF));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      unread_ = errno != EAGAIN;
      break;
    }
    went += static_cast<std::size_t>(got);
  }
  return went;
}

}  // namespace vrdma::agent
