// The verbs objects as this library keeps them. Each begins with the public struct that the application holds a pointer to.
//
// The public fields follow libibverbs; everything behind them is private. Objects are created and destroyed by the verbs of
// the same name; the application must not destroy what it still uses, as always in verbs.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "guest_lib/attachment.hpp"
#include "guest_lib/busy_wait.hpp"
#include "guest_lib/event_source.hpp"
#include "guest_lib/memory/manager.hpp"
#include "guest_lib/post_ex.hpp"
#include "guest_lib/process.hpp"
#include "guest_lib/readers.hpp"
#include "guest_lib/spin_lock.hpp"
#include "guest_lib/stream_pace.hpp"
#include "guest_lib/work_queue.hpp"
#include "vmci_channel/arch.hpp"
#include "vmci_channel/lane.hpp"
#include "vrdma/attributes.hpp"

namespace vrdma::guest {

struct Qp;
struct Cq;

// Whether the pipe of these events is lost (PrivateFd::found_lost): then they end. Asked in a long wait, and before what is left is read.
template <class Events>
bool end_if_lost(PrivateFd& pipe, Events& events) {
  if (!pipe.found_lost()) return false;
  events.lose_descriptors();
  return true;
}

struct Context {
  verbs_context verbs;  // the application holds &verbs.context
  std::shared_ptr<Attachment> attachment;
  std::uint32_t handle = 0;
  std::unique_ptr<PrivateFd> async_pipe;
  EventSource<control::AsyncRecord> events;
  Readers readers;
  std::atomic<bool> fatal_reported{false};
  // How far the service's clock is ahead of ours, modulo 2^64 (time namespaces set them apart, a virtual machine has its own), and in which
  // generation of the machine that was found out.
  static constexpr std::uint64_t never = UINT64_MAX;
  std::atomic<std::uint64_t> clock_ahead_ns{0};
  std::atomic<std::uint64_t> clock_compared_in{never};

  static Context& of(ibv_context* context) {
    return *reinterpret_cast<Context*>(reinterpret_cast<std::byte*>(context) - offsetof(verbs_context, context));
  }
  // The attachment for a verb that creates something: this process's own, also when the context came through a fork.
  // EIO: the device is fatal.
  Result<std::shared_ptr<Attachment>> usable();
  Result<control::DeviceReply> device();  // asked of it
};

struct Td {
  ibv_td verbs{};
  std::atomic<std::uint32_t> users{0};  // parent domains

  static Td& of(ibv_td* td) { return *reinterpret_cast<Td*>(td); }
};

// A protection domain, or a parent domain, which is another name of one.
struct Pd {
  ibv_pd verbs{};
  std::shared_ptr<Attachment> attachment;  // none of a parent domain
  std::atomic<std::uint32_t> users{0};
  // Of a parent domain: whose other name it is, perhaps itself one of a third, and its thread domain or nullptr.
  Pd* parent_of = nullptr;
  Td* thread_domain = nullptr;

  static Pd& of(ibv_pd* pd) { return *reinterpret_cast<Pd*>(pd); }
  Pd& proper() {
    Pd* pd = this;
    while (pd->parent_of != nullptr) pd = pd->parent_of;
    return *pd;
  }
  // Its handle on that attachment: a PD that came through a fork is made anew there.
  Result<std::uint32_t> handle_on(const std::shared_ptr<Attachment>& wanted);
};

struct Dm {
  ibv_dm verbs{};
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0, mapped_bytes = 0;  // mapped: with a spare page at the end
  std::atomic<std::uint32_t> users{0};  // regions

  static Dm& of(ibv_dm* dm) { return *reinterpret_cast<Dm*>(dm); }
};

struct Mr {
  ibv_mr verbs{};
  std::shared_ptr<Attachment> attachment;
  memory::Registration registration;
  std::uint64_t iova = 0;
  std::uint32_t access = 0;
  Dm* device_memory = nullptr;  // of which it is a region

  static Mr& of(ibv_mr* mr) { return *reinterpret_cast<Mr*>(mr); }
  bool on_demand() const { return (access & IBV_ACCESS_ON_DEMAND) != 0; }
};
struct Mw {
  ibv_mw verbs{};
  std::shared_ptr<Attachment> attachment;

  static Mw& of(ibv_mw* mw) { return *reinterpret_cast<Mw*>(mw); }
};

// What ibv_reg_mr_iova2() gives: `bytes` at `start`, which requests name by `iova` and on (IBV_ACCESS_ZERO_BASED: by 0 and on).
Result<ibv_mr*> make_mr(ibv_pd* pd, void* start, std::size_t bytes, std::uint64_t iova, std::uint32_t access);

struct Ah {
  ibv_ah verbs{};
  UdOperand route{};  // but for the remote QPN and Q_Key

  static Ah& of(ibv_ah* ah) { return *reinterpret_cast<Ah*>(ah); }
};

// The address of a request of a UD queue pair, as its WQE has it.
inline UdOperand ud_operand(const ibv_send_wr& wr) {
  UdOperand operand = Ah::of(wr.wr.ud.ah).route;
  operand.remote_qpn = wr.wr.ud.remote_qpn;
  operand.remote_qkey = wr.wr.ud.remote_qkey;
  return operand;
}

struct Channel {
  ibv_comp_channel verbs{};
  std::shared_ptr<Attachment> attachment;
  std::uint32_t handle = 0;
  std::unique_ptr<PrivateFd> pipe;
  std::unique_ptr<PrivateFd> interrupt;  // in a virtual machine that has one for this channel: its records come by a ring
  std::unique_ptr<PrivateFd> peers;      // where direct mode is offered: the pipe to which peers write
  EventSource<control::CompletionRecord> events;
  Readers readers;
  BusyWait busy;
  std::vector<Cq*> cqs;       // guarded by the attachment's objects_mutex
  bool pipe_watched = true;   // by verbs.fd, an epoll descriptor; guarded likewise

  static Channel& of(ibv_comp_channel* channel) { return *reinterpret_cast<Channel*>(channel); }
};

// Where the completions of one direction of a queue pair arrive. Guarded by its completion queue's lock.
struct Lane {
  static constexpr std::uint32_t not_hot = ~0u;

  vmci::LaneReader reader;          // of no lane once the service is gone and what was outstanding has been flushed
  vmci::QueuePairHeader* header = nullptr;
  Qp* qp = nullptr;
  SendQueue* send = nullptr;        // one of the two is set
  ReceiveQueue* receive = nullptr;
  std::uint32_t qpn = 0;            // 0: of an XRC SRQ; its completions say theirs
  std::uint32_t number = control::no_lane;  // in its completion queue
  std::uint32_t hot_index = not_hot;
  Cq* timed = nullptr;        // its completion queue, of one with times
  std::uint32_t visits = 0;   // by way of the bitmap, since it was last hot
  bool lined_up = false;      // in its completion queue's `heads`, …
  std::uint64_t place = 0;    // … by when its next entry was written
  std::uint32_t unstamped = 0;  // entries that were there before its completion queue had an order
};

struct Cq {
  ibv_cq_ex verbs{};
  std::shared_ptr<Attachment> attachment;
  Liveness* liveness = nullptr;
  control::CqShared* shared = nullptr;

  alignas(64) SpinLock lock;
  std::uint32_t consumed = 0;  // as in shared
  StreamPace<> pace;
  std::atomic<bool> polled{false};    // since its last event was read; like left_off only kept for a CQ with a channel
  std::atomic<bool> left_off{false};  // the last poll filled its array, and there was more
  Lane* hot[control::hot_lanes] = {};
  std::uint32_t hot_hits[control::hot_lanes] = {};
  std::vector<Lane*> lanes;  // by number
  // Of the only queue pair: when no older completion was left, in stamps. Under the lock, but for the first time.
  std::atomic<std::uint64_t> emptied{0};
  // Once several queue pairs complete here (poll_in_order.cpp): the lanes that hold something, a heap; the latest place that was seen there;
  // up to which place everything has been seen; and beyond what is found by this poll, 0 until it has found something.
  bool in_order = false;
  std::vector<Lane*> heads;
  std::uint64_t newest = 0, settled = 0, latest = 0;

  // Of an extended one: the completion that its functions read, and who polls it in steps.
  ibv_wc current{};
  SpinLock steps_lock;
  bool one_thread = false;
  bool timed = false;                 // its completions carry their time, by the service's clock
  std::uint64_t current_time_ns = 0;  // of `current`; 0: it came from nowhere but this library
  std::uint64_t clock_ns() { return vmci::monotonic_ns() + Context::of(verbs.context).clock_ahead_ns.load(std::memory_order_relaxed); }
  Pd* parent_domain = nullptr;  // on which it was made, or nullptr

  std::atomic<std::uint32_t> users{0};
  std::uint32_t first_arm_sequence = 0;
  std::uint32_t reported_arm_sequence = 0;  // of the last arm whose event was read; guarded like the counts below
  // Events read so far; guarded by the attachment's objects_mutex until the CQ has left the table.
  std::uint32_t completion_events_reported = 0;
  std::uint32_t async_events_reported = 0;
  bool fatal_event_owed = true;  // once the service is gone: whoever is armed then, and later where something is flushed
  std::uint32_t posted_at_fatal_event = 0;  // of all queue pairs that complete here

  static Cq& of(ibv_cq* cq) { return *reinterpret_cast<Cq*>(cq); }
  ibv_cq* base() { return reinterpret_cast<ibv_cq*>(&verbs); }

  // Before anybody knows of the lane: all that may fail (bad_alloc) of adding it.
  void make_room_for(const Lane& lane);
  void add_lane(Lane& lane);
  // Takes the lane out and drops what is left in it; nobody writes to it any more.
  void remove_lane(Lane& lane);
  void drop_entries(Lane& lane);
  // Any thread, before anybody can complete here what is to come in order with the rest.
  void ask_for_stamps();
};

struct Xrcd {
  ibv_xrcd verbs{};
  std::shared_ptr<Attachment> attachment;
  std::uint32_t handle = 0;
  std::atomic<std::uint32_t> users{0};
  // What its target queue pairs are made with and never use. Of the first one on.
  std::mutex equipping;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;

  static Xrcd& of(ibv_xrcd* xrcd) { return *reinterpret_cast<Xrcd*>(xrcd); }
};

struct Srq {
  ibv_srq verbs{};
  std::shared_ptr<Attachment> attachment;
  Liveness* liveness = nullptr;
  std::uint32_t srq_num = 0;
  std::uint32_t max_sge = 0;
  SpinLock lock;
  ReceiveQueue queue;
  std::atomic<std::uint32_t> users{0};
  std::uint32_t events_reported = 0;
  ibv_qp* completions = nullptr;  // of an XRC SRQ (control::xrc_srq)

  static Srq& of(ibv_srq* srq) { return *reinterpret_cast<Srq*>(srq); }
};

struct Qp {
  ibv_qp_ex verbs{};
  std::uint32_t verbs_comp_mask = 0;  // where libibverbs' own struct goes on
  std::uint32_t doorbell_member = 0;
  Liveness* liveness = nullptr;
  Doorbell doorbell;
  std::uint32_t max_send_sge = 0;
  std::uint32_t max_recv_sge = 0;
  std::uint32_t max_inline_data = 0;
  std::uint32_t implied_flags = 0;  // wr_signaled for sq_sig_all
  std::uint32_t opcodes = 0;  // that it takes: 1 << enum ibv_wr_opcode of each
  std::unique_ptr<WrBatch> batch;   // of an extended one; under send_lock
  SpinLock send_lock;
  std::atomic<std::uint32_t> visits{0};  // by who polls, and found it by a lane
  SpinLock receive_lock;
  // Modifies of ibv_qp.state, by which a query knows whether its answer may be older. All three are written under both locks, and the state is read
  // under either.
  std::atomic<std::uint32_t> modifies_begun{0}, modifies_ended{0};
  bool has_received = false;  // receives of its own have been posted; under receive_lock
  SendQueue send;
  ReceiveQueue receive;
  Lane send_lane;
  Lane receive_lane;

  std::shared_ptr<Attachment> attachment;
  // Direct mode: what it takes to run the send queue here, and for which offer that was opened. Guarded by send_lock.
  std::unique_ptr<DirectEnd> direct;
  std::unique_ptr<DatagramSender> datagrams;  // likewise, of a UD queue pair
  std::atomic<std::uint32_t> direct_offer{0};  // that it follows; written under send_lock
  ibv_qp_cap caps{};
  int sq_sig_all = 0;
  // Each once, as attaching again changes nothing. The mutex is held while the service is asked: of a group that one thread leaves and
  // another joins, it must end up with what the list says.
  std::mutex mcast_mutex;
  std::vector<control::McastRequest> mcast_groups;
  std::uint32_t events_reported = 0;
  Xrcd* xrcd = nullptr;  // of an XRC target, and of what completes for an XRC SRQ

  static Qp& of(ibv_qp* qp) { return *reinterpret_cast<Qp*>(qp); }
  ibv_qp& base() { return verbs.qp_base; }
};
// ibv_qp_ex grows at its end, by wr_flush in rdma-core 46; verbs_context before its head, which tells how much of it there is.
// Each has a mutex in it, which is longer on some processors.
static_assert(offsetof(Qp, verbs_comp_mask) == sizeof(ibv_qp_ex) && sizeof(ibv_qp_ex) - sizeof(pthread_mutex_t) >= 312 &&
              sizeof(verbs_context) - sizeof(pthread_mutex_t) >= 608 && sizeof(ibv_cq_ex) - sizeof(pthread_mutex_t) == 248);

// The data verbs, which every context's ops point to.
// Qp::opcodes. windows: the service offers memory windows.
std::uint32_t opcodes_of(ibv_qp_type type, bool windows);
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
// After a post, no lock of the queue pair held: tells who has armed where it is flushed, as the service is gone.
void tell_if_gone(const Qp& qp, ibv_cq* cq);
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
// Carries out what is in the send queue, where the service has handed it out. send_lock is held.
void run_send_queue(Qp& qp);
int poll_cq(ibv_cq* cq, int count, ibv_wc* wc);
// Without the step of the adaptive wait where there is nothing.
int poll_cq_at_once(ibv_cq* cq, int count, ibv_wc* wc);
// All of the chain or, with an errno value, none of it. send_lock is held.
int post_all(Qp& qp, ibv_send_wr* chain);
ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* wanted);
// `xrcd`: of an XRC target, of which nothing but its type counts, or, of type RC with an SRQ, for what completes for an XRC SRQ; else nullptr.
// target: the number of one to open; 0: a new one.
Result<ibv_qp*> create_qp(ibv_pd* pd, ibv_qp_init_attr& init, Xrcd* xrcd, std::uint32_t target = 0);
Result<ibv_srq*> create_srq(ibv_pd* pd, ibv_srq_init_attr& init);
int req_notify_cq(ibv_cq* cq, int solicited_only);

// An arm of a dead device's CQ: its channel becomes readable again, so that whoever waits there is not left waiting.
void watch_after_death(Cq& cq);
void watch_for_posted(Cq& cq);  // likewise, after a post; no lock of the queue pair is held
// The armed CQ holds completions that its application may not look for any more. False: there is no memory for the event, where its channel holds
// more of them than it has completion queues.
bool raise_missed(Cq& cq);

// Drops the unread asynchronous events of an object that was destroyed.
void purge_async_events(ibv_context* context, std::uint32_t handle);

// struct ibv_ah_attr as it travels, and back.
AddressVector to_wire(const ibv_ah_attr& attributes);
ibv_ah_attr from_wire(const AddressVector& path);

}  // namespace vrdma::guest
