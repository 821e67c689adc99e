// The shards of a service, and which guest is whose.
//
// The engine runs both ends of a connection in one thread, so guests that reach each other are of one group, and a group is one shard's:
// its queues, timers and copies are touched by that shard in its turns and by nobody else. Guests begin as groups of their own on the shard
// with the fewest; connections, and datagrams to who is elsewhere, bring groups together. What only the first shard has to do with
// (other hosts, direct connections, virtual machines) takes the group there, for good.
//
// Everything but finished() is for who is alone (turnstile.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "vmkernel_svc/mediated_ports.hpp"
#include "vmkernel_svc/memory/process_memory.hpp"
#include "vmkernel_svc/turnstile.hpp"

namespace vrdma::svc {

struct Guest;
class Shard;

struct GuestGroup {
  Shard* shard;
  std::vector<Guest*> guests;
  bool pinned = false;  // to the first shard
};

class Shards final : public JobSink {
 public:
  explicit Shards(std::size_t count) : turnstile(count), count_(count) {}

  Turnstile turnstile;

  // In order of their numbers, before any of them runs. All live as long as the first one.
  void add(Shard& shard) { all_.push_back(&shard); }
  const std::vector<Shard*>& all() const { return all_; }
  std::size_t count() const { return count_; }  // also before all have been added
  Shard& first() const { return *all_.front(); }
  Shard* of(const engine::Qp<MediatedPorts>& qp) const;  // stand-ins are the first one's

  // Gives a new guest its shard, and its line in the page that says who sleeps.
  void place(Guest& guest);
  void remove(Guest& guest);
  void bring_together(Guest& a, Guest& b);
  void pin(Guest& guest);

  void finished(ProcessJob* job) override;  // any thread

 private:
  void move(GuestGroup& group, Shard& to);
  void merge(GuestGroup& from, GuestGroup& into);

  std::size_t count_;
  std::vector<Shard*> all_;
  std::vector<std::unique_ptr<GuestGroup>> groups_;
  std::uint32_t lines_given_ = 0;
};

}  // namespace vrdma::svc
