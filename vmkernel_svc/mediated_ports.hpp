// The engine's ports when a shard of the host service runs it: registered memory mapped in the service or reached through
// the guest's process, completions into the guest's lanes, events into its pipes, peers found among the service's guests.
//
// Each shard has its own, and uses them in its turns; whoever is alone (turnstile.hpp) may use any.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cache/generation_cache.hpp"
#include "vmci_channel/placement_copy.hpp"
#include "vmkernel_svc/engine/far_marks.hpp"
#include "vmkernel_svc/engine/ports.hpp"
#include "vmkernel_svc/engine/qp.hpp"
#include "vmkernel_svc/memory/process_memory.hpp"
#include "vmkernel_svc/memory/region.hpp"
#include "vrdma/control.hpp"

namespace vrdma::engine {
template <class P>
struct StandIn;
}

namespace vrdma::svc {

struct Guest;
struct QueuePair;
struct SharedReceiveQueue;
struct CompletionQueue;
class Fabric;
class Runner;
class MediatedPorts;
struct StandIn;
struct HcaConnection;
struct HcaShared;
struct DirectLink;

struct RouteKey {
  std::uint32_t qpn;
  std::uint16_t dlid;
  std::uint8_t link_layer;  // the sender's: it decides whether LID or GID counts
  std::uint16_t pkey;       // the sender's
  Gid dgid;
  bool operator==(const RouteKey&) const = default;
};
struct Route {
  engine::Qp<MediatedPorts>* peer = nullptr;
  bool refuses = false;  // its P_Key does not match the sender's
};
struct RouteKeyHash {
  std::size_t operator()(const RouteKey& key) const {
    std::uint64_t high, low;
    std::memcpy(&high, key.dgid.data(), 8);
    std::memcpy(&low, key.dgid.data() + 8, 8);
    return (static_cast<std::uint64_t>(key.qpn) << 32 | std::uint64_t{key.link_layer} << 16 | key.dlid) ^ std::uint64_t{key.pkey} << 40 ^ high * 31 ^ low;
  }
};

class MediatedPorts {
 public:
  using Qp = engine::Qp<MediatedPorts>;
  using Srq = engine::Srq<MediatedPorts>;

  // The last region that a key of this queue pair named: most programs use one (D9).
  struct KeyHint {
    std::uint32_t key = 0;
    std::uint32_t slot = 0;
    std::uint64_t generation = 0;
  };
  struct QpPort {
    QueuePair* owner = nullptr;    // nullptr: it stands in for a requester of another host, …
    StandIn* stand_in = nullptr;   // … this
    std::uint64_t pd = 0;
    KeyHint local_hint, remote_hint, receive_hint;
    Qp* peer = nullptr;
    std::uint16_t pkey = 0;             // what its packets bear and take: its tenant's, at pkey_index (pkeys.hpp)
    std::uint64_t peer_generation = 0;  // Fabric::topology_generation that `peer` was found under
    // A copy that a guest's worker has: which, and the finished job once it is back.
    std::uint64_t job_sequence = 0;  // 0: none
    std::unique_ptr<ProcessJob> finished_job;
    // Of that copy, and as it was of the last one: whose memory it reaches, by which region or window, and, where it changes that, what holds it.
    GuestId reaches{};
    RegionRef reached_by;
    std::shared_ptr<WriteLeash> leash;
    std::uint64_t copied = 0;  // bytes of that copy that are done
    std::uint64_t waiting = 0;     // its number among those who wait for room, 0: it does not; …
    GuestId waits_for{};           // … at whose worker, …
    bool called = false;           // … and whether there was some, and it was woken
    std::uint64_t jobs_ended_seen = 0;  // of that worker
    bool has_moved_up = false;          // it has got a place for which it waited (moved_up)
    GuestId has_room_at{};         // whose worker it will give what is being read
    std::optional<WcStatus> window_changed;  // how the BIND_MW or LOCAL_INV under way ended
    std::uint64_t window_since_ns = 0;       // for what it waits since then; 0: it does not
    // To another host (remote/hca_desk.hpp):
    HcaConnection* hca = nullptr;   // by the HCA, …
    std::string no_hca;             // … or why not; empty: nobody has asked
    bool psn_from_records = false;  // messages went by an HCA: the first that comes otherwise says which PSN it is
    engine::FarMark mark;           // it is connected anew: who is to send to it from there waits for that
    // The shard's own bookkeeping.
    bool runnable = false;       // stands in its tenant's list
    std::uint32_t idle_turns = 0;
    std::uint64_t wake_ns = 0;   // 0: no timer
    DirectLink* link = nullptr;  // its guest may run it (direct/)
    Qp* waiting_sender = nullptr;  // found no receive WQE here, and …
    Qp* waiting_at = nullptr;      // … the other way round
  };
  struct SrqPort {
    SharedReceiveQueue* owner = nullptr;
    // To another host (remote/hca_shared.cpp):
    HcaShared* hca = nullptr;  // the HCA has receive WQEs of it, …
    std::string no_hca;        // … or will not have any, and why
  };

  MediatedPorts(Fabric& fabric, Runner& runner) : fabric_(fabric), runner_(runner) {}

  std::optional<engine::Place> find(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access);
  std::optional<engine::Place> find_receive(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes);
  engine::MemoryStatus copy(Qp& qp, const engine::Place& to, const engine::Place& from, std::uint64_t bytes);
  engine::MemoryStatus fetch_and_add(Qp& qp, const engine::Place& place, std::uint64_t add, std::uint64_t& old_value);
  engine::MemoryStatus compare_and_swap(Qp& qp, const engine::Place& place, std::uint64_t compare, std::uint64_t swap,
                                        std::uint64_t& old_value);
  void abandon(Qp& qp);
  // What `qp` has under way into somebody's memory ends here, but for the step that it may be at.
  void cut_off(Qp& qp);
  // Likewise all that reaches memory by this window.
  void cut_off(const RegionRef& window);
  // Its worker has room again for what others wait to give it.
  void call_next(Guest& guest);
  // Whoever waits for room at a worker and does not run: none is kept for it.
  void leave_line(Qp& qp);
  // Whether, since this was last asked, the copy that `qp` waits for has come nearer to its turn.
  bool moved_up(Qp& qp);
  // Whether a worker has something under way that reaches memory by this window.
  bool is_reached_by(const RegionRef& window) const;
  // What was cut off of messages of or to `qp`, or by this window, may still be at its last step in memory of the owner: in how many ns to look
  // again; 0: it is over, or has taken last_step_max_ns, as only memory does that its owner lets others wait for.
  std::uint64_t last_step_ns(Qp& qp);
  std::uint64_t last_step_ns(Guest& guest, const RegionRef& window);
  static constexpr std::uint64_t last_step_max_ns = 2'000'000'000;

  // The completion can be seen at once by who looks at its lane; who has to be told is told by announce().
  bool complete(Qp& qp, engine::Direction direction, Cqe& cqe, CqeState state);
  // Sets the ready bits and raises the events that the completions since the last call ask for: one fence for all of them. Called
  // after every Engine::run(), which is all that completes anything.
  void announce();
  // Whether messages have come, since the last call, for applications that poll on other processors than this one, and for none that
  // polls on this one: their answers are near, and nobody here is kept waiting.
  bool take_answer_expected();
  void event(Qp& qp, engine::AsyncEvent event);
  void srq_limit(Srq& srq);
  std::uint32_t srq_posted(Srq& srq);
  // Of an XRC target queue pair: the SRQ of its domain with that number, from whose protection domain R_Keys are then, too. nullptr: there is
  // none; std::nullopt: nobody answers, as its machine stands still.
  std::optional<Srq*> xrc_srq(Qp& qp, std::uint32_t srqn);
  // Carries out the BIND_MW or LOCAL_INV that `qp` is at. std::nullopt: not yet; `qp` is run again.
  std::optional<WcStatus> change_window(Qp& qp);
  // SEND with invalidate: ends a memory window that is bound to `qp`. False: there is none of that key.
  bool invalidate(Qp& qp, Key key);
  void srq_wanted(Srq& srq) {
    if (srq.port.hca != nullptr) [[unlikely]] take_back(srq);
  }
  bool immediate_follows(Qp& qp);
  void state_changed(Qp& qp);
  void await_receive(Qp& sender, Qp& receiver);

  std::uint64_t now_ns();
  void wake_at(Qp& qp, std::uint64_t ns);

  Qp* peer(Qp& qp);
  // The far end of a connection, by its address alone, if it is of this host.
  QueuePair* addressee(const Qp& qp) const;
  Qp* datagram_peer(Qp& qp, const UdOperand& ud);
  // Likewise, for who asks before there is a datagram: nothing is counted.
  const Qp* reachable(const Qp& qp, const UdOperand& ud);
  // Whether the receiver's guest is of another group: another shard's, now or some time.
  bool is_elsewhere(const Qp& sender, const Qp& receiver) const;
  void bring_together(Qp& sender, Qp& receiver);  // after this turn
  // Whether the service may deliver there now (direct mode).
  bool may_deliver(Qp& receiver);
  Qp* multicast_peer(Qp& qp, const UdOperand& ud, std::uint32_t& from);
  bool leads_back(Qp& receiver, Qp& sender);
  static bool has_grh(const Qp& receiver, const UdOperand& ud);
  static const control::GidEntry& source(const Qp& sender, const UdOperand& ud);
  bool write_grh(Qp& sender, Qp& receiver, const UdOperand& ud, std::uint32_t packet_bytes, std::byte* bytes);
  std::uint16_t lid(Qp& qp);
  std::uint8_t sl(Qp& sender, const UdOperand& ud);
  // Whether what `sender` sends may come to `receiver`: by their P_Keys. What may not is counted there.
  static bool admits(const Qp& sender, Qp& receiver);

  const cache::CacheCounters& route_counters() const { return routes_.counters(); }
  cache::CacheCounters& key_counters() { return key_counters_; }

  // Other hosts (engine/far_requester.hpp).
  void far_send(Qp& qp, engine::FarFramePtr frame);
  bool far_room(Qp& qp);
  std::uint64_t far_session(Qp& qp);
  bool far_connected(Qp& qp);
  std::uint64_t far_silent_ns(Qp& qp);
  void far_describe(Qp& qp, engine::FarOpen& open);
  std::uint32_t far_epoch();
  void far_connected_again(Qp& qp);
  void far_datagram(Qp& qp, const engine::Request& request, const UdOperand& ud, std::uint32_t qkey);
  // … and those who stand for their requesters (engine/far_responder.hpp).
  void far_say(engine::StandIn<MediatedPorts>& stand_in, engine::FarFramePtr frame, bool may_wait);
  bool far_room(engine::StandIn<MediatedPorts>& stand_in);
  bool far_waits_for_mark(engine::StandIn<MediatedPorts>& stand_in);
  void far_asked(engine::StandIn<MediatedPorts>& stand_in);
  void far_speaks_for(engine::StandIn<MediatedPorts>& stand_in, const engine::FarDatagram& head);
  bool stands_still(Qp& qp);
  bool is_awaited(Qp& qp) { return qp.port.waiting_at != nullptr; }
  void count_malformed();

 private:
  Qp* addressed(std::uint32_t link_layer, const UdOperand& ud);  // of this host, in whatever partition
  void take_back(Srq& srq);
  // window_qpn: whose request it is that may come by a memory window; 0: none.
  std::optional<engine::Place> find_in(KeyHint& hint, std::uint64_t pd, std::uint32_t window_qpn, Key key, std::uint64_t address,
                                       std::uint64_t bytes, std::uint32_t access);
  // Where a place is in the service: a mapped address for all of `bytes`, or not that simple.
  std::byte* mapped(const engine::Place& place, std::uint64_t bytes);
  std::uint64_t piece_left(const engine::Place& place);  // from there on to the end of its piece
  std::optional<engine::MemoryStatus> copy_mapped(const engine::Place& to, const engine::Place& from, std::uint64_t bytes);
  engine::MemoryStatus copy_parts(Qp& qp, const engine::Place& to, const engine::Place& from, std::uint64_t bytes);
  bool frozen(const engine::Place& place);
  engine::MemoryStatus copy_by_worker(Qp& qp, const engine::Place& to, const engine::Place& from, std::uint64_t bytes);
  engine::MemoryStatus atomic_by_worker(Qp& qp, const engine::Place& place, ProcessJob::Kind kind, std::uint64_t operand,
                                        std::uint64_t compare, std::uint64_t& old_value);
  bool must_wait_for_room(Qp& qp, Guest* writer, Guest* reader);  // nullptr: none
  void stand_in_line(Qp& qp, Guest& guest, bool at_its_head);
  void give_up_room(Qp& qp);
  bool submit(Qp& qp, const engine::Place& place, Region& region, std::uint32_t slot, std::unique_ptr<ProcessJob> job);

  struct Announcement {
    CompletionQueue* cq;
    std::uint32_t lane;
    bool solicited_or_error;
    bool received;  // a message, that is: something that an application may answer
    bool ready_is_set;
  };

  Fabric& fabric_;
  Runner& runner_;
  cache::GenerationCache<RouteKey, Route, RouteKeyHash> routes_{4096};
  cache::CacheCounters key_counters_;
  std::array<Announcement, 8> announcements_;
  std::size_t announcement_count_ = 0;
  bool told_here_ = false, told_elsewhere_ = false;
};

}  // namespace vrdma::svc
