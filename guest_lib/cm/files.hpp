// The descriptors that this process has of /dev/infiniband/rdma_cm: each is the read end of a pipe in which the service keeps one record
// for as long as events wait, so that waiting for it is what it is with the kernel's. What is written to it are librdmacm's commands
// (commands.hpp); write(2), fstat(2) and close(2) of such a descriptor come here (interpose.cpp).
//
// Any thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "guest_lib/attachment.hpp"

namespace vrdma::guest::cm {

// What has been told of an identifier, or of a membership of a multicast group.
struct Told {
  std::uint64_t channel = 0;   // File::key()
  std::uint64_t uid = 0;
  std::uint32_t events = 0;    // that were read
  std::uint64_t member = 0;    // of a membership: the identifier's key; its events are that one's, too
  bool removal = false;        // that its device is gone is among them
};

struct File {
  const std::shared_ptr<Attachment> attachment;
  const std::uint32_t channel;
  const int fd;
  const ino_t inode;  // of the pipe: another one means that the number is another file's by now
  std::atomic<bool> closed{false};

  File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in, ino_t inode_in)
      : attachment(std::move(attachment_in)), channel(channel_in), fd(fd_in), inode(inode_in) {}

  // Of an identifier, or of the channel, among all that this process ever had.
  std::uint64_t key(std::uint32_t handle) const { return attachment->ordinal() << 32 | handle; }
  std::uint64_t key() const { return key(channel); }
  // The record is the service's word that events wait; it has said that none does.
  void take_record() const;
};

class Files {
 public:
  static Files& instance();

  // Whether it may be one of them: all that a write to another file costs.
  static bool may_hold(int fd) {
    return fd >= 0 && fd < fds_max && (marks_[fd / 64].load(std::memory_order_relaxed) >> (fd % 64) & 1) != 0;
  }

  // In a fork's child: its descriptors are its parent's channels, and no channels of its own.
  static void abandon();

  // As open(2): a descriptor, or an error.
  Result<int> open(int flags);
  // nullptr: it is none, or not any more.
  std::shared_ptr<File> find(int fd);
  // Its identifiers go with it.
  void forget(int fd);

  // By File::key(). Locked while used.
  std::mutex mutex;
  std::unordered_map<std::uint64_t, Told> told;

 private:
  static constexpr int fds_max = 65536;
  static std::atomic<std::uint64_t> marks_[fds_max / 64];
  static std::atomic<bool> ever_opened_;
  void mark(int fd, bool on);

  std::unordered_map<int, std::shared_ptr<File>> files_;
};

}  // namespace vrdma::guest::cm
