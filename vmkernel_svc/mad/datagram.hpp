// A management datagram (IBA 13.4) as bytes, and fields of it: big-endian, by bit and width, as the specification draws them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "vrdma/mad.hpp"

namespace vrdma::svc::mad {

// `bit` counts from the first byte's highest; up to 64 wide.
struct Field {
  unsigned bit, width;
};

inline std::uint64_t get(std::span<const std::uint8_t> bytes, Field field) {
  std::uint64_t value = 0;
  if ((field.bit | field.width) % 8 == 0) {
    for (const std::uint8_t byte : bytes.subspan(field.bit / 8, field.width / 8)) value = value << 8 | byte;
    return value;
  }
  for (unsigned i = field.bit; i < field.bit + field.width; ++i) value = value << 1 | (bytes[i / 8] >> (7 - i % 8) & 1u);
  return value;
}

// More than the field can hold is the most that it can.
inline void put(std::span<std::uint8_t> bytes, Field field, std::uint64_t value) {
  if (field.width < 64) value = std::min(value, (std::uint64_t{1} << field.width) - 1);
  if ((field.bit | field.width) % 8 == 0) {
    for (unsigned i = field.width / 8; i-- > 0; value >>= 8) bytes[field.bit / 8 + i] = static_cast<std::uint8_t>(value);
    return;
  }
  for (unsigned i = field.bit + field.width; i-- > field.bit; value >>= 1) {
    const auto mask = static_cast<std::uint8_t>(0x80u >> i % 8);
    if ((value & 1) != 0) bytes[i / 8] |= mask;
    else bytes[i / 8] = static_cast<std::uint8_t>(bytes[i / 8] & ~mask);
  }
}

enum Class : std::uint8_t {
  class_lid_routed = 0x01,       // subnet management
  class_administration = 0x03,
  class_performance = 0x04,
  class_directed_route = 0x81,   // subnet management, too
};
constexpr bool is_subnet_management(std::uint8_t management_class) { return management_class == class_lid_routed || management_class == class_directed_route; }
constexpr bool has_oui(std::uint8_t management_class) { return management_class >= 0x30 && management_class <= 0x4f; }

enum Method : std::uint8_t { method_get = 0x01, method_set = 0x02, method_trap = 0x05, method_get_table = 0x12, method_delete = 0x15 };
constexpr std::uint8_t method_is_response = 0x80;
constexpr std::uint8_t method_repress = 0x07;  // TrapRepress answers a trap, without that bit

// IBA 13.4.7; of subnet administration 15.2.7.
enum MadStatus : std::uint16_t {
  status_ok = 0,
  status_bad_version = 0x0004,
  status_bad_method = 0x0008,
  status_bad_attribute = 0x000c,  // in that method
  status_bad_value = 0x001c,
  status_no_resources = 0x0100,
  status_request_invalid = 0x0200,
  status_no_records = 0x0300,
  status_too_many_records = 0x0400,
  status_bad_gid = 0x0500,
  status_insufficient_components = 0x0600,
  status_denied = 0x0700,
};

enum Attribute : std::uint16_t {
  attribute_class_port_info = 0x0001,
  // subnet management
  attribute_node_description = 0x0010,
  attribute_node_info = 0x0011,
  attribute_switch_info = 0x0012,
  attribute_guid_info = 0x0014,
  attribute_port_info = 0x0015,
  attribute_pkey_table = 0x0016,
  attribute_sl_to_vl = 0x0017,
  attribute_vl_arbitration = 0x0018,
  attribute_forwarding_table = 0x0019,
  attribute_multicast_table = 0x001b,
  attribute_sm_info = 0x0020,
  // subnet administration
  attribute_node_record = 0x0011,
  attribute_port_info_record = 0x0012,
  attribute_switch_info_record = 0x0014,
  attribute_sm_info_record = 0x0018,
  attribute_link_record = 0x0020,
  attribute_pkey_table_record = 0x0033,
  attribute_path_record = 0x0035,
  attribute_member_record = 0x0038,
  // performance
  attribute_port_counters = 0x0012,
  attribute_port_counters_extended = 0x001d,
};

// Where what a class carries begins. Subnet management's is 64 bytes long, the others' to the end.
constexpr std::size_t smp_data = 64, smp_data_bytes = 64, initial_path = 128, return_path = 192;
constexpr std::size_t performance_data = 64;
constexpr std::size_t administration_data = 56;

class Mad {
 public:
  explicit Mad(std::span<const std::uint8_t> given) : bytes(given.begin(), given.end()) {
    if (bytes.size() < control::mad_bytes) bytes.resize(control::mad_bytes);
  }

  std::uint8_t management_class() const { return bytes[1]; }
  std::uint8_t class_version() const { return bytes[2]; }
  std::uint8_t method() const { return bytes[3]; }
  std::uint16_t attribute() const { return static_cast<std::uint16_t>(get(bytes, {128, 16})); }
  std::uint32_t modifier() const { return static_cast<std::uint32_t>(get(bytes, {160, 32})); }
  std::uint32_t sender() const { return static_cast<std::uint32_t>(get(bytes, {64, 32})); }  // of the transaction's number, what the sender's port has put there
  std::uint32_t transaction() const { return static_cast<std::uint32_t>(get(bytes, {96, 32})); }
  std::uint32_t oui() const { return static_cast<std::uint32_t>(get(bytes, {296, 24})); }
  bool is_response() const {
    return (method() & method_is_response) != 0 || method() == method_repress;
  }

  void set_sender(std::uint32_t number) { put(bytes, {64, 32}, number); }
  // It becomes the answer to itself.
  void respond(std::uint16_t status) {
    bytes[3] = static_cast<std::uint8_t>(method() == method_set ? method_get | method_is_response : method() | method_is_response);
    put(bytes, {32, 16}, status | (management_class() == class_directed_route ? 0x8000u : 0u));
  }
  std::span<std::uint8_t> data(std::size_t from, std::size_t count) { return std::span(bytes).subspan(from, count); }

  std::vector<std::uint8_t> bytes;
};

}  // namespace vrdma::svc::mad
