// The engine's ports in direct mode: the posting thread runs the engine on its own send queue and its peer's receive queue, which
// the claim of the direction (vrdma/direct.hpp) gives it for that time.
//
// Only what goes well is carried out here. Whatever else the engine comes to (no receive WQE, a wrong key, memory that is out of reach,
// an error of any kind) is noted as given_up() before anybody could see it; the caller then forgets the turn, and the service
// carries the same WQE out from its start. Hence: after the first completion of a message, or its atomic operation, nothing of it can
// fail. The claim can be revoked while this thread stands still: before that point, the message is then given up, too.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "guest_lib/direct/peer_memory.hpp"
#include "guest_lib/direct/peer_queue.hpp"
#include "guest_lib/direct/reached_process.hpp"
#include "guest_lib/single_thread.hpp"
#include "vmci_channel/arch.hpp"
#include "vmci_channel/claimed_stores.hpp"
#include "vmci_channel/memcheck.hpp"
#include "vmci_channel/placement_copy.hpp"
#include "vmci_channel/record_turns.hpp"
#include "vmkernel_svc/engine/engine.hpp"
#include "vmkernel_svc/engine/grh.hpp"
#include "vrdma/control.hpp"
#include "vrdma/direct.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

// One guest's registered memory: its keys, as the service publishes them, its files, as this process maps them, and what lies in none.
struct ReachedGuest {
  const direct::KeyTable* keys = nullptr;
  PeerMemory* memory = nullptr;
  ReachedProcess* process = nullptr;
  std::uint32_t pd = 0;  // direct::pd_number()
  const direct::LetGo* let_go = nullptr;  // where `memory` has to catch up with that
};

// The peer's receive queue where it is a shared one: others take from it meanwhile.
struct SharedReceives {
  vmci::RecordTurns turns;
  std::uint32_t taker = 0;
  direct::Taking* taking = nullptr;         // this direction's
  const std::uint32_t* posted = nullptr;    // how many records there are
};

// What a receiver of datagrams is told of their sender.
struct DatagramSource {
  bool has_grh = false;
  control::GidEntry gid{};
  std::uint16_t lid = 0;
};

class DirectPorts {
 public:
  using Qp = engine::Qp<DirectPorts>;
  using Srq = engine::Srq<DirectPorts>;
  struct QpPort {};
  struct SrqPort {};
  struct Unmapped {  // what a message needed and was not there
    bool peers = false;
    std::uint32_t backing = 0;  // backing_process: what is reached through the process
    std::uint64_t offset = 0, bytes = 0;
    bool needed = true;  // else it would only be faster
  };

  // sent, received: where completions go, of this end and of the far one.
  DirectPorts(const vmci::ClaimedStores& stores, ReachedGuest own, ReachedGuest peer, const Told& sent, const Told& received, Qp& far_end,
              Cqe* far_entries, SharedReceives shared, const DatagramSource& source = {})
      : stores_(stores), own_(own), peer_(peer), sent_to_(sent), received_at_(received), far_end_(far_end), far_entries_(far_entries),
        shared_(shared), source_(source) {}

  void begin() {
    given_up_ = certain_ = turn_lost_ = through_process_ = into_receive_ = false;
    stamp_ = 0;
    if (shared_.turns) seek_receive();
  }
  // From a shared receive queue: the record that is next now, …
  void seek_receive() {
    turn_taken_ = false;
    receive_buffers_ = 0;
    named_ = {};
    last_turn_ = shared_.turns.last();
    far_end_.receive_ring.skip_to(vmci::RecordTurns::next(last_turn_) * far_end_.receive_record_slots);
  }
  // … and to take it, once nothing else can be in the way. False: another has it, or the service is to take it, or carry out all of it:
  // the engine goes on with what was given up where it can (a WRITE with immediate needs no receive buffer), and takes nothing for it.
  bool take_turn(std::uint64_t wr_id) {
    if (given_up_) return false;
    if (!shared_.turns || turn_taken_) return true;
    const std::uint32_t index = vmci::RecordTurns::next(last_turn_), limit = shared_.turns.limit();
    if (limit != 0 && posted() - (index + 1) < limit) return false;
    direct::Taking& taking = *shared_.taking;
    taking.wr_id = wr_id;
    taking.buffer = named_;
    // G3: pairs with G4 in the service's DirectDesk::settle_turn, should this process end here, or stand still.
    std::atomic_ref(taking.index).store(index, std::memory_order_release);
    VRDMA_CRASH_POINT("direct.guest.turn_named");
    turn_taken_ = shared_.turns.take(last_turn_, shared_.taker, stores_);
    turn_lost_ = !turn_taken_;
    if (turn_taken_) VRDMA_CRASH_POINT("direct.guest.turn_taken");
    return turn_taken_;
  }
  // Whether the message was given up only because another poster was faster.
  bool turn_lost() const { return turn_lost_; }
  // Whether a record was taken for a message that was given up then: the service's to give back.
  bool owes_turn() const { return shared_.taking != nullptr && shared_.taking->unfinished != 0; }
  bool shares() const { return static_cast<bool>(shared_.turns); }
  // After the last record that this direction has taken, if it took one since begin().
  std::uint32_t taken(std::uint32_t before) const { return turn_taken_ ? vmci::RecordTurns::next(last_turn_) + 1 : before; }
  // The service had the direction meanwhile: keys may mean something else, or nothing.
  void forget_keys() {
    found_[0] = found_[1] = {}, runs_[0] = runs_[1] = {};
    if (peer_.let_go != nullptr) peer_.memory->catch_up(*peer_.let_go);
  }
  bool given_up() const { return given_up_; }
  // An unreliable message that the engine has dropped, which is the service's to count.
  bool dropped() const { return far_end_.counters.dropped != 0; }
  bool has_unmapped() const { return unmapped_.has_value(); }
  std::optional<Unmapped> take_unmapped() { return std::exchange(unmapped_, std::nullopt); }
  const Told& sent_to() const { return sent_to_; }
  const Told& received_at() const { return received_at_; }
  // Whether completions were written since the last call.
  bool take_sent() { return std::exchange(sent_, false); }
  bool take_received() { return std::exchange(received_, false); }
  bool take_solicited() { return std::exchange(solicited_, false); }  // … with that event, at the receiver

  std::optional<engine::Place> find(Qp&, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    engine::Place place;
    return find(place, key, address, bytes, access) ? std::optional(place) : std::nullopt;
  }
  // The same for who has a place already, which then stays in registers. False: there is none.
  bool find(engine::Place& place, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    return look(place, access & engine::access_remote_any ? peer_ : own_, key, address, bytes, access);
  }
  // The buffer of a record that is about to be taken without being written to: with it, the record goes back should this process end.
  void name_receive(const Sge& buffer) { named_ = buffer; }
  std::optional<engine::Place> find_receive(Qp&, Key key, std::uint64_t address, std::uint64_t bytes) {
    engine::Place place;
    // Given up: what is missing is known already.
    return !given_up_ && find_receive(place, {address, static_cast<std::uint32_t>(bytes), key.value}, bytes) ? std::optional(place) : std::nullopt;
  }
  // Of `buffer`, what a message of so many bytes writes to: it may end beyond its region.
  bool find_receive(engine::Place& place, const Sge& buffer, std::uint64_t bytes) {
    VRDMA_CRASH_POINT("direct.guest.receive_taken");
    // One that was taken and not completed is given back, with the one buffer that its poster can put on record.
    if (receive_buffers_++ != 0 && shared_.turns) return give_up(), false;
    named_ = buffer;
    into_receive_ = true;
    return look(place, peer_, Key{buffer.lkey}, buffer.address, bytes, engine::access_local_write);
  }
  [[gnu::always_inline]] engine::MemoryStatus copy(Qp&, const engine::Place& to, const engine::Place& from, std::uint64_t bytes) {
    if (given_up_ || (far_end_.inbound.active && !take_turn(far_end_.inbound.wr_id))) return give_up(), engine::MemoryStatus::destination_fault;
    if (through_process_ && (is_elsewhere(to) || is_elsewhere(from))) [[unlikely]] {
      const engine::Place into = to, out_of = from;  // so that those, whose addresses nobody has then, stay in registers
      return copy_through_process(into, out_of, bytes);
    }
    auto* const target = reinterpret_cast<std::byte*>(to.address);
    const auto* const source = reinterpret_cast<const std::byte*>(from.address);
    if (certain_) vmci::placement_copy(target, source, bytes);
    else if (!stores_.copy(target, source, bytes)) return give_up(), engine::MemoryStatus::destination_fault;
    VRDMA_CRASH_POINT("direct.guest.copied");
    return engine::MemoryStatus::done;
  }
  engine::MemoryStatus fetch_and_add(Qp&, const engine::Place& place, std::uint64_t add, std::uint64_t& old_value) {
    if (!can_be_atomic(place)) return give_up(), engine::MemoryStatus::destination_fault;
    old_value = add;
    return carried_out(stores_.fetch_add(word(place), old_value));
  }
  engine::MemoryStatus compare_and_swap(Qp&, const engine::Place& place, std::uint64_t compare, std::uint64_t swap, std::uint64_t& old_value) {
    if (!can_be_atomic(place)) return give_up(), engine::MemoryStatus::destination_fault;
    old_value = compare;
    return carried_out(stores_.compare_and_swap(word(place), old_value, swap));
  }
  // To where such an operation wants it: mapped, and nothing of it can fail any more (can_be_atomic, certain_).
  void return_value(const engine::Place& to, std::uint64_t old_value) {
    vmci::placement_copy(reinterpret_cast<std::byte*>(to.address), reinterpret_cast<const std::byte*>(&old_value), sizeof(old_value));
    VRDMA_CRASH_POINT("direct.guest.copied");
  }
  void abandon(Qp&) {}

  [[gnu::always_inline]] bool complete(Qp& qp, engine::Direction direction, Cqe& cqe, CqeState state) {
    const bool send = direction == engine::Direction::send;
    if (state.status != WcStatus::success || given_up_ || dropped()) return give_up(), true;
    if (!send && !take_turn(cqe.wr_id)) return give_up(), true;
    const Told& to = send ? sent_to_ : received_at_;
    bool cold = false;  // who polls is told at once, so as to find this before what is done because of it; the event can wait for the end of the turn
    if (to.wants_stamps()) {
      // One for the message: its receiver's answer is later than both.
      if (stamp_ == 0) stamp_ = vmci::stamp_now();
      vmci::put_stamp(cqe, state, send, stamp_);
      cold = !to.is_hot() && (!send || !single_threaded());
    }
    VRDMA_CRASH_POINT("direct.guest.before_cqe");
    if (send) qp.send_lane.push(cqe, pack(state));
    else if (!push_to_peer(qp.receive_lane, far_entries_, cqe, pack(state), stores_)) return give_up(), true;
    VRDMA_CRASH_POINT("direct.guest.cqe_written");
    if (cold && send) [[unlikely]] vmci::ReadyBitmap(&to.cq->ready).set(to.lane);
    else if (cold) [[unlikely]] set_peers_bit(to.cq->ready, to.lane, stores_);  // where the claim is lost, the service sets it
    (send ? sent_ : received_) = certain_ = true;
    solicited_ |= !send && (state.flags & wc_solicited) != 0;
    return true;
  }
  void event(Qp&, engine::AsyncEvent) { give_up(); }
  std::optional<WcStatus> change_window(Qp&) { return give_up(), std::nullopt; }
  void srq_limit(Srq&) { give_up(); }
  std::uint32_t srq_posted(Srq&) { return 0; }
  void srq_wanted(Srq&) {}
  bool immediate_follows(Qp&) { return false; }
  void state_changed(Qp&) { give_up(); }
  void await_receive(Qp&, Qp&) { give_up(); }
  std::uint64_t now_ns() { return 0; }
  void wake_at(Qp&, std::uint64_t) { give_up(); }

  Qp* peer(Qp&) { return &far_end_; }
  Qp* datagram_peer(Qp&, const UdOperand&) { return &far_end_; }  // whose path it is
  Qp* multicast_peer(Qp&, const UdOperand&, std::uint32_t) { return nullptr; }
  bool leads_back(Qp&, Qp&) { return true; }  // else the service would not have offered the connection
  bool write_grh(Qp&, Qp&, const UdOperand& ud, std::uint32_t packet_bytes, std::byte* bytes) {
    if (source_.has_grh) engine::write_grh_bytes(source_.gid, ud, packet_bytes, bytes);
    else std::memset(bytes, 0, engine::grh_bytes);
    return source_.has_grh;
  }
  std::uint16_t lid(Qp&) { return source_.lid; }
  std::uint8_t sl(Qp&, const UdOperand& ud) { return engine::sl_to_tell(source_.gid, ud); }
  const DatagramSource& source() const { return source_; }

 private:
  void give_up() { given_up_ = true; }
  std::uint32_t posted() const { return std::atomic_ref(const_cast<std::uint32_t&>(*shared_.posted)).load(std::memory_order_acquire); }
  engine::MemoryStatus carried_out(bool stored) {
    if (!stored) return give_up(), engine::MemoryStatus::destination_fault;
    certain_ = true;
    return engine::MemoryStatus::done;
  }

  // Places that are not mapped here, or not all of what is wanted there: `address` in the memory of this process (region 0), as the program
  // has it, or of the peer's (1), by the key that is its generation.
  static engine::Place elsewhere(bool peers, std::uint32_t key, std::uint64_t address) {
    return {engine::Place::Kind::registered, peers, key, address};
  }
  static bool is_elsewhere(const engine::Place& place) { return place.kind == engine::Place::Kind::registered; }
  // Not where memory is reached through a process: a word there, or the old value on its way back, could yet fail.
  bool can_be_atomic(engine::Place place) const { return !given_up_ && !through_process_ && place.address % 8 == 0; }

  // What of a key's region is mapped after all: between pages that it fills only in part lie whole ones. The last key of each side.
  struct Run {
    std::uint64_t key = 0, begin = 0, end = 0;  // addresses
    std::byte* data = nullptr;
  };
  static constexpr std::uint64_t run_bytes_min = 16384;  // below it, one system call more costs as much as it saves
  struct Span {
    std::byte* data;  // nullptr: to be reached through the process
    std::uint64_t bytes;
  };
  Span span(engine::Place place, std::uint64_t bytes) const {
    if (!is_elsewhere(place)) return {reinterpret_cast<std::byte*>(place.address), bytes};
    const Run& run = runs_[place.region];
    if (run.key != place.generation) return {nullptr, bytes};
    if (place.address < run.begin) return {nullptr, std::min(bytes, run.begin - place.address)};
    if (place.address >= run.end) return {nullptr, bytes};
    return {run.data + (place.address - run.begin), std::min(bytes, run.end - place.address)};
  }
  // What a key names of a file.
  struct FilePart {
    std::uint64_t address, bytes;
    std::uint32_t backing;
    std::uint64_t offset;
  };
  // What of it is mapped in one piece, too.
  struct Overlap {
    std::uint64_t address, bytes;
    std::byte* data;
  };
  static Overlap overlap(const FilePart& part, const PeerMemory::Part& mapped) {
    const std::uint64_t first = std::max(part.offset, mapped.offset);
    const std::uint64_t end = std::min(part.offset + part.bytes, mapped.offset + mapped.bytes);
    return {part.address + (first - part.offset), end - first, mapped.data + (first - mapped.offset)};
  }
  void note_run(const ReachedGuest& guest, std::uint32_t key, const direct::KeyRegion& region, std::uint32_t backing, std::uint64_t offset,
                std::uint64_t bytes) {
    const bool peers = &guest == &peer_;
    const std::uint64_t begin = std::max(offset, region.mapped_from), end = std::min(offset + bytes, region.mapped_from + region.mapped_bytes);
    runs_[peers] = {};
    if (end < begin + run_bytes_min) return;
    const std::uint64_t in_file = region.backing_offset + (begin - region.mapped_from);
    const PeerMemory::Part mapped = guest.memory->around(backing, in_file, end - begin);
    if (mapped.data == nullptr) {
      unmapped_ = {peers, backing, in_file, end - begin, false};  // for the next message
      return;
    }
    // Several buffers of a message may lie there.
    const Overlap part = overlap({region.address + region.mapped_from, region.mapped_bytes, backing, region.backing_offset}, mapped);
    vmci::memcheck::show(part.data, part.bytes);
    runs_[peers] = {key, part.address, part.address + part.bytes, part.data};
  }

  [[gnu::noinline]] engine::MemoryStatus copy_through_process(const engine::Place& to, const engine::Place& from, std::uint64_t bytes) {
    for (std::uint64_t moved = 0; moved < bytes;) {
      const engine::Place into = to + moved, out_of = from + moved;
      const std::uint64_t rest = bytes - moved;
      const Span target = span(into, rest);
      Span source = span(out_of, rest);
      // The last word is not cut where its source is: somebody may look at it.
      if (source.bytes < rest && rest - source.bytes < vmci::ordered_tail_bytes) {
        if (rest > vmci::ordered_tail_bytes) source.bytes = rest - vmci::ordered_tail_bytes;
        else source = {nullptr, rest};
      }
      const std::uint64_t part = std::min(target.bytes, source.bytes);
      const bool done = target.data != nullptr && source.data != nullptr ? stores_.copy(target.data, source.data, part)
                        : source.data == nullptr && (target.data != nullptr || out_of.region != 0) ? read_through(out_of, into, target.data, part)
                                                                                                   : write_through(into, out_of, source.data, part);
      if (!done) {
        if (turn_taken_) shared_.taking->unfinished = 1;
        return give_up(), engine::MemoryStatus::destination_fault;
      }
      moved += part;
      VRDMA_CRASH_POINT("direct.guest.copied_by_process");
    }
    return engine::MemoryStatus::done;
  }
  // The end that is not mapped is reached through its process, the peer's rather than this one; the other one is a pointer: this process's
  // memory, where the program has it, may fault like the other.
  bool read_through(engine::Place from, engine::Place to, std::byte* data, std::uint64_t bytes) const {
    if (data == nullptr) data = reinterpret_cast<std::byte*>(to.address);
    return process_of(from).read(from.address, data, bytes, from.region != 0 ? ReachedProcess::Order::any : order_at_peer(), stores_);
  }
  bool write_through(engine::Place to, engine::Place from, const std::byte* data, std::uint64_t bytes) const {
    if (data == nullptr) data = reinterpret_cast<const std::byte*>(from.address);
    return process_of(to).write(to.address, data, bytes, to.region != 0 ? order_at_peer() : ReachedProcess::Order::any, stores_);
  }
  const ReachedProcess& process_of(engine::Place place) const { return *(place.region != 0 ? peer_ : own_).process; }
  // A message that needs a receive request, or is read, has no reader before its completion.
  ReachedProcess::Order order_at_peer() const { return into_receive_ ? ReachedProcess::Order::any : ReachedProcess::Order::tail_last; }

  // Memory that a key was found for, while the direction is ours: so long no key is taken away.
  struct Found {
    std::uint32_t key = 0, access = 0;
    std::uint64_t address = 0, bytes = 0;
    std::byte* data = nullptr;
  };

  [[gnu::always_inline]] bool look(engine::Place& place, const ReachedGuest& guest, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    const Found& last = found_[&guest == &peer_];
    const std::uint64_t offset = address - last.address;
    if (key.value != last.key || (access & ~last.access) != 0 || offset > last.bytes || bytes > last.bytes - offset || bytes > direct::message_bytes_max)
        [[unlikely]] {
      const std::optional<engine::Place> found = look_up(guest, key, address, bytes, access);
      if (found) place = *found;
      return found.has_value();
    }
    if ((access & (engine::access_local_write | engine::access_remote_write)) != 0) vmci::prefetch_for_write(last.data + offset);
    place = engine::Place::in_engine(last.data + offset);
    return true;
  }

  [[gnu::noinline]] std::optional<engine::Place> look_up(const ReachedGuest& guest, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
    if (key.value == 0) return give_up(), std::nullopt;  // nobody's: a free entry says 0
    for (std::uint32_t probe = 0; probe < direct::key_probes; ++probe) {
      const std::uint32_t place = direct::key_place(key.value, probe);
      const direct::KeyEntry& entry = guest.keys->entries[place];
      // T1: pairs with T2 in the service's KeyBook::add: what the entry says was written before its key.
      if (std::atomic_ref(const_cast<std::uint32_t&>(entry.key)).load(std::memory_order_acquire) != key.value) continue;
      if (entry.pd != guest.pd || (entry.file & access) != access || bytes > direct::message_bytes_max) break;
      const std::uint64_t offset = address - entry.address;
      if (offset <= entry.bytes && bytes <= entry.bytes - offset) [[likely]]
        return look_in(guest, key, {entry.address, entry.bytes, direct::key_backing(entry.file), entry.backing_offset}, entry.file, address, bytes);
      return look_around(guest, key, guest.keys->regions[place], entry.file, address, bytes);
    }
    give_up();
    return std::nullopt;
  }
  // Of what a key names of a file.
  std::optional<engine::Place> look_in(const ReachedGuest& guest, Key key, const FilePart& named, std::uint32_t access, std::uint64_t address,
                                       std::uint64_t bytes) {
    const std::uint64_t in_file = named.offset + (address - named.address);
    const PeerMemory::Part mapped = guest.memory->around(named.backing, in_file, bytes);
    if (mapped.data == nullptr) {
      unmapped_ = {&guest == &peer_, named.backing, in_file, bytes};
      give_up();
      return std::nullopt;
    }
    const Overlap part = overlap(named, mapped);
    vmci::memcheck::show(part.data, part.bytes);
    found_[&guest == &peer_] = {key.value, access, part.address, part.bytes, part.data};
    return engine::Place::in_engine(mapped.data + (in_file - mapped.offset));
  }
  // Of a region that does not lie in a file with all that is wanted, or far within it.
  std::optional<engine::Place> look_around(const ReachedGuest& guest, Key key, const direct::KeyRegion& region, std::uint32_t file, std::uint64_t address,
                                           std::uint64_t bytes) {
    const std::uint64_t offset = address - region.iova;
    if (address < region.iova || offset > region.bytes || bytes > region.bytes - offset) return give_up(), std::nullopt;
    const std::uint32_t backing = direct::key_backing(file);
    if (offset >= region.mapped_from && offset - region.mapped_from <= region.mapped_bytes && bytes <= region.mapped_bytes - (offset - region.mapped_from))
      return look_in(guest, key, {region.iova + region.mapped_from, region.mapped_bytes, backing, region.backing_offset}, file, address, bytes);
    if (region.address == 0 || !reaches(guest)) return give_up(), std::nullopt;
    through_process_ = true;
    note_run(guest, key.value, region, backing, offset, bytes);
    return elsewhere(&guest == &peer_, key.value, region.address + offset);
  }
  bool reaches(const ReachedGuest& guest) {
    const ReachedProcess::State state = guest.process->state();
    if (state == ReachedProcess::State::unknown) unmapped_ = {&guest == &peer_, control::backing_process, 0, 0};
    return state == ReachedProcess::State::opened;
  }
  static std::uint64_t* word(const engine::Place& place) { return reinterpret_cast<std::uint64_t*>(place.address); }

  const vmci::ClaimedStores& stores_;
  ReachedGuest own_, peer_;
  Told sent_to_, received_at_;
  Qp& far_end_;
  Cqe* far_entries_;  // of its receive lane
  SharedReceives shared_;
  DatagramSource source_;
  std::uint64_t last_turn_ = 0;
  Sge named_{};  // the buffer of the record that is looked at
  std::uint32_t receive_buffers_ = 0;
  bool turn_taken_ = false;
  bool sent_ = false, received_ = false, solicited_ = false;
  // Of the message, side by side: begin() clears them at once.
  std::uint64_t stamp_ = 0;  // 0: none yet
  bool given_up_ = false, turn_lost_ = false;
  bool certain_ = false;  // others can know that the message was carried out
  bool through_process_ = false;  // it needs memory that is not mapped here
  bool into_receive_ = false;     // it goes to a receive buffer
  Found found_[2];  // own, the peer's
  Run runs_[2];     // likewise
  std::optional<Unmapped> unmapped_;
};

}  // namespace vrdma::guest
