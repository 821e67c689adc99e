// The kinds of transfer that lost.cpp has under way, a queue pair for each, and how it marks what they move.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace vrdma::test {

struct Kind {
  const char* name;
  ibv_qp_type type;
  ibv_wr_opcode opcode;
  std::uint32_t bytes;
  bool shared = false;  // its receives
};
constexpr std::uint32_t small = 61, datagram = 1000, large = 160 * 1024 + 13;  // of no round size; large: of several slices
constexpr Kind kinds[] = {
    {"RC send", IBV_QPT_RC, IBV_WR_SEND, small},
    {"RC large send", IBV_QPT_RC, IBV_WR_SEND, large},
    {"RC send with immediate", IBV_QPT_RC, IBV_WR_SEND_WITH_IMM, small},
    {"RC large send with immediate", IBV_QPT_RC, IBV_WR_SEND_WITH_IMM, large},
    {"RC send to an SRQ", IBV_QPT_RC, IBV_WR_SEND, small, true},
    {"RC write", IBV_QPT_RC, IBV_WR_RDMA_WRITE, small},
    {"RC large write", IBV_QPT_RC, IBV_WR_RDMA_WRITE, large},
    {"RC write with immediate", IBV_QPT_RC, IBV_WR_RDMA_WRITE_WITH_IMM, small},
    {"RC large write with immediate", IBV_QPT_RC, IBV_WR_RDMA_WRITE_WITH_IMM, large},
    {"RC read", IBV_QPT_RC, IBV_WR_RDMA_READ, small},
    {"RC large read", IBV_QPT_RC, IBV_WR_RDMA_READ, large},
    {"RC fetch and add", IBV_QPT_RC, IBV_WR_ATOMIC_FETCH_AND_ADD, 8},
    {"RC compare and swap", IBV_QPT_RC, IBV_WR_ATOMIC_CMP_AND_SWP, 8},
    {"UC send", IBV_QPT_UC, IBV_WR_SEND, small},
    {"UC large send", IBV_QPT_UC, IBV_WR_SEND, large},
    {"UC send with immediate", IBV_QPT_UC, IBV_WR_SEND_WITH_IMM, small},
    {"UC write", IBV_QPT_UC, IBV_WR_RDMA_WRITE, small},
    {"UC large write", IBV_QPT_UC, IBV_WR_RDMA_WRITE, large},
    {"UC large write with immediate", IBV_QPT_UC, IBV_WR_RDMA_WRITE_WITH_IMM, large},
    {"UD send", IBV_QPT_UD, IBV_WR_SEND, small},
    {"UD send with immediate", IBV_QPT_UD, IBV_WR_SEND_WITH_IMM, datagram},
};
constexpr std::size_t kind_count = sizeof(kinds) / sizeof(kinds[0]);
constexpr std::size_t grh_bytes = 40;

constexpr std::size_t stride(const Kind& kind) { return (kind.bytes + grh_bytes + 63) / 64 * 64; }
inline bool receives(const Kind& kind) {
  return kind.opcode == IBV_WR_SEND || kind.opcode == IBV_WR_SEND_WITH_IMM || kind.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}
inline bool immediate(const Kind& kind) { return kind.opcode == IBV_WR_SEND_WITH_IMM || kind.opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
inline bool fetches(const Kind& kind) {
  return kind.opcode == IBV_WR_RDMA_READ || kind.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || kind.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
}

// A number at the begin and the end of what is moved, and in each page of it.
template <class Visit>
void each_stamp(std::byte* at, std::size_t bytes, const Visit& visit) {
  for (std::size_t offset = 0; offset + 16 <= bytes; offset += 4096) visit(at + offset);
  visit(at + bytes - 8);
}
inline void stamp(std::byte* at, std::size_t bytes, std::uint64_t number) {
  each_stamp(at, bytes, [&](std::byte* where) { std::memcpy(where, &number, sizeof(number)); });
}
inline std::uint64_t number_at(const std::byte* at) {
  std::uint64_t number;
  std::memcpy(&number, at, sizeof(number));
  return number;
}

}  // namespace vrdma::test
