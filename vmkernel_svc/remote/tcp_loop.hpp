// What belongs to the TCP carrier's thread: UCX's worker, the connections, and what is under way to and from each host.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include <netinet/in.h>

#include "vmkernel_svc/remote/link_head.hpp"
#include "vmkernel_svc/remote/tcp_carrier.hpp"

namespace vrdma::remote {

class TcpCarrier::Loop {
 public:
  explicit Loop(TcpCarrier& carrier);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void run();

 private:
  static constexpr unsigned am_id = 0;
  static constexpr std::size_t accepted_max = 64;
  static constexpr std::uint32_t sends_max = 64;
  static constexpr std::uint64_t look_ns = 50'000'000, alive_ns = 200'000'000, hello_pause_ns = 20'000'000;
  static constexpr std::uint64_t stall_ns = 4'000'000'000, pause_min_ns = 50'000'000, pause_max_ns = 1'000'000'000, agree_ns = 150'000'000;
  static constexpr std::uint64_t acknowledge_ns = 5'000'000, acknowledge_bytes = 512 * 1024, early_max = 4096, early_bytes_max = 32 << 20;
  static constexpr std::int64_t arrived_bytes_max = 8 << 20;
  static constexpr std::size_t past_runs_max = 1024;

  struct Connection {
    void* loop = nullptr;
    ucp_ep_h endpoint = nullptr;
    std::uint32_t sends = 0;  // that UCX is not done with
    bool broken = false, closed = false;
  };
  struct Send {
    Loop* loop;
    Connection* connection;
    std::shared_ptr<engine::FarFrame> frame;
  };
  struct Record {
    std::shared_ptr<engine::FarFrame> frame;
    std::uint64_t number;
    bool sealed;
  };
  struct Link {  // to and from one host
    HostId id = 0;
    std::string name;
    std::shared_ptr<Gauge> gauge;
    std::array<std::byte, 32> key{};
    std::unique_ptr<Tagger> tagger;          // nullptr: the two have agreed on no key yet, or the host was removed
    std::unique_ptr<Tagger> last_tagger;     // of the key before, which the far end may still use
    std::unique_ptr<Connection> connection;  // on which we send
    std::uint64_t connect_at_ns = 0, pause_ns = 0, connected_at_ns = 0;
    std::uint64_t said_ns = 0, progress_ns = 0;
    std::uint64_t run = 0, candidate = 0;    // of the far service: agreed on, and claimed
    std::deque<std::uint64_t> past_runs;
    std::uint64_t session = 0;               // counts the runs that were agreed on
    std::deque<Record> records;              // not acknowledged; the first `unsent` of them went out on this connection
    std::size_t unsent = 0;
    std::uint64_t last_number = 0;
    std::uint64_t expected = 1;
    std::map<std::uint64_t, engine::FarFramePtr> early;
    std::uint64_t early_bytes = 0;
    std::uint64_t acknowledge_at_ns = 0;     // 0: nothing to acknowledge
    std::uint64_t unacknowledged_bytes = 0;
  };

  static void on_broken(void* argument, ucp_ep_h endpoint, ucs_status_t status);
  static void on_closed(void* request, ucs_status_t status, void* argument);
  static void on_connection(ucp_conn_request_h request, void* argument);
  static void on_sent(void* request, ucs_status_t status, void* argument);
  static ucs_status_t on_message(void* argument, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                                 const ucp_am_recv_param_t* param);
  static socklen_t address_of(const std::string& text, std::uint16_t port, sockaddr_storage& address);  // 0: not an address
  static std::string device_of(const std::string& address);

  void start();
  void stop();
  void find_hosts();
  Link* find(HostId host);
  void agree(Link& link, std::uint64_t now);
  void sleep();
  bool take_outgoing();
  void connect(Link& link, std::uint64_t now);
  void retry_later(Link& link, std::uint64_t now);
  void disconnect(Link& link, std::uint64_t now);
  void close(std::unique_ptr<Connection> connection);
  bool close_broken();
  void transmit(Link& link, const std::shared_ptr<engine::FarFrame>& frame);
  void seal(Link& link, engine::FarFrame& frame, LinkKind kind, std::uint64_t number, std::uint64_t your_run);
  void say(Link& link, LinkKind kind, std::uint64_t your_run);
  bool pump(Link& link, std::uint64_t now);
  void look(std::uint64_t now);
  void message(const std::byte* data, std::size_t bytes);
  void heard(Link& link, std::uint64_t now);
  void hello(Link& link, const LinkHead& head, std::uint64_t now);
  void forget_records(Link& link);
  void acknowledged(Link& link, std::uint64_t number, std::uint64_t now);
  void record(Link& link, std::uint64_t number, engine::FarFramePtr frame, std::uint64_t now);
  void take(Link& link, engine::FarFramePtr frame);
  void deliver(engine::FarFramePtr frame);

  TcpCarrier& carrier_;
  const Ucx& ucx_;
  std::uint64_t run_ = 0;  // ours
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  std::vector<int> listening_;  // UCX's, for others to connect to
  vmci::UniqueFd epoll_;
  std::map<HostId, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Connection>> accepted_, closing_;
  std::shared_ptr<std::atomic<bool>> changed_ = std::make_shared<std::atomic<bool>>(true);
  std::uint64_t next_look_ns_ = 0;
  bool news_ = false;
};

}  // namespace vrdma::remote
