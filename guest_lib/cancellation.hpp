// Verbs are no cancellation points, but for those that wait for events: a thread that is cancelled in the middle of one would leave
// a lock held or half an object behind, and an unwinding that meets a catch (...) ends the program. Any thread.
#pragma once

#include <pthread.h>

namespace vrdma::guest {

class CancellationOff {
 public:
  CancellationOff() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~CancellationOff() { pthread_setcancelstate(before_, nullptr); }
  CancellationOff(const CancellationOff&) = delete;
  CancellationOff& operator=(const CancellationOff&) = delete;

 private:
  int before_ = 0;
};

}  // namespace vrdma::guest
