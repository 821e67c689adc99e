// Where this process is in the networks of its host: what the service must know of it to find who is called by an IP address. Any thread.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <vector>

#include "guest_lib/attachment.hpp"

namespace vrdma::guest::cm {

// The addresses of the interfaces in this process's network namespace, as they are now.
class Interfaces {
 public:
  Interfaces();
  // Whether who sends there reaches this namespace itself.
  bool lead_to(const control::CmAddress& address) const;
  const std::vector<control::CmAddress>& addresses() const { return addresses_; }

 private:
  std::vector<control::CmAddress> addresses_;
};

// Tells the service where this process is, if that is another place than it was told last.
Status tell_place(Attachment& attachment, const Interfaces& interfaces);
// In a fork's child: a thread of the parent's may have been telling it.
void forget_place();
// From which address one reaches that one, by the kernel's routes; family 0: none leads there.
control::CmAddress source_for(const control::CmAddress& destination);

// family 0: none, or one that is not served, or is longer than `room`.
control::CmAddress address_of(const sockaddr* address, std::size_t room = sizeof(sockaddr_in6));
// Of one's own: of a service ID, what its mask covers.
control::CmAddress own_address_of(const sockaddr* address, std::size_t room);
// Writes sockaddr_in, sockaddr_in6 or sockaddr_ib; how many bytes, 0 for family 0.
std::size_t put_address(sockaddr_storage& out, const control::CmAddress& address);

}  // namespace vrdma::guest::cm
