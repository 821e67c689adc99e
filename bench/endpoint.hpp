// One side of a pair of verbs programs: device, protection domain, completion queue, queue pairs, memory; and the socket to
// the other side. Plain libibverbs as applications use it. One thread; whatever fails ends the program with a message.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bench {

struct Options {
  std::string what;
  int peer_fd = -1;
  bool client = false;
  double seconds = 1.0;
  std::size_t samples = 200'000;
  std::uint64_t bytes = 65536;         // of a message
  std::uint32_t buffers = 16;          // of `bytes`, used by turns
  std::uint32_t window = 16;           // requests outstanding
  std::uint32_t chain = 1;             // requests in one ibv_post_send
  std::uint32_t signal_every = 1;      // request that asks for a completion
  std::uint32_t idle_qps = 0;          // connected and never used, with room …
  std::uint32_t depth = 16;            // … for so many sends and receives each
  std::uint32_t qps = 1;               // used by turns
  std::uint32_t mrs = 1;               // read from by turns
  std::uint32_t processes = 2;         // of all-to-all
  std::uint32_t hogs = 0;              // processes beside us that burn a core each
  int cpu = -1;                        // to run on; -1: any
};

[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

struct Memory {
  char* data = nullptr;
  std::size_t bytes = 0;
  ibv_mr* mr = nullptr;
};

// Where a peer's RDMA goes.
struct Remote {
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
  std::uint32_t reserved = 0;
};

struct Depths {
  std::uint32_t send = 64, receive = 64;
};

class Endpoint {
 public:
  // `cqe` entries; `events`: with a completion channel, on which wait() then sleeps.
  Endpoint(const Options& options, int cqe, bool events);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  ~Endpoint();

  ibv_pd* pd() const { return pd_; }
  ibv_cq* cq() const { return cq_; }

  // Private anonymous memory, touched, registered with every right.
  Memory allocate(std::size_t bytes);

  ibv_qp* create_qp(Depths depths);
  void to_init(ibv_qp* qp);
  void to_rts(ibv_qp* qp, std::uint32_t remote_qpn, std::uint16_t remote_lid);
  std::uint16_t lid() const { return port_.lid; }

  // `count` queue pairs, each connected to the one of the same index of the other side, which does likewise.
  std::vector<ibv_qp*> connect(std::uint32_t count, Depths depths);
  Remote exchange(const Memory& mine);

  // Destroys what connect() has made last.
  void disconnect(std::span<ibv_qp* const> made);

  // Connections and exchanges from now on are with whoever has the other end of `fd`.
  void face(int fd) { peer_fd_ = fd; }

  // Both sides say yes. Sleeps in read(2).
  bool agree(bool mine);

  // Keys of the other side's `theirs.size()` regions, for ours.
  void exchange_keys(std::span<const std::uint32_t> mine, std::span<std::uint32_t> theirs);

  // Both sides have come here. Sleeps in read(2).
  void barrier();

  // Up to `room` completions, at least one; each successful. Polls, or sleeps on the channel.
  int wait(ibv_wc* wc, int room);
  // Likewise, but returns 0 when there is none.
  int poll(ibv_wc* wc, int room);

  void post(ibv_qp* qp, ibv_send_wr& wr);
  void post(ibv_qp* qp, ibv_recv_wr& wr);

 private:
  void tell(std::span<const std::byte> mine);
  void hear(std::span<std::byte> theirs);

  int peer_fd_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  bool armed_ = false;
  ibv_port_attr port_{};
  std::vector<Memory> memories_;
  std::vector<ibv_qp*> qps_;
};

// The measurements. Each prints its figures on the client's standard output.
void send_ping_pong(const Options& options, bool events);
void fetch_latency(const Options& options, ibv_wr_opcode opcode);
void write_ping_pong(const Options& options);  // both spin on memory, as ib_write_lat does
void write_bandwidth(const Options& options, bool events);
void write_rate(const Options& options);
void send_rate(const Options& options);
void flood(const Options& options, bool events);  // until SIGTERM
void idle_pairs(const Options& options);          // until SIGTERM
void registration(const Options& options);
void creation(const Options& options);
void connection_rate(const Options& options);
void all_to_all(const Options& options);  // processes of its own, without a peer

}  // namespace bench
