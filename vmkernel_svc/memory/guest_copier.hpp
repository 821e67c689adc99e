// A guest's memory that no file backs and that the service cannot reach, copied by a thread of the guest itself (the protocol:
// vrdma/copy_ring.hpp): two changes of thread a copy, as with ProcessMemory, and possible wherever a guest can attach at all.
//
// Nothing of the guest is believed: a thread that copies wrong bytes harms its own process, one that answers nothing keeps its
// own jobs, which whoever waits for them gives up after a while as with ProcessMemory, and one that answers what it was not
// asked is found out. Used by the shard's thread only; never blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "vmci_channel/record_ring.hpp"
#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/memory/process_memory.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::svc {

class GuestCopier {
 public:
  // doorbell: the member of the guest's bitmap that it sets after answering.
  static Result<std::unique_ptr<GuestCopier>> create(std::uint32_t doorbell, JobSink& sink);

  // In a segment that a virtual machine lends.
  static Result<std::unique_ptr<GuestCopier>> over(vmci::Segment segment, std::uint32_t doorbell, JobSink& sink);
  // pipe: the write end; what comes out of it wakes the machine's thread.
  void wake_by(vmci::UniqueFd pipe) { wake_ = std::move(pipe); }

  // Takes ownership of the job until the sink has it back. False: no room.
  bool submit(std::unique_ptr<ProcessJob> job);
  // Looks at the answers. False: the guest does not keep to the protocol.
  bool collect();
  // No more jobs and answers: those under way go back to the sink, failed.
  void close();

  std::uint32_t doorbell() const { return doorbell_; }
  int fd() const { return segment_.fd(); }
  std::uint64_t jobs_served() const { return jobs_served_; }

  GuestCopier(const GuestCopier&) = delete;
  GuestCopier& operator=(const GuestCopier&) = delete;

 private:
  // A job and how much of it has been done: one that is larger than a slot, or has more ranges than a record, goes in parts,
  // with the jobs of others in between.
  struct Waiting {
    std::unique_ptr<ProcessJob> job;
    std::size_t range = 0;            // the next one, …
    std::uint64_t range_offset = 0;   // … of which so much is done
    std::uint64_t buffer_offset = 0;
  };
  struct Underway {
    Waiting rest;  // what remains after this part
    std::uint64_t number;
    std::uint32_t slot;
    std::uint32_t ring_end;  // position in the ring of jobs after it
    std::uint64_t bytes, buffer_offset;
  };

  GuestCopier(vmci::Segment segment, std::uint32_t doorbell, JobSink& sink);
  void wake();
  void give();
  void give(Waiting waiting);
  void finish(std::unique_ptr<ProcessJob> job, bool ok);
  copying::Header& header() const { return *segment_.at<copying::Header>(0); }
  std::byte* bounce(std::uint32_t slot) const { return segment_.data() + copying::bounce_offset + slot * copying::bounce_bytes; }

  vmci::Segment segment_;
  vmci::UniqueFd wake_;  // none: by the word in the segment
  std::uint32_t doorbell_;
  JobSink& sink_;
  vmci::RecordWriter jobs_;
  vmci::RecordReader answers_;
  std::uint32_t news_ = 0;
  std::uint64_t next_number_ = 1;
  std::uint64_t jobs_served_ = 0;
  std::vector<std::uint32_t> free_slots_;  // the last used first: its pages are warm
  std::deque<Waiting> waiting_;
  std::deque<Underway> underway_;          // in the order in which the answers come
};

}  // namespace vrdma::svc
