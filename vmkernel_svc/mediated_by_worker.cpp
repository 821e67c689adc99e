// What MediatedPorts does with memory that is not mapped in the service: its owner's worker (memory/guest_copier.hpp) reads or writes it, the
// queue pair waits meanwhile, and what would change memory can be called off.
#include <algorithm>
#include <cstring>

#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/mediated_ports.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"

namespace vrdma::svc {

using engine::MemoryStatus;
using engine::Place;

namespace {

// The parts of [offset, offset + bytes) of a region: mapped(host, bytes) or process(address, bytes), in order.
template <class Mapped, class Process>
void for_each_part(const Region& region, std::uint64_t offset, std::uint64_t bytes, Mapped&& mapped, Process&& process) {
  while (bytes != 0) {
    const Piece& piece = region.piece_at(offset);
    const std::uint64_t within = offset - piece.offset;
    const std::uint64_t part = std::min(bytes, piece.bytes - within);
    if (piece.host != nullptr)
      mapped(piece.host + within, part);
    else
      process(piece.address + within, part);
    offset += part, bytes -= part;
  }
}

bool by_process(const Region& region, std::uint64_t offset, std::uint64_t bytes) {
  bool found = false;
  for_each_part(region, offset, bytes, [](std::byte*, std::uint64_t) {}, [&](std::uint64_t, std::uint64_t) { found = true; });
  return found;
}

}  // namespace

// A worker takes so many jobs at a time; who finds no room stands in line, and is called when there is some, however often it is looked at before.
// Who comes is given none that somebody waits for or has been called for. Who is called at one worker and finds none at the other is the next there.
// Whoever will write has its place from the beginning, so that what has been read never waits for room.
bool MediatedPorts::must_wait_for_room(Qp& qp, Guest* writer, Guest* reader) {
  QpPort& port = qp.port;
  const bool has_waited = port.waiting != 0;
  if (has_waited && !port.called && fabric_.guest(port.waits_for) != nullptr) return true;
  Guest* const called_by = std::exchange(port.called, false) ? fabric_.guest(port.waits_for) : nullptr;  // which has taken it out of its line for that
  if (called_by != nullptr) --called_by->called_for_room;
  for (Guest* const guest : {writer, reader}) {
    if (guest == nullptr) continue;
    const bool is_free = called_by != nullptr ? guest->room_for_jobs() != 0 : guest->waiting_for_room.empty() && guest->may_call_for_room();
    if (is_free) continue;
    stand_in_line(qp, *guest, has_waited);
    call_next(*guest);  // all others in the line may have left it
    if (called_by != nullptr && called_by != guest) call_next(*called_by);
    return true;
  }
  leave_line(qp);
  port.has_moved_up |= has_waited;
  if (called_by != nullptr && called_by != writer && called_by != reader) call_next(*called_by);
  if (writer != nullptr) ++writer->jobs, port.has_room_at = writer->id;
  return false;
}

// In a line, the others' turns are no time that it waits for its own copy: a worker that gets on comes to it. With a place it has to be served soon.
bool MediatedPorts::moved_up(Qp& qp) {
  QpPort& port = qp.port;
  if (std::exchange(port.has_moved_up, false)) return true;
  const Guest* const guest = port.waiting != 0 ? fabric_.guest(port.waits_for) : nullptr;
  return guest != nullptr && std::exchange(port.jobs_ended_seen, guest->jobs_ended) != guest->jobs_ended;
}

void MediatedPorts::stand_in_line(Qp& qp, Guest& guest, bool at_its_head) {
  leave_line(qp);
  qp.port.waiting = fabric_.waiting.add(qp);
  qp.port.waits_for = guest.id;
  qp.port.jobs_ended_seen = guest.jobs_ended;
  auto& line = guest.waiting_for_room;
  line.insert(at_its_head ? line.begin() : line.end(), qp.port.waiting);
  constexpr std::size_t left_kept = 1024;  // numbers of those who have left
  if (line.size() > 2 * fabric_.waiting.size() + left_kept) std::erase_if(line, [this](std::uint64_t number) { return fabric_.waiting.find(number) == nullptr; });
}

// Neither waits for room any more, nor has any.
void MediatedPorts::give_up_room(Qp& qp) {
  leave_line(qp);
  Guest* const guest = fabric_.guest(std::exchange(qp.port.has_room_at, GuestId{}));
  if (guest == nullptr) return;
  --guest->jobs;
  call_next(*guest);
}

void MediatedPorts::leave_line(Qp& qp) {
  QpPort& port = qp.port;
  if (port.waiting == 0) return;
  fabric_.waiting.remove(std::exchange(port.waiting, 0));
  Guest* const guest = std::exchange(port.called, false) ? fabric_.guest(port.waits_for) : nullptr;
  if (guest == nullptr) return;
  --guest->called_for_room;
  call_next(*guest);  // it does not come
}

void MediatedPorts::call_next(Guest& guest) {
  auto& line = guest.waiting_for_room;
  while (!line.empty() && guest.may_call_for_room()) {
    Qp* const next = fabric_.waiting.find(line.front());
    line.pop_front();
    if (next == nullptr) continue;  // it has left
    next->port.called = true;
    ++guest.called_for_room;
    runner_.make_runnable(*next);
  }
}

bool MediatedPorts::frozen(const Place& place) {
  if (place.kind != Place::Kind::registered) return false;
  const Region* const region = fabric_.regions.reach(place.region, place.generation, 0).region;
  return region != nullptr && region->frozen;
}

// Gather into a buffer, scatter from it; whichever side has bytes in the guest's process goes by that guest's worker, and the
// other parts are copied here. Repeated with the same arguments until done: the state is in qp.port, and nothing of it remains then.
MemoryStatus MediatedPorts::copy_by_worker(Qp& qp, const Place& to, const Place& from, std::uint64_t bytes) {
  QpPort& port = qp.port;
  if (port.job_sequence != 0 && !port.finished_job) return MemoryStatus::pending;
  if (frozen(to) || frozen(from)) return leave_line(qp), MemoryStatus::pending;  // what a job has brought waits, too
  const std::unique_ptr<ProcessJob> job = std::move(port.finished_job);
  port.job_sequence = 0;
  const auto ends = [&](MemoryStatus status) { return give_up_room(qp), status; };

  const auto reached = [&](const Place& place) {
    return place.kind == Place::Kind::registered ? fabric_.regions.reach(place.region, place.generation, place.address) : RegionTable::Reached{};
  };
  const auto [source, source_slot, source_at] = reached(from);
  const auto [destination, destination_slot, destination_at] = reached(to);
  if (from.kind == Place::Kind::registered && source == nullptr) return ends(MemoryStatus::source_fault);
  if (to.kind == Place::Kind::registered && destination == nullptr) return ends(MemoryStatus::destination_fault);
  if (job && job->kind == ProcessJob::Kind::write) return ends(job->ok ? MemoryStatus::done : MemoryStatus::destination_fault);
  if (job && !job->ok) return ends(MemoryStatus::source_fault);
  if (!job) {
    // What has begun may come to its end, but nothing more begins, or others' streams would keep a worker at it for ever.
    if (source != nullptr && source->leaving) return ends(MemoryStatus::source_fault);
    if (destination != nullptr && destination->leaving) return ends(MemoryStatus::destination_fault);
    Guest* const writer = destination != nullptr && by_process(*destination, destination_at, bytes) ? destination->guest : nullptr;
    Guest* const reader = source != nullptr && by_process(*source, source_at, bytes) ? source->guest : nullptr;
    if (must_wait_for_room(qp, writer, reader)) return MemoryStatus::pending;
  }

  std::vector<std::byte> buffer;
  std::vector<ProcessRange> ranges;
  if (!job && source != nullptr)
    for_each_part(*source, source_at, bytes, [](std::byte*, std::uint64_t) {},
                  [&](std::uint64_t address, std::uint64_t part) { ranges.push_back({address, part}); });
  if (!ranges.empty()) {
    auto read = std::make_unique<ProcessJob>();
    read->kind = ProcessJob::Kind::read;
    std::uint64_t total = 0;
    for (const auto& range : ranges) total += range.bytes;
    read->buffer.resize(total);
    read->ranges = std::move(ranges);
    return submit(qp, from, *source, source_slot, std::move(read)) ? MemoryStatus::pending : ends(MemoryStatus::source_fault);
  }

  // All of the source is at hand now: assemble it.
  buffer.resize(bytes);
  if (source == nullptr) {
    std::memcpy(buffer.data(), reinterpret_cast<const std::byte*>(from.address), bytes);
  } else {
    const BusGuard::Access access;
    std::byte* at = buffer.data();
    const std::byte* read = job ? job->buffer.data() : nullptr;
    for_each_part(*source, source_at, bytes,
                  [&](std::byte* host, std::uint64_t part) { std::memcpy(at, host, part), at += part; },
                  [&](std::uint64_t, std::uint64_t part) { std::memcpy(at, read, part), at += part, read += part; });
    if (access.failed()) return ends(MemoryStatus::source_fault);
  }

  if (destination == nullptr) {
    std::memcpy(reinterpret_cast<std::byte*>(to.address), buffer.data(), bytes);
    return ends(MemoryStatus::done);
  }
  auto write = std::make_unique<ProcessJob>();
  write->kind = ProcessJob::Kind::write;
  const std::byte* at = buffer.data();
  bool lost = false;
  for_each_part(*destination, destination_at, bytes,
                [&](std::byte* host, std::uint64_t part) {
                  const BusGuard::Access access;
                  vmci::placement_copy(host, at, part), at += part;
                  lost |= access.failed();
                },
                [&](std::uint64_t address, std::uint64_t part) {
                  write->ranges.push_back({address, part});
                  write->buffer.insert(write->buffer.end(), at, at + part);
                  at += part;
                });
  if (lost) return ends(MemoryStatus::destination_fault);
  if (write->ranges.empty()) return ends(MemoryStatus::done);
  return submit(qp, to, *destination, destination_slot, std::move(write)) ? MemoryStatus::pending : ends(MemoryStatus::destination_fault);
}

bool MediatedPorts::submit(Qp& qp, const Place& place, Region& region, std::uint32_t slot, std::unique_ptr<ProcessJob> job) {
  job->qpn = qp.qpn.value;
  job->slot = slot;
  job->generation = region.generation;
  job->of = region.guest->id;
  job->shard = runner_.number();
  const std::uint64_t sequence = job->sequence = fabric_.jobs.add(qp);
  QpPort& port = qp.port;
  port.leash = job->leash = job->changes_memory() ? std::make_shared<WriteLeash>() : nullptr;
  const bool takes_its_room = job->changes_memory();
  port.reaches = region.guest->id;
  port.reached_by = {place.region, place.generation};
  if (!region.guest->submit(std::move(job))) return fabric_.jobs.remove(sequence), call_next(*region.guest), false;  // the place stays free
  region.job_begins();
  if (takes_its_room) port.has_room_at = {};
  else ++region.guest->jobs;
  port.job_sequence = sequence;
  return true;
}

void MediatedPorts::cut_off(Qp& qp) {
  const auto leash = std::exchange(qp.port.leash, nullptr);
  if (leash == nullptr || leash->call_off()) return;
  Guest* const guest = fabric_.guest(qp.port.reaches);
  if (guest == nullptr) return;
  const std::uint32_t to = qp.accepted_by != nullptr ? qp.accepted_by->qpn.value : 0;
  guest->last_steps.push_back({leash, vmci::monotonic_ns(), qp.qpn.value, to, qp.port.reached_by});
}

void MediatedPorts::cut_off(const RegionRef& window) {
  fabric_.jobs.for_each([&](Qp& waiting) {
    if (waiting.port.reached_by == window) cut_off(waiting);
  });
}

bool MediatedPorts::is_reached_by(const RegionRef& window) const {
  bool found = false;
  fabric_.jobs.for_each([&](const Qp& waiting) { found |= waiting.port.reached_by == window; });
  return found;
}

namespace {
template <class Concerns>
std::uint64_t look_again_ns(Guest& guest, const Concerns& concerns) {
  constexpr std::uint64_t soonest_ns = 50'000, latest_ns = 50'000'000;
  if (guest.last_steps.empty()) return 0;
  const std::uint64_t now = vmci::monotonic_ns();
  std::erase_if(guest.last_steps, [&](const LastStep& step) { return step.leash->over() || now - step.since_ns >= MediatedPorts::last_step_max_ns; });
  std::uint64_t wait_ns = 0;
  for (const LastStep& step : guest.last_steps)
    if (concerns(step)) wait_ns = std::max(wait_ns, std::clamp((now - step.since_ns) / 8, soonest_ns, latest_ns));
  return wait_ns;
}
}  // namespace

std::uint64_t MediatedPorts::last_step_ns(Qp& qp) {
  if (qp.port.owner == nullptr) return 0;
  return look_again_ns(*qp.port.owner->guest, [number = qp.qpn.value](const LastStep& step) { return step.of == number || step.to == number; });
}
std::uint64_t MediatedPorts::last_step_ns(Guest& guest, const RegionRef& window) {
  return look_again_ns(guest, [&](const LastStep& step) { return step.by == window; });
}

void MediatedPorts::abandon(Qp& qp) {
  cut_off(qp);
  give_up_room(qp);
  qp.port.window_changed.reset();
  qp.port.window_since_ns = 0;
  qp.port.copied = 0;
  if (qp.port.job_sequence == 0) return;
  fabric_.jobs.remove(qp.port.job_sequence);  // the sink drops it when it comes back, if it does
  qp.port.job_sequence = 0;
  qp.port.finished_job.reset();
}

MemoryStatus MediatedPorts::atomic_by_worker(Qp& qp, const Place& place, ProcessJob::Kind kind, std::uint64_t operand,
                                             std::uint64_t compare, std::uint64_t& old_value) {
  QpPort& port = qp.port;
  if (port.job_sequence != 0) {
    if (!port.finished_job) return MemoryStatus::pending;
    const auto job = std::move(port.finished_job);
    port.job_sequence = 0;
    old_value = job->value;
    return job->ok ? MemoryStatus::done : MemoryStatus::destination_fault;
  }
  const auto [region, slot, at] = fabric_.regions.reach(place.region, place.generation, place.address);
  if (region == nullptr || region->leaving) return give_up_room(qp), MemoryStatus::destination_fault;
  if (region->frozen) return leave_line(qp), MemoryStatus::pending;
  if (must_wait_for_room(qp, region->guest, nullptr)) return MemoryStatus::pending;
  const Piece& piece = region->piece_at(at);
  auto job = std::make_unique<ProcessJob>();
  job->kind = kind;
  job->operand = operand;
  job->compare = compare;
  job->ranges.push_back({piece.address + (at - piece.offset), 8});
  if (submit(qp, place, *region, slot, std::move(job))) return MemoryStatus::pending;
  return give_up_room(qp), MemoryStatus::destination_fault;
}

}  // namespace vrdma::svc
