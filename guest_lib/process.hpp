// What exists once per process: its current attachment, every attachment and descriptor that a fork's child must let go of.
// Never destroyed, because verbs are called from other libraries' exit handlers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "guest_lib/attachment.hpp"

namespace vrdma::guest {

struct Process {
  static Process& instance();

  // Guards everything here, and each context's choice of attachment. Held while attaching; locked across a fork, so that the
  // child finds it consistent. Never taken while a lock of an object is held.
  std::mutex mutex;
  std::shared_ptr<Attachment> attachment;
  std::vector<std::weak_ptr<Attachment>> attachments;  // that may still be in use
  // By which this process and its fork's children have one address (control::ShareAddressRequest); zeros: none could be had.
  std::array<std::uint8_t, 16> address_secret{};
  std::set<vmci::UniqueFd*> private_descriptors;       // of contexts and channels: closed in a child

  void remember(const std::shared_ptr<Attachment>& made);
  // Registers the fork handlers, once. The mutex is held.
  void watch_forks();

 private:
  bool watching_forks_ = false;
};

// A descriptor that a fork's child must not keep. Does not move.
class PrivateFd {
 public:
  explicit PrivateFd(vmci::UniqueFd fd) : fd_(std::move(fd)) {
    std::lock_guard lock(Process::instance().mutex);
    Process::instance().private_descriptors.insert(&fd_);
  }
  ~PrivateFd() {
    std::lock_guard lock(Process::instance().mutex);
    Process::instance().private_descriptors.erase(&fd_);
  }
  PrivateFd(const PrivateFd&) = delete;
  PrivateFd& operator=(const PrivateFd&) = delete;
  int get() const { return fd_.get(); }

 private:
  vmci::UniqueFd fd_;
};

}  // namespace vrdma::guest
