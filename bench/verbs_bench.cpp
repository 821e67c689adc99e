// An ordinary verbs program that measures: links libibverbs alone and is started by `vrdma run`, one process per side.
//
//   verbs_bench WHAT --peer-fd FD [--client] [--seconds S] …
//
// FD is one end of a unix stream socket pair; both processes open the device themselves. WHAT is one of
//   send-lat, event-lat              8 B SEND, half a round trip; both poll, both sleep on a completion channel
//   read-lat, fadd-lat, cswap-lat    8 B from post to completion; the peer sleeps. read-lat: from one of --mrs regions
//   write-lat                        8 B RDMA WRITE, half a round trip; both spin on their memory, outside verbs
//   write-bw, write-bw-events        RDMA WRITE of --bytes, --window outstanding, over --buffers buffers; polls, sleeps
//   write-rate, send-rate            8 B inline, --window outstanding; write-rate: over --qps queue pairs by turns
//   flood, flood-events              large RDMA WRITEs until SIGTERM; "ready" when the first are posted
//   idle                             --idle-qps connected queue pairs of --depth until SIGTERM; "ready" when connected
//   connect-rate                     pairs of queue pairs made, brought to RTS and destroyed
//   reg-mr, create-qp                without a peer
//   all-to-all                       8 B WRITEs between --processes processes of its own; without a peer
// The client prints JSON objects, one a line; nanoseconds, GB/s, million messages per second.
#include <sched.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <map>

#include "endpoint.hpp"
#include "hog.hpp"

using namespace bench;

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(const Options&)>> measurements{
      {"send-lat", [](const Options& o) { send_ping_pong(o, false); }},
      {"event-lat", [](const Options& o) { send_ping_pong(o, true); }},
      {"read-lat", [](const Options& o) { fetch_latency(o, IBV_WR_RDMA_READ); }},
      {"fadd-lat", [](const Options& o) { fetch_latency(o, IBV_WR_ATOMIC_FETCH_AND_ADD); }},
      {"cswap-lat", [](const Options& o) { fetch_latency(o, IBV_WR_ATOMIC_CMP_AND_SWP); }},
      {"write-lat", write_ping_pong},
      {"write-bw", [](const Options& o) { write_bandwidth(o, false); }},
      {"write-bw-events", [](const Options& o) { write_bandwidth(o, true); }},
      {"write-rate", write_rate},
      {"send-rate", send_rate},
      {"flood", [](const Options& o) { flood(o, false); }},
      {"flood-events", [](const Options& o) { flood(o, true); }},
      {"idle", idle_pairs},
      {"reg-mr", registration},
      {"create-qp", creation},
      {"connect-rate", connection_rate},
      {"all-to-all", all_to_all},
  };
  Options options;
  CLI::App app{"Measures verbs over the first RDMA device."};
  app.add_option("what", options.what)->required()->check(CLI::IsMember(measurements));
  app.add_option("--peer-fd", options.peer_fd);
  app.add_flag("--client", options.client);
  app.add_option("--seconds", options.seconds);
  app.add_option("--samples", options.samples);
  app.add_option("--bytes", options.bytes);
  app.add_option("--buffers", options.buffers)->check(CLI::PositiveNumber);
  app.add_option("--window", options.window)->check(CLI::PositiveNumber);
  app.add_option("--chain", options.chain)->check(CLI::PositiveNumber);
  app.add_option("--signal-every", options.signal_every)->check(CLI::PositiveNumber);
  app.add_option("--idle-qps", options.idle_qps);
  app.add_option("--depth", options.depth)->check(CLI::PositiveNumber);
  app.add_option("--qps", options.qps)->check(CLI::PositiveNumber);
  app.add_option("--mrs", options.mrs)->check(CLI::PositiveNumber);
  app.add_option("--processes", options.processes)->check(CLI::Range(2, 256));
  app.add_option("--hogs", options.hogs);
  app.add_option("--cpu", options.cpu);
  CLI11_PARSE(app, argc, argv);

  ::alarm(120);  // a measurement that hangs ends here, whoever started it
  if (options.cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(options.cpu, &set);
    if (::sched_setaffinity(0, sizeof(set), &set) != 0) fail("cannot run on processor %d", options.cpu);
  }
  const Hogs hogs(options.hogs);
  measurements.at(options.what)(options);
  return 0;
}
