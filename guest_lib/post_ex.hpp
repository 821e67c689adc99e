// The work requests of an extended queue pair between ibv_wr_start and ibv_wr_complete. Under the queue pair's send lock, which the
// application holds from the one to the other.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace vrdma::guest {

class WrBatch {
 public:
  void clear() {
    requests_.clear();
    pieces_.clear();
    inline_bytes_.clear();
    error_ = 0;
  }
  // The first error counts, and nothing is posted then.
  void fail(int error) {
    if (error_ == 0) error_ = error;
  }
  int error() const { return error_; }

  // A new request; nullptr: no memory.
  ibv_send_wr* add(const ibv_qp_ex& qp, ibv_wr_opcode opcode);
  // The request that is being made; nullptr: none was begun.
  ibv_send_wr* last() { return requests_.empty() ? nullptr : &requests_.back().wr; }
  void set_pieces(const ibv_sge* pieces, std::size_t count);
  void set_inline(const ibv_data_buf* buffers, std::size_t count);

  // All requests as a chain, or nullptr: there are none. Valid until the next change.
  ibv_send_wr* chain();

 private:
  struct Request {
    ibv_send_wr wr;
    std::size_t first_piece;
    std::size_t inline_offset;  // into inline_bytes_, where wr.send_flags say so
  };
  std::vector<Request> requests_;
  std::vector<ibv_sge> pieces_;
  std::vector<std::byte> inline_bytes_;
  int error_ = 0;
};

// The operations that ibv_wr_* call, for a queue pair that was made with send_ops_flags.
void set_wr_operations(ibv_qp_ex& qp);

}  // namespace vrdma::guest
