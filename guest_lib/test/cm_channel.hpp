// Commands to /dev/infiniband/rdma_cm, as librdmacm writes them.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/rdma_user_cm.h>
#include <unistd.h>

#include <cstdint>

#include "doctest/doctest.h"

namespace vrdma::test {

template <class Command>
long say(int channel, std::uint32_t command, const Command& body, std::size_t answer_bytes = 0) {
  struct {
    rdma_ucm_cmd_hdr head;
    Command body;
  } whole{{command, sizeof(Command), static_cast<std::uint16_t>(answer_bytes)}, body};
  return ::write(channel, &whole, sizeof(whole));
}

template <class Command, class Answer>
long ask(int channel, std::uint32_t command, Command body, Answer& answer) {
  body.response = reinterpret_cast<std::uintptr_t>(&answer);
  return say(channel, command, body, sizeof(Answer));
}

struct CmChannel {
  explicit CmChannel(int flags = 0) : fd(::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC | flags)) { REQUIRE(fd >= 0); }

  std::uint32_t create(std::uint64_t uid, std::uint16_t port_space = RDMA_PS_TCP) const {  // without a uid it has no events
    rdma_ucm_create_id command{};
    command.uid = uid;
    command.ps = port_space;
    rdma_ucm_create_id_resp answer{};
    REQUIRE(ask(fd, RDMA_USER_CM_CMD_CREATE_ID, command, answer) > 0);
    return answer.id;
  }
  void resolve(std::uint32_t id) const {  // this host
    rdma_ucm_resolve_ip command{};
    command.id = id;
    command.timeout_ms = 1000;
    put(command.dst_addr, INADDR_LOOPBACK);
    REQUIRE(say(fd, RDMA_USER_CM_CMD_RESOLVE_IP, command) > 0);
  }
  void bind(std::uint32_t id) const {
    rdma_ucm_bind_ip command{};
    command.id = id;
    put(command.addr, INADDR_LOOPBACK);
    REQUIRE(say(fd, RDMA_USER_CM_CMD_BIND_IP, command) > 0);
  }
  std::uint32_t join(std::uint32_t id, std::uint64_t uid, std::uint32_t group) const {
    rdma_ucm_join_ip_mcast command{};
    command.id = id;
    command.uid = uid;
    put(command.addr, group);
    rdma_ucm_create_id_resp answer{};
    REQUIRE(ask(fd, RDMA_USER_CM_CMD_JOIN_IP_MCAST, command, answer) > 0);
    return answer.id;
  }
  // An identifier (RDMA_USER_CM_CMD_DESTROY_ID) or a membership (_LEAVE_MCAST): how many of its events have been read.
  std::uint32_t end(std::uint32_t command, std::uint32_t id) const {
    rdma_ucm_destroy_id body{};
    body.id = id;
    rdma_ucm_destroy_id_resp answer{};
    REQUIRE(ask(fd, command, body, answer) > 0);
    return answer.events_reported;
  }
  long next_event(rdma_ucm_event_resp& event) const { return ask(fd, RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, event); }
  long next_event() const {
    rdma_ucm_event_resp event{};
    return next_event(event);
  }

  const int fd;

 private:
  static void put(sockaddr_in6& to, std::uint32_t address) {
    to.sin6_family = AF_INET;
    reinterpret_cast<sockaddr_in&>(to).sin_addr.s_addr = htonl(address);
  }
};

}  // namespace vrdma::test
