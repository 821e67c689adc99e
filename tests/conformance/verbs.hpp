// Verbs objects as a test wants them: made or the test fails, destroyed or the test fails, with the few operations that
// every test repeats. Any thread may use an object as far as verbs itself allows; nothing is locked here.
// Nothing is hidden either: every class gives its raw pointer, and tests of rules call the verbs themselves.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tests/conformance/run.hpp"

namespace vrdma::conformance {

// As ints: clang objects to the header's macros mixing two enumerations.
constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;
constexpr unsigned all_access =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
constexpr std::size_t grh_bytes = 40;  // in front of a datagram

class Device {
 public:
  explicit Device(const Settings& settings);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  bool ethernet() const { return port.link_layer == IBV_LINK_LAYER_ETHERNET; }
  bool by_gid() const { return gid_index >= 0; }
  std::size_t mtu_bytes() const { return std::size_t{128} << port.active_mtu; }

  // Waits for this event, acknowledges it and returns it. Link events and COMM_EST are passed over, any other fails.
  ibv_async_event wait_event(ibv_event_type type, Where where = Where::current());
  // Takes one pending event without waiting. Not acknowledged.
  bool take_event(ibv_async_event& event);
  // Nothing is pending but link events and COMM_EST.
  void expect_no_event(Where where = Where::current());

  ibv_context* ctx = nullptr;
  std::uint8_t port_num = 1;
  int gid_index = -1;  // -1: addressed by LID
  ibv_gid gid{};
  ibv_port_attr port{};
  ibv_device_attr attr{};
};

class Pd {
 public:
  explicit Pd(Device& device, Where where = Where::current());
  ~Pd();
  Pd(const Pd&) = delete;
  Pd& operator=(const Pd&) = delete;
  operator ibv_pd*() const { return p; }
  ibv_pd* p;
};

// Memory of its own pages, with an inaccessible page on either side.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  std::uint64_t address(std::size_t offset = 0) const { return reinterpret_cast<std::uint64_t>(data_) + offset; }

 private:
  std::byte* map_;
  std::size_t map_bytes_;
  std::byte* data_;
  std::size_t bytes_;
};

class Mr {
 public:
  Mr(ibv_pd* pd, void* address, std::size_t bytes, unsigned access = all_access, Where where = Where::current());
  ~Mr();
  Mr(const Mr&) = delete;
  Mr& operator=(const Mr&) = delete;
  void dereg(Where where = Where::current());
  operator ibv_mr*() const { return p; }
  ibv_mr* p;
};

// A buffer and its registration.
class Region {
 public:
  Region(ibv_pd* pd, std::size_t bytes, unsigned access = all_access, Where where = Where::current())
      : buffer(bytes), mr(pd, buffer.data(), bytes, access, where) {}
  ibv_sge sge(std::size_t offset, std::size_t bytes) const {
    return {buffer.address(offset), static_cast<std::uint32_t>(bytes), mr.p->lkey};
  }
  std::byte* data(std::size_t offset = 0) const { return buffer.data() + offset; }
  Buffer buffer;
  Mr mr;
};

class Channel {
 public:
  explicit Channel(Device& device, Where where = Where::current());
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  bool readable(int timeout_ms = 0) const;
  // Waits for the next event; not acknowledged.
  ibv_cq* wait(Where where = Where::current());
  ibv_comp_channel* p;
};

class Cq {
 public:
  Cq(Device& device, int depth, Channel* channel = nullptr, void* context = nullptr, Where where = Where::current());
  ~Cq();
  Cq(const Cq&) = delete;
  Cq& operator=(const Cq&) = delete;
  operator ibv_cq*() const { return p; }

  // The next completion, under the watchdog.
  ibv_wc next(Where where = Where::current());
  // The next completion has this wr_id and status.
  ibv_wc expect(std::uint64_t id, ibv_wc_status status = IBV_WC_SUCCESS, Where where = Where::current());
  void expect_empty(Where where = Where::current());
  void arm(bool solicited_only = false, Where where = Where::current());
  ibv_cq* p;
};

class Srq {
 public:
  Srq(ibv_pd* pd, std::uint32_t depth, std::uint32_t sges = 1, Where where = Where::current());
  ~Srq();
  Srq(const Srq&) = delete;
  Srq& operator=(const Srq&) = delete;
  operator ibv_srq*() const { return p; }
  ibv_srq* p;
  ibv_srq_attr attr{};
};

struct QpSpec {
  ibv_qp_type type = IBV_QPT_RC;
  std::uint32_t send_wr = 64;
  std::uint32_t recv_wr = 64;
  std::uint32_t send_sge = 4;
  std::uint32_t recv_sge = 4;
  std::uint32_t inline_bytes = 0;
  bool sig_all = false;
  ibv_srq* srq = nullptr;
};
ibv_qp_init_attr init_attr(ibv_cq* send_cq, ibv_cq* recv_cq, const QpSpec& spec);

class Qp {
 public:
  Qp(ibv_pd* pd, ibv_cq* send_cq, ibv_cq* recv_cq, const QpSpec& spec = {}, Where where = Where::current());
  ~Qp();
  Qp(const Qp&) = delete;
  Qp& operator=(const Qp&) = delete;
  void destroy(Where where = Where::current());
  ibv_qp_state state(Where where = Where::current()) const;
  void wait_state(ibv_qp_state wanted, Where where = Where::current()) const;
  void set_state(ibv_qp_state wanted, Where where = Where::current());
  operator ibv_qp*() const { return p; }
  ibv_qp* p;
  ibv_qp_cap cap{};
};

class Ah {
 public:
  Ah(ibv_pd* pd, ibv_ah_attr attr, Where where = Where::current());
  explicit Ah(ibv_ah* ah) : p(ah) {}
  ~Ah();
  Ah(const Ah&) = delete;
  Ah& operator=(const Ah&) = delete;
  operator ibv_ah*() const { return p; }
  ibv_ah* p;
};

// Where a QP can be reached; what the two roles tell each other.
struct Address {
  ibv_gid gid;
  std::uint32_t qpn;
  std::uint32_t psn;
  std::uint16_t lid;
  std::uint16_t mtu;  // ibv_mtu
  std::uint32_t reserved;
};
struct Remote {
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint32_t rkey;
  std::uint32_t reserved;
};

constexpr std::uint32_t test_qkey = 0x11223344;

struct Path {
  unsigned access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_LOCAL_WRITE;
  std::uint8_t timeout = 14;  // 67 ms
  std::uint8_t retry_count = 7;
  std::uint8_t rnr_retry = 7;
  std::uint8_t min_rnr_timer = 12;  // 0.64 ms
  std::uint8_t rd_atomic = 0;       // 0: the device's limit, at most 16
  std::uint8_t dest_rd_atomic = 0;  // 0: the same rule
  int mtu = 0;                      // 0: the smaller of both ports
  std::uint32_t qkey = test_qkey;
};

struct Modify {
  ibv_qp_attr attr{};
  int mask = 0;
};
std::uint32_t psn_of(std::uint32_t qpn);
Address address_of(const Device& device, const ibv_qp* qp);
ibv_ah_attr ah_to(const Device& device, const Address& remote);
Modify init_of(const Device& device, ibv_qp_type type, const Path& path = {});
Modify rtr_of(const Device& device, ibv_qp_type type, const Address& remote, const Path& path = {});
Modify rts_of(const Device& device, const ibv_qp* qp, const Path& path = {});
int apply(ibv_qp* qp, Modify modify);

void to_init(const Device& device, ibv_qp* qp, const Path& path = {}, Where where = Where::current());
void to_rtr(const Device& device, ibv_qp* qp, const Address& remote, const Path& path = {}, Where where = Where::current());
void to_rts(const Device& device, ibv_qp* qp, const Path& path = {}, Where where = Where::current());
// From RESET (or INIT) to RTS in one call.
void bring_up(const Device& device, ibv_qp* qp, const Address& remote, const Path& path = {}, Where where = Where::current());

struct Send {
  ibv_wr_opcode opcode = IBV_WR_SEND;
  std::uint64_t id = 0;
  std::vector<ibv_sge> sges{};
  unsigned flags = IBV_SEND_SIGNALED;
  std::uint32_t imm = 0;  // as it lies in memory
  std::uint64_t remote_address = 0;
  std::uint32_t rkey = 0;
  std::uint64_t compare_add = 0;
  std::uint64_t swap = 0;
  ibv_ah* ah = nullptr;
  std::uint32_t qpn = 0;
  std::uint32_t qkey = 0;
  std::uint32_t srqn = 0;  // XRC
};
// The errno that ibv_post_send answered; on an error bad_wr must have named the request.
int post(ibv_qp* qp, const Send& send, Where where = Where::current());
ibv_send_wr to_wr(const Send& send);

struct Recv {
  std::uint64_t id = 0;
  std::vector<ibv_sge> sges{};
};
int post(ibv_qp* qp, const Recv& recv, Where where = Where::current());
int post(ibv_srq* srq, const Recv& recv, Where where = Where::current());

// The usual set-up of a two-process test: one QP on each side, connected, and a region each that the other knows.
struct LinkSpec {
  QpSpec qp{};
  Path path{};
  int cq_depth = 256;
  std::size_t bytes = 64 * 1024;
  unsigned access = all_access;
};
class Link {
 public:
  explicit Link(Run& run, const LinkSpec& spec = {}, Where where = Where::current());

  Send write(std::uint64_t id, std::size_t local, std::size_t remote_offset, std::size_t bytes) const;
  Send read(std::uint64_t id, std::size_t local, std::size_t remote_offset, std::size_t bytes) const;
  Send send(std::uint64_t id, std::size_t local, std::size_t bytes) const;
  Recv recv(std::uint64_t id, std::size_t local, std::size_t bytes) const;

  // Both roles together: through RESET back to RTS, whatever the state was.
  void reconnect(Where where = Where::current());

  Run& run;
  LinkSpec spec;
  Device dev;
  Pd pd;
  Cq scq;
  Cq rcq;
  Region mem;
  Qp qp;
  Address peer_address{};
  Remote remote{};
};

// A request that must fail remotely. Both roles call this; a posts, b is the responder. Afterwards the link works again.
struct Fault {
  const char* name;
  Send request{};
  ibv_wc_status status = IBV_WC_REM_ACCESS_ERR;
  ibv_event_type event = IBV_EVENT_QP_ACCESS_ERR;
};
void expect_fault(Link& link, const Fault& fault, Where where = Where::current());

// Two connected QPs within one process.
class Loop {
 public:
  explicit Loop(Run& run, const LinkSpec& spec = {}, Where where = Where::current());
  Device dev;
  Pd pd;
  Cq scq;  // of qp
  Cq rcq;  // of other
  Cq unused;
  Region mem;
  Qp qp;
  Qp other;
};

// Bytes that depend on seed and position only, so that either role can predict them.
void fill_pattern(std::span<std::byte> out, std::uint64_t seed);
void expect_bytes(std::span<const std::byte> got, std::span<const std::byte> wanted, const char* what,
                  Where where = Where::current());

// Threads whose failures are the test's; joined at the end of the scope.
class Threads {
 public:
  void start(std::function<void()> body);
  void join();
  ~Threads() { join(); }
  Threads() = default;
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  std::vector<std::function<void()>> joiners_;
};

}  // namespace vrdma::conformance
