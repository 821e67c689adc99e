// A guest's memory that no file backs, reached through its process (/proc/PID/mem) by a worker thread of that
// guest, because such a copy can block for as long as the guest likes (a userfaultfd page).
//
// The shard submits a job and gets it back, finished, through the sink; the worker touches nothing but the guest's process
// and the job's own buffer, so a registration may vanish meanwhile without harm to anybody else.
#pragma once

#include <array>
#include <atomic>
#include <boost/lockfree/spsc_queue.hpp>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/ids.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

// A region or window, as it was when somebody found it.
struct RegionRef {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  bool operator==(const RegionRef&) const = default;
};

struct ProcessRange {
  std::uint64_t address;
  std::uint64_t bytes;
};

// Lets whoever has given a write to a worker call it off: after that, nothing is begun that changes memory, and over() tells when what had been
// begun has ended. A step is one system call, or what a guest's own thread was given to do.
class WriteLeash {
 public:
  // The worker's. False: it was called off, and writes nothing (more).
  bool begin_step() {
    std::uint32_t none = 0;
    return state_.compare_exchange_strong(none, in_step, std::memory_order_acq_rel);
  }
  bool end_step() { return (state_.fetch_and(~in_step, std::memory_order_acq_rel) & called_off) == 0; }  // WL1: pairs with WL2: the memory is as it stays
  // False: it is within a step.
  bool call_off() { return (state_.fetch_or(called_off, std::memory_order_acq_rel) & in_step) == 0; }
  bool over() const { return (state_.load(std::memory_order_acquire) & in_step) == 0; }  // WL2

 private:
  static constexpr std::uint32_t in_step = 1, called_off = 2;
  std::atomic<std::uint32_t> state_{0};
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
  std::shared_ptr<WriteLeash> leash;  // of one that changes memory, where it can be called off
  bool changes_memory() const { return kind != Kind::read; }
  bool begin_step() const { return leash == nullptr || leash->begin_step(); }
  bool end_step() const { return leash == nullptr || leash->end_step(); }
  // What the sink does with it in place of telling a queue pair. Destroyed by a worker where the guest goes first.
  std::function<void(const ProcessJob&)> then;
  // For the submitter.
  GuestId of{};                      // whose memory it is
  std::uint32_t shard = 0;           // whose job it is
  std::uint32_t qpn = 0;
  std::uint64_t sequence = 0;
  std::uint32_t slot = 0;            // region whose bytes are touched, and …
  std::uint64_t generation = 0;      // … its generation
};

// That one guest's worker is given, and that have not been taken back from the sink: each holds up to a slice of bytes.
inline constexpr std::size_t jobs_max = 256;

// Where finished jobs go: called by workers, from any thread.
class JobSink {
 public:
  virtual void finished(ProcessJob* job) = 0;

 protected:
  ~JobSink() = default;
};

// A write to a guest that was called off while it was at a step.
struct LastStep {
  std::shared_ptr<WriteLeash> leash;
  std::uint64_t since_ns;
  std::uint32_t of, to;  // the QPN of the requester, and of the responder if there is one
  RegionRef by;
};

// What the workers of one tenant have in common.
struct Workers {
  std::atomic<std::uint32_t> lingering{0};  // those of closed memories that have not left yet: such a thread and its descriptor are still somebody's to pay for
  // Held from reading a word to writing it: two processes may have mapped the same file. By where in its page the word lies, which is one for all.
  std::array<std::mutex, 64> atomics;
};

class ProcessMemory {
 public:
  ProcessMemory() = default;
  // Without open() every job fails. connected.pid as seen by the service, 0 if it cannot see it: every job then fails. pidfd, and the ids: guard
  // against another process or program under that pid (vmci_channel/peer_process.hpp).
  void open(const vmci::Credentials& connected, const vmci::UniqueFd& pidfd, JobSink& sink, std::shared_ptr<Workers> workers);
  // Whether the memory could be opened. Whose it is, a read of it must show: pids of another namespace name others.
  bool opened() const;
  // Takes ownership of the job until the sink has it back. Starts the worker on first use. False: not reachable, or no room.
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
