#include "vmkernel_svc/memory/process_memory.hpp"

#include <fcntl.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <semaphore>

#include "vmci_channel/backoff.hpp"
#include "vmci_channel/peer_process.hpp"
#include "vmci_channel/placement_copy.hpp"

namespace vrdma::svc {

namespace {

using vmci::ordered_tail_bytes;

// A write that is refused where a read is not: the guest's library has just frozen the page, to move it, and the kernel does not
// wait for that here. Also a shared mapping that is read-only, of which no more than a wait comes.
bool frozen(int memory, std::uint64_t address) {
  std::byte ignored;
  return ::pread(memory, &ignored, 1, static_cast<off_t>(address)) == 1;
}

// /proc/PID/mem names the memory that the process had when it was opened, not whatever runs under that pid later: after an
// exec (of a setuid program, say) and after its end there is nothing to read or write any more.
bool transfer(int memory, bool write, std::byte* buffer, std::uint64_t address, std::uint64_t bytes, ProcessJob& job) {
  constexpr std::uint64_t patience_ns = 500'000'000;
  constexpr int patience_naps = 5000;  // as long, but longer where this thread, and so probably the guest's, gets little of a processor
  constexpr timespec nap{0, 20'000};
  std::uint64_t give_up_ns = 0;
  int naps = 0;
  while (bytes != 0) {
    if (write && !job.begin_step()) return false;
    const ssize_t moved = write ? ::pwrite(memory, buffer, bytes, static_cast<off_t>(address))
                                : ::pread(memory, buffer, bytes, static_cast<off_t>(address));
    const int error = errno;
    if (write && !job.end_step()) return false;
    errno = error;
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && write && frozen(memory, address)) {
      const std::uint64_t now = vmci::monotonic_ns();
      if (give_up_ns == 0) give_up_ns = now + patience_ns;
      if (now >= give_up_ns && naps >= patience_naps) return false;
      ++naps;
      ::nanosleep(&nap, nullptr);
      continue;
    }
    job.gone = moved == 0;
    if (moved <= 0) return false;
    buffer += moved, address += static_cast<std::uint64_t>(moved), bytes -= static_cast<std::uint64_t>(moved);
  }
  return true;
}

bool still_alive(const vmci::UniqueFd& pidfd) {
  pollfd state{pidfd.get(), POLLIN, 0};
  return pidfd && ::poll(&state, 1, 0) == 0;
}

// The memory of the process as it is now, provided that it is still the process that connected (pidfd), and runs no program of more rights.
vmci::UniqueFd open_memory(const vmci::Credentials& connected, const vmci::UniqueFd& pidfd) {
  const vmci::UniqueFd folder = vmci::process_folder(connected.pid);
  if (!folder || !vmci::is_as_it_connected(folder.get(), connected)) return {};
  vmci::UniqueFd memory(::openat(folder.get(), "mem", O_RDWR | O_CLOEXEC));
  if (!memory || !vmci::is_as_it_connected(folder.get(), connected) || !still_alive(pidfd)) return {};
  return memory;
}

}  // namespace

struct ProcessMemory::Worker {
  vmci::UniqueFd memory;
  JobSink* sink = nullptr;
  std::shared_ptr<Workers> workers;
  // The shard pushes, the worker pops.
  boost::lockfree::spsc_queue<ProcessJob*, boost::lockfree::capacity<jobs_max + 1>> jobs;  // and the probe
  std::atomic<bool> sleeping{false};
  std::atomic<bool> closing{false};
  std::counting_semaphore<> wake{0};
  bool started = false;

  ~Worker() {
    ProcessJob* job;
    while (jobs.pop(job)) delete job;
  }

  // Who holds it may stand at memory that does not come, which is hardly the word that is wanted here: it is not waited for without end.
  std::unique_lock<std::mutex> lock_atomics(std::uint64_t address) const {
    constexpr std::uint64_t patience_ns = 20'000'000;
    std::unique_lock lock(workers->atomics[address / sizeof(std::uint64_t) % workers->atomics.size()], std::defer_lock);
    vmci::Backoff backoff;
    for (const std::uint64_t until = vmci::monotonic_ns() + patience_ns; !lock.try_lock() && vmci::monotonic_ns() < until;) backoff.idle();
    return lock;
  }

  bool execute(ProcessJob& job) const {
    if (!memory) return false;
    if (job.kind == ProcessJob::Kind::fetch_and_add || job.kind == ProcessJob::Kind::compare_and_swap) {
      const std::uint64_t at = job.ranges[0].address;
      const std::unique_lock alone = lock_atomics(at);
      std::uint64_t old;
      if (!transfer(memory.get(), false, reinterpret_cast<std::byte*>(&old), at, 8, job)) return false;
      job.value = old;
      std::uint64_t next = job.kind == ProcessJob::Kind::fetch_and_add ? old + job.operand : job.operand;
      if (job.kind == ProcessJob::Kind::compare_and_swap && old != job.compare) return true;
      return transfer(memory.get(), true, reinterpret_cast<std::byte*>(&next), at, 8, job);
    }
    const bool write = job.kind == ProcessJob::Kind::write;
    std::byte* at = job.buffer.data();
    for (std::size_t i = 0; i < job.ranges.size(); ++i) {
      ProcessRange range = job.ranges[i];
      const bool tail = write && i + 1 == job.ranges.size() && range.bytes > ordered_tail_bytes;
      const std::uint64_t first = tail ? range.bytes - ordered_tail_bytes : range.bytes;
      if (!transfer(memory.get(), write, at, range.address, first, job)) return false;
      if (tail && !transfer(memory.get(), write, at + first, range.address + first, ordered_tail_bytes, job)) return false;
      at += range.bytes;
    }
    return true;
  }

  void run() {
    vmci::Backoff backoff;
    while (!closing.load(std::memory_order_acquire)) {
      ProcessJob* job;
      if (jobs.pop(job)) {
        backoff.reset();
        job->ok = execute(*job);
        if (closing.load(std::memory_order_acquire)) {
          delete job;
          return;
        }
        sink->finished(job);
        continue;
      }
      if (!backoff.tired()) {
        backoff.idle();
        continue;
      }
      sleeping.store(true, std::memory_order_relaxed);
      vmci::store_load_fence();  // W1: pairs with W2 in submit: either we see its job or it sees us asleep
      if (jobs.empty() && !closing.load(std::memory_order_acquire)) wake.acquire();
      sleeping.store(false, std::memory_order_relaxed);
      backoff.reset();
    }
  }
};

void ProcessMemory::open(const vmci::Credentials& connected, const vmci::UniqueFd& pidfd, JobSink& sink, std::shared_ptr<Workers> workers) {
  worker_ = std::make_shared<Worker>();
  worker_->memory = open_memory(connected, pidfd);
  worker_->sink = &sink;
  worker_->workers = std::move(workers);
}

bool ProcessMemory::opened() const { return worker_ && worker_->memory; }

bool ProcessMemory::submit(std::unique_ptr<ProcessJob> job) {
  if (!opened()) return false;
  if (!worker_->started) {
    worker_->started = true;
    try {
      std::thread([worker = worker_] {
        worker->run();  // until close(), which has counted it
        worker->workers->lingering.fetch_sub(1, std::memory_order_release);  // whoever sees it may do away with what the worker used
      }).detach();
    } catch (const std::system_error&) {
      worker_->started = false;
      return false;
    }
  }
  if (!worker_->jobs.push(job.get())) return false;
  job.release();
  vmci::store_load_fence();  // W2: pairs with W1
  if (worker_->sleeping.exchange(false, std::memory_order_acq_rel)) worker_->wake.release();
  return true;
}

void ProcessMemory::close() {
  if (!worker_) return;
  if (worker_->started) worker_->workers->lingering.fetch_add(1, std::memory_order_relaxed);
  worker_->closing.store(true, std::memory_order_release);
  vmci::store_load_fence();
  if (worker_->sleeping.exchange(false, std::memory_order_acq_rel)) worker_->wake.release();
  worker_.reset();
}

}  // namespace vrdma::svc
