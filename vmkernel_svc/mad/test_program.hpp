// For the tests of management datagrams: a program of a guest's that sends and receives them, by a service of one host.
#pragma once

#include <fcntl.h>
#include <poll.h>

#include <cstring>
#include <set>

#include "vmkernel_svc/cm/test_guests.hpp"
#include "vmkernel_svc/mad/management.hpp"

namespace vrdma::svc::test {

using namespace control;
using namespace mad;

class Program {
 public:
  Program(TestHost& host, uid_t uid = 1000, std::uint32_t link_layer = link_layer_infiniband) : management_(*host.fabric.management), guest(host.put(uid, link_layer)) {
    int ends[2];
    REQUIRE(::pipe2(ends, O_NONBLOCK) == 0);
    pipe_.reset(ends[0]);
    const auto opened = management_.open(guest, vmci::UniqueFd(ends[1]));
    if (opened) channel = opened->channel;
  }

  std::uint32_t agent(std::uint8_t of_class, std::uint8_t version = 1, std::uint64_t methods = 0, std::uint32_t oui = 0) {
    MadRegisterRequest request{};
    request.channel = channel;
    request.qpn = is_subnet_management(of_class) ? 0 : 1;
    request.management_class = of_class;
    request.class_version = version;
    request.oui = oui;
    request.methods[0] = methods;
    const auto added = management_.add_agent(guest, request);
    REQUIRE(added);
    return added->agent;
  }

  Mad request(std::uint8_t of_class, std::uint8_t method, std::uint16_t attribute, std::uint32_t modifier = 0, std::uint8_t version = 1) {
    Mad mad({});
    mad.bytes[0] = 1, mad.bytes[1] = of_class, mad.bytes[2] = version, mad.bytes[3] = method;
    put(mad.bytes, {96, 32}, ++last_transaction_);
    put(mad.bytes, {128, 16}, attribute);
    put(mad.bytes, {160, 32}, modifier);
    return mad;
  }
  Status send(std::uint32_t by, std::uint16_t to, const Mad& mad, std::uint32_t timeout_ms = 100) {
    MadSendRequest out{};
    out.by = {channel, by};
    out.to.lid = to;
    out.to.qpn = is_subnet_management(mad.management_class()) ? 0 : 1;
    out.timeout_ms = timeout_ms;
    out.bytes = static_cast<std::uint32_t>(mad.bytes.size());
    std::copy(mad.bytes.begin(), mad.bytes.end(), out.data.begin());
    return management_.send(guest, out);
  }
  bool is_told() const {
    pollfd readable{pipe_.get(), POLLIN, 0};
    return ::poll(&readable, 1, 0) == 1;
  }
  struct Received {
    MadTakeReply head;
    std::vector<std::uint8_t> bytes;
  };
  // As guest_lib/mad/file.cpp does.
  std::optional<Received> receive(std::uint32_t room = 1 << 20) {
    Received out{};
    for (std::uint32_t offset = 0;;) {
      const auto taken = management_.take(guest, {channel, room, offset, 0});
      REQUIRE(taken);
      if (taken->last != 0) {
        AsyncRecord record;
        REQUIRE(::read(pipe_.get(), &record, sizeof(record)) == sizeof(record));
      }
      if (taken->found == 0) return std::nullopt;
      if (offset == 0) out.head = *taken;
      out.bytes.insert(out.bytes.end(), taken->data.begin(), taken->data.begin() + taken->bytes);
      offset += taken->bytes;
      if (offset == taken->total_bytes || taken->total_bytes > room) return out;
    }
  }
  Received ask(std::uint32_t by, std::uint16_t to, const Mad& mad) {
    REQUIRE(send(by, to, mad));
    CHECK(is_told());
    auto answer = receive();
    REQUIRE(answer);
    CHECK(answer->head.status == 0);
    CHECK(get(answer->bytes, {96, 32}) == get(mad.bytes, {96, 32}));
    CHECK((answer->bytes[3] & method_is_response) != 0);
    CHECK_FALSE(is_told());
    return *answer;
  }
  void close() { REQUIRE(management_.close(guest, channel)); }

 private:
  Management& management_;

 public:
  Guest& guest;
  std::uint32_t channel = 0;

 private:
  vmci::UniqueFd pipe_;
  std::uint32_t last_transaction_ = 0x1000;
};

inline std::uint16_t status_of(std::span<const std::uint8_t> mad) { return static_cast<std::uint16_t>(get(mad, {32, 16}) & 0x7fff); }
inline std::size_t records_in(const Program::Received& answer) {
  const std::uint64_t bytes = get(answer.bytes, {352, 16}) * 8;
  return bytes == 0 ? 0 : (answer.bytes.size() - administration_data) / bytes;
}

inline Mad directed(Program& from, std::uint16_t attribute, std::initializer_list<std::uint8_t> path, std::uint32_t modifier = 0) {
  Mad mad = from.request(class_directed_route, method_get, attribute, modifier);
  put(mad.bytes, {256, 32}, 0xffffffff);
  mad.bytes[7] = static_cast<std::uint8_t>(path.size());
  std::copy(path.begin(), path.end(), mad.bytes.begin() + initial_path + 1);
  return mad;
}

inline Mad member_request(Program& from, std::uint8_t method, const Gid& group, std::uint64_t mask, std::uint32_t qkey = 0x11111111) {
  Mad mad = from.request(class_administration, method, attribute_member_record, 0, 2);
  put(mad.bytes, {384, 64}, mask);
  const auto record = mad.data(administration_data, 52);
  std::copy(group.begin(), group.end(), record.begin());
  std::copy(from.guest.gids[0].gid.begin(), from.guest.gids[0].gid.end(), record.begin() + 16);
  put(record, {256, 32}, qkey);
  put(record, {320, 16}, 0xffff);
  put(record, {388, 4}, 1);
  return mad;
}
constexpr std::uint64_t all_to_create = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 12 | 1 << 13 | 1 << 16;

}  // namespace vrdma::svc::test
