// One command of librdmacm's, and what of them has a file of its own.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "guest_lib/cm/files.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest::cm {

// A command's body, as long as its program's version of the ABI has it; the rest is zeroes.
class Command {
 public:
  Command(const std::shared_ptr<File>& file_in, const std::byte* body, std::size_t bytes, std::size_t answer_bytes)
      : file(file_in), attachment(*file_in->attachment), body_(body), bytes_(bytes), answer_bytes_(answer_bytes) {}

  // least: of a body that the first version of the ABI has already.
  template <class Body>
  std::optional<Body> body(std::size_t least = sizeof(Body)) const {
    if (bytes_ < least) return std::nullopt;
    Body out{};
    std::memcpy(&out, body_, std::min(bytes_, sizeof(Body)));
    return out;
  }
  // As much of it as the program has room for. `least` of it, or ENOSPC.
  template <class Answer>
  Status answer(std::uint64_t to, const Answer& what, std::size_t least = sizeof(Answer)) const {
    if (answer_bytes_ < least) return Errno{ENOSPC};
    std::memcpy(reinterpret_cast<void*>(to), &what, std::min(answer_bytes_, sizeof(what)));
    return ok();
  }
  std::size_t answer_bytes() const { return answer_bytes_; }

  control::CmId id(std::uint32_t number) const { return {number, file->channel}; }
  template <control::Request R>
  Status call(const RequestBody<R>& body) const {
    const auto reply = attachment.call<R>(body);
    if (!reply) return reply.error();
    return ok();
  }

  const std::shared_ptr<File>& file;
  Attachment& attachment;

 private:
  const std::byte* body_;
  std::size_t bytes_, answer_bytes_;
};

// What control::CmParameters and rdma_ucm_conn_param call alike.
template <class From, class To>
void copy_parameters(const From& from, To& to) {
  to.qkey = from.qkey;
  to.srq = from.srq;
  to.responder_resources = from.responder_resources;
  to.initiator_depth = from.initiator_depth;
  to.flow_control = from.flow_control;
  to.retry_count = from.retry_count;
  to.rnr_retry_count = from.rnr_retry_count;
}

// queries.cpp
Status query_route(const Command& command);
Status query(const Command& command);
Status init_qp_attr(const Command& command);

// events.cpp. The only command that waits, and a cancellation point while it does. As write(2): `whole`, or -1 with errno.
long get_event(const std::shared_ptr<File>& file, const std::byte* body, std::size_t bytes, std::size_t answer_bytes, std::size_t whole);

}  // namespace vrdma::guest::cm
