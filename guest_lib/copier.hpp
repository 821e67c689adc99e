// The thread that copies this process's memory for a service that cannot reach it (vrdma/copy_ring.hpp). It exists only in
// processes that need it: from the first registration of memory that no file backs until the attachment ends.
//
// It blocks every signal, never allocates, holds no lock but the copy gate's, and touches the application's memory only
// through the kernel: a registered range that the application has unmapped becomes an error completion, not a crash. Atomics
// are therefore a read and a write; all atomics on such memory pass this one thread, so they are atomic to one another
// (IBV_ATOMIC_HCA), not to the program's own instructions.
//
// start() and the destructor: one thread at a time.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>

#include "guest_lib/doorbell.hpp"
#include "guest_lib/liveness.hpp"
#include "guest_lib/own_memory.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::guest {

class Copier {
 public:
  // fd: of the segment; none where the kernel does not copy by it. word: what the thread sleeps on, in memory that the waker shares with
  // it; empty: the one in the segment. doorbell and liveness outlive the copier. member: what it rings.
  Copier(vmci::Mapping segment, vmci::UniqueFd fd, vmci::Mapping word, Doorbell doorbell, std::uint32_t member, Liveness& liveness);
  ~Copier();  // ends the thread; waits for a job in hand
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // EAGAIN, ENOMEM as pthread_create(3). Does nothing where the thread runs already.
  Status start();
  // In a fork's child: there is no thread and no segment.
  void abandon();

 private:
  static void* main(void* self);
  void run();
  void sleep();
  void answer(std::span<const std::byte> record);
  Status execute(const copying::Job& job, std::span<iovec> ranges, std::uint64_t& value);
  std::uint32_t& word() const { return word_ ? *reinterpret_cast<std::uint32_t*>(word_.data()) : header().service.news; }
  copying::Header& header() const { return *reinterpret_cast<copying::Header*>(memory_.segment()); }

  OwnMemory memory_;
  vmci::Mapping word_;
  Doorbell doorbell_;
  std::uint32_t member_;
  Liveness& liveness_;
  vmci::RecordReader jobs_;
  vmci::RecordWriter answers_;
  pthread_t thread_{};
  bool running_ = false;
  std::atomic<bool> stopping_{false};
};

}  // namespace vrdma::guest
