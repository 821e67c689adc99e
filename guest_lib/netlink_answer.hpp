// What a netlink socket of the kernel's would answer.
#pragma once

#include <linux/netlink.h>
#include <string.h>

#include <cstddef>
#include <cstdint>

namespace vrdma {

// One datagram of netlink messages. What does not fit is left out.
class NetlinkAnswer {
 public:
  NetlinkAnswer(const nlmsghdr& request, std::uint32_t port) : request_(request), port_(port) {}

  void begin(std::uint16_t type, std::uint16_t flags = 0) {
    message_ = bytes_;
    const nlmsghdr head{NLMSG_HDRLEN, type, flags, request_.nlmsg_seq, port_};
    append(&head, sizeof(head));
  }
  void put(std::uint16_t attribute, const void* value, std::size_t bytes) {
    if (bytes_ + NLA_HDRLEN + bytes + NLA_ALIGNTO > sizeof(data_)) return;
    const nlattr head{static_cast<std::uint16_t>(NLA_HDRLEN + bytes), attribute};
    append(&head, sizeof(head));
    append(value, bytes);
  }
  template <class Number>
  void put(std::uint16_t attribute, Number value) {
    put(attribute, &value, sizeof(value));
  }
  void put(std::uint16_t attribute, const char* text) { put(attribute, text, ::strlen(text) + 1); }
  // Attributes within an attribute: what `fill` puts.
  template <class Fill>
  void nest(std::uint16_t attribute, const Fill& fill) {
    const std::size_t start = bytes_;
    put(attribute, nullptr, 0);
    if (bytes_ == start) return;
    fill();
    const auto length = static_cast<std::uint16_t>(bytes_ - start);
    ::memcpy(data_ + start, &length, sizeof(length));
  }
  // NLMSG_DONE, or NLMSG_ERROR with the request's head: 0 is an acknowledgement.
  void end(std::uint16_t type, int error) {
    begin(type, type == NLMSG_DONE ? NLM_F_MULTI : 0);
    append(&error, sizeof(error));
    if (type == NLMSG_ERROR) append(&request_, sizeof(request_));
  }

  std::size_t room() const { return sizeof(data_) - bytes_; }
  const std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void append(const void* from, std::size_t bytes) {
    if (bytes != 0) ::memcpy(data_ + bytes_, from, bytes);
    bytes_ += NLMSG_ALIGN(bytes);
    const auto length = static_cast<std::uint32_t>(bytes_ - message_);
    ::memcpy(data_ + message_, &length, sizeof(length));
  }

  const nlmsghdr request_;
  const std::uint32_t port_;
  std::size_t bytes_ = 0, message_ = 0;
  alignas(nlmsghdr) std::byte data_[4096]{};
};

}  // namespace vrdma
