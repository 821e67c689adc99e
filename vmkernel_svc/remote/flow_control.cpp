#include "vmkernel_svc/remote/flow_control.hpp"

#include <linux/dcbnl.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

namespace vrdma::remote {
namespace {

constexpr const char* unknown = "unknown";
constexpr std::size_t aligned(std::size_t bytes) { return NLA_ALIGN(bytes); }

// The contents of the first attribute of that type.
std::optional<std::span<const std::byte>> attribute(std::span<const std::byte> from, std::uint16_t type) {
  nlattr head;
  while (from.size() >= sizeof(head)) {
    std::memcpy(&head, from.data(), sizeof(head));
    if (head.nla_len < sizeof(head) || head.nla_len > from.size()) break;
    if ((head.nla_type & NLA_TYPE_MASK) == type) return from.subspan(sizeof(head), head.nla_len - sizeof(head));
    from = from.subspan(std::min(from.size(), aligned(head.nla_len)));
  }
  return std::nullopt;
}

}  // namespace

std::string priority_flow_control_in(std::span<const std::byte> answer) {
  nlmsghdr head;
  if (answer.size() < sizeof(head)) return unknown;
  std::memcpy(&head, answer.data(), sizeof(head));
  const std::size_t before = NLMSG_HDRLEN + aligned(sizeof(dcbmsg));
  if (head.nlmsg_type != RTM_GETDCB || head.nlmsg_len < before || head.nlmsg_len > answer.size()) return unknown;
  const auto ieee = attribute(answer.subspan(before, head.nlmsg_len - before), DCB_ATTR_IEEE);
  const auto found = ieee ? attribute(*ieee, DCB_ATTR_IEEE_PFC) : std::nullopt;
  if (!found || found->size() < sizeof(ieee_pfc)) return unknown;
  ieee_pfc pfc;
  std::memcpy(&pfc, found->data(), sizeof(pfc));
  if (pfc.pfc_en == 0) return "off";
  std::string text;
  for (int priority = 0; priority < IEEE_8021QAZ_MAX_TCS; ++priority)
    if ((pfc.pfc_en >> priority & 1) != 0) text += (text.empty() ? "" : ",") + std::to_string(priority);
  return text;
}

std::string priority_flow_control(const std::string& interface) {
  struct {
    nlmsghdr head;
    dcbmsg dcb;
    nlattr name_head;
    char name[IFNAMSIZ];
  } question{};
  if (interface.empty() || interface.size() >= sizeof(question.name)) return unknown;
  const std::size_t bytes = offsetof(decltype(question), name) + aligned(interface.size() + 1);
  question.head = {static_cast<std::uint32_t>(bytes), RTM_GETDCB, NLM_F_REQUEST, 1, 0};
  question.dcb = {AF_UNSPEC, DCB_CMD_IEEE_GET, 0};
  question.name_head = {static_cast<std::uint16_t>(sizeof(question.name_head) + interface.size() + 1), DCB_ATTR_IFNAME};
  std::memcpy(question.name, interface.data(), interface.size());
  const int fd = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
  if (fd < 0) return unknown;
  const timeval patience{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  std::byte answer[8192];
  ssize_t got = -1;
  if (::send(fd, &question, bytes, 0) == static_cast<ssize_t>(bytes)) got = ::recv(fd, answer, sizeof(answer), 0);
  ::close(fd);
  return got < 0 ? unknown : priority_flow_control_in({answer, static_cast<std::size_t>(got)});
}

}  // namespace vrdma::remote
