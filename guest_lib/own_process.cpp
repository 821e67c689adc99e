#include "guest_lib/own_process.hpp"

#include <pthread.h>

namespace vrdma {
namespace {

// Before other constructors, but for that which registers the memory's handler: handlers run in the child in the order of their registration.
__attribute__((constructor(102))) void settle_here_and_in_children() {
  OwnProcess::settle();
  ::pthread_atfork(nullptr, nullptr, &OwnProcess::settle);
}

}  // namespace
}  // namespace vrdma
