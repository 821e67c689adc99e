#include "cli/stats.hpp"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "cli/query.hpp"

namespace vrdma::cli {

void print_stats(const Service& service, const std::string& command, pid_t pid) try {
  // The service learns of the end of a process from the kernel, a moment after we do.
  for (int tries = 0; tries < 50; ++tries) {
    const auto state = query(service);
    if (!knows_user(state)) throw std::runtime_error("the service cannot tell this user from others, as its user namespace maps neither");
    for (const auto& guest : state.at("departed")) {
      if (guest.at("pid") != pid) continue;
      fmt::print(stderr, "vrdma: {} (LID {}): {} control requests", guest.at("name").get<std::string>(),
                 guest.at("lid").get<int>(), guest.at("requests").get<std::uint64_t>());
      for (const auto& [name, count] : guest.at("counters").items())
        if (count.get<std::uint64_t>() != 0) fmt::print(stderr, ", {} {}", name, count.get<std::uint64_t>());
      fmt::print(stderr, "\n");
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  fmt::print(stderr, "vrdma: {} (pid {}) did not use RDMA itself; programs that it started are not counted\n", command, pid);
} catch (const std::exception& error) {
  fmt::print(stderr, "vrdma: no statistics: {}\n", error.what());
}

}  // namespace vrdma::cli
