#include "vmkernel_svc/remote/flow_control.hpp"

#include <doctest/doctest.h>
#include <linux/dcbnl.h>
#include <linux/rtnetlink.h>

#include <cstring>
#include <vector>

namespace vrdma::remote {
namespace {

void append(std::vector<std::byte>& to, const void* bytes, std::size_t count) {
  const auto* const from = static_cast<const std::byte*>(bytes);
  to.insert(to.end(), from, from + count);
  to.resize(NLA_ALIGN(to.size()));
}
void append_attribute(std::vector<std::byte>& to, std::uint16_t type, const void* bytes, std::size_t count) {
  const nlattr head{static_cast<std::uint16_t>(sizeof(nlattr) + count), type};
  append(to, &head, sizeof(head));
  append(to, bytes, count);
}

// As dcbnl of the kernel answers DCB_CMD_IEEE_GET: the interface's name, then what it knows, nested.
std::vector<std::byte> answer(std::uint8_t enabled) {
  std::vector<std::byte> inside, attributes, whole;
  ieee_ets ets{};
  append_attribute(inside, DCB_ATTR_IEEE_ETS, &ets, sizeof(ets));
  ieee_pfc pfc{};
  pfc.pfc_cap = 8;
  pfc.pfc_en = enabled;
  append_attribute(inside, DCB_ATTR_IEEE_PFC, &pfc, sizeof(pfc));
  append_attribute(attributes, DCB_ATTR_IFNAME, "eth0", 5);
  append_attribute(attributes, DCB_ATTR_IEEE | NLA_F_NESTED, inside.data(), inside.size());
  const nlmsghdr head{static_cast<std::uint32_t>(NLMSG_HDRLEN + sizeof(dcbmsg) + attributes.size()), RTM_GETDCB, 0, 1, 0};
  const dcbmsg dcb{0, DCB_CMD_IEEE_GET, 0};
  append(whole, &head, sizeof(head));
  append(whole, &dcb, sizeof(dcb));
  append(whole, attributes.data(), attributes.size());
  return whole;
}

TEST_CASE("Priority flow control is what the kernel says") {
  CHECK(priority_flow_control_in(answer(0)) == "off");
  CHECK(priority_flow_control_in(answer(1 << 3)) == "3");
  CHECK(priority_flow_control_in(answer(1 << 3 | 1 << 4)) == "3,4");
}

TEST_CASE("An answer that ends anywhere is no answer") {
  const auto whole = answer(8);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    std::vector<std::byte> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(bytes));
    CHECK(priority_flow_control_in(part) == "unknown");
  }
  std::vector<std::byte> garbage(whole);
  for (std::size_t i = sizeof(nlmsghdr); i < garbage.size(); ++i) {
    garbage = whole;
    garbage[i] ^= std::byte{0xff};
    CHECK_FALSE(priority_flow_control_in(garbage).empty());
  }
}

TEST_CASE("An interface that has none, or is none, is not known") {
  CHECK(priority_flow_control("lo") == "unknown");
  CHECK(priority_flow_control("nobody0") == "unknown");
  CHECK(priority_flow_control("") == "unknown");
}

}  // namespace
}  // namespace vrdma::remote
