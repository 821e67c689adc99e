// The carrier over TCP: one connection for each pair of hosts, made by the one whose name is smaller. What a connection protects is
// tcp_connection.hpp's; that each record comes once and in order, also over connections that break, is seen to here (link_head.hpp).
//
// Where there is a bypass records go by it, and none by the connection, which goes on to say who is there and what has come. Neither
// waits for the other's: from the connection to the bypass a record goes over only when all before it are acknowledged, and back with
// the first that is not, so that whichever way numbers come, they come in order but for those that come again.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "vmkernel_svc/remote/carrier.hpp"
#include "vmkernel_svc/remote/tcp_connection.hpp"

namespace vrdma::remote {

class TcpCarrier final : public Carrier {
 public:
  struct Place {
    std::string name;     // this host's
    std::string address;  // numeric, of an interface of this host
    std::uint16_t port;
    bool encrypt = false;  // payload, to and from whatever host
  };
  // Throws std::runtime_error for a person.
  TcpCarrier(Place here, std::shared_ptr<Directory> directory);
  ~TcpCarrier() override;

  void send(engine::FarFramePtr frame) override;
  bool turn() override;
  void flush() override;
  bool anything_waiting() const override { return !arrivals_.empty() || !to_pump_.empty() || changed_->load(std::memory_order_relaxed); }
  std::uint64_t next_wake_ns() const override { return next_look_ns_ < acknowledge_at_ns_ ? next_look_ns_ : acknowledge_at_ns_; }
  int descriptor() const override { return epoll_.get(); }
  engine::FarFramePtr receive() override;
  std::shared_ptr<Gauge> gauge(HostId host) override;
  const CarrierCounters& counters() const override { return counters_; }
  std::string name() const override { return "tcp"; }
  bool dials(HostId host) const override;
  void set_bypass(HostId host, Bypass* bypass) override;
  void bypass_has_room(HostId host) override;
  bool takes_more() const override { return arrivals_.size() < arrivals_max; }
  void bypassed(HostId host, const Bypass& by, std::uint64_t number, std::uint64_t acknowledged, engine::FarFramePtr frame) override;
  bool encrypts(HostId host) const override;
  std::string disagreement(HostId host) const override;

 private:
  struct Record {
    std::shared_ptr<engine::FarFrame> frame;
    std::uint64_t number;
  };
  struct Link {  // to and from one host
    HostId id = 0;
    std::string name;
    bool dials = false;                         // we do
    std::shared_ptr<Gauge> gauge;
    std::unique_ptr<TcpConnection> connection;
    bool encrypts = false;                      // the connection, or the last one: it is the same for a pair of runs
    std::string disagreement;                   // by its last hello
    bool greeted = false;                       // it has said hello on this connection
    bool knows_us = false;                      // and something else since, so that ours has come: what a bypass brings there is taken
    std::uint32_t watched = 0;                  // events of the connection that epoll tells of
    std::uint64_t dial_at_ns = 0, pause_ns = 0;
    int no_socket = 0;                          // why there was none to connect with; 0: there was
    std::uint64_t connects = 0;                 // that were tried since the last one that stood
    std::uint64_t said_ns = 0;
    std::uint64_t mute_ns = 0;                  // for how long nothing has come on this connection, while we looked
    std::uint64_t unheard_ns = 0;               // likewise, whatever of ours was acknowledged meanwhile
    std::uint64_t proven_bytes = 0;             // delivered when something came last, or when so much more was that it counted as that
    std::uint64_t opened_ns = 0, cut_ns = 0;    // when this connection stood; when one ended last on which something was stuck, 0: none did
    int mute_shakes = 0;                        // handshakes that nobody answered, since the last connection that stood
    bool doubted = false;                       // one ended so, and nothing has come since that shows that records pass: signs of life are none
    std::uint64_t strange_since_ns = 0;         // since when connections fail for want of the key, and none stood; 0: none did
    bool strange_said = false;
    std::uint64_t run = 0, session = 0;         // of the far service; how many of its runs there have been
    std::deque<Record> records;                 // not acknowledged; the first `sent` of them were given to this connection, or to the bypass
    std::size_t sent = 0;
    Bypass* bypass = nullptr;
    bool bypassing = false;                     // records go by it
    std::uint64_t last_number = 0, furthest_sent = 0, expected = 1;
    std::uint64_t acknowledge_at_ns = never, unacknowledged_bytes = 0;
    bool to_pump = false;
  };
  struct Stranger {  // a connection to us whose other end is not known yet
    std::unique_ptr<TcpConnection> connection;
    std::uint32_t watched = 0;
  };

  static constexpr std::uint64_t never = ~std::uint64_t{0};
  static constexpr std::size_t arrivals_max = 512;  // then nothing more is read
  // That went one way on one connection: more than hello and signs of life, and than one packet. Where large ones are lost it does not come to that,
  // as nothing passes after the first of them.
  static constexpr std::uint64_t proof_bytes = 32 * 1024;

  void listen();
  void find_hosts();
  std::uint64_t run_of(const Link& link) const { return first_run_ + link.id; }  // ours, to that host
  static bool connects_elsewhere(const Link& link, const PeerHost& host);
  void close_to_strangers(const std::vector<std::string>& hosts);
  Link* find(HostId host);
  void dial(Link& link, std::uint64_t now);
  void accept(std::uint64_t now);
  void pause_accepting(int why, std::uint64_t now);
  void watch_listener(bool on);
  void disconnect(Link& link, std::uint64_t now);
  void count_strange(const TcpConnection& connection, HostId host);
  void note_other_protocol(const TcpConnection& connection);
  void opened(Link& link, std::uint64_t now);
  void watch(TcpConnection& connection, std::uint32_t& watched);
  void dispose(std::unique_ptr<TcpConnection> connection);
  bool poll(std::uint64_t now);
  void ready(Link& link, std::uint32_t events, std::uint64_t now);
  void ready(std::size_t stranger, std::uint64_t now);
  void look(std::uint64_t now);
  void acknowledge_due(std::uint64_t now);
  void want_pump(Link& link);
  bool pump(Link& link, std::uint64_t now);
  bool send_next(Link& link, std::uint64_t now);
  bool bypass_next(Link& link, const Record& record);
  void transmit(Link& link, LinkKind kind, std::uint64_t number, std::shared_ptr<engine::FarFrame> frame, std::uint64_t now);
  void say(Link& link, LinkKind kind, std::uint64_t now);
  void frame(Link& link, const LinkHead& head, engine::FarFramePtr frame, std::uint64_t now);
  void hello(Link& link, const LinkHead& head, std::uint64_t now);
  void heard(Link& link, LinkKind kind, std::uint64_t now);
  void bytes_came(Link& link);
  void note_end(Link& link, std::uint64_t now);
  void compare_lids(Link& link, const LinkHead& hello);
  void came(Link& link, std::uint64_t number, engine::FarFramePtr frame, std::uint64_t now);
  void acknowledged(Link& link, std::uint64_t number);
  void forget_records(Link& link);
  void void_what_nobody_repeats(Link& link);
  void take(Link& link, engine::FarFramePtr frame, std::uint64_t now);

  Place here_;
  std::shared_ptr<Directory> directory_;
  std::uint64_t first_run_ = 0;
  CarrierCounters counters_;
  Handshake::Context context_;
  vmci::UniqueFd epoll_, listener_;
  int not_accepted_ = 0;                   // why nobody could be when that was tried last; 0: somebody was
  std::optional<unsigned> compared_bits_;  // of an address, before its packets reach the listener
  std::map<HostId, std::shared_ptr<Gauge>> gauges_;
  std::map<HostId, std::unique_ptr<Link>> links_;
  std::vector<Stranger> strangers_;                          // oldest first
  std::vector<std::unique_ptr<TcpConnection>> disposed_;     // an event in hand may still name them
  std::deque<engine::FarFramePtr> arrivals_;
  std::vector<Link*> to_pump_;
  std::shared_ptr<std::atomic<bool>> changed_ = std::make_shared<std::atomic<bool>>(true);
  std::uint64_t looked_ns_ = 0, next_look_ns_ = 0, acknowledge_at_ns_ = never, accept_at_ns_ = never;
  std::uint64_t next_poll_cycles_ = 0, busy_until_ns_ = 0;
};

}  // namespace vrdma::remote
