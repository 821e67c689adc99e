// The carrier over TCP, by UCX: active messages on one connection for each direction of a pair of hosts. A thread of its own turns
// UCX's worker. What UCX delivers is authenticated by its tag, and a broken connection is made again; what is sent and received
// once and in order is seen to here (link_head.hpp), because a connection that breaks does not say what has arrived.
#pragma once

#include <atomic>
#include <boost/lockfree/queue.hpp>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "vmci_channel/packet_socket.hpp"
#include "vmkernel_svc/remote/carrier.hpp"
#include "vmkernel_svc/remote/ucx.hpp"

namespace vrdma::remote {

class TcpCarrier final : public Carrier {
 public:
  struct Place {
    std::string name;     // this host's
    std::string address;  // numeric, of an interface of this host
    std::uint16_t port;
  };
  // arrived: called by the carrier's thread when something is there to receive(). Throws std::runtime_error for a person.
  TcpCarrier(Place here, std::shared_ptr<Directory> directory, std::function<void()> arrived);
  ~TcpCarrier() override;

  void send(engine::FarFramePtr frame) override;
  engine::FarFramePtr receive() override;
  bool anything_arrived() const override { return !arrivals_.empty(); }
  std::shared_ptr<Gauge> gauge(HostId host) override;
  const CarrierCounters& counters() const override { return counters_; }
  std::string name() const override { return "tcp"; }

 private:
  class Loop;  // all that belongs to the thread

  Place here_;
  std::shared_ptr<Directory> directory_;
  std::function<void()> arrived_;
  const Ucx& ucx_;
  CarrierCounters counters_;
  std::mutex gauges_mutex_;
  std::map<HostId, std::shared_ptr<Gauge>> gauges_;
  boost::lockfree::queue<engine::FarFrame*> outgoing_{1024};
  boost::lockfree::queue<engine::FarFrame*> arrivals_{1024};
  std::atomic<bool> asleep_{false}, stopping_{false};
  vmci::UniqueFd wake_;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace vrdma::remote
