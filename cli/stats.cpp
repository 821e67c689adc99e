#include "cli/stats.hpp"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "cli/output.hpp"
#include "cli/query.hpp"

namespace vrdma::cli {

void print_stats(const Service& service, const std::string& command, pid_t pid) try {
  // The service learns of the end of a process from the kernel, a moment after we do.
  for (int tries = 0; tries < 50; ++tries) {
    const auto state = query(service);
    if (!knows_user(state)) throw std::runtime_error("the service cannot tell this user from others, as its user namespace maps neither");
    for (const auto& guest : state.at("departed")) {
      if (guest.at("pid") != pid) continue;
      std::string counts = fmt::format("{} control requests", guest.at("requests").get<std::uint64_t>());
      for (const auto& [name, count] : guest.at("counters").items())
        if (count.get<std::uint64_t>() != 0) counts += fmt::format(", {} {}", name, count.get<std::uint64_t>());
      tell("vrdma: {} (LID {}): {}\n", guest.at("name").get<std::string>(), guest.at("lid").get<int>(), counts);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  tell("vrdma: {} (pid {}) did not use RDMA itself; programs that it started are not counted\n", command, pid);
} catch (const std::exception& error) {
  tell("vrdma: no statistics: {}\n", error.what());
}

}  // namespace vrdma::cli
