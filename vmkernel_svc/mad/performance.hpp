// Performance management (IBA 16.1): a port's traffic, for its own user. There is no link that could fail, so all other counters are 0; a
// message is a packet.
#pragma once

#include <functional>
#include <map>

#include "vmkernel_svc/mad/datagram.hpp"
#include "vmkernel_svc/mad/subnet.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc::mad {

class Performance {
 public:
  explicit Performance(Subnet& subnet) : subnet_(subnet) {}
  void use_traffic(std::function<control::CountersReply(const Guest&)> traffic) { traffic_ = std::move(traffic); }
  // Turns a request to `node` into the answer. False: nobody answers.
  bool answer(const Viewer& viewer, const Node& node, Mad& mad);

 private:
  // By LID, since they were reset last: of all its ports, or of one.
  std::map<std::uint16_t, control::CountersReply> of_user(const Viewer& user, std::optional<std::uint16_t> only);
  std::optional<control::CountersReply> of_port(const Viewer& viewer, const Node& node, std::uint8_t port);

  Subnet& subnet_;
  std::function<control::CountersReply(const Guest&)> traffic_;
  struct Reset {
    std::uint64_t guid;
    control::CountersReply before;
  };
  std::map<std::uint16_t, Reset> resets_;  // by LID; of one that somebody else has by now until it is looked at
};

}  // namespace vrdma::svc::mad
