// Loads libvrdma in a child process, as a program would, and moves data from the child to itself through the service: by
// memory that the service must reach through the process (8 bytes on the stack) and by whole pages.
//
// The child has a watchdog; whatever happens to it, the caller gets a result.
#pragma once

#include <string>

namespace vrdma::cli {

struct SelfTestResult {
  std::string failed_at;   // empty: all is well; else the step in words
  std::string error;       // why, where it failed
  std::string small_path;  // how the service reaches the memory: "mapped", "process", "mixed"; empty: unknown
  std::string pages_path;
};

SelfTestResult self_test(const std::string& library, const std::string& socket);

}  // namespace vrdma::cli
