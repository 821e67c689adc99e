// Keeps what a peer has sent in a former life from a queue pair that is connected to it anew: records of that may still be on their way
// between the hosts, while the two ends were reset and met by another one.
//
//     the queue pair's host                             its peer's host
//       it goes to RTR, not for the first time:
//       mark n                                     →
//                                                  ←      what was said before, with the `close` of who was reset meanwhile
//                                                  ←      mark n, at once
//
// Until its mark is back, stand-ins that are for that queue pair wait: those of a former life are gone by then, by their own `close`, and
// whatever else has come goes on. So nothing is lost, a peer that was not reset goes on as on a wire, and nobody's modify_qp waits.
//
// One mark is under way to a host at a time, whoever wants one. A new session ends all waits, as nothing old comes in it.
#pragma once

#include <cstdint>

namespace vrdma::engine {

class FarMarks {
 public:
  // The host is another run of itself; `echoes`: and sends marks back.
  void begin(bool echoes) {
    echoes_ = echoes;
    back_ = asked_ = wanted_;
  }
  // The mark to wait for: none that was sent before now. 0 is always back.
  std::uint64_t want() { return echoes_ ? wanted_ = asked_ + 1 : 0; }
  // The one to be sent now; 0: none.
  std::uint64_t next() {
    if (asked_ != back_ || asked_ == wanted_) return 0;
    return asked_ = wanted_;
  }
  // It has come back. False: nobody has sent that one.
  bool came_back(std::uint64_t mark) {
    if (mark != asked_ || asked_ == back_) return false;
    back_ = mark;
    return true;
  }
  bool is_back(std::uint64_t mark) const { return mark <= back_; }
  bool all_back() const { return wanted_ == back_; }

 private:
  bool echoes_ = false;
  std::uint64_t wanted_ = 0, asked_ = 0, back_ = 0;
};

// Of a queue pair: which mark it waits for, and whose.
struct FarMark {
  std::uint32_t host = 0;
  std::uint64_t number = 0;
};

}  // namespace vrdma::engine
