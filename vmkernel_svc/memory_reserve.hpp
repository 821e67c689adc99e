// Memory that is kept for when the system gives no more (limits of address space or data, strict overcommit). What is under way then is finished
// with it, for an allocation that fails in its middle would end the service and with it every user's programs; whoever asks for more is refused.
#pragma once

namespace vrdma::svc {

class MemoryReserve {
 public:
  // Behind operator new, of every thread. Once, before there are others.
  static void install();
  // Whether something new may be begun: enough is there, or could be laid by again just now. Any thread.
  static bool is_there();
};

}  // namespace vrdma::svc
