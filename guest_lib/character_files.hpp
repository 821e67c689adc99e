// The descriptors that this process has of character devices below /dev/infiniband: each is the read end of a pipe, or of a pair of sockets, in which the service
// keeps one record for as long as something waits to be read, so that waiting for it is what it is with the kernel's. What is written to
// it, read from it and asked by ioctl(2) comes here (character_interpose.cpp), as does close(2), and fstat(2) (fstat_interpose.cpp).
//
// Any thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "guest_lib/attachment.hpp"
#include "guest_lib/fd_marks.hpp"
#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "guest_lib/provisional.hpp"

namespace vrdma::guest {

class CharacterFile : public std::enable_shared_from_this<CharacterFile> {
 public:
  virtual ~CharacterFile() = default;

  // As the system calls: a count or 0, or -1 with errno.
  virtual long write(const void* bytes, std::size_t count) = 0;
  virtual long read(void* bytes, std::size_t count);
  virtual int control(unsigned long request, void* argument);
  // The descriptor is closed.
  virtual void forgotten() = 0;

  const std::shared_ptr<Attachment> attachment;
  const std::uint32_t channel;
  const int fd;
  const dev_t device;
  std::atomic<bool> closed{false};

  // Whether who reads now wants to wait. Asked once, before it does: a closed descriptor cannot say any more.
  bool blocks() const;
  // Something can be read. -1 with errno: EAGAIN, EINTR.
  int wait_until_readable(bool blocks) const;
  // The record is the service's word that something waits; it has said that nothing does.
  void take_record();
  // The service is gone, and all that there was to say of it has been said. poll(2) calls a file readable whose writing end is closed, for ever,
  // and who asks it after every event, as rsockets' thread does, would spin: a pipe's writing end is opened again, and nobody writes there. The descriptor
  // of a socket becomes that of such a pipe: epoll instances forget it then (epoll_ctl(2): ENOENT), unless a child has the socket, too, which
  // keeps them readable for as long.
  void fall_silent();

 protected:
  CharacterFile(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in, dev_t device_in);

 private:
  friend class CharacterFiles;
  bool has_descriptor() const;
  const memory::FileId pipe_;  // another one means that the number is another file's by now, but for the one with which it falls silent
  memory::FileId silent_pipe_;
  std::atomic<bool> silenced_{false};
  mutable std::atomic<bool> blocks_{true};  // when it was last asked, a hint that pairs with nothing
  std::mutex descriptor_;  // locked while the number must not become another file's
  OwnFd writing_end_;      // of one that has fallen silent
};

class CharacterFiles {
 public:
  static CharacterFiles& instance();

  // Whether it may be one of them: all that a call on another file costs.
  static bool may_hold(int fd) { return marks_.may_hold(fd); }

  // Around fork(2), so that the child finds them whole. Its descriptors are its parent's and lead nowhere (Liveness::inherited).
  static void lock_for_fork() { instance().mutex_.lock(); }
  static void unlock_after_fork() { instance().mutex_.unlock(); }

  // As open(2) with these flags: make(attachment, pipe) is the file of a new channel of the service's, whose pipe it names and does not own.
  template <control::Request Open, control::Request Close, class Make>
  Result<int> open(int flags, std::uint16_t minor_of_service, const Make& make) {
    forget_closed();
    auto attachment = attach(minor_of_service);
    if (!attachment) return attachment.error();
    auto opened = (*attachment)->template call_on_socket<Open>({});
    if (!opened) return opened.error();
    Provisional<Close> made(**attachment, opened->body.channel);
    if (opened->descriptors.size() != 1) return vmci::not_brought(opened->descriptors);
    auto file = make(*attachment, opened->body.channel, opened->descriptors[0].get());
    if (const auto prepared = prepare(file->fd, flags); !prepared) return prepared.error();
    add(std::move(file));
    made.keep();
    return opened->descriptors[0].release();
  }
  // nullptr: it is none, or not any more.
  std::shared_ptr<CharacterFile> find(int fd);
  // As close(2), which `really` is. nullopt: it is none of them.
  std::optional<int> close(int fd, int (*really)(int));

 private:
  static Result<std::shared_ptr<Attachment>> attach(std::uint16_t minor_of_service);
  static Status prepare(int fd, int flags);
  void add(std::shared_ptr<CharacterFile> file);
  // That file's number, unless it is another one's by now, or a visitor's, who closes what is its own.
  void forget(int fd, const CharacterFile& file);
  // Those whose descriptors somebody has closed by another way than close(2).
  void forget_closed();

  static inline constinit FdMarks marks_;
  static inline constinit std::mutex mutex_;  // as Process::mutex
  std::unordered_map<int, std::shared_ptr<CharacterFile>> files_;
};

}  // namespace vrdma::guest
