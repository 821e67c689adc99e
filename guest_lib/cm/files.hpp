// The descriptors that this process has of /dev/infiniband/rdma_cm, and what it has been told by them. What is written to one are
// librdmacm's commands (commands.hpp). Any thread.
#pragma once

#include <condition_variable>

#include "guest_lib/character_files.hpp"

namespace vrdma::guest::cm {

class File final : public CharacterFile {
 public:
  File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in);

  long write(const void* command, std::size_t bytes) override;
  void closing() override;
  void forgotten() override;  // its identifiers go with it

  // The calling thread is asking for the next event, or has been given one: tells closing().
  void asks();
  void has_taken();

  // Of an identifier, or of the channel, among all that this process ever had.
  std::uint64_t key(std::uint32_t handle) const { return attachment->ordinal() << 32 | handle; }
  std::uint64_t key() const { return key(channel); }

 private:
  std::mutex mutex_;
  std::condition_variable asked_;
  pid_t taker_ = 0;  // the thread that was given the last event and has not asked for the next
};

// nullptr: that descriptor is none of these.
std::shared_ptr<File> find_file(int fd);

// What has been told of an identifier, or of a membership of a multicast group.
struct Told {
  std::uint64_t channel = 0;   // File::key()
  std::uint64_t uid = 0;
  std::uint32_t events = 0;    // that were read
  std::uint64_t member = 0;    // of a membership: the identifier's key; its events are that one's, too
  bool removal = false;        // that its device is gone is among them
};

// By File::key(). Locked while used.
struct Account {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, Told> told;

  static Account& instance();
  static void abandon();  // in a fork's child
};

}  // namespace vrdma::guest::cm
