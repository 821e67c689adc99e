// Takes records to other hosts: each once, in order, and only to the run of the far service that it is meant for.
//
// All members are for the shard's thread, which drives the carrier: whoever waits for a message is as many threads away from it as can be.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/hosts/directory.hpp"

namespace vrdma::remote {

// What is known of one host; other threads may look at it.
struct Gauge {
  // For how long nothing has come from the far service that matters: hello and signs of life do not where records got stuck. Only time in
  // which this side looked counts: who was stopped, or waited for a processor, knows nothing of the others.
  std::atomic<std::uint64_t> silent_ns{0};
  std::atomic<std::int64_t> queued_bytes{0};   // given to the carrier and not acknowledged
  std::atomic<std::int64_t> arrived_bytes{0};  // that came and the shard has not taken
  std::atomic<std::int64_t> queued_datagrams{0}, arrived_datagrams{0};  // bytes of these that are of datagrams, which keep to no window
  std::atomic<bool> connected{false};
  // Connections with it were cut one after the other while records were under way, so that large packets may be lost: by the count of the one who
  // dials, and makes the next connection of small ones.
  std::atomic<bool> small_packets{false};
  std::atomic<bool> other_protocol{false};  // from its address connections came that are not of TLS, as those of very old services, and none stood since
  std::atomic<int> connect_error{0};  // errno of the last connect of ours to it; ETIMEDOUT: nobody has answered; 0: none failed, or another host connects
  // For `vrdma show`.
  std::atomic<std::uint64_t> sent_bytes{0}, sent_records{0}, received_bytes{0}, received_records{0}, resent{0}, reconnects{0};
  std::atomic<std::uint64_t> bypassed_bytes{0}, bypassed_records{0};  // of what was sent
  std::atomic<std::uint64_t> unauthenticated{0};  // connections with it that failed, or that somebody began in its name, since the last that stood
};

// `sign` 1: `frame` is one of those given to the carrier, or arrived; -1: no more.
inline void count(std::atomic<std::int64_t>& bytes, std::atomic<std::int64_t>& datagrams, engine::FarFrame& frame, int sign) {
  const auto all = sign * static_cast<std::int64_t>(frame.whole_bytes());
  bytes.fetch_add(all, std::memory_order_relaxed);
  if (frame.record().kind == engine::FarKind::datagram) datagrams.fetch_add(all, std::memory_order_relaxed);
}
inline void count_queued(Gauge& gauge, engine::FarFrame& frame, int sign) { count(gauge.queued_bytes, gauge.queued_datagrams, frame, sign); }
inline void count_arrived(Gauge& gauge, engine::FarFrame& frame, int sign) { count(gauge.arrived_bytes, gauge.arrived_datagrams, frame, sign); }

struct CarrierCounters {
  std::atomic<std::uint64_t> unauthenticated{0};  // connections and frames that are not of a host of this subnet: dropped
  std::atomic<std::uint64_t> malformed{0}, refused_connections{0};
};

// Another way for records to one host, beside the carrier's own, while that stands. It keeps their order, and loses none unless it ends.
class Bypass {
 public:
  virtual ~Bypass() = default;
  virtual bool open() const = 0;  // the other end takes what is sent
  // Takes a copy. False: there is no room, which Carrier::bypass_has_room ends. `number` and `acknowledged` are the carrier's own, and
  // come out of the other end with the record.
  virtual bool send(std::uint64_t number, std::uint64_t acknowledged, engine::FarFrame& frame) = 0;
  virtual void flush() = 0;  // what was taken leaves
};

class Carrier {
 public:
  virtual ~Carrier() = default;
  // frame->host and frame->session are set. What is of another session than the present one is dropped.
  virtual void send(engine::FarFramePtr frame) = 0;
  // Sends and receives what can be sent and received now. False: there was nothing to do.
  virtual bool turn() = 0;
  // Only sends: what was given since the last turn.
  virtual void flush() = 0;
  // Before the thread sleeps: whether there is anything to do at once, till when it may sleep, and on what.
  virtual bool anything_waiting() const = 0;
  virtual std::uint64_t next_wake_ns() const = 0;
  virtual int descriptor() const = 0;  // readable while there is something to receive, or room to send; for epoll, level-triggered
  // The next that came; nullptr: none. One with record().kind news says: from here on frame->session of that host counts, and what
  // was sent before and not answered is lost. Its record().bytes are the far service's LinkHead::features.
  virtual engine::FarFramePtr receive() = 0;
  virtual std::shared_ptr<Gauge> gauge(HostId host) = 0;
  virtual const CarrierCounters& counters() const = 0;
  virtual std::string name() const = 0;
  virtual bool dials(HostId host) const = 0;  // this host makes the connection to it, not that one to this
  // nullptr: there is none any more, and what it was given and nobody has acknowledged goes the carrier's way.
  virtual void set_bypass(HostId host, Bypass* bypass) = 0;
  virtual void bypass_has_room(HostId host) = 0;
  virtual bool takes_more() const = 0;  // else what comes is left where it is
  virtual void bypassed(HostId host, const Bypass& by, std::uint64_t number, std::uint64_t acknowledged, engine::FarFramePtr frame) = 0;
  // Whether payload for this host is encrypted on its way.
  virtual bool encrypts(HostId host) const = 0;
  // Where the files of the two hosts differ in their LIDs, for a person; empty: they agree, or nothing is known.
  virtual std::string disagreement(HostId host) const = 0;
};

}  // namespace vrdma::remote
