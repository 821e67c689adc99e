// The descriptors that this process has of /dev/infiniband/rdma_cm, and what it has been told by them. What is written to one are
// librdmacm's commands (commands.hpp). Any thread.
#pragma once

#include <rdma/rdma_user_cm.h>

#include <cstddef>

#include "guest_lib/character_files.hpp"
#include "guest_lib/readers.hpp"

namespace vrdma::guest::cm {

class File final : public CharacterFile {
 public:
  File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in);

  long write(const void* command, std::size_t bytes) override;
  void forgotten() override;  // its identifiers go with it

  // Of an identifier, or of the channel, among all that this process ever had.
  std::uint64_t key(std::uint32_t handle) const { return attachment->ordinal() << 32 | handle; }
  std::uint64_t key() const { return key(channel); }

  Readers readers;  // closed when every identifier has been told that its device is gone: the last to leave has the descriptor fall silent
};

// What librdmacm has room for at least when it asks for an event.
constexpr std::size_t event_bytes_least = offsetof(rdma_ucm_event_resp, reserved);

// The calling thread has read an event there.
void remember_reader(const std::shared_ptr<File>& file);
// What has been written to a descriptor that is closed is a thread's question for the next event after those of a channel that has been closed meanwhile.
bool asks_for_more_of_closed(int fd, const void* command, std::size_t bytes);

// nullptr: that descriptor is none of these.
std::shared_ptr<File> find_file(int fd);

// What has been told of an identifier, or of a membership of a multicast group.
struct Told {
  std::uint64_t channel = 0;   // File::key()
  std::uint64_t uid = 0;
  std::uint32_t events = 0;    // that were read
  std::uint64_t member = 0;    // of a membership: the identifier's key; its events are that one's, too
  bool connected = false;      // a connection was established, and has not ended
  bool removal = false;        // that its device is gone is among them
};

// By File::key(). Locked while used; and while the service is asked, by whoever takes an event, or what it may be of, from it: nobody is to see
// the one gone and the other not counted (the kernel does both under one lock).
struct Account {
  static inline constinit std::mutex mutex;  // as Process::mutex
  std::unordered_map<std::uint64_t, Told> told;
  Account* parents = nullptr;  // of a fork's child: left as a thread was changing it, and known, so that nobody calls it a leak

  static Account& instance();
  static void abandon();  // in a fork's child
};

}  // namespace vrdma::guest::cm
