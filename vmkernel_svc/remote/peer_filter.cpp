#include "vmkernel_svc/remote/peer_filter.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>

namespace vrdma::remote {

bool accept_only(int socket, const std::vector<std::string>& addresses) {
  constexpr auto from_network_header = static_cast<std::uint32_t>(SKF_NET_OFF);
  constexpr std::uint32_t v4_source = 12, v6_source = 8, all = 0xffffffff;
  std::vector<sock_filter> program;
  const auto load = [&](std::uint32_t offset) { program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, from_network_header + offset)); };
  int family = 0;
  socklen_t bytes = sizeof(family);
  if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &bytes) != 0) return false;
  if (family == AF_INET) load(v4_source);
  for (const auto& text : addresses) {
    std::uint32_t words[4];
    if (::inet_pton(family, text.c_str(), words) != 1) continue;
    if (family == AF_INET) {
      program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[0]), 0, 1));
    } else {
      for (std::uint8_t i = 0; i < 4; ++i) {  // past this address at the first word that differs
        load(v6_source + 4u * i);
        program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[i]), 0, static_cast<std::uint8_t>(2 * (3 - i) + 1)));
      }
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, all));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  if (program.size() > BPF_MAXINSNS) return false;
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) == 0;
}

}  // namespace vrdma::remote
