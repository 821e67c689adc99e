// How much goes through with many requests outstanding.
#include <time.h>

#include <csignal>
#include <cstring>

#include "endpoint.hpp"
#include "figures.hpp"

namespace bench {

namespace {

volatile std::sig_atomic_t told_to_stop = 0;

void stop_on_sigterm() {
  struct sigaction action{};
  action.sa_handler = [](int) { told_to_stop = 1; };  // without SA_RESTART: who sleeps wakes up
  sigaction(SIGTERM, &action, nullptr);
}

// Processor time of this program so far.
double used_s() {
  timespec used;
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9;
}

std::string rate_json(std::uint64_t messages, std::uint64_t bytes, double seconds) {
  char text[120];
  std::snprintf(text, sizeof(text), "\"messages\": %lu, \"gb_per_s\": %.6g, \"mmsg_per_s\": %.6g", messages,
                static_cast<double>(messages) * static_cast<double>(bytes) / seconds / 1e9,
                static_cast<double>(messages) / seconds / 1e6);
  return text;
}

// A chain of requests that is posted over and over; the last one is signalled.
class Chain {
 public:
  Chain(const Options& options, ibv_wr_opcode opcode, const Memory& memory, Remote remote)
      : sges_(options.chain), requests_(options.chain) {
    for (std::uint32_t i = 0; i < options.chain; ++i) {
      sges_[i] = {reinterpret_cast<std::uintptr_t>(memory.data), 8, memory.mr->lkey};
      ibv_send_wr& wr = requests_[i];
      wr = {};
      wr.next = i + 1 < options.chain ? &requests_[i + 1] : nullptr;
      wr.sg_list = &sges_[i];
      wr.num_sge = 1;
      wr.opcode = opcode;
      wr.send_flags = IBV_SEND_INLINE;
      wr.wr.rdma = {remote.address + 64 * (i % 32), remote.rkey};
    }
  }
  ibv_send_wr& posted_from(std::uint64_t sent, std::uint32_t signal_every) {
    for (auto& wr : requests_) {
      if (++sent % signal_every == 0) wr.send_flags |= IBV_SEND_SIGNALED;
      else wr.send_flags &= ~unsigned{IBV_SEND_SIGNALED};
    }
    return requests_.front();
  }

 private:
  std::vector<ibv_sge> sges_;
  std::vector<ibv_send_wr> requests_;
};

// Posts chains to the queue pairs by turns, with at most `window` requests outstanding, for the time given: how many, in how many seconds.
std::pair<std::uint64_t, double> pump(Endpoint& endpoint, const std::vector<ibv_qp*>& qps, const Options& options, Chain& chain) {
  if (options.window % options.chain != 0 || options.window % options.signal_every != 0)
    fail("the window has to be a multiple of the chain and of the distance of signalled requests");
  std::uint64_t sent = 0, completed = 0, completed_before = 0;
  std::size_t turn = 0;
  double began = -1, now = 0;
  const Clock clock;
  for (;;) {
    now = clock.seconds();
    if (began < 0 && now >= options.seconds * 0.1 && completed != 0) began = now, completed_before = completed;
    if (began >= 0 && now >= options.seconds * 1.1 && completed - completed_before >= options.window) break;
    while (sent - completed + options.chain <= options.window) {
      endpoint.post(qps[turn], chain.posted_from(sent, options.signal_every));
      turn = turn + 1 < qps.size() ? turn + 1 : 0;
      sent += options.chain;
    }
    ibv_wc wc[16];
    completed += static_cast<std::uint64_t>(endpoint.poll(wc, 16)) * options.signal_every;
  }
  const std::pair result{completed - completed_before, now - began};
  while (completed + options.signal_every <= sent) {
    ibv_wc wc[16];
    completed += static_cast<std::uint64_t>(endpoint.poll(wc, 16)) * options.signal_every;
  }
  return result;
}

}  // namespace

void write_bandwidth(const Options& options, bool events) {
  Endpoint endpoint(options, static_cast<int>(options.window), events);
  const Memory memory = endpoint.allocate(options.bytes * options.buffers);
  std::memset(memory.data, options.client ? 0x5a : 0, memory.bytes);
  ibv_qp* const qp = endpoint.connect(1, {options.window, 1}).front();
  const Remote remote = endpoint.exchange(memory);
  endpoint.barrier();
  if (!options.client) {
    endpoint.barrier();
    for (std::uint64_t at = 0; at < options.bytes * options.buffers; ++at)
      if (memory.data[at] != 0x5a) fail("byte %lu was not written", at);
    return;
  }
  Samples samples(options.seconds, options.samples);
  std::vector<std::uint64_t> posted_at(options.window);
  std::uint64_t sent = 0, completed = 0, completed_before = 0, counted = 0;
  double began = -1, now = 0, used = 0;
  for (bool more = true; more || completed < sent;) {
    if (more) {
      samples.more();
      now = samples.clock().seconds();
      if (began < 0 && now >= options.seconds * 0.1 && completed >= options.buffers) began = now, used = used_s(), completed_before = completed;
      more = began < 0 || now < options.seconds * 1.1 || completed - completed_before < options.buffers;
      if (!more) counted = completed - completed_before, used = used_s() - used;
    }
    for (; more && sent - completed < options.window; ++sent) {
      const std::uint64_t offset = sent % options.buffers * options.bytes;
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data) + offset, static_cast<std::uint32_t>(options.bytes), memory.mr->lkey};
      ibv_send_wr wr{};
      wr.wr_id = sent % options.window;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.rdma = {remote.address + offset, remote.rkey};
      posted_at[wr.wr_id] = vmci::cycles();
      endpoint.post(qp, wr);
    }
    ibv_wc wc[16];
    const int got = events ? endpoint.wait(wc, 16) : endpoint.poll(wc, 16);
    const std::uint64_t at = vmci::cycles();
    for (int i = 0; i < got; ++i) samples.add(at - posted_at[wc[i].wr_id]);
    completed += static_cast<std::uint64_t>(got);
  }
  endpoint.barrier();
  char cost[60];
  std::snprintf(cost, sizeof(cost), ", \"cpu_s_per_gib\": %.6f, ", used * (1 << 30) / static_cast<double>(counted * options.bytes));
  print(options.what, rate_json(counted, options.bytes, now - began) + cost + samples.json());
}

void write_rate(const Options& options) {
  Endpoint endpoint(options, static_cast<int>(options.qps * (options.window + 1)), false);  // room for all, as direct mode asks
  const Memory memory = endpoint.allocate(4096);
  const std::vector<ibv_qp*> qps = endpoint.connect(options.qps, {options.window, 1});
  const Remote remote = endpoint.exchange(memory);
  endpoint.barrier();
  if (!options.client) return endpoint.barrier();
  Chain chain(options, IBV_WR_RDMA_WRITE, memory, remote);
  const auto [messages, seconds] = pump(endpoint, qps, options, chain);
  endpoint.barrier();
  print(options.what, rate_json(messages, 8, seconds));
}

void send_rate(const Options& options) {
  constexpr std::uint32_t receives = 4096, batch = 32;
  Endpoint endpoint(options, receives + 64, false);
  const Memory memory = endpoint.allocate(4096);
  ibv_qp* const qp = endpoint.connect(1, {options.window, receives}).front();
  // Receives go out in chains of `batch`, all into one buffer, as perftest does.
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data), 8, memory.mr->lkey};
  ibv_recv_wr chain_of_receives[batch];
  for (std::uint32_t i = 0; i < batch; ++i) chain_of_receives[i] = {0, i + 1 < batch ? &chain_of_receives[i + 1] : nullptr, &sge, 1};
  if (!options.client) {
    for (std::uint32_t i = 0; i < receives; i += batch) endpoint.post(qp, chain_of_receives[0]);
    endpoint.barrier();
    const std::uint64_t last = 1;
    std::uint64_t came = 0;
    for (std::uint64_t due = 0;;) {
      ibv_wc wc[batch];
      due += static_cast<std::uint64_t>(endpoint.poll(wc, batch)), came += due;
      for (; due >= batch; due -= batch) endpoint.post(qp, chain_of_receives[0]);
      if (std::memcmp(memory.data, &last, sizeof(last)) == 0) break;
    }
    return endpoint.barrier();
  }
  endpoint.barrier();
  Chain chain(options, IBV_WR_SEND, memory, {});
  const auto [messages, seconds] = pump(endpoint, {qp}, options, chain);
  const std::uint64_t last = 1;
  std::memcpy(memory.data, &last, sizeof(last));
  endpoint.post(qp, chain.posted_from(0, 1));
  endpoint.barrier();
  print(options.what, rate_json(messages, 8, seconds));
}

void flood(const Options& options, bool events) {
  stop_on_sigterm();
  Endpoint endpoint(options, static_cast<int>(options.window), events);
  const Memory memory = endpoint.allocate(options.bytes);
  ibv_qp* const qp = endpoint.connect(1, {options.window, 1}).front();
  const Remote remote = endpoint.exchange(memory);
  endpoint.barrier();
  if (!options.client) return endpoint.barrier();
  std::uint64_t sent = 0, completed = 0;
  const Clock clock;
  while (!told_to_stop) {
    for (; sent - completed < options.window; ++sent) {
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data), static_cast<std::uint32_t>(options.bytes), memory.mr->lkey};
      ibv_send_wr wr{};
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.rdma = {remote.address, remote.rkey};
      endpoint.post(qp, wr);
    }
    if (completed == 0) std::printf("ready\n"), std::fflush(stdout);
    ibv_wc wc[16];
    int got = 0;
    while (got == 0 && !told_to_stop) got = events ? endpoint.wait(wc, 16) : endpoint.poll(wc, 16);
    completed += static_cast<std::uint64_t>(got);
  }
  print(options.what, rate_json(completed, options.bytes, clock.seconds()));
  endpoint.barrier();
}

}  // namespace bench
