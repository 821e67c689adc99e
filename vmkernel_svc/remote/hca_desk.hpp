// Connections to other hosts that go by HCAs: a virtual RC queue pair is one RC QP of this host's HCA, which reads and writes guests'
// memory in place, and a virtual SRQ of such queue pairs one SRQ of the HCA (HcaShared). Work requests are taken, checked and completed by the engine's rules; the hardware
// moves the bytes, and keeps order, retries and RNR as the virtual queue pair's attributes say. Who says what to the other host's
// service stands in hca_message.hpp.
//
// What the HCA cannot reach:
// - the operand of an RDMA operation, here or there: that operation goes by records (far_requester.hpp), when those before it are done
//   and before those after it begin;
// - buffers of SENDs and receives: through memory of the service (Bounce). `copied_bytes` counts it.
// Records go by the HCA themselves while it stands, by a queue pair of the services' own (hca_trunks.cpp), and with them all that does not
// go in place: UC and UD, programs in virtual machines, and the above.
//
// Lost is what cannot be known: who loses its HCA, or finds that the other end is not reached by it, stops its QP, and both say how many
// messages that take a receive WQE have come. What is known not to have been executed is done again by records; READs are, too; a WRITE
// or atomic that may have been executed and was not acknowledged ends in RETRY_EXC_ERR.
//
// Used by the shard's thread only.
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "vmkernel_svc/engine/engine.hpp"
#include "vmkernel_svc/hosts/directory.hpp"
#include "vmkernel_svc/objects.hpp"
#include "vmkernel_svc/remote/hca_device.hpp"
#include "vmkernel_svc/remote/hca_message.hpp"
#include "vmkernel_svc/remote/hca_trunk.hpp"

namespace vrdma::svc {

class Fabric;
class Shard;
class FarDesk;

struct HcaSend {  // a send WQE that the HCA has, or had
  std::uint64_t wr_id;
  std::uint32_t next_position;
  std::uint8_t flags;
  const engine::OpcodeRule* rule;
  engine::Request request;
  RemoteOperand remote;
  engine::ScatterGather local;
  std::unique_ptr<std::byte[]> inline_bytes;
  std::vector<remote::Bounce> bounces;
  std::uint64_t ordinal = 0;  // of those that take a receive WQE
  bool posted = false;
  // After a loss: do it again, or it is known to be done, or nobody knows; or it had failed here.
  enum class Fate : std::uint8_t { again, done, unknown, refused } fate = Fate::again;
  WcStatus status = WcStatus::success;  // refused: how it ends
};

struct HcaReceive {  // a receive WQE that the HCA has
  struct Part {      // of its buffers, in memory of the service
    remote::Bounce bounce;
    engine::Place place;
    std::uint64_t offset, bytes;  // in the message
  };
  engine::Inbound inbound;
  std::vector<Part> parts;
  // Once a message is in it:
  WcStatus status = WcStatus::success;
  WcOpcode opcode = WcOpcode::recv;
  std::uint8_t flags = 0;
  std::uint32_t bytes = 0, imm_data = 0;
  std::size_t part = 0;        // being copied to the guest, …
  std::uint64_t part_done = 0;  // … so far
  remote::HcaDomain* domain = nullptr;  // that the bounces are of
};

// A virtual SRQ whose receive WQEs the HCA has: as long as every queue pair that takes of it goes by the HCA. With the first one that
// does not they all go by records, as no WQE can be taken back from an HCA one by one, and none may be out of reach of a message.
struct HcaShared {
  MediatedPorts::Srq* srq = nullptr;
  std::uint64_t pd = 0;
  remote::HcaDomain* domain = nullptr;
  remote::HcaDevice::SharedReceive physical;
  std::uint32_t wr = 0, sge = 0;
  std::map<std::uint64_t, HcaReceive> posted;  // by the number that is their physical work request id: in the order of the queue
  std::uint64_t next_number = 1;
  boost::unordered_flat_map<std::uint32_t, HcaConnection*> users;  // by number of the physical QP
  bool awaits_memory = false;  // as HcaConnection's
  // Nobody rings for what is posted to an SRQ: while the HCA has none of it, it is looked at, less often the longer that lasts.
  std::uint64_t empty_since_ns = 0, look_ns = 0;
};

struct HcaConnection {
  // calling: the other end has not said hello to this epoch. stopped: the physical QP is gone, the other end has not said how far it came.
  // resuming: by records, what was not executed first.
  enum class Stage : std::uint8_t { calling, bound, stopped, resuming } stage = Stage::calling;
  MediatedPorts::Qp* qp = nullptr;
  std::uint64_t number = 0;  // in physical work request ids: number × 2, and 1 for a receive
  remote::HostId host = 0;
  std::uint32_t peer_qpn = 0;
  std::uint32_t epoch = 0, their_epoch = 0;
  std::uint32_t told_epoch = 0;  // of theirs, that our last hello has named
  remote::HcaMessage theirs{};
  bool heard = false, allowed = false, sending = false;  // hello has come; ready has; the physical QP is in RTS
  bool closed_there = false;
  bool refused_there = false;  // what was not executed is known
  bool losing = false;         // its hardware has failed; lose() comes
  bool awaits_memory = false;  // there is no room to copy through for what is being registered
  std::string why = "its HCA was lost";  // it is

  std::uint64_t pd = 0;
  remote::HcaDomain* domain = nullptr;
  ibv_qp* physical = nullptr;
  remote::HcaDevice::Cq* cq = nullptr;
  remote::HcaDevice::QpWish wish{};
  std::uint32_t access_flags = 0, min_rnr_timer = 0;  // the physical queue pair's

  std::deque<HcaSend> outstanding;
  std::deque<HcaReceive> posted, arrived;  // posted: where the receive queue is its own
  HcaShared* shared = nullptr;
  std::uint64_t sent = 0, received = 0;  // messages that take a receive WQE
  std::uint64_t completed = 0;           // sends
  struct Look {  // the last one at whether anything moves, and how many before it saw the same
    std::uint64_t completed = 0, received = 0;
    std::uint32_t sends_unmoved = 0, receives_unmoved = 0;
  } look;
  std::uint32_t flushed = 0;             // completions of a QP that was stopped
  std::map<std::uint64_t, std::uint64_t> told_bytes;  // of messages whose payload went by records, by ordinal

  struct Preparing {  // the operation under way: gathered, not posted yet
    HcaSend send;
    std::vector<ibv_sge> sges;
    struct Part {
      engine::Place from;
      std::byte* to;
      std::uint64_t bytes;
    };
    std::vector<Part> parts;
    std::size_t part = 0;
    std::uint64_t part_done = 0;
  };
  std::unique_ptr<Preparing> preparing;
  bool copy_of_receive = false;  // the copy that is pending
  bool by_records = false;       // the operation under way goes so
  std::unique_ptr<HcaSend> after_records;  // what the HCA has to do then
  std::unique_ptr<HcaSend> again;  // by records: the one under way
  Key asked{};                   // a remote key, and …
  Key answered{};                // … one that the other end does not know: the operation under way goes by records
  std::uint64_t waiting_since_ns = 0;
};

class HcaDesk {
 public:
  using Qp = MediatedPorts::Qp;

  HcaDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine, FarDesk& far);
  ~HcaDesk();

  bool turn();
  bool anything_waiting() const;
  void prepare_to_sleep();  // completions that come now wake the shard
  std::uint64_t next_wake_ns() const;

  // A queue pair was connected, or something about its path has changed.
  void consider(Qp& qp);
  // It has a connection here: one turn.
  engine::Progress run(Qp& qp, engine::Budget& budget);
  // It is in ERR: its memory hears no more of the other end's. What it had is flushed in its next turn.
  void end_remote_operations(Qp& qp);
  // It is reset or goes away; nothing is completed.
  void leave(Qp& qp);
  // Its P_Key is another; who is in which partition has changed: who may not speak to each other is found out by records.
  void pkey_changed(Qp& qp);
  void look_at_partitions();
  // Before a region goes or changes. held: the HCA has it yet, and lets go of it soon; else not a byte of it is read or written any
  // more. known: a host that was told its key has not said yet that it has forgotten it.
  enum class Forgotten : std::uint8_t { yes, held, known };
  Forgotten forget_region(std::uint32_t slot);

  void new_session(remote::HostId host);
  void arrived(engine::FarFramePtr frame);
  // A queue pair that does not go by the HCA takes receive WQEs of this SRQ, of which the HCA has some.
  void take_back(MediatedPorts::Srq& srq);
  // The bytes of a WRITE that came by records, and are refused: whether its immediate is still to come by the HCA. Then that gives back
  // the receive WQEs it has.
  bool immediate_follows(Qp& qp);
  void peer_goes_by_records(remote::HostId host, std::uint32_t qpn);  // it has opened a connection of records
  bool holds(remote::HostId host) const;  // it may still say that it has an HCA

  struct Counters {
    std::uint64_t sent = 0, received = 0, copied_bytes = 0, copies = 0, by_records = 0, losses = 0, keys_asked = 0, revoked = 0, stalled = 0, refused = 0;
  };
  const Counters& counters() const { return counters_; }
  const remote::HcaDevice* device() const { return device_.get(); }
  remote::HcaDevice* device() { return device_.get(); }
  const std::string& why_no_device() const { return why_; }
  std::size_t connection_count() const;      // that are bound
  bool has_trunk(remote::HostId host) const;  // records to that host go by the HCA
  void forget_host(remote::HostId host);  // it was removed
  void want_trunk(remote::HostId host);      // records go there, or come from there
  std::string why_no_trunk(remote::HostId host) const;
  std::size_t registration_count() const;
  std::size_t being_registered() const;  // or taken back
  // How connections to that host go, in words; empty: by HCAs.
  std::string why_not(remote::HostId host) const;
  // Why the last one of those that began by the HCA goes on over tcp; empty: none does.
  std::string fallen_back(remote::HostId host) const;
  std::string why_not(const Qp& qp) const;

 private:
  using Stage = HcaConnection::Stage;
  struct Trunk {  // what is known of it, also while there is none
    std::unique_ptr<remote::HcaTrunk> way;
    bool wanted = false;             // there have been records but for what the services say to each other
    std::uint32_t epoch = 0;         // the try, as the host that dials counts them
    static constexpr std::uint64_t first_pause_ns = 5'000'000'000;
    std::uint64_t try_ns = 0;        // not before, …
    std::uint64_t pause_ns = first_pause_ns;  // … which is so long after the last try
    std::uint64_t looked_at = 0;     // how many messages it had sent then
    std::uint32_t looks_unmoved = 0;
    std::string why = "the hosts' HCAs have not agreed on a queue pair for records yet";  // there is none
  };
  struct Hello {
    remote::HcaMessage message;
    std::uint32_t epoch;
    bool none;
  };
  struct Host {
    Trunk trunk;
    bool heard = false, present = false;
    std::uint8_t link_layer = 0;
    std::uint64_t since_ns = 0;  // the session
    std::string text;
    std::string fallen_back;
    boost::unordered_flat_map<std::uint32_t, std::uint32_t> keys;  // the guests' there → the HCA's there; 0: by records
    boost::unordered_flat_map<std::uint32_t, Hello> hellos;        // by the QPN of who said it, to one that is not connected yet
  };
  struct Mapped {  // what a registration has been mapped in once more
    Tenant* tenant = nullptr;  // who is charged for it
    std::size_t parts = 0;
  };
  // A region at the HCA: as a whole, with its rights, so that it serves other hosts, too; or, where that cannot be, piece by piece.
  struct Registered {
    struct Piece {
      ibv_mr* mr = nullptr;
      bool tried = false;
    };
    std::uint64_t pd = 0;
    remote::HcaDomain* domain = nullptr;
    bool tried = false;  // as a whole
    std::shared_ptr<remote::HcaRegistration> whole;
    Mapped mapped;
    std::vector<Piece> pieces;
    std::vector<remote::HostId> askers;
    std::string refusal;  // of the HCA, to register it
  };
  struct Leaving {  // which the registrar takes back
    std::shared_ptr<remote::HcaRegistration> registration;
    std::uint64_t pd;
    Key key;
    Mapped mapped;
  };
  struct Reach {
    ibv_mr* mr;           // nullptr: not by the HCA, …
    std::uint64_t bytes;  // … for so many bytes
  };
  enum class Step : std::uint8_t { posted, waiting, ended };

  // hca_desk.cpp: the device and the other hosts
  void look_at_device();
  void open_device();
  void device_lost(const std::string& why);
  void announce_device(remote::HostId host);
  void look_at_progress();
  std::uint8_t ack_timeout(const QpAttributes& attributes) const;  // of the physical queue pair
  void say(remote::HostId host, std::uint32_t connection, std::uint32_t epoch, remote::HcaKind kind, remote::HcaMessage message);
  void say(HcaConnection& c, remote::HcaKind kind, remote::HcaMessage message = {});
  void on_host(remote::HostId host, const remote::HcaMessage& message);
  void settle_revocations(remote::HostId host);  // none of them waits for its answer any more

  // hca_trunks.cpp: the way of records
  void call_trunk(remote::HostId host);
  bool make_trunk(remote::HostId host, std::uint32_t epoch);
  bool connect_trunk(remote::HostId host, const remote::HcaMessage& theirs);
  void say_trunk(remote::HostId host, remote::HcaKind kind);
  void on_trunk(remote::HostId host, std::uint32_t epoch, remote::HcaKind kind, const remote::HcaMessage& message);
  void end_trunk(remote::HostId host);
  void lose_trunk(remote::HostId host, const std::string& why);
  void look_at_trunks();
  bool turn_trunks();
  void trunk_completed(const ibv_wc& wc);

  // hca_connection.cpp: connections from their beginning to their end
  void say_none(Qp& qp, remote::HostId host, std::uint32_t to_epoch, const std::string& why);
  void say_hello(HcaConnection& c);
  bool create(HcaConnection& c);
  void heard(HcaConnection& c, const Hello& hello);
  void bind(HcaConnection& c);
  bool to_rts(HcaConnection& c);
  void unbind(HcaConnection& c);
  void go_by_records(HcaConnection& c, const std::string& why);
  bool may_speak(HcaConnection& c);
  void on_hello(remote::HostId host, std::uint32_t connection, Hello hello);
  HcaConnection* bound_to(remote::HostId host, std::uint32_t connection, std::uint32_t epoch, const remote::HcaMessage& message);
  std::string refusal(const Qp& qp) const;

  // hca_loss.cpp: what becomes of one that is lost or ends
  void stop(HcaConnection& c);
  void stop_quietly(HcaConnection& c);  // nobody is to be told how far it came: its stage stays
  void lose(HcaConnection& c);
  void lose(HcaConnection& c, const std::string& why);
  void resolve(HcaConnection& c, std::uint64_t count);
  void drop(HcaConnection& c);  // qp.port.hca is nullptr afterwards
  void free_physical(HcaConnection& c);
  void free_bounces(HcaConnection& c, std::vector<remote::Bounce>& bounces);
  void flush(HcaConnection& c);
  void load(Qp& qp, HcaSend& send);
  engine::Progress resume(HcaConnection& c, engine::Budget& budget);

  // hca_shared.cpp: SRQs
  bool join_shared(HcaConnection& c);
  void leave_shared(HcaConnection& c);
  void end_shared(HcaShared& shared);
  void dissolve(HcaShared& shared, const std::string& why);
  bool pump_shared(HcaShared& shared);
  bool pump_all_shared();
  bool poll_shared(HcaShared& shared);

  // hca_completion.cpp: completions
  static constexpr int completions_per_look = 32;
  static constexpr std::uint64_t drain_ns = 1'000'000'000;  // of a physical QP in error; it takes microseconds
  bool poll();
  bool poll(remote::HcaDevice::Cq& cq);
  void look_at_events();
  void send_done(HcaConnection& c, const ibv_wc& wc);
  void receive_done(HcaConnection& c, const ibv_wc& wc);
  void succeed(HcaConnection& c, const HcaSend& send);
  void lose_soon(HcaConnection& c);
  void fail(HcaConnection& c, const HcaSend& send, WcStatus status);
  void received(HcaConnection& c, HcaReceive receive, const ibv_wc& wc);
  bool take_arrived(HcaConnection& c);
  engine::MemoryStatus copy(HcaConnection& c, const engine::Place& to, const engine::Place& from, std::uint64_t bytes, bool of_receive);
  void wake(HcaConnection& c);

  // hca_mover.cpp: work requests, and turns
  bool pump_receives(HcaConnection& c);
  bool waits_for(std::uint64_t bytes);
  bool lay_out(HcaReceive& receive, remote::HcaDomain& domain, std::vector<ibv_sge>& sges);
  Step post(HcaConnection& c);
  Step post_prepared(HcaConnection& c);
  bool prepare(HcaConnection& c);
  HcaSend describe(Qp& qp);
  Step by_records(HcaConnection& c);
  bool patient(HcaConnection& c);

  // hca_memory.cpp
  Reach reach(std::uint32_t slot, const Region& region, std::uint64_t offset);
  Registered& registered(std::uint32_t slot, const Region& region);
  remote::HcaRegistration* whole(Registered& known, const Region& region);
  bool gather(Registered& known, const Region& region, remote::HcaRegistration& registration);
  bool leaves(Key key) const;
  void unmap(Mapped& mapped);
  void forget_all_registrations();
  void look_at_registrations();

  // hca_keys.cpp
  std::uint32_t remote_key(const Qp& qp, Key rkey, bool& known, remote::HostId asker);
  std::optional<std::uint32_t> key_of(HcaConnection& c, Key rkey);  // nullopt: asked for
  void on_key(remote::HostId host, std::uint32_t connection, std::uint32_t epoch, remote::HcaKind kind, const remote::HcaMessage& message);

  // Walks what lies at `place`: reached(sge) for what the HCA reaches, other(place, bytes) for the rest.
  template <class Reached, class Other>
  void for_each_part(engine::Place place, std::uint64_t bytes, Reached&& reached, Other&& other);

  Fabric& fabric_;
  Shard& shard_;
  MediatedPorts& ports_;
  engine::Engine<MediatedPorts>& engine_;
  FarDesk& far_;
  std::unique_ptr<remote::HcaDevice> device_;
  std::string why_;
  std::map<remote::HostId, Host> hosts_;
  std::map<std::uint64_t, std::unique_ptr<HcaConnection>> connections_;  // by number
  boost::unordered_flat_map<std::uint32_t, Registered> registered_;      // by region slot
  std::vector<Leaving> leaving_;
  std::map<std::uint32_t, std::set<remote::HostId>> revoking_;           // by key: who has not answered
  std::vector<std::unique_ptr<HcaShared>> shared_;
  std::map<std::uint64_t, remote::HcaTrunk*> trunks_;  // by number, as connections_
  std::vector<std::uint64_t> losing_;  // connections that are to be lost once all completions were looked at
  std::uint64_t next_number_ = 1;
  std::uint64_t check_ns_ = 0;
  std::uint64_t drain_until_ns_ = 0;  // all connections are stopped by then; 0: each by itself
  bool found_ = false, fatal_ = false;
  bool completion_event_ = false, device_event_ = false;  // the shard woke up for
  std::uint32_t said_by_records_ = 0;  // how often the log has
  std::string refused_;  // what the HCA would not register while a request was laid out
  bool awaited_ = false;  // some of what it asks for is being registered
  Counters counters_;
};

}  // namespace vrdma::svc
