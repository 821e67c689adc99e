// `vrdma doctor`: what is missing on this machine and what it costs, in plain words.
//
// Looks by trying what programs will do (a child process loads libvrdma and moves data to itself), not by guessing from
// versions. Changes nothing: the guest it makes at the service is gone when it returns.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace vrdma::cli {

struct DoctorOptions {
  std::string socket;  // empty: where find_service() looks
  bool json = false;
  std::string host;    // empty: this machine is looked at; else the way to that host and back
  std::string folder;  // of the certificates
};

// 0; 1 where something keeps programs from working.
int doctor(const DoctorOptions& options);

struct Finding {
  enum class Level { ok, note, problem } level;
  std::string subject;  // one word
  std::string what;     // what is so, and what it costs
  std::string remedy;   // empty: nothing to do
};

// What the machine allows, without the service.
std::vector<Finding> examine_machine();

// Whether the service, a process that is seen here as that one, is in a control group with a limit of memory which is not ours.
std::optional<Finding> examine_memory_of_service(pid_t pid);
// Whether it gets less of the processors than this process.
std::optional<Finding> examine_scheduling_of_service(pid_t pid);

}  // namespace vrdma::cli
