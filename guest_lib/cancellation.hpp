// Verbs are no cancellation points, but for those that wait for events: a thread that is cancelled in the middle of one would leave
// a lock held or half an object behind, and an unwinding that meets a catch (...) ends the program. Any thread.
//
// For what asks the service, and whatever else may wait or call into the C library. Data verbs, and what stands in for madvise(2), mremap(2) and
// fork(2), make bare system calls instead (memory/raw_file.hpp, doorbell.hpp), which are no cancellation points and cost nothing more.
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
