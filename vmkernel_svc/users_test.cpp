#include "vmkernel_svc/users.hpp"

#include <doctest/doctest.h>

namespace vrdma::svc {

TEST_CASE("The overflow uid may be several users where a user namespace does not map everybody") {
  CHECK_FALSE(overflow_uid("         0          0 4294967295\n", "65534\n").has_value());
  CHECK_FALSE(overflow_uid("0 0 1000\n1000 1000 4294966295\n", "65534\n").has_value());
  CHECK(overflow_uid("         0       1000          1\n", "65534\n") == 65534);
  CHECK(overflow_uid("0 100000 65536\n", "65534\n") == 65534);  // one that is mapped there has it, too
  CHECK(overflow_uid("0 0 1\n", "77\n") == 77);
  CHECK(overflow_uid("", "") == 65534);  // without /proc, or with a map that nobody has written
}

}  // namespace vrdma::svc
