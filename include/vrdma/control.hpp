// The one table of control requests between a guest and the host service, and what each carries.
//
// A request is a VMCI datagram from the guest to (host_context, control_port). It travels in the guest's control queue pair,
// or, where descriptors go along or the pair does not exist yet, as one packet on the guest's socket. Every request has
// exactly one reply with the same sequence number; `status` is 0 or an errno value and the reply's body is only meaningful
// with 0. Versions: another major is refused at attach, naming both; a newer minor is accepted.
#pragma once

#include <array>
#include <cstdint>

#include "vrdma/attributes.hpp"
#include "vrdma/cm.hpp"
#include "vrdma/completion_queue.hpp"
#include "vrdma/ids.hpp"
#include "vrdma/mad.hpp"
#include "vrdma/queue_layout.hpp"
#include "vrdma/service_page.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::control {

constexpr std::uint32_t magic = 0x4d445256;  // "VRDM"
constexpr std::uint16_t version_major = 2;
constexpr std::uint16_t version_minor = 22;  // 2: attach_in_bar; 3: open_direct; 4: set_direct; 5: open_shared_receives, events in direct mode; 6: open_process; 7: share_address; 8: open_path;
                                            // 9: keys of direct mode in entries and regions; 10: rdma_cm; 11: XRC; 12: times of completions, memory windows;
                                            // 13: read_counters; 14: what 12 has, in virtual machines, too; backings that are not sealed; 15: cm_write_event; 16: management datagrams;
                                            // 17: rdma_cm by addresses of AF_IB; 18: memory windows change in their turn; 19: more than 64 addresses;
                                            // 20: flow labels; 21: IPv4 groups of RoCE v2; 22: query_link_layer, cm_option_tos

constexpr std::uint32_t host_context = 2;     // VMADDR_CID_HOST
constexpr std::uint32_t control_port = 28249; // where the service answers control requests

// Head of every datagram: in a record its first 32 bytes, on the socket its first 32 bytes too.
struct Head {
  RecordHead record;  // tag: destination (context << 32 | port); word: bytes of body; control's user bits: Request | reply bit
  std::uint32_t source_context;
  std::uint32_t source_port;
  std::uint32_t sequence;
  std::int32_t status;
};
static_assert(WireRecord<Head> && sizeof(Head) == 32);
constexpr std::uint32_t reply_bit = 1u << 16;
constexpr std::uint32_t body_bytes_max = record_slots_max * slot_bytes - sizeof(Head);  // 4064
constexpr std::uint64_t address_of(std::uint32_t context, std::uint32_t port) {
  return (static_cast<std::uint64_t>(context) << 32) | port;
}

struct Empty {};

// --- attach, descriptors --------------------------------------------------------------------------------------
enum LinkLayer : std::uint32_t { link_layer_default = 0, link_layer_infiniband = 1, link_layer_ethernet = 2 };

// What a guest gets that does not wish for one; who asks need not be a guest.
struct LinkLayerReply {
  std::uint32_t link_layer;  // LinkLayer
  std::uint32_t reserved;
};

struct AttachRequest {
  std::uint32_t magic;
  std::uint16_t major, minor;
  std::uint32_t link_layer;  // LinkLayer
  std::uint32_t pid;         // as the guest sees itself
  char name[32];             // NUL-padded; empty: the service picks one
};
// Descriptors of the reply, in order: arena (memfd), service page (memfd, read only), doorbell (eventfd), wake (pipe, read end).
struct AttachReply {
  std::uint16_t major, minor;
  std::uint32_t guest;            // VMCI context id
  std::uint64_t arena_bytes;
  std::uint64_t control_offset;   // of the control queue pair in the arena
  vmci::QueuePairGeometry control_geometry;
  std::uint64_t doorbell_offset;  // of the guest's ReadyWords: member 0 the control pair, others QpReply::doorbell
  std::uint16_t shard;            // index into ServicePage::shards: the guest's line, whichever shard it is served by
  std::uint16_t flags;            // attach_in_machine, attach_in_bar
  std::int32_t service_pid;       // as the guest's pid namespace sees it, 0 if it does not
  char name[32];
  char service_version[32];
};
constexpr std::uint16_t attach_in_machine = 1;  // by a virtual machine's agent: memory is pinned where it is (add_pinned)
// With that: the machine's RAM is its own. Segments are parts of its device's BAR, of which each descriptor is one, at a position that
// says where the part begins; and memory that shall be reached in place is moved to more such parts (add_pinned with lend_pages).
constexpr std::uint16_t attach_in_bar = 2;
constexpr std::uint16_t minor_of_bar = 2;       // of a guest that knows that flag
constexpr std::uint16_t minor_of_sharing = 7;   // of a service that knows share_address
constexpr std::uint16_t minor_of_cm = 10;       // of a service that knows cm_open
constexpr std::uint16_t minor_of_written_events = 15;  // … that knows cm_write_event
constexpr std::uint16_t minor_of_mads = 16;     // … that knows mad_open
constexpr std::uint16_t minor_of_cm_by_gid = 17;  // … that knows CmAddress of AF_IB
constexpr std::uint16_t minor_of_tos = 22;      // … that knows cm_option_tos
constexpr std::uint16_t minor_of_xrc = 11;      // … that knows open_xrcd
constexpr std::uint16_t minor_of_times = 12;    // … that knows time_cq
constexpr std::uint16_t minor_of_windows = 12;  // … and alloc_mw
constexpr std::uint16_t minor_of_windows_in_turn = 18;  // … that knows wire.hpp's window_in_turn
constexpr std::uint16_t minor_of_many_addresses = 19;  // … that adds to CmPlaceRequest
constexpr std::uint16_t minor_of_flow_labels = 20;    // … that takes what is not UdOperand::sl out of it
constexpr std::uint16_t minor_of_both_in_machines = 14;  // … and grants both to guests in virtual machines
constexpr std::uint16_t minor_of_counters = 13;  // … and read_counters
constexpr std::uint16_t minor_of_ipv4_groups = 21;  // of a guest that attaches to ::ffff:239.1.2.3; older ones join RoCE v1's groups
constexpr std::uint16_t minor_of_direct = 9;    // of a guest whose direct mode is as vrdma/direct.hpp describes it; older ones stay mediated

// A guest's LID, GUID and GIDs are those of the first guest that named this secret, of the same user and link layer, also after that one
// has gone, unless somebody else has them by now: a fork's child keeps the address that its parent has told others, as it keeps the
// parent's HCA. Asked once, before the first context (EBUSY); a secret is not zero (EINVAL).
struct ShareAddressRequest {
  std::array<std::uint8_t, 16> secret;
};

// One descriptor goes along: a memfd, or a file of tmpfs or hugetlbfs; else EPERM. Peers are lent what is sealed against shrinking only.
struct AddBackingRequest {
  std::uint64_t bytes;  // 0: all of it
  std::uint32_t flags;  // backing_window: file offset = the guest's virtual address, mapped piecewise on demand
  std::uint32_t reserved;
};
constexpr std::uint32_t backing_window = 1;
struct AddBackingReply {
  std::uint32_t backing;
  std::uint32_t page;  // with lend_pages, of the agent: where in the BAR / 4096
};
struct RemoveBackingRequest {
  std::uint32_t backing;
  std::uint32_t reserved;
};
// In a virtual machine: memory that the process has pinned by an io_uring's registered buffers. The machine's agent takes the ring
// over (pidfd_getfd), so that the pages stay until remove_backing or the process's end, translates them, and passes the request
// on with its own number of the memory. The backing begins at the page that holds `address`.
// With lend_pages for a ring, the agent lends pages of the BAR, whole ones and zero, until remove_backing; `address` is 0.
struct AddPinnedRequest {
  std::uint64_t address, bytes;
  std::int32_t ring;      // the process's descriptor; may be closed after the reply; or lend_pages
  std::uint32_t segment;  // the agent's: vrdma/vm_link.hpp
};
constexpr std::int32_t lend_pages = -2;
// Reply descriptor: the read end of the pipe that carries EventRecords of this context.
struct OpenContextRequest {
  std::uint32_t reserved[2];
};
struct OpenContextReply {
  std::uint32_t context;
  std::uint32_t reserved;
};
// Reply descriptor: the read end of the pipe that carries CompletionRecords. In a virtual machine there may be a second one, an eventfd
// that the kernel rings when the device interrupts for this channel: then the records come by the EventRing, and the pipe tells only
// of the service's end. Where direct mode is offered there is a second pipe instead, in one description for reading and writing: its
// CompletionRecords are written by posters in direct mode, who are given it, too. That has no end: the first pipe tells of the service's.
struct CreateChannelRequest {
  std::uint32_t context;
  std::uint32_t interrupt;  // of the guest: interrupt_wanted or 0; the machine's agent puts the vector there, or 0 if it has none left
};
constexpr std::uint32_t interrupt_wanted = 1;  // is no vector that an agent lends
struct ChannelReply {
  std::uint32_t handle;
  std::uint32_t ring;  // offset of the EventRing in the arena / ring_unit_bytes; 0: the records come by the pipe
};
constexpr std::uint32_t ring_unit_bytes = 128;
struct HandleReply {
  std::uint32_t handle;
  std::uint32_t reserved;
};
struct HandleRequest {
  std::uint32_t handle;
  std::uint32_t reserved;
};

// --- device ---------------------------------------------------------------------------------------------------
struct GidEntry {
  Gid gid;
  std::uint32_t type;  // enum ibv_gid_type: 0 IB, 1 RoCE v1, 2 RoCE v2; meaningful where gid is not zero
  std::uint32_t ndev_ifindex;  // 0: interfaces are those of a guest's network namespace, which finds it (guest_lib/port_interface.hpp)
};
struct DeviceReply {
  std::uint64_t node_guid;  // network order
  std::uint64_t sys_image_guid;
  std::uint32_t generation;  // ServicePage::device_generation when this was true
  std::uint32_t link_layer;  // LinkLayer, never default
  std::uint16_t lid, sm_lid;
  std::uint8_t port_state, max_mtu, active_mtu, sm_sl;  // enum ibv_port_state, ibv_mtu
  std::uint32_t qp_max, cq_max, srq_max, mr_max, pd_max;
  std::uint32_t qp_wr_max, srq_wr_max, cqe_max, sge_max, inline_max, rd_atomic_max, comp_vectors;
  std::uint64_t mr_bytes_max;
  std::uint16_t pkeys[16];  // network order; 0 where empty
  GidEntry gids[16];
  char fw_version[32];
};

// --- protection domains and memory ----------------------------------------------------------------------------
struct CreatePdRequest {
  std::uint32_t context;
  std::uint32_t reserved;
};
// Asks how memory that no file backs is reached, once per guest, before the first registration of such memory; again where the answer's
// descriptor could not be received or mapped (EALREADY where there was none). The service answers when it has read the word, or has failed
// to: a page can keep it waiting. Without this request no such memory is registered.
struct ReachProcessRequest {
  std::uint64_t probe_address;  // of an aligned word in the guest's memory that holds …
  std::uint64_t probe_value;    // … this: whether the memory that the service sees under the guest's pid is the guest's
};
enum ReachWay : std::uint32_t {
  reach_by_service = 0,
  reach_by_guest = 1,  // a thread of the guest copies (vrdma/copy_ring.hpp); descriptor: the segment (memfd)
};
struct ReachProcessReply {
  std::uint32_t way;
  std::uint32_t doorbell;  // member of the guest's doorbell bitmap for answers
};

// Where [address, address + bytes) of the guest's memory is reached. backing_process: as ReachProcessReply says; EINVAL before there was one.
struct Extent {
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t backing_offset;
  std::uint32_t backing;
  std::uint32_t reserved;
};
constexpr std::uint32_t backing_process = 0xffffffff;
// Appends to the guest's list that the next reg_mr or rereg_mr takes and clears.
constexpr std::uint32_t stage_extents_max = 120;
struct StageExtentsRequest {
  std::uint32_t count;
  std::uint32_t clear_first;
  Extent extents[stage_extents_max];  // those behind `count` need not travel
};
constexpr std::size_t stage_extents_bytes(std::uint32_t count) { return 8 + count * sizeof(Extent); }
static_assert(stage_extents_bytes(stage_extents_max) == sizeof(StageExtentsRequest));
struct RegMrRequest {
  std::uint32_t pd;
  std::uint32_t access;  // enum ibv_access_flags
  std::uint64_t address, bytes, iova;
};
struct RegMrReply {
  std::uint32_t handle;
  std::uint32_t key;  // lkey and rkey
};
// Memory windows. A window's keys differ in their last 8 bits, which whoever binds it chooses.
struct AllocMwRequest {
  std::uint32_t pd;
  std::uint32_t type;  // enum ibv_mw_type: 1, 2
};
struct BindMwRequest {
  std::uint32_t mw, qp;
  std::uint32_t mr;      // 0, or no bytes: bound to nothing
  std::uint32_t access;  // enum ibv_access_flags
  std::uint32_t key;     // the new one
  std::uint32_t reserved;
  std::uint64_t address, bytes;
};
struct InvalidateMwRequest {
  std::uint32_t qp;
  std::uint32_t key;
};
// enum ibv_rereg_mr_flags in `flags`; the fields that it does not name are ignored. The MR is gone if it fails after checks.
struct ReregMrRequest {
  std::uint32_t mr, flags;
  std::uint32_t pd, access;
  std::uint64_t address, bytes, iova;
};

// --- completion queues ----------------------------------------------------------------------------------------
struct CreateCqRequest {
  std::uint32_t context, cqe, channel /* 0: none */, comp_vector;
};
struct CreateCqReply {
  std::uint32_t cq, cqe;
  std::uint64_t offset;  // of the CqShared in the arena
};
// time_cq: completions of a queue, which nothing uses yet, carry their time from now on (vrdma/wire.hpp). read_clock, of a context: that clock.
struct ClockReply {
  std::uint64_t monotonic_ns;
};
// read_counters: of the guest's port, since it attached; a message is one packet.
struct CountersReply {
  std::uint64_t sent_bytes, sent_messages, received_bytes, received_messages;
};
struct ResizeCqRequest {
  std::uint32_t cq, cqe;
};
struct ResizeCqReply {
  std::uint32_t cqe, reserved;
};

// --- queues ---------------------------------------------------------------------------------------------------
struct QueueReply {
  std::uint64_t offset;  // of the queue pair in the arena
  vmci::QueuePairGeometry geometry;
  std::uint32_t lane;    // its number in its CQ's bitmap; no_lane for an SRQ
  std::uint32_t record_slots;  // receive queues: slots that every WQE takes
};
struct CreateSrqRequest {
  std::uint32_t context, pd, max_wr, max_sge, srq_limit, reserved;
};
struct CreateSrqReply {
  std::uint32_t srq, max_wr, max_sge, srq_num;
  QueueReply queue;
};
struct ModifySrqRequest {
  std::uint32_t srq, mask /* enum ibv_srq_attr_mask */, max_wr, srq_limit;
};
struct QuerySrqReply {
  std::uint32_t max_wr, max_sge, srq_limit, reserved;
};
struct CreateQpRequest {
  std::uint32_t context, pd, send_cq, recv_cq, srq /* 0: none */;
  std::uint32_t type;  // enum ibv_qp_type: 2 RC, 3 UC, 4 UD
  std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
  std::uint32_t sq_sig_all;
};
struct CreateQpReply {
  std::uint32_t qp, qpn;
  std::uint32_t doorbell;  // member of the guest's doorbell bitmap
  std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
  QueueReply send, receive;  // receive.offset 0: it has an SRQ, whose completions come in receive.lane of its own pair
};
// An XRC domain: one's own, or, with a descriptor of a file, that of all programs of the user that name the same file. EAGAIN: it is not open yet,
// and O_CREAT was not said; EINVAL: it is, and O_EXCL was.
struct OpenXrcdRequest {
  std::uint32_t context;
  std::uint32_t flags;          // XrcdFlag
  std::uint64_t device, inode;  // in a virtual machine, from where no descriptor comes: the file
};
enum XrcdFlag : std::uint32_t { xrcd_create = 1, xrcd_exclusive = 2, xrcd_file = 4 };
// Queue pairs of XRC. A target (IBV_QPT_XRC_RECV) has a protection domain and completion queues of its own like any other, and uses neither; an
// SRQ becomes an XRC SRQ by a queue pair of type xrc_srq, whose receive lane brings what is received there, and whose number is the SRQ's.
struct CreateXrcQpRequest {
  CreateQpRequest qp;  // type: 9 XRC_SEND, 10 XRC_RECV, or xrc_srq
  std::uint32_t xrcd;  // 0 of an initiator
  // Of a target: the number of one that is there (ibv_open_qp): the reply is another handle of it, which keeps it when the others are gone, and
  // gets its events, too. 0: a new one.
  std::uint32_t target;
};
constexpr std::uint32_t xrc_srq = 0x100;
struct ModifyQpRequest {
  std::uint32_t qp, mask;  // enum ibv_qp_attr_mask
  // Where the guest's writers stand: RESET skips to it, and RESET and ERR let the sends before it go first that get on by themselves.
  std::uint32_t send_position, receive_position;
  QpAttributes attributes;
};
struct ModifyQpReply {
  std::uint32_t state, reserved;
};
struct QueryQpReply {
  QpAttributes attributes;
};
struct McastRequest {
  std::uint32_t qp;
  std::uint16_t lid, reserved;
  Gid gid;
};

// --- direct mode (vrdma/direct.hpp) -----------------------------------------------------------------------------
// A guest that finds an offer in its send queue's header asks for what it takes to run the connection. Reply descriptors (memfds):
// the room of the two guests, the peer's arena, the guest's own keys, the peer's keys; mapping them changes nothing until the
// direction's claim is free. Where the peer's receives complete on a queue with a channel, the pipe for its events, too. ESTALE: the
// offer does not stand any more. The peer of a UD queue pair is itself.
struct OpenDirectRequest {
  std::uint32_t qp, offer;
};
struct OpenDirectReply {
  std::uint32_t room;         // unique among the service's
  std::uint32_t peer;         // guest
  std::uint32_t direction;    // index in the room, of the one that starts at `qp`
  std::uint32_t epoch;
  std::uint64_t pd, peer_pd;  // the service's numbers
  std::uint64_t peer_arena_bytes;
  std::uint64_t peer_cq;      // offset of the CqShared in the peer's arena, where its receives complete
  QueueReply peer_receive;    // in the peer's arena
  std::uint32_t peer_qpn;
  std::uint32_t peer_channel;    // of the queue where its receives complete; 0: none
  std::uint32_t peer_cq_handle;  // for the records of its events
  std::uint32_t taker;        // whose records of the peer's shared receive queue are this direction's; 0: it has a queue of its own
  std::uint32_t has_unmapped; // 1: some memory of either is reached through its process: open_process is worth asking at once
  std::uint32_t reserved;
};
// Where the shared receive queue of such an end lies, in the peer's arena; asked as open_direct.
struct OpenSharedReceivesReply {
  QueueReply queue;
  std::uint64_t turns;  // direct::Turns
};
// Of a UD queue pair that has taken its offer up: what it takes to deliver to one address. Descriptors as for open_direct, the room being the
// receiver's own. EHOSTUNREACH: datagrams to there are the service's.
struct OpenPathRequest {
  std::uint32_t qp, offer;
  UdOperand address;  // but for the Q_Key
};
struct OpenPathReply {
  OpenDirectReply end;              // `direction` is the receiver's inbox; `peer_receive` where its lane is
  OpenSharedReceivesReply shared;   // where end.taker is not 0
  GidEntry source;                  // of the sender, for the GRH
  std::uint32_t has_grh;
  std::uint16_t slid, reserved;
  std::uint32_t poster;             // the sender's number in the inbox's claim
  std::uint32_t reserved_too;
};
// A file that the keys of a guest name: one's own, or a peer's. Reply descriptor: the file.
struct OpenBackingRequest {
  std::uint32_t guest, backing;
};
struct OpenBackingReply {
  std::uint64_t bytes;
};
// How to find the process of a guest that keys with an address are of (direct::KeyEntry). ENOENT: not reached through its process.
struct OpenProcessRequest {
  std::uint32_t guest;
  std::uint32_t reserved;
};
struct OpenProcessReply {
  std::uint32_t pid;            // as it sees itself; guests that are direct share their pid namespace
  std::uint32_t reserved;
  std::uint64_t probe_address;  // of an aligned word in its memory that holds …
  std::uint64_t probe_value;    // … this, as ReachProcessRequest says
};
// May these guests be direct? From a tool: for one guest, or (0) for all that its user may see, those that are yet to attach included.
// EOPNOTSUPP: the service's "direct" is "mediated". ENOENT: no such guest, or not for this user to see.
struct SetDirectRequest {
  std::uint32_t guest;
  std::uint32_t mediated;  // 1: they may not
};
struct SetDirectReply {
  std::uint32_t guests;          // that are attached, and that it was said of
  std::uint32_t still_mediated;  // of them, because it holds for all of their user's or of the service's guests
};

// --- VMCI ports, datagrams, queue pairs (drawn in vmkernel_svc/vmci_switch.hpp) ---------------------------------
// A datagram goes to (context, port) by its tag. To (host_context, control_port) it is a control request. To another guest the
// service forwards it: source_context is then the one that the service knows, and the user bits are datagram_bit | the
// sender's 16 kind bits. What guests do not receive on a bound port is dropped and counted.
constexpr std::uint32_t datagram_bit = 1u << 17;  // never in an answer
constexpr std::uint32_t kind_mask = 0xffff;
constexpr std::uint32_t dynamic_port_first = 49152;  // of those that the service picks
constexpr std::uint32_t port_max = 0x7fffffff;
constexpr std::uint64_t queue_bytes_min = 4096;
constexpr std::uint64_t queue_bytes_max = std::uint64_t{1} << 30;

struct BindPortRequest {
  std::uint32_t port;        // 0: any that is free
  std::uint32_t offers_max;  // queue pairs that may wait here to be attached; 0: none are taken
};
struct PortReply {
  std::uint32_t port;
  std::uint32_t reserved;
};
struct PortRequest {
  std::uint32_t port;
  std::uint32_t reserved;
};
struct QueuePairHandle {
  std::uint32_t context;  // of its creator
  std::uint32_t resource;
  bool operator==(const QueuePairHandle&) const = default;
};
// Reply descriptors of alloc and attach: memory (memfd), doorbell (one end of a pair of connected sockets).
struct QueuePairAllocRequest {
  std::uint32_t peer_context, peer_port;      // who may attach, and where it is offered
  std::uint32_t local_port;                   // a bound port that wants to hear of attach and detach; 0: none
  std::uint32_t reserved;
  std::uint64_t produce_bytes, consume_bytes; // powers of two, queue_bytes_min to queue_bytes_max
};
struct QueuePairAttachRequest {
  QueuePairHandle handle;
  std::uint32_t local_port;  // a bound port that wants to hear of detach; 0: none
  std::uint32_t reserved;
};
struct QueuePairReply {
  QueuePairHandle handle;
  vmci::QueuePairGeometry geometry;           // kind bytes; produce and consume are named from the creator's side
  std::uint32_t peer_context, peer_port;
};
// Datagrams from (host_context, control_port), never dropped; `kind`: Notice.
enum Notice : std::uint16_t { notice_offer = 0xff01, notice_attached = 0xff02, notice_detached = 0xff03 };
struct QueuePairNotice {
  QueuePairHandle handle;
  vmci::QueuePairGeometry geometry;
  std::uint32_t peer_context, peer_port;  // the other side
};

// name, request body, reply body, on the socket?
#define VRDMA_CONTROL_REQUESTS(X)                                        \
  X(attach, AttachRequest, AttachReply, true)                            \
  X(add_backing, AddBackingRequest, AddBackingReply, true)               \
  X(remove_backing, RemoveBackingRequest, Empty, true)                   \
  X(open_context, OpenContextRequest, OpenContextReply, true)            \
  X(create_channel, CreateChannelRequest, ChannelReply, true)            \
  X(show, Empty, Empty, true)                                            \
  X(query_device, Empty, DeviceReply, false)                             \
  X(close_context, HandleRequest, Empty, false)                          \
  X(destroy_channel, HandleRequest, Empty, false)                        \
  X(create_pd, CreatePdRequest, HandleReply, false)                      \
  X(destroy_pd, HandleRequest, Empty, false)                             \
  X(stage_extents, StageExtentsRequest, Empty, false)                    \
  X(reg_mr, RegMrRequest, RegMrReply, false)                             \
  X(rereg_mr, ReregMrRequest, RegMrReply, false)                         \
  X(dereg_mr, HandleRequest, Empty, false)                               \
  X(create_cq, CreateCqRequest, CreateCqReply, false)                    \
  X(resize_cq, ResizeCqRequest, ResizeCqReply, false)                    \
  X(destroy_cq, HandleRequest, Empty, false)                             \
  X(create_srq, CreateSrqRequest, CreateSrqReply, false)                 \
  X(modify_srq, ModifySrqRequest, Empty, false)                          \
  X(query_srq, HandleRequest, QuerySrqReply, false)                      \
  X(destroy_srq, HandleRequest, Empty, false)                            \
  X(create_qp, CreateQpRequest, CreateQpReply, false)                    \
  X(modify_qp, ModifyQpRequest, ModifyQpReply, false)                    \
  X(query_qp, HandleRequest, QueryQpReply, false)                        \
  X(destroy_qp, HandleRequest, Empty, false)                             \
  X(attach_mcast, McastRequest, Empty, false)                            \
  X(detach_mcast, McastRequest, Empty, false)                            \
  X(bind_port, BindPortRequest, PortReply, false)                        \
  X(unbind_port, PortRequest, Empty, false)                              \
  X(queue_pair_alloc, QueuePairAllocRequest, QueuePairReply, true)       \
  X(queue_pair_attach, QueuePairAttachRequest, QueuePairReply, true)     \
  X(queue_pair_detach, QueuePairHandle, Empty, false)                    \
  X(reach_process, ReachProcessRequest, ReachProcessReply, true)        \
  X(add_pinned, AddPinnedRequest, AddBackingReply, true)                 \
  X(open_direct, OpenDirectRequest, OpenDirectReply, true)               \
  X(open_backing, OpenBackingRequest, OpenBackingReply, true)            \
  X(set_direct, SetDirectRequest, SetDirectReply, true)                  \
  X(open_shared_receives, OpenDirectRequest, OpenSharedReceivesReply, true) \
  X(open_process, OpenProcessRequest, OpenProcessReply, true)             \
  X(share_address, ShareAddressRequest, Empty, false)                     \
  X(open_path, OpenPathRequest, OpenPathReply, true)                      \
  VRDMA_CM_REQUESTS(X)                                                    \
  X(open_xrcd, OpenXrcdRequest, HandleReply, true)                        \
  X(close_xrcd, HandleRequest, Empty, false)                              \
  X(create_xrc_qp, CreateXrcQpRequest, CreateQpReply, false)              \
  X(time_cq, HandleRequest, Empty, false)                                 \
  X(read_clock, HandleRequest, ClockReply, false)                         \
  X(alloc_mw, AllocMwRequest, RegMrReply, false)                          \
  X(dealloc_mw, HandleRequest, Empty, false)                              \
  X(bind_mw, BindMwRequest, Empty, false)                                 \
  X(invalidate_mw, InvalidateMwRequest, Empty, false)                     \
  X(read_counters, Empty, CountersReply, false)                           \
  X(cm_write_event, CmWriteEventRequest, Empty, false)                    \
  VRDMA_MAD_REQUESTS(X)                                                   \
  X(query_link_layer, Empty, LinkLayerReply, true)

enum class Request : std::uint16_t {
  none,
#define VRDMA_ENUMERATOR(name, request, reply, socket) name,
  VRDMA_CONTROL_REQUESTS(VRDMA_ENUMERATOR)
#undef VRDMA_ENUMERATOR
      count
};

template <Request R>
struct Message;
#define VRDMA_MESSAGE(name_, request, reply, socket)                                                \
  template <>                                                                                       \
  struct Message<Request::name_> {                                                                  \
    using RequestBody = request;                                                                    \
    using ReplyBody = reply;                                                                        \
    static constexpr bool on_socket = socket;                                                       \
    static constexpr const char* name = #name_;                                                     \
    static_assert(std::is_trivially_copyable_v<request> && sizeof(request) <= body_bytes_max);      \
    static_assert(std::is_trivially_copyable_v<reply> && sizeof(reply) <= body_bytes_max);          \
  };
VRDMA_CONTROL_REQUESTS(VRDMA_MESSAGE)
#undef VRDMA_MESSAGE

}  // namespace vrdma::control
