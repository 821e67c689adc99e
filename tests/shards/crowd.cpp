// A crowd: processes that each call all others, by datagrams from the start and over connections that are made one after the other while
// everything else flows; every message is known beforehand to who receives it, arrives once and in order. Between them a service with
// several shards has to bring all guests together step by step (vmkernel_svc/shards.hpp), under traffic.
//
//   crowd MEMBERS MESSAGES SEED     of each member to each other one, as many by connection as by datagrams
//
// Says what was moved and ends with 0, or says what was wrong. A client of libibverbs alone.
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr unsigned members_max = 16;
constexpr unsigned window = 16;         // receives of a connection
constexpr unsigned credit = 2 * window;  // messages under way: more than there are receives
constexpr unsigned datagram_window = 4;
constexpr unsigned slot_bytes = 4096, grh_bytes = 40;
constexpr std::uint32_t qkey = 0x5eed;
constexpr unsigned give_up_s = 100;

// What all members see of each other. Whoever publishes does so last; all words are atomic.
struct Place {
  std::atomic<std::uint32_t> qpn{0};  // 0: not there yet
  std::uint64_t landing;              // of RDMA WRITEs, a slot for each credit
  std::uint64_t counter;              // of FETCH_ADDs
  std::uint32_t rkey;
  std::atomic<bool> connected{false};
  std::atomic<std::uint32_t> taken{0};  // messages that came here and were right
};
struct Board {
  std::atomic<std::uint32_t> done{0};
  std::atomic<bool> failed{false};
  char why[256];
  struct {
    std::atomic<std::uint32_t> qpn{0};
    std::uint16_t lid;
    ibv_gid gid;
    bool global;
    std::atomic<std::uint32_t> taken[members_max];  // datagrams, by sender
  } members[members_max];
  Place ends[members_max][members_max];  // [owner][peer]
};
Board* board;
unsigned self;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char* format, ...) {
  if (!board->failed.exchange(true)) {
    const int at = std::snprintf(board->why, sizeof(board->why), "member %u: ", self);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(board->why + at, sizeof(board->why) - static_cast<std::size_t>(at), format, arguments);
    va_end(arguments);
  }
  ::_exit(1);
}
template <class T>
T* have(T* object, const char* what) {
  if (object == nullptr) fail("%s: %s", what, std::strerror(errno));
  return object;
}
void check(int status, const char* what) {
  if (status != 0) fail("%s: %s", what, std::strerror(status));
}

std::uint64_t mix(std::uint64_t z) {  // splitmix64
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

enum class Way : std::uint64_t { connection = 0, datagram = 1 };

// A message, known from who sends it to whom, by what, and its number.
struct Message {
  Message(std::uint64_t seed, unsigned from, unsigned to, Way way, std::uint32_t number)
      : key(mix(seed ^ mix(std::uint64_t{from} << 40 | std::uint64_t{to} << 36 | static_cast<std::uint64_t>(way) << 35 | number))),
        bytes(static_cast<std::uint32_t>(8 * (1 + key % ((key >> 32) % 4 == 0 ? slot_bytes / 8 : 16)))) {}
  void write(std::byte* at) const {
    for (std::uint32_t i = 0; i < bytes / 8; ++i) {
      const std::uint64_t word = key * (2 * i + 1);
      std::memcpy(at + 8 * i, &word, 8);
    }
  }
  bool stands_at(const std::byte* at) const {
    for (std::uint32_t i = 0; i < bytes / 8; ++i) {
      std::uint64_t word;
      std::memcpy(&word, at + 8 * i, 8);
      if (word != key * (2 * i + 1)) return false;
    }
    return true;
  }
  std::uint64_t key;
  std::uint32_t bytes;
};
bool is_write(std::uint32_t number) { return number % 3 == 2; }
bool is_followed_by_add(std::uint32_t number) { return number % 8 == 0; }

class Member {
 public:
  Member(unsigned count, std::uint32_t messages, std::uint64_t seed) : count_(count), messages_(messages), seed_(seed), peers_(count) {
    int devices = 0;
    ibv_device** const list = have(ibv_get_device_list(&devices), "ibv_get_device_list");
    if (devices == 0) fail("there is no device");
    context_ = have(ibv_open_device(list[0]), "ibv_open_device");
    ibv_free_device_list(list);
    pd_ = have(ibv_alloc_pd(context_), "ibv_alloc_pd");
    if (self % 2 != 0) channel_ = have(ibv_create_comp_channel(context_), "ibv_create_comp_channel");
    cq_ = have(ibv_create_cq(context_, static_cast<int>(count * (window + 3 * credit + 2 * datagram_window)), nullptr, channel_, 0), "ibv_create_cq");
    // Of each peer: receives, landing, sends, datagrams out; then receives of datagrams, and 8-byte words.
    per_peer_ = (window + credit + credit + datagram_window) * slot_bytes;
    datagrams_at_ = count * per_peer_;
    words_at_ = datagrams_at_ + count * datagram_window * (slot_bytes + grh_bytes);
    // Whole pages: all of it is mapped into the service, which then waits for nobody when it delivers.
    memory_bytes_ = (words_at_ + 2 * count * 8 + slot_bytes - 1) / slot_bytes * slot_bytes;
    void* const memory = ::mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap: %s", std::strerror(errno));
    memory_ = static_cast<std::byte*>(memory);
    mr_ = have(ibv_reg_mr(pd_, memory_, memory_bytes_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC), "ibv_reg_mr");
    check(ibv_query_port(context_, 1, &port_), "ibv_query_port");
    begin_datagrams();
    for (unsigned peer = 0; peer < count; ++peer)
      if (peer != self) order_.push_back(peer);
    // The same order of pairs for all, so that nobody waits in a circle.
    std::sort(order_.begin(), order_.end(), [this](unsigned a, unsigned b) { return rank(a) < rank(b); });
  }

  void run() {
    bool said = false;
    while (board->done.load() < count_) {
      if (board->failed.load(std::memory_order_relaxed)) ::_exit(1);
      bool moved = take_completions();
      moved |= make_connections();
      for (const unsigned peer : order_) {
        moved |= send(peer);
        moved |= send_datagram(peer);
      }
      if (!said && finished()) said = true, board->done.fetch_add(1);
      if (!moved) rest();
    }
    for (const unsigned peer : order_) {
      std::uint64_t wanted = 0, counted;
      for (std::uint32_t number = 0; number < messages_; ++number) wanted += is_followed_by_add(number) ? number + 1 : 0;
      std::memcpy(&counted, word(peer), 8);
      if (counted != wanted) fail("%lu was added by member %u, and not %lu", counted, peer, wanted);
      check(ibv_destroy_qp(peers_[peer].qp), "ibv_destroy_qp");
      check(ibv_destroy_ah(peers_[peer].ah), "ibv_destroy_ah");
    }
    check(ibv_destroy_qp(datagrams_), "ibv_destroy_qp");
    if (channel_ != nullptr) ibv_ack_cq_events(cq_, events_);
    check(ibv_destroy_cq(cq_), "ibv_destroy_cq");
    if (channel_ != nullptr) check(ibv_destroy_comp_channel(channel_), "ibv_destroy_comp_channel");
    check(ibv_dereg_mr(mr_), "ibv_dereg_mr");
    check(ibv_dealloc_pd(pd_), "ibv_dealloc_pd");
    check(ibv_close_device(context_), "ibv_close_device");
  }

 private:
  struct Peer {
    ibv_qp* qp = nullptr;
    ibv_ah* ah = nullptr;
    bool connected = false;
    std::uint32_t sent = 0, completed = 0, received = 0;  // by connection
    std::uint32_t adds = 0, added = 0;
    std::uint32_t datagrams_sent = 0, datagrams_completed = 0, datagrams_received = 0;
  };
  enum Kind : std::uint64_t { message_out, message_in, add_out, datagram_out, datagram_in };
  static std::uint64_t id(Kind kind, unsigned peer, std::uint32_t slot) { return std::uint64_t{kind} << 56 | std::uint64_t{peer} << 32 | slot; }

  std::uint64_t rank(unsigned peer) const { return mix(seed_ * 31 + std::min(self, peer) * members_max + std::max(self, peer)); }
  std::byte* slot(unsigned peer, unsigned area_slots, std::uint32_t number) {
    return memory_ + peer * per_peer_ + (area_slots + number) * slot_bytes;
  }
  std::byte* receive_slot(unsigned peer, std::uint32_t number) { return slot(peer, 0, number % window); }
  std::byte* landing_slot(unsigned peer, std::uint32_t number) { return slot(peer, window, number % credit); }
  std::byte* send_slot(unsigned peer, std::uint32_t number) { return slot(peer, window + credit, number % credit); }
  std::byte* datagram_slot(unsigned peer, std::uint32_t number) { return slot(peer, window + 2 * credit, number % datagram_window); }
  std::byte* datagram_receive(std::uint32_t slot) { return memory_ + datagrams_at_ + slot * (slot_bytes + grh_bytes); }
  std::byte* word(unsigned peer) { return memory_ + words_at_ + peer * 8; }
  std::byte* old_value(unsigned peer) { return memory_ + words_at_ + (count_ + peer) * 8; }
  ibv_sge sge(std::byte* at, std::uint32_t bytes) const { return {reinterpret_cast<std::uint64_t>(at), bytes, mr_->lkey}; }

  ibv_ah_attr way_to(unsigned peer) const {
    const auto& other = board->members[peer];
    ibv_ah_attr way{};
    way.port_num = 1;
    way.dlid = other.lid;
    if (other.global) way.is_global = 1, way.grh.dgid = other.gid, way.grh.sgid_index = 1, way.grh.hop_limit = 64;
    return way;
  }

  void begin_datagrams() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = IBV_QPT_UD;
    init.cap = {count_ * datagram_window, count_ * datagram_window, 1, 1, 0};
    datagrams_ = have(ibv_create_qp(pd_, &init), "ibv_create_qp of UD");
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT, attr.port_num = 1, attr.qkey = qkey;
    check(ibv_modify_qp(datagrams_, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
    attr.qp_state = IBV_QPS_RTR;
    check(ibv_modify_qp(datagrams_, &attr, IBV_QP_STATE), "to RTR");
    attr.qp_state = IBV_QPS_RTS;
    check(ibv_modify_qp(datagrams_, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    for (std::uint32_t at = 0; at < count_ * datagram_window; ++at) receive_datagram(at);
    auto& mine = board->members[self];
    mine.lid = port_.lid;
    mine.global = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (mine.global) check(ibv_query_gid(context_, 1, 1, &mine.gid), "ibv_query_gid");
    mine.qpn.store(datagrams_->qp_num, std::memory_order_release);
  }
  void receive_datagram(std::uint32_t at) {
    ibv_sge buffer = sge(datagram_receive(at), slot_bytes + grh_bytes);
    ibv_recv_wr wr{}, *bad;
    wr.wr_id = id(datagram_in, 0, at), wr.sg_list = &buffer, wr.num_sge = 1;
    check(ibv_post_recv(datagrams_, &wr, &bad), "ibv_post_recv of UD");
  }
  void receive(unsigned peer, std::uint32_t number) {
    ibv_sge buffer = sge(receive_slot(peer, number), slot_bytes);
    ibv_recv_wr wr{}, *bad;
    wr.wr_id = id(message_in, peer, number), wr.sg_list = &buffer, wr.num_sge = 1;
    check(ibv_post_recv(peers_[peer].qp, &wr, &bad), "ibv_post_recv");
  }

  // The next one is made once a part of the messages of the one before has gone.
  bool make_connections() {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      Peer& peer = peers_[order_[i]];
      if (peer.connected) {
        if (peer.sent < messages_ / 4) return false;
        continue;
      }
      return connect(order_[i], peer);
    }
    return false;
  }
  bool connect(unsigned number, Peer& peer) {
    Place& here = board->ends[self][number];
    const Place& there = board->ends[number][self];
    if (peer.qp == nullptr) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq_;
      init.qp_type = IBV_QPT_RC;
      init.cap = {2 * credit, window, 1, 1, 0};
      peer.qp = have(ibv_create_qp(pd_, &init), "ibv_create_qp of RC");
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_INIT, attr.port_num = 1;
      attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
      check(ibv_modify_qp(peer.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "to INIT");
      for (std::uint32_t i = 0; i < window; ++i) receive(number, i);
      here.landing = reinterpret_cast<std::uint64_t>(landing_slot(number, 0));
      here.counter = reinterpret_cast<std::uint64_t>(word(number));
      here.rkey = mr_->rkey;
      here.qpn.store(peer.qp->qp_num, std::memory_order_release);
      return true;
    }
    const std::uint32_t qpn = there.qpn.load(std::memory_order_acquire);
    if (qpn == 0) return false;
    if (!here.connected.load(std::memory_order_relaxed)) {
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_RTR, attr.path_mtu = IBV_MTU_1024, attr.dest_qp_num = qpn, attr.max_dest_rd_atomic = 4, attr.min_rnr_timer = 1;
      attr.ah_attr = way_to(number);
      check(ibv_modify_qp(peer.qp, &attr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                              IBV_QP_MIN_RNR_TIMER),
            "to RTR");
      attr.qp_state = IBV_QPS_RTS, attr.timeout = 17, attr.retry_cnt = 7, attr.rnr_retry = 7, attr.max_rd_atomic = 4;
      check(ibv_modify_qp(peer.qp, &attr,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
            "to RTS");
      here.connected.store(true, std::memory_order_release);
    }
    return peer.connected = there.connected.load(std::memory_order_acquire);
  }

  bool send(unsigned number) {
    Peer& peer = peers_[number];
    const Place& there = board->ends[number][self];
    if (!peer.connected || peer.sent == messages_ || peer.sent - there.taken.load(std::memory_order_acquire) >= credit ||
        peer.sent - peer.completed >= credit || peer.adds != peer.added)
      return false;
    const Message message(seed_, self, number, Way::connection, peer.sent);
    message.write(send_slot(number, peer.sent));
    ibv_sge bytes = sge(send_slot(number, peer.sent), message.bytes);
    ibv_send_wr wr{}, add{}, *bad;
    wr.wr_id = id(message_out, number, peer.sent), wr.sg_list = &bytes, wr.num_sge = 1, wr.send_flags = IBV_SEND_SIGNALED, wr.opcode = IBV_WR_SEND;
    if (is_write(peer.sent)) {
      wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wr.imm_data = peer.sent;
      wr.wr.rdma = {there.landing + peer.sent % credit * slot_bytes, there.rkey};
    }
    ibv_sge old = sge(old_value(number), 8);
    if (is_followed_by_add(peer.sent)) {
      add.wr_id = id(add_out, number, 0), add.sg_list = &old, add.num_sge = 1, add.send_flags = IBV_SEND_SIGNALED,
      add.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      add.wr.atomic = {there.counter, peer.sent + 1, 0, there.rkey};
      wr.next = &add;
      ++peer.adds;
    }
    check(ibv_post_send(peer.qp, &wr, &bad), "ibv_post_send");
    ++peer.sent;
    return true;
  }

  bool send_datagram(unsigned number) {
    Peer& peer = peers_[number];
    const auto& other = board->members[number];
    const std::uint32_t qpn = other.qpn.load(std::memory_order_acquire);
    if (qpn == 0 || peer.datagrams_sent == messages_ || peer.datagrams_sent - other.taken[self].load(std::memory_order_acquire) >= datagram_window ||
        peer.datagrams_sent - peer.datagrams_completed >= datagram_window)
      return false;
    if (peer.ah == nullptr) {
      ibv_ah_attr way = way_to(number);
      peer.ah = have(ibv_create_ah(pd_, &way), "ibv_create_ah");
    }
    const Message message(seed_, self, number, Way::datagram, peer.datagrams_sent);
    message.write(datagram_slot(number, peer.datagrams_sent));
    ibv_sge bytes = sge(datagram_slot(number, peer.datagrams_sent), message.bytes);
    ibv_send_wr wr{}, *bad;
    wr.wr_id = id(datagram_out, number, 0), wr.sg_list = &bytes, wr.num_sge = 1, wr.opcode = IBV_WR_SEND_WITH_IMM, wr.send_flags = IBV_SEND_SIGNALED;
    wr.imm_data = self;
    wr.wr.ud = {peer.ah, qpn, qkey};
    check(ibv_post_send(datagrams_, &wr, &bad), "ibv_post_send of UD");
    ++peer.datagrams_sent;
    return true;
  }

  bool take_completions() {
    ibv_wc entries[32];
    const int got = ibv_poll_cq(cq_, 32, entries);
    if (got < 0) fail("ibv_poll_cq: %d", got);
    for (int i = 0; i < got; ++i) take(entries[i]);
    return got != 0;
  }
  void take(const ibv_wc& wc) {
    const auto kind = static_cast<Kind>(wc.wr_id >> 56);
    unsigned number = static_cast<unsigned>(wc.wr_id >> 32 & 0xff);
    const auto at = static_cast<std::uint32_t>(wc.wr_id);
    if (wc.status != IBV_WC_SUCCESS) fail("%s with member %u, kind %lu, number %u", ibv_wc_status_str(wc.status), number, std::uint64_t{kind}, at);
    switch (kind) {
      case message_out:
        if (at != peers_[number].completed++) fail("message %u to %u completed in place of %u", at, number, peers_[number].completed - 1);
        return;
      case add_out: ++peers_[number].added; return;
      case datagram_out: ++peers_[number].datagrams_completed; return;
      case message_in: {
        Peer& peer = peers_[number];
        const std::uint32_t expected = peer.received++;
        const Message message(seed_, number, self, Way::connection, expected);
        if (at != expected || is_write(expected) != (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) || wc.byte_len != message.bytes ||
            (is_write(expected) && wc.imm_data != expected) ||
            !message.stands_at(is_write(expected) ? landing_slot(number, expected) : receive_slot(number, expected)))
          fail("message %u of %u is not what it should be (receive %u, %u bytes): %s", expected, number, at, wc.byte_len,
               what_else(number, Way::connection, expected, is_write(expected) ? landing_slot(number, expected) : receive_slot(number, expected)));
        receive(number, expected + window);
        board->ends[self][number].taken.store(peer.received, std::memory_order_release);
        return;
      }
      case datagram_in: {
        number = wc.imm_data;
        if (number >= count_ || number == self) fail("a datagram of nobody, %u", number);
        Peer& peer = peers_[number];
        const std::uint32_t expected = peer.datagrams_received++;
        const Message message(seed_, number, self, Way::datagram, expected);
        if (wc.byte_len != message.bytes + grh_bytes || wc.src_qp != board->members[number].qpn.load() ||
            !message.stands_at(datagram_receive(at) + grh_bytes))
          fail("datagram %u of %u is not what it should be (%u bytes): %s", expected, number, wc.byte_len,
               what_else(number, Way::datagram, expected, datagram_receive(at) + grh_bytes));
        receive_datagram(at);
        board->members[self].taken[number].store(peer.datagrams_received, std::memory_order_release);
        return;
      }
    }
    fail("a completion of nothing, %lx", wc.wr_id);
  }

  // For who looks for the reason.
  const char* what_else(unsigned from, Way way, std::uint32_t expected, const std::byte* at) const {
    static char said[64] = "nothing that it ever sends";
    for (std::uint32_t number = 0; number < messages_; ++number)
      if (Message(seed_, from, self, way, number).stands_at(at))
        std::snprintf(said, sizeof(said), "that is its %u%s", number, number < expected ? ", again" : "");
    return said;
  }

  bool finished() const {
    return std::all_of(order_.begin(), order_.end(), [this](unsigned number) {
      const Peer& peer = peers_[number];
      return peer.completed == messages_ && peer.received == messages_ && peer.adds == peer.added && peer.datagrams_completed == messages_ &&
             peer.datagrams_received == messages_;
    });
  }

  // Others tell by the board, too: nobody sleeps for long.
  void rest() {
    if (channel_ == nullptr) return;
    check(ibv_req_notify_cq(cq_, 0), "ibv_req_notify_cq");
    if (take_completions()) return;
    pollfd event{channel_->fd, POLLIN, 0};
    if (::poll(&event, 1, 1) != 1) return;
    ibv_cq* cq;
    void* context;
    check(ibv_get_cq_event(channel_, &cq, &context), "ibv_get_cq_event");
    ++events_;
  }

  unsigned count_;
  std::uint32_t messages_;
  std::uint64_t seed_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_qp* datagrams_ = nullptr;
  ibv_port_attr port_{};
  std::size_t per_peer_ = 0, datagrams_at_ = 0, words_at_ = 0, memory_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<Peer> peers_;
  std::vector<unsigned> order_;
  unsigned events_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const unsigned count = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0;
  if (argc != 4 || count < 2 || count > members_max) {
    std::fprintf(stderr, "usage: crowd MEMBERS MESSAGES SEED, 2 to %u members\n", members_max);
    return 2;
  }
  const auto messages = static_cast<std::uint32_t>(std::atoi(argv[2]));
  const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
  void* const shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return std::perror("mmap"), 1;
  board = new (shared) Board{};
  std::vector<pid_t> pids;
  for (self = 0; self < count; ++self) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::alarm(give_up_s);
      Member(count, messages, seed).run();
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  bool good = true;
  for (const pid_t pid : pids) {
    int status = 0;
    if (::waitpid(pid, &status, 0) != pid || status == 0) continue;
    good = false;
    if (!board->failed.load())
      std::printf("a member ended with status %#x%s\n", status,
                  WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? ": it did not come to an end" : "");
  }
  if (board->failed.load()) std::printf("%s\n", board->why);
  if (!good) return std::printf("seed %lu\n", seed), 1;
  std::printf("%u members: %u messages and as many datagrams each way between any two\n", count, messages);
  return 0;
}
