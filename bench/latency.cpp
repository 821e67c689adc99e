// How long one small operation takes: ping-pongs, and READ and atomics to a peer that sleeps.
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "endpoint.hpp"
#include "figures.hpp"

namespace bench {

namespace {

// A message carries its number and whether it is the last: the side that measures decides.
constexpr std::uint64_t last_bit = 1ull << 63;

constexpr std::uint32_t receives = 16;  // posted ahead
constexpr std::size_t line = 64;        // messages do not share cache lines

ibv_sge piece(const Memory& memory, std::size_t offset, std::uint32_t bytes) {
  return {reinterpret_cast<std::uintptr_t>(memory.data) + offset, bytes, memory.mr->lkey};
}

// Number `number` goes out, number `number` comes back.
class PingPong {
 public:
  PingPong(const Options& options, bool events)
      : endpoint_(options, static_cast<int>(2 * (receives + 64) + 2 * options.idle_qps), events), signal_every_(options.signal_every) {
    memory_ = endpoint_.allocate((receives + 1) * line);
    idle_ = endpoint_.connect(options.idle_qps, {1, 1});
    qp_ = endpoint_.connect(1, {64, receives}).front();
    for (std::uint32_t i = 0; i < receives; ++i) post_receive(i);
    sge_ = piece(memory_, receives * line, 8);
    wr_.wr_id = receives;
    wr_.sg_list = &sge_;
    wr_.num_sge = 1;
    wr_.opcode = IBV_WR_SEND;
    endpoint_.barrier();
  }
  PingPong(const PingPong&) = delete;
  PingPong& operator=(const PingPong&) = delete;

  void send(std::uint64_t payload) {
    std::memcpy(memory_.data + receives * line, &payload, sizeof(payload));
    wr_.send_flags = IBV_SEND_INLINE | (++sent_ % signal_every_ == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u);
    endpoint_.post(qp_, wr_);
  }

  // The next message's payload. Completions of what was sent come by the way.
  std::uint64_t receive() {
    for (std::uint64_t payload = 0;;) {
      ibv_wc wc[4];
      const int got = endpoint_.wait(wc, 4);
      bool came = false;
      for (int i = 0; i < got; ++i) {
        if (wc[i].wr_id == receives) continue;
        if (came || wc[i].byte_len != 8) fail("a ping-pong of 8 bytes received something else");
        came = true;
        std::memcpy(&payload, memory_.data + wc[i].wr_id * line, sizeof(payload));
        post_receive(static_cast<std::uint32_t>(wc[i].wr_id));
      }
      if (came) return payload;
    }
  }

  void leave() { endpoint_.barrier(); }

 private:
  void post_receive(std::uint32_t index) {
    ibv_sge sge = piece(memory_, index * line, 8);
    ibv_recv_wr wr{index, nullptr, &sge, 1};
    endpoint_.post(qp_, wr);
  }

  Endpoint endpoint_;
  Memory memory_;
  std::vector<ibv_qp*> idle_;
  ibv_qp* qp_ = nullptr;
  std::uint64_t sent_ = 0;
  std::uint32_t signal_every_;
  ibv_sge sge_{};
  ibv_send_wr wr_{};
};

struct Regions {
  Regions(const Endpoint& endpoint, const Memory& memory, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      mrs.push_back(ibv_reg_mr(endpoint.pd(), memory.data, memory.bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
      if (mrs.back() == nullptr) fail("ibv_reg_mr of region %u: %s", i, std::strerror(errno));
      keys.push_back(mrs.back()->rkey);
    }
  }
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;
  ~Regions() {
    for (ibv_mr* mr : mrs) ibv_dereg_mr(mr);
  }
  std::vector<ibv_mr*> mrs;
  std::vector<std::uint32_t> keys;
};

}  // namespace

void send_ping_pong(const Options& options, bool events) {
  PingPong pair(options, events);
  if (!options.client) {
    for (std::uint64_t number = 0;; ++number) {
      const std::uint64_t payload = pair.receive();
      if ((payload & ~last_bit) != number) fail("message %lu came instead of %lu", payload & ~last_bit, number);
      pair.send(payload);
      if (payload & last_bit) break;
    }
    return pair.leave();
  }
  Samples samples(options.seconds, options.samples);
  for (std::uint64_t number = 0, more = true; more; ++number) {
    more = samples.more();
    const std::uint64_t payload = number | (more ? 0 : last_bit), before = vmci::cycles();
    pair.send(payload);
    const std::uint64_t echo = pair.receive();
    samples.add(vmci::cycles() - before);
    if (echo != payload) fail("message %lu came back as %lu", number, echo & ~last_bit);
  }
  pair.leave();
  print(options.what, samples.json(2));
}

void fetch_latency(const Options& options, ibv_wr_opcode opcode) {
  Endpoint endpoint(options, 16, false);
  const Memory memory = endpoint.allocate(4096);
  constexpr std::uint64_t start = 1000;
  std::memcpy(memory.data, &start, sizeof(start));
  ibv_qp* const qp = endpoint.connect(1, {16, 1}).front();
  const Remote remote = endpoint.exchange(memory);
  // More regions of the same page, each with a key of its own, are read from by turns that no cache of keys foresees.
  const Regions regions(endpoint, memory, options.client ? 0 : options.mrs - 1);
  std::vector<std::uint32_t> keys(options.client ? options.mrs - 1 : 0);
  endpoint.exchange_keys(regions.keys, keys);
  keys.push_back(remote.rkey);
  endpoint.barrier();
  if (!options.client) return endpoint.barrier();  // asleep until the client has done

  std::uint64_t number = start;
  // Made once, as programs that are in a hurry do: to clear one takes longer than to post it.
  ibv_sge sge = piece(memory, line, 8);
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.send_flags = IBV_SEND_SIGNALED;
  const auto fetch = [&] {
    if (opcode == IBV_WR_RDMA_READ) {
      wr.wr.rdma = {remote.address, keys[number * 0x9E3779B97F4A7C15u % keys.size()]};
    } else {
      wr.wr.atomic.remote_addr = remote.address;
      wr.wr.atomic.rkey = remote.rkey;
      wr.wr.atomic.compare_add = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 1 : number;
      wr.wr.atomic.swap = number + 1;
    }
    ibv_wc wc;
    const std::uint64_t before = vmci::cycles();
    endpoint.post(qp, wr);
    endpoint.wait(&wc, 1);
    const std::uint64_t took = vmci::cycles() - before;
    std::uint64_t fetched;
    std::memcpy(&fetched, memory.data + line, sizeof(fetched));
    if (fetched != (opcode == IBV_WR_RDMA_READ ? start : number)) fail("fetched %lu at number %lu", fetched, number);
    ++number;
    return took;
  };
  while (number - start < 2 * keys.size()) fetch();  // what is measured is not who asks for a key first
  Samples samples(options.seconds, options.samples);
  while (samples.more()) samples.add(fetch());
  endpoint.barrier();
  print(options.what, samples.json());
}

void write_ping_pong(const Options& options) {
  Endpoint endpoint(options, 64, false);
  const Memory memory = endpoint.allocate(4096);
  ibv_qp* const qp = endpoint.connect(1, {64, 1}).front();
  const Remote remote = endpoint.exchange(memory);
  endpoint.barrier();
  const std::atomic_ref<std::uint64_t> inbox(*reinterpret_cast<std::uint64_t*>(memory.data));
  std::uint64_t sent = 0;
  ibv_sge sge = piece(memory, line, 8);
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.wr.rdma = {remote.address, remote.rkey};
  const auto write = [&](std::uint64_t payload) {
    std::memcpy(memory.data + line, &payload, sizeof(payload));
    wr.send_flags = IBV_SEND_INLINE | (++sent % 16 == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u);
    endpoint.post(qp, wr);
    ibv_wc wc;
    if (sent % 16 == 0) endpoint.wait(&wc, 1);
  };
  const auto await = [&](std::uint64_t number) {
    for (;;) {
      const std::uint64_t now = inbox.load(std::memory_order_acquire);
      if ((now & ~last_bit) == number) return now;
      vmci::cpu_relax();
    }
  };
  if (!options.client) {
    for (std::uint64_t number = 1;; ++number) {
      const std::uint64_t payload = await(number);
      write(payload);
      if (payload & last_bit) return endpoint.barrier();
    }
  }
  Samples samples(options.seconds, options.samples);
  for (std::uint64_t number = 1, more = true; more; ++number) {
    more = samples.more();
    const std::uint64_t before = vmci::cycles();
    write(number | (more ? 0 : last_bit));
    await(number);
    samples.add(vmci::cycles() - before);
  }
  endpoint.barrier();
  print(options.what, samples.json(2));
}

}  // namespace bench
