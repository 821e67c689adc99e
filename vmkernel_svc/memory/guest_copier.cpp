#include "vmkernel_svc/memory/guest_copier.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/sleep_word.hpp"

namespace vrdma::svc {

using namespace copying;

namespace {
Kind kind_of(const ProcessJob& job) {
  switch (job.kind) {
    case ProcessJob::Kind::read: return Kind::read;
    case ProcessJob::Kind::write: return Kind::write;
    case ProcessJob::Kind::fetch_and_add: return Kind::fetch_and_add;
    case ProcessJob::Kind::compare_and_swap: break;
  }
  return Kind::compare_and_swap;
}
}  // namespace

Result<std::unique_ptr<GuestCopier>> GuestCopier::create(std::uint32_t doorbell, JobSink& sink) {
  auto segment = vmci::Segment::create("vrdma-copy", segment_bytes);
  if (!segment) return segment.error();
  return std::unique_ptr<GuestCopier>(new GuestCopier(std::move(*segment), doorbell, sink));
}

Result<std::unique_ptr<GuestCopier>> GuestCopier::over(vmci::Segment segment, std::uint32_t doorbell, JobSink& sink) {
  return std::unique_ptr<GuestCopier>(new GuestCopier(std::move(segment), doorbell, sink));
}

GuestCopier::GuestCopier(vmci::Segment segment, std::uint32_t doorbell, JobSink& sink)
    : segment_(std::move(segment)),
      doorbell_(doorbell),
      sink_(sink),
      jobs_(segment_.data() + jobs_offset, job_slots),
      answers_(segment_.data() + answers_offset, answer_slots) {
  for (std::uint32_t slot = slot_count; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

bool GuestCopier::submit(std::unique_ptr<ProcessJob> job) {
  if (waiting_.size() + underway_.size() >= jobs_max) return false;
  waiting_.push_back({std::move(job)});
  give();
  return true;
}

void GuestCopier::give() {
  bool given = false;
  for (; !free_slots_.empty() && !waiting_.empty(); given = true) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    give(std::move(next));
  }
  if (!given) return;
  // Pairs with the load in Copier::sleep: who sleeps on this value has looked at the jobs that it tells of.
  std::atomic_ref(header().service.news).store(++news_, std::memory_order_release);
  vmci::store_load_fence();  // G1: pairs with G2 in Copier::sleep: either it sees the news or we see it asleep
  if (std::atomic_ref(header().guest.sleeping).load(std::memory_order_relaxed) != 0) wake();
}

void GuestCopier::wake() {
  if (!wake_) return vmci::wake_word(&header().service.news);
  const char news = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &news, 1);  // full: the machine has yet to look at it
}

void GuestCopier::give(Waiting waiting) {
  ProcessJob& job = *waiting.job;
  if (!job.begin_step()) return finish(std::move(waiting.job), false);
  Range ranges[ranges_max];
  Underway part{{}, next_number_++, free_slots_.back(), 0, 0, waiting.buffer_offset};
  free_slots_.pop_back();
  std::uint32_t count = 0;
  while (count < ranges_max && part.bytes < bounce_bytes && waiting.range < job.ranges.size()) {
    const ProcessRange& whole = job.ranges[waiting.range];
    const std::uint64_t bytes = std::min(whole.bytes - waiting.range_offset, bounce_bytes - part.bytes);
    ranges[count++] = {whole.address + waiting.range_offset, bytes};
    part.bytes += bytes;
    waiting.range_offset += bytes;
    if (waiting.range_offset == whole.bytes) ++waiting.range, waiting.range_offset = 0;
  }
  waiting.buffer_offset += part.bytes;
  if (job.kind == ProcessJob::Kind::write) std::memcpy(bounce(part.slot), job.buffer.data() + part.buffer_offset, part.bytes);

  const Job record{{}, job.operand, job.compare, part.slot, count, 0};
  jobs_.write(sizeof(RecordHead), std::as_bytes(std::span(&record, 1)).subspan(sizeof(RecordHead)));
  jobs_.write(sizeof(Job), std::as_bytes(std::span(ranges, count)));
  jobs_.publish(part.number, static_cast<std::uint32_t>(part.bytes), static_cast<std::uint32_t>(kind_of(job)),
                static_cast<std::uint32_t>((sizeof(Job) + count * sizeof(Range) + slot_bytes - 1) / slot_bytes));
  part.ring_end = jobs_.position();
  part.rest = std::move(waiting);
  underway_.push_back(std::move(part));
}

bool GuestCopier::collect() {
  alignas(64) std::byte record[slot_bytes];
  std::uint32_t slots = 0;
  for (;;) {
    const auto peek = answers_.peek(record, 1, slots);
    if (peek == vmci::RecordReader::Peek::empty) break;
    if (peek == vmci::RecordReader::Peek::malformed || underway_.empty()) return false;
    Answer answer;
    std::memcpy(&answer, record, sizeof(answer));
    if (answer.head.tag != underway_.front().number) return false;
    answers_.advance(slots);
    Underway part = std::move(underway_.front());
    underway_.pop_front();
    jobs_.set_freed(part.ring_end);  // it has read the job that it answers
    free_slots_.push_back(part.slot);
    ProcessJob& job = *part.rest.job;
    job.value = answer.value;
    if (!job.end_step() || answer.head.word != 0) {
      finish(std::move(part.rest.job), false);
      continue;
    }
    if (job.kind == ProcessJob::Kind::read) std::memcpy(job.buffer.data() + part.buffer_offset, bounce(part.slot), part.bytes);
    if (part.rest.range < job.ranges.size())
      waiting_.push_back(std::move(part.rest));
    else
      finish(std::move(part.rest.job), true);
  }
  std::atomic_ref(header().service.answers_taken).store(answers_.position(), std::memory_order_release);
  give();
  return true;
}

void GuestCopier::finish(std::unique_ptr<ProcessJob> job, bool ok) {
  ++jobs_served_;
  job->ok = ok;
  sink_.finished(job.release());
}

void GuestCopier::close() {
  for (auto& part : std::exchange(underway_, {})) part.rest.job->end_step(), finish(std::move(part.rest.job), false);
  for (auto& next : std::exchange(waiting_, {})) finish(std::move(next.job), false);
}

}  // namespace vrdma::svc
