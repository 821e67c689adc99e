#include "guest_lib/copier.hpp"

#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>

#include <array>
#include <cstring>

#include "guest_lib/memory/copy_gate.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/placement_copy.hpp"
#include "vmci_channel/sleep_word.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

using namespace copying;

namespace {

constexpr std::size_t stack_bytes = 256 * 1024;  // room for a program's thread-local data; untouched pages cost nothing
constexpr std::uint64_t longest_sleep_ns = 5'000'000'000;  // then it looks whether the service still lives
using vmci::ordered_tail_bytes;
constexpr std::uint64_t long_yield_us = 50;

// Who yields to a thread that computes waits for its time slice to end; who sleeps is let in as soon as it is woken. There are
// such threads: an application that waits for an RDMA WRITE spins on its own memory.
bool gave_way_for_long(vmci::Backoff& backoff) {
  const std::uint64_t before = vmci::cycles();
  backoff.idle();
  return vmci::cycles() - before > long_yield_us * vmci::cycles_per_us();
}

}  // namespace

Copier::Copier(vmci::Mapping segment, vmci::UniqueFd fd, vmci::Mapping word, Doorbell doorbell, std::uint32_t member, Liveness& liveness)
    : memory_(std::move(segment), std::move(fd)),
      word_(std::move(word)),
      doorbell_(doorbell),
      member_(member),
      liveness_(liveness),
      jobs_(memory_.segment() + jobs_offset, job_slots),
      answers_(memory_.segment() + answers_offset, answer_slots) {}

Status Copier::start() {
  if (running_) return ok();
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, stack_bytes);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&thread_, &attributes, &main, this);
  if (failed == EINVAL) failed = pthread_create(&thread_, nullptr, &main, this);  // more thread-local data than that
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  running_ = failed == 0;
  return failed == 0 ? ok() : Status(Errno{failed});
}

Copier::~Copier() {
  if (!running_) return;
  stopping_.store(true, std::memory_order_release);
  // The word is the service's to change, but nobody needs its value any more.
  std::atomic_ref(word()).fetch_add(1, std::memory_order_acq_rel);
  vmci::wake_word(&word());
  pthread_join(thread_, nullptr);
}

void Copier::abandon() {
  running_ = false;
  memory_.abandon();
  if (word_) word_.abandon();
}

void* Copier::main(void* self) {
  ::prctl(PR_SET_NAME, "vrdma-copy");
  memory::CopyGate::change_threads(1);  // itself: it also ends by itself, and who does not count here counts as any other thread
  static_cast<Copier*>(self)->run();
  memory::CopyGate::change_threads(-1);
  return nullptr;
}

void Copier::run() {
  alignas(64) std::array<std::byte, job_record_slots_max * slot_bytes> record;
  vmci::Backoff backoff;
  while (!stopping_.load(std::memory_order_acquire)) {
    std::uint32_t slots = 0;
    switch (jobs_.peek(record.data(), job_record_slots_max, slots)) {
      case vmci::RecordReader::Peek::malformed: {
        const memory::CopyGate::Passage passage;
        return liveness_.mark_dead();
      }
      case vmci::RecordReader::Peek::empty:
        if (!backoff.tired() && !gave_way_for_long(backoff)) continue;
        sleep();
        if (const memory::CopyGate::Passage passage; liveness_.gone()) return;
        backoff.reset();
        continue;
      case vmci::RecordReader::Peek::ready:
        break;
    }
    VRDMA_CRASH_POINT("guest.copy.job_taken");
    // Our own books are in the heap, a page of which may be about to move with something small that is registered.
    const memory::CopyGate::Passage passage;
    jobs_.advance(slots);
    answer(std::span(record).first(slots * slot_bytes));
    backoff.reset();
  }
}

void Copier::sleep() {
  auto sleeping = std::atomic_ref(header().guest.sleeping);
  sleeping.store(1, std::memory_order_relaxed);
  vmci::store_load_fence();  // G2: pairs with G1 in GuestCopier::give
  const std::uint32_t seen = std::atomic_ref(word()).load(std::memory_order_acquire);
  if (jobs_.empty() && !stopping_.load(std::memory_order_acquire))
    vmci::sleep_on_word(&word(), seen, longest_sleep_ns);
  sleeping.store(0, std::memory_order_relaxed);
}

void Copier::answer(std::span<const std::byte> record) {
  Job job;
  std::memcpy(&job, record.data(), sizeof(job));
  std::array<iovec, ranges_max> ranges;
  Answer out{};
  Status done = Errno{EPROTO};
  if (job.slot < slot_count && job.range_count >= 1 && job.range_count <= (record.size() - sizeof(Job)) / sizeof(Range) &&
      job.head.word <= bounce_bytes) {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < job.range_count; ++i) {
      Range range;
      std::memcpy(&range, record.data() + sizeof(Job) + i * sizeof(Range), sizeof(range));
      ranges[i] = {reinterpret_cast<void*>(range.address), range.bytes};
      bytes += range.bytes;
    }
    if (bytes == job.head.word) done = execute(job, std::span(ranges).first(job.range_count), out.value);
  }
  VRDMA_CRASH_POINT("guest.copy.copied");
  // The service has room for an answer to every job that it has given: nothing to wait for.
  answers_.write(sizeof(RecordHead), std::as_bytes(std::span(&out, 1)).subspan(sizeof(RecordHead)));
  answers_.publish(job.head.tag, done ? 0 : static_cast<std::uint32_t>(value(done.error())), 0, 1);
  VRDMA_CRASH_POINT("guest.copy.answered");
  doorbell_.ring(member_);
}

Status Copier::execute(const Job& job, std::span<iovec> ranges, std::uint64_t& value) {
  const std::uint64_t at = bounce_offset + job.slot * bounce_bytes;
  const auto kind = static_cast<Kind>(job.head.control & control_user_mask);
  if (kind == Kind::read) return memory_.gather(ranges, at);
  if (kind == Kind::write) {
    iovec& last = ranges.back();
    const std::uint64_t bytes = job.head.word;
    if (last.iov_len <= ordered_tail_bytes) return memory_.scatter(ranges, at);
    // The last 8 bytes by a call of their own, after all others (DESIGN.md D7).
    iovec tail{static_cast<std::byte*>(last.iov_base) + (last.iov_len - ordered_tail_bytes), ordered_tail_bytes};
    last.iov_len -= ordered_tail_bytes;
    if (Status bulk = memory_.scatter(ranges, at); !bulk) return bulk;
    return memory_.scatter(std::span(&tail, 1), at + bytes - ordered_tail_bytes);
  }
  if (job.head.word != sizeof(value)) return Errno{EPROTO};
  if (Status read = memory_.gather(ranges, at); !read) return read;
  std::byte* const bounce = memory_.segment() + at;
  std::memcpy(&value, bounce, sizeof(value));
  if (kind == Kind::compare_and_swap && value != job.compare) return ok();
  const std::uint64_t next = kind == Kind::fetch_and_add ? value + job.operand : job.operand;
  std::memcpy(bounce, &next, sizeof(next));
  return memory_.scatter(ranges, at);
}

}  // namespace vrdma::guest
