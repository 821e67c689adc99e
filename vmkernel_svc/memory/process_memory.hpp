// A guest's memory that no file backs, reached through its process (/proc/PID/mem) by a worker thread of that
// guest, because such a copy can block for as long as the guest likes (a userfaultfd page).
//
// The shard submits a job and gets it back, finished, through the sink; the worker touches nothing but the guest's process
// and the job's own buffer, so a registration may vanish meanwhile without harm to anybody else.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <boost/lockfree/spsc_queue.hpp>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

struct ProcessRange {
  std::uint64_t address;
  std::uint64_t bytes;
};

struct ProcessJob {
  enum class Kind : std::uint8_t { read, write, fetch_and_add, compare_and_swap } kind;
  bool ok = false;
  bool gone = false;  // not ok, because the process has no such memory any more: it has ended, or runs another program
  // read and write: `buffer` against `ranges`, in order. The last 8 bytes of a write go by a call of their own (D7).
  std::vector<ProcessRange> ranges;
  std::vector<std::byte> buffer;
  // atomics on ranges[0].address; old value in `value`
  std::uint64_t value = 0, operand = 0, compare = 0;
  // What the sink does with it in place of telling a queue pair. Destroyed by a worker where the guest goes first.
  std::function<void(const ProcessJob&)> then;
  // For the submitter.
  std::uint32_t shard = 0;           // whose job it is
  std::uint32_t qpn = 0;
  std::uint64_t sequence = 0;
  std::uint32_t slot = 0;            // region whose bytes are touched, and …
  std::uint64_t generation = 0;      // … its generation
};

// Where finished jobs go: called by workers, from any thread.
class JobSink {
 public:
  virtual void finished(ProcessJob* job) = 0;

 protected:
  ~JobSink() = default;
};

class ProcessMemory {
 public:
  ProcessMemory() = default;
  // Without open() every job fails. pid as seen by the service, 0 if it cannot see it: every job then fails. pidfd, uid: guard against another process
  // or program under that pid.
  // lingering: how many workers of closed memories have not left yet; such a thread and its descriptor are still somebody's to pay for.
  void open(pid_t pid, uid_t uid, const vmci::UniqueFd& pidfd, JobSink& sink, std::shared_ptr<std::atomic<std::uint32_t>> lingering);
  // Whether the memory could be opened. Whose it is, a read of it must show: pids of another namespace name others.
  bool opened() const;
  // Takes ownership of the job until the sink has it back. Starts the worker on first use. False: not reachable.
  bool submit(std::unique_ptr<ProcessJob> job);
  // No more jobs; the worker leaves after the one in hand (which may block until the guest dies: never waited for).
  void close();

  ProcessMemory(const ProcessMemory&) = delete;
  ProcessMemory& operator=(const ProcessMemory&) = delete;
  ~ProcessMemory() { close(); }

 private:
  struct Worker;
  std::shared_ptr<Worker> worker_;
};

}  // namespace vrdma::svc
