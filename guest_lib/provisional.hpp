// An object that the service has made for a verb which may yet fail, for want of descriptors or memory: given back to it at the end of the
// scope unless it was kept, or the program would be charged for it until it exits. Any thread; not under a lock that others wait for, as
// the service is asked.
#pragma once

#include <utility>

#include "guest_lib/attachment.hpp"

namespace vrdma::guest {

template <control::Request Destroy>
class Provisional {
 public:
  Provisional(Attachment& attachment, std::uint32_t handle) : attachment_(&attachment), handle_(handle) {}
  Provisional(Provisional&& other) noexcept : attachment_(std::exchange(other.attachment_, nullptr)), handle_(other.handle_) {}
  ~Provisional() {
    if (attachment_ != nullptr) (void)attachment_->call<Destroy>({handle_, 0});
  }
  Provisional& operator=(Provisional&&) = delete;

  std::uint32_t handle() const { return handle_; }
  // It has an owner now.
  void keep() { attachment_ = nullptr; }

 private:
  Attachment* attachment_;  // nullptr: kept
  std::uint32_t handle_;
};

}  // namespace vrdma::guest
