#include "guest_lib/fd_marks.hpp"

#include <doctest/doctest.h>

#include <climits>

using vrdma::FdMarks;

TEST_CASE("A mark is of one descriptor, and numbers that there is no room for are never held") {
  static constinit FdMarks marks;
  constexpr int last = FdMarks::fds_max - 1;
  for (const int fd : {0, 63, 64, last}) {
    CHECK_FALSE(marks.may_hold(fd));
    marks.set(fd);
    CHECK(marks.may_hold(fd));
  }
  for (const int fd : {1, 62, 65, last - 1, -1, INT_MIN, FdMarks::fds_max, INT_MAX}) CHECK_FALSE(marks.may_hold(fd));
  marks.clear(64);
  CHECK_FALSE(marks.may_hold(64));
  for (const int fd : {0, 63, last}) CHECK(marks.may_hold(fd));
  CHECK_FALSE(FdMarks::has_room_for(-1));
  CHECK_FALSE(FdMarks::has_room_for(FdMarks::fds_max));
}
