// Descriptors 0, 1 and 2, where whoever started this program has closed some of them (`>&-`): the next file that it opened would be standard
// output, and what is printed would go into a socket. Called first of all, before other threads are.
#pragma once

#include <fcntl.h>

namespace vmci {

// They stay what they are to who reads or writes (EBADF), and closed to programs that are started.
inline void occupy_standard_streams() {
  for (const int standard : {0, 1, 2})
    if (::fcntl(standard, F_GETFD) < 0) (void)::open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);  // the lowest that is free
}

}  // namespace vmci
