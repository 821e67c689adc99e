// A shard: the thread that runs the engine for its guests. It looks at doorbells and at the queues that were busy of late, gives
// every tenant its fair share by bytes, keeps timers, answers control requests from the guests' rings, and sleeps in epoll
// when nothing has happened for a while (DESIGN.md D4).
//
// The first one brings the fabric and the desks; further ones (shards.hpp) run the queue pairs of their guests and share the rest, which
// whoever changes it does alone (turnstile.hpp): tasks, control requests, guests that move from shard to shard. Members that take a guest or
// something of it may be called at any shard, and act at the one whose it is. Other threads talk to the first one by submit().
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <boost/lockfree/queue.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmci_channel/backoff.hpp"
#include "vmkernel_svc/engine/engine.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/timers.hpp"
#include "vmkernel_svc/turn_order.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc {

class ControlDesk;
class DirectDesk;

class Shard final : public Runner {
 public:
  using Qp = MediatedPorts::Qp;
  using Task = std::function<void(Shard&)>;

  // The first one. page: the service's, in which it says when it sleeps.
  Shard(const Config& config, control::ServicePage& page);
  // A further one, of as many as first's configuration says. It must outlive `first`.
  explicit Shard(Shard& first);
  ~Shard();

  void run();   // until stop()
  void stop();  // any thread
  bool turn();  // one round of run(): whatever waits gets its turn once. False: nothing did

  // Any thread, the first shard only: run `task` on the shard's thread, alone, in order of submission.
  void submit(Task task);
  void wake();  // any thread, after giving it something to find in its next turn
  // Before run(): there are other hosts.
  void join(std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier);
  void finished(ProcessJob* job);  // any thread
  void change_window(Qp& qp) override;
  std::uint32_t number() const override { return number_; }
  std::size_t guest_count() const { return guests_.size(); }
  std::size_t attended_guests() const { return attended_; }  // looked at in each turn
  // A group of this shard's guests is another's from now on, which takes it over.
  void give_up(const GuestGroup& group);
  void take_over(const GuestGroup& group);
  std::uint64_t moved_bytes(const Tenant& tenant) const;  // by this shard

  Fabric& fabric() { return fabric_; }
  engine::Engine<MediatedPorts>& engine() { return engine_; }
  DirectDesk& direct() { return *direct_; }
  Qp* peer(Qp& qp) { return ports_.peer(qp); }  // on this host
  MediatedPorts& ports() { return ports_; }

  // Another place where this shard says that it sleeps, and that devices have changed: the page of a virtual machine. In the shard's thread.
  void mirror(control::ServicePage& page);
  void end_mirror(control::ServicePage& page) { std::erase(mirrors_, &page); }
  // What a guest has been told of its device is not true any more: it asks again.
  void devices_changed();

  // A guest's doorbell descriptor is to be waited for in sleep.
  Status watch(int doorbell_fd, bool* came = nullptr);  // it sets *came when it woke up for that
  void unwatch(int doorbell_fd);  // the guest may keep the descriptor, and with it the wait, for as long as it likes
  Status add(Guest& guest);
  void remove(Guest& guest);

  // The guest has ended. What it had goes piece by piece, others have their turns in between; then `gone` is told. The first shard's alone.
  void let_go(Guest& guest, std::function<void()> gone);

  // The guest's machine stands still or is being saved (Guest::frozen), or goes on.
  void freeze(Guest& guest);
  void thaw(Guest& guest);

  void make_runnable(Qp& qp) override;
  void withdraw(Qp& qp) { take_out(qp); }  // the other way round
  void set_timer(Qp& qp, std::uint64_t at_ns) override;
  void overran(CompletionQueue& cq) override;
  bool owns_inbox(QueuePair& qp) override;
  void bring_together(Qp& sender, QueuePair& receiver) override;
  // Before a queue pair goes: no list, timer or job knows it any more.
  void forget(Qp& qp);
  // Before a CQ goes: nobody announces what is in it any more.
  void forget(CompletionQueue& cq);

  struct Counters {
    std::uint64_t turns = 0, sleeps = 0, doorbells = 0, requests = 0, wakes = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct RunList {  // the runnable queue pairs of one tenant
    TurnOrder<Qp> queue_pairs;
    bool running = false;  // it is in running_
    // Deficit round robin by bytes among tenants (Shreedhar and Varghese): what it may still move in this round.
    std::int64_t deficit_bytes = 0;
    std::uint64_t moved_bytes = 0;
  };
  static constexpr std::uint64_t held_events_patience_ns = 1'000'000;  // a full pipe is tried again after so long

  static Shard& of(const Guest& guest) { return *guest.group->shard; }
  bool is_first() const { return number_ == 0; }
  bool own_turn();
  bool must_be_alone();
  bool common_turn();
  void unite();
  void make_descriptors();
  void adopt(Guest& guest);
  void take_in(Qp& qp);
  void take_timer(Qp& qp, std::uint64_t at_ns);
  Qp* set_for(const Timers::Timer& timer);
  bool run_tasks();
  bool run_finished_jobs();
  bool look_at_doorbells();
  bool look_at_silent();
  bool look_at(Guest& guest);
  void flush_held_events();
  bool serve_control();
  void expel(Guest& guest);
  bool run_queue_pairs();
  bool run_list(RunList& list);
  bool run_timers();
  bool change_windows();
  bool let_go_on();
  // The queue pair is not looked at any more, until somebody rings. False: it has something to do after all.
  bool park(RunList& list, Qp& qp);
  void take_out(Qp& qp);  // of its tenant's list
  void park_all();
  bool anything_waiting();
  void sleep();
  bool wait_for_events();
  void say_asleep(bool asleep);

  const std::uint32_t number_;
  control::ServicePage& page_;
  // The first one's, for all.
  struct Common {
    Common(const Config& config) : shards(config.shards), fabric(config, shards) {}
    Shards shards;
    Fabric fabric;
  };
  const std::shared_ptr<Common> common_;
  Shards& shards_;
  Fabric& fabric_;
  MediatedPorts ports_{fabric_, *this};
  engine::Engine<MediatedPorts> engine_{ports_};
  // The first one's alone.
  std::vector<control::ServicePage*> mirrors_;
  std::unique_ptr<DirectDesk> direct_;
  std::unique_ptr<FarDesk> far_;  // nullptr: no other hosts

  std::unique_ptr<ControlDesk> desk_;
  // The first `attended_` are looked at in each turn. The others have been silent for a while, and are looked at by turns, in a small part of
  // the time; all of them in the turn after a sleep, and by anything_waiting() before one.
  std::vector<Guest*> guests_;
  std::size_t attended_ = 0;
  std::size_t next_silent_ = 0;
  std::uint64_t silent_looked_ = 0;  // cycles(): up to when the others have been paid for
  std::uint64_t cycles_per_silent_look_;
  std::array<std::uint32_t, std::size(control::ServicePage{}.shards)> on_line_{};  // guests, by their lines
  std::bitset<std::size(control::ServicePage{}.shards)> asleep_on_;               // where it says that it sleeps
  std::vector<std::pair<GuestId, GuestId>> apart_;                                // guests that are to be one shard's, after this turn
  std::uint64_t tried_ns_ = 0;
  bool control_due_ = false, events_held_ = false;  // by some guest that was looked at in this turn
  // They stay where they are, and there: whoever made one queue pair run may make another tenant's runnable. As tenants do, they stay for
  // ever, for what they have moved; a turn looks only at those of running_, which has all that are not empty.
  std::unordered_map<const Tenant*, RunList> lists_;
  std::vector<RunList*> running_;
  std::size_t runnable_count_ = 0;
  Timers timers_;
  std::vector<std::uint32_t> changing_windows_;  // QPNs (change_window)
  std::deque<std::pair<GuestId, std::function<void()>>> leaving_;
  vmci::Backoff backoff_;
  std::uint32_t patience_us_ = 0;  // of the waiting that comes
  std::uint64_t held_events_check_ns_ = 0;

  boost::lockfree::queue<Task*> tasks_{256};
  boost::lockfree::queue<ProcessJob*> jobs_{256};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> asleep_{false};
  vmci::UniqueFd epoll_, wake_;
  Counters counters_;
};

}  // namespace vrdma::svc
