// Numeric addresses, as configurations and messages have them.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace vrdma::hosts {

constexpr std::uint16_t default_port = 28250;  // the first of PVRDMA's range for hosts

inline bool is_numeric(const std::string& address) {
  in6_addr ignored;
  return ::inet_pton(AF_INET, address.c_str(), &ignored) == 1 || ::inet_pton(AF_INET6, address.c_str(), &ignored) == 1;
}

inline bool is_v6(const std::string& numeric) { return numeric.find(':') != std::string::npos; }

// No interface here has it, or it cannot be used yet (a tentative one). What cannot be tried is taken for one of ours.
inline bool is_of_no_interface(const std::string& numeric) {
  sockaddr_storage place{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(place);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(place);
  const bool of_v6 = is_v6(numeric);
  place.ss_family = of_v6 ? AF_INET6 : AF_INET;
  if (::inet_pton(place.ss_family, numeric.c_str(), of_v6 ? static_cast<void*>(&v6.sin6_addr) : &v4.sin_addr) != 1) return false;
  const int fd = ::socket(place.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool missing = ::bind(fd, reinterpret_cast<const sockaddr*>(&place), of_v6 ? sizeof(v6) : sizeof(v4)) != 0 && errno == EADDRNOTAVAIL;
  ::close(fd);
  return missing;
}

// Of two numeric ones: an IPv6 address has several spellings.
inline bool same_address(const std::string& one, const std::string& other) {
  in6_addr first{}, second{};
  const int family = is_v6(one) ? AF_INET6 : AF_INET;
  return ::inet_pton(family, one.c_str(), &first) == 1 && ::inet_pton(family, other.c_str(), &second) == 1 && std::memcmp(&first, &second, sizeof(first)) == 0;
}

// Why an address is none by which hosts find each other, also one with a zone ("fe80::1%eth0"); empty: it may be, if it is numeric.
inline std::string no_place(const std::string& text) {
  const std::string address = text.substr(0, text.find('%'));
  in_addr v4{};
  in6_addr v6{};
  const bool is_4 = ::inet_pton(AF_INET, address.c_str(), &v4) == 1, is_6 = ::inet_pton(AF_INET6, address.c_str(), &v6) == 1;
  if (!is_4 && !is_6) return {};
  if (is_6 ? IN6_IS_ADDR_UNSPECIFIED(&v6) : v4.s_addr == INADDR_ANY) return "which names no host: give the one at which others reach it";
  if (is_6 ? IN6_IS_ADDR_MULTICAST(&v6) : ntohl(v4.s_addr) >> 28 == 0xe || v4.s_addr == INADDR_BROADCAST) return "which is that of many hosts, or of none: give the one at which others reach it";
  if (!is_6) return {};
  if (IN6_IS_ADDR_LINKLOCAL(&v6)) return "which is link-local, and means something else on each interface: give a global or a unique local one (fd00::/8)";
  if (char within[INET_ADDRSTRLEN]; IN6_IS_ADDR_V4MAPPED(&v6) && ::inet_ntop(AF_INET, v6.s6_addr + 12, within, sizeof(within)) != nullptr)
    return std::string("which is an IPv4 address within an IPv6 one: give ") + within;
  return {};
}

// "10.0.0.1", "10.0.0.1:28250", "fd00::1", "[fd00::1]:28250".
inline std::optional<std::pair<std::string, std::uint16_t>> address_and_port(const std::string& text) {
  std::string address = text, port;
  if (text.starts_with("[")) {
    const auto end = text.find(']');
    if (end == std::string::npos || (end + 1 < text.size() && text[end + 1] != ':')) return std::nullopt;
    address = text.substr(1, end - 1);
    if (end + 1 < text.size()) port = text.substr(end + 2);
    if (end + 1 < text.size() && port.empty()) return std::nullopt;
  } else if (const auto colon = text.find(':'); colon != std::string::npos && text.find(':', colon + 1) == std::string::npos) {
    address = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) return std::nullopt;
  }
  std::uint16_t number = default_port;
  if (!port.empty()) {
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    if (error != std::errc() || end != port.data() + port.size() || number == 0) return std::nullopt;
  }
  if (!is_numeric(address)) return std::nullopt;
  return std::pair{address, number};
}

inline std::string with_port(const std::string& address, std::uint16_t port) {
  return (is_v6(address) ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

}  // namespace vrdma::hosts
