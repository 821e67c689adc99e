// The service's end of copies by a guest, against guests that keep to the protocol and guests that do not.
#include "vmkernel_svc/memory/guest_copier.hpp"

#include <doctest/doctest.h>

#include <cstring>

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::copying;

namespace {

struct Sink final : JobSink {
  std::vector<std::unique_ptr<ProcessJob>> back;
  void finished(ProcessJob* job) override { back.emplace_back(job); }
};

// The guest's end, its memory a plain array whose addresses count from 0.
struct TestGuest {
  Sink sink;
  std::unique_ptr<GuestCopier> copier;
  vmci::Mapping mapping;
  vmci::RecordReader jobs;
  vmci::RecordWriter answers;
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);
  std::vector<std::uint64_t> bytes_of_jobs;

  TestGuest() {
    auto made = GuestCopier::create(7, sink);
    REQUIRE(made.has_value());
    copier = std::move(*made);
    auto mapped = vmci::Mapping::map(copier->fd(), 0, segment_bytes, vmci::Writable::yes);
    REQUIRE(mapped.has_value());
    mapping = std::move(*mapped);
    jobs = vmci::RecordReader(mapping.data() + jobs_offset, job_slots);
    answers = vmci::RecordWriter(mapping.data() + answers_offset, answer_slots);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 31 >> 4);
  }

  void answer(std::uint64_t number, std::uint32_t error, std::uint64_t value = 0) {
    answers.write(sizeof(RecordHead), std::as_bytes(std::span(&value, 1)));
    answers.publish(number, error, 0, 1);
  }

  // Does one job. False: there is none.
  bool work() {
    alignas(64) std::byte record[job_record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    const auto peek = jobs.peek(record, job_record_slots_max, slots);
    REQUIRE(peek != vmci::RecordReader::Peek::malformed);
    if (peek == vmci::RecordReader::Peek::empty) return false;
    jobs.advance(slots);
    copying::Job job;
    std::memcpy(&job, record, sizeof(job));
    REQUIRE(job.slot < slot_count);
    REQUIRE(job.range_count <= ranges_max);
    std::byte* at = mapping.data() + bounce_offset + job.slot * bounce_bytes;
    std::uint64_t total = 0;
    for (std::uint32_t i = 0; i < job.range_count; ++i) {
      Range range;
      std::memcpy(&range, record + sizeof(job) + i * sizeof(range), sizeof(range));
      total += range.bytes;
      REQUIRE(total <= bounce_bytes);
      const bool read = static_cast<Kind>(job.head.control & control_user_mask) == Kind::read;
      std::memcpy(read ? at : memory.data() + range.address, read ? memory.data() + range.address : at, range.bytes);
      at += range.bytes;
    }
    REQUIRE(total == job.head.word);
    bytes_of_jobs.push_back(total);
    answer(job.head.tag, 0);
    return true;
  }
};

std::unique_ptr<ProcessJob> job_over(ProcessJob::Kind kind, std::vector<ProcessRange> ranges) {
  auto job = std::make_unique<ProcessJob>();
  job->kind = kind;
  for (const auto& range : ranges) job->buffer.resize(job->buffer.size() + range.bytes);
  job->ranges = std::move(ranges);
  return job;
}

}  // namespace

TEST_CASE("Jobs of any shape are copied whole, in parts that fit a slot and a record") {
  for (const auto kind : {ProcessJob::Kind::read, ProcessJob::Kind::write}) {
    TestGuest guest;
    std::vector<ProcessRange> shapes[] = {
        {{5, 1}}, {{0, 65536}}, {{3, 65537}}, {{100, 200'000}}, {{7, 8}, {1000, 65536}, {70'000, 3}}, {}};
    for (std::uint64_t i = 0; i < 100; ++i) shapes[5].push_back({i * 5000 + i % 8, 1 + i * 37 % 4000});
    for (const auto& ranges : shapes) {
      auto job = job_over(kind, ranges);
      for (std::size_t i = 0; i < job->buffer.size(); ++i) job->buffer[i] = static_cast<std::byte>(i * 7 + 1);
      const auto before = kind == ProcessJob::Kind::write ? job->buffer : std::vector<std::byte>();
      REQUIRE(guest.copier->submit(std::move(job)));
      for (int turns = 0; guest.sink.back.empty() && turns < 1000; ++turns) {
        while (guest.work()) {
        }
        REQUIRE(guest.copier->collect());
      }
      REQUIRE(guest.sink.back.size() == 1);
      const auto done = std::move(guest.sink.back.back());
      guest.sink.back.clear();
      CHECK(done->ok);
      const auto& expected = kind == ProcessJob::Kind::write ? before : done->buffer;
      std::size_t at = 0;
      for (const auto& range : ranges) {
        CHECK(std::memcmp(guest.memory.data() + range.address, expected.data() + at, range.bytes) == 0);
        at += range.bytes;
      }
    }
  }
}

TEST_CASE("More jobs than slots wait their turn, and a large one lets small ones pass between its parts") {
  TestGuest guest;
  REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 1 << 20}})));
  for (int i = 0; i < 100; ++i) REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{static_cast<std::uint64_t>(i), 8}})));
  for (int turns = 0; guest.sink.back.size() < 101 && turns < 1000; ++turns) {
    std::size_t under_way = 0;
    while (guest.work()) ++under_way;
    CHECK(under_way <= slot_count);
    REQUIRE(guest.copier->collect());
  }
  REQUIRE(guest.sink.back.size() == 101);
  CHECK(guest.sink.back.back()->buffer.size() == 1 << 20);  // 16 parts: the last to be ready
  CHECK(std::memcmp(guest.sink.back.back()->buffer.data(), guest.memory.data(), 1 << 20) == 0);
}

TEST_CASE("An error of the guest's ends the job, and a closed copier gives all jobs back as failed") {
  TestGuest guest;
  REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::write, {{0, 200'000}})));
  guest.answer(1, EFAULT);
  REQUIRE(guest.copier->collect());
  REQUIRE(guest.sink.back.size() == 1);
  CHECK_FALSE(guest.sink.back[0]->ok);
  for (int i = 0; i < 40; ++i) REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 8}})));
  guest.copier->close();
  REQUIRE(guest.sink.back.size() == 41);
  for (const auto& job : guest.sink.back) CHECK_FALSE(job->ok);
}

TEST_CASE("A guest that answers what it was not asked is found out") {
  SUBCASE("without a job") {
    TestGuest guest;
    guest.answer(1, 0);
    CHECK_FALSE(guest.copier->collect());
  }
  SUBCASE("another job than the oldest") {
    TestGuest guest;
    for (int i = 0; i < 2; ++i) REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 8}})));
    guest.answer(2, 0);
    CHECK_FALSE(guest.copier->collect());
  }
  SUBCASE("twice") {
    TestGuest guest;
    REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 8}})));
    guest.answer(1, 0);
    guest.answer(1, 0);
    CHECK_FALSE(guest.copier->collect());
    CHECK(guest.sink.back.size() == 1);
  }
  SUBCASE("by a record of many slots") {
    TestGuest guest;
    REQUIRE(guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 8}})));
    guest.answers.publish(1, 0, 0, 8);
    CHECK_FALSE(guest.copier->collect());
  }
}

TEST_CASE("A guest that never answers is given no more than it can hold, and refused in the end") {
  TestGuest guest;
  std::size_t taken = 0;
  while (taken < 100'000 && guest.copier->submit(job_over(ProcessJob::Kind::read, {{0, 8}}))) ++taken;
  CHECK(taken == jobs_max);
  std::size_t seen = 0;
  while (guest.work()) ++seen;
  CHECK(seen == slot_count);
}
