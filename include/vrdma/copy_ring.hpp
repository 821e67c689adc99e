// How a thread of a guest copies that guest's own memory for the service, where the service cannot reach it (DESIGN.md D6).
// One segment, made by the service for a guest that asks how its memory is reached (control: reach_process):
//
//   CopyHeader | answers: records, guest → service | jobs: records, service → guest | slots of 64 KiB that bytes pass through
//
//   service: bytes to write → slot, job → ring, news + 1, wakes the thread if it sleeps
//   guest:   job → slot filled or emptied, answer → ring, doorbell member of the reply
//   service: answer, bytes that were read ← slot; the slot is free
//
// Jobs are answered in the order in which they were given, so that nothing of the guest's needs to be believed: the service
// knows which slot and which job an answer is for, and takes more answers than jobs for a broken protocol. Plain data.
#pragma once

#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::copying {

constexpr std::uint32_t slot_count = 16;  // jobs under way at a time
constexpr std::uint64_t bounce_bytes = 64 * 1024;
constexpr std::uint32_t ranges_max = 29;  // of one job: eight slots of the ring
constexpr std::uint32_t job_slots = 256;
constexpr std::uint32_t answer_slots = 32;
constexpr std::uint32_t job_record_slots_max = 8;

enum class Kind : std::uint32_t { read = 0, write = 1, fetch_and_add = 2, compare_and_swap = 3 };  // control's user bits

struct Range {  // of the guest's memory
  std::uint64_t address;
  std::uint64_t bytes;
};
// head.tag: number of the job; head.word: bytes of all ranges together.
struct Job {
  RecordHead head;
  std::uint64_t operand;  // added, or swapped in
  std::uint64_t compare;
  std::uint32_t slot;
  std::uint32_t range_count;  // ranges follow; 1 for atomics
  std::uint64_t reserved;
};
// head.tag: number of the job; head.word: 0, or the errno value of why not.
struct Answer {
  RecordHead head;
  std::uint64_t value;  // atomics: what was there
};
static_assert(WireRecord<Range> && WireRecord<Job> && WireRecord<Answer> && sizeof(Job) == 48 && sizeof(Answer) == 24);
static_assert(sizeof(Job) + ranges_max * sizeof(Range) == job_record_slots_max * slot_bytes);
static_assert(slot_count * job_record_slots_max < job_slots && slot_count < answer_slots);

struct alignas(128) GuestCursor {  // written by the guest's thread only
  std::uint32_t sleeping;          // 1: wake me after publishing
  std::uint32_t reserved[31];
};
struct alignas(128) ServiceCursor {  // written by the service only
  std::uint32_t news;                // changes with every job; the guest's thread sleeps on it
  std::uint32_t answers_taken;       // position in the ring of answers
  std::uint32_t reserved[30];
};
struct Header {
  GuestCursor guest;
  ServiceCursor service;
};
static_assert(WireRecord<GuestCursor> && WireRecord<ServiceCursor> && sizeof(Header) == 256);

constexpr std::uint64_t answers_offset = sizeof(Header);
constexpr std::uint64_t jobs_offset = answers_offset + answer_slots * slot_bytes;
constexpr std::uint64_t bounce_offset = 32 * 1024;
constexpr std::uint64_t segment_bytes = bounce_offset + slot_count * bounce_bytes;
static_assert(jobs_offset + job_slots * slot_bytes <= bounce_offset);

}  // namespace vrdma::copying
