// The descriptors of a port's counters (synthetic_tree.hpp). A file of the kernel's says what is so when it is read, and programs that
// watch a counter keep it open: perftest -W, for one. So the text of ours is written anew before it is read from its beginning.
#pragma once

#include "guest_lib/fd_marks.hpp"

namespace vrdma::traffic_files {

inline constinit FdMarks marks;

// Whether `fd` may be one of them: all that a read of another file costs.
inline bool may_hold(int fd) { return marks.may_hold(fd); }

// `fd` was opened at `path`, whose text changes. Of many the oldest is forgotten, and says what it said.
void remember(int fd, const char* path);
// Before a read. A descriptor that is none any more is forgotten.
void refresh(int fd);

}  // namespace vrdma::traffic_files
