// What a queue pair keeps while its peer is on another host: the requester's half of the connection.
#pragma once

#include <deque>
#include <memory>

#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/engine/opcodes.hpp"
#include "vmkernel_svc/engine/scatter_gather.hpp"

namespace vrdma::engine {

struct FarHalf {
  struct Outstanding {  // a message that was sent and is not answered yet
    std::uint32_t message;
    std::uint32_t next_position;
    std::uint64_t wr_id;
    std::uint64_t bytes;
    const OpcodeRule* rule;
    bool signaled;
    std::unique_ptr<ScatterGather> into;  // READ, atomics
  };

  std::uint32_t host = 0;
  std::uint32_t epoch = 0;
  std::uint64_t session = 0;      // of the far host's service, as of the first record; another: the connection is lost
  bool opened = false;            // the stand-in knows the attributes
  std::uint32_t messages = 0;     // begun
  std::uint32_t reads = 0;        // of the outstanding: READs and atomics
  std::deque<Outstanding> outstanding;
  std::deque<FarFramePtr> arrived;  // answers and parts, not looked at yet
  std::uint32_t arrived_offset = 0;  // of the first one's payload: scattered so far
  bool arrived_copy = false;         // a copy is pending, and it is of what arrived, not of the operation under way
  FarFramePtr filling;            // of the operation under way
  std::uint64_t sent = 0, credited = 0;  // payload, free-running: sent, and taken by the stand-in
  std::uint64_t taken = 0, told = 0;     // payload that came, and how much of it the stand-in knows to be taken
  std::uint64_t waiting_since_ns = 0;    // for the far end; 0: not
  WcStatus refused = WcStatus::success;  // why the operation under way failed here; it completes after those before it
  bool blocked = false;           // the send queue waits for the far end
  // While an HCA carries the connection, the queue is its runner's, who gives one message at a time to be sent as records.
  bool given_one_by_one = false;
  std::uint32_t under_way = 0;    // messages that the HCA has: what fails here completes after them
};

}  // namespace vrdma::engine
