// A shard: the thread that runs the engine for its guests. It looks at doorbells and at the queues that were busy of late, gives
// every tenant its fair share by bytes, keeps timers, answers control requests from the guests' rings, and sleeps in epoll
// when nothing has happened for a while (DESIGN.md D4).
//
// Everything of fabric() belongs to this thread. Others talk to it by submit().
#pragma once

#include <atomic>
#include <boost/lockfree/queue.hpp>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "vmci_channel/backoff.hpp"
#include "vmkernel_svc/engine/engine.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vrdma/control.hpp"

namespace vrdma::svc {

class ControlDesk;
class DirectDesk;

class Shard final : public Runner, public JobSink {
 public:
  using Qp = MediatedPorts::Qp;
  using Task = std::function<void(Shard&)>;

  // page: the service's, in which it has a line.
  Shard(const Config& config, control::ServicePage& page);
  ~Shard();

  void run();   // until stop()
  void stop();  // any thread
  bool turn();  // one round of run(): whatever waits gets its turn once. False: nothing did

  // Any thread: run `task` on the shard's thread, in order of submission.
  void submit(Task task);
  void wake();  // any thread, after giving it something to find in its next turn
  // Before run(): there are other hosts.
  void join(std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier);
  void finished(ProcessJob* job) override;  // any thread

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
  Status watch(int doorbell_fd);
  void unwatch(int doorbell_fd);  // the guest may keep the descriptor, and with it the wait, for as long as it likes
  void add(Guest& guest) { guests_.push_back(&guest); }
  void remove(Guest& guest);

  // The guest's machine stands still or is being saved (Guest::frozen), or goes on.
  void freeze(Guest& guest);
  void thaw(Guest& guest);

  void make_runnable(Qp& qp) override;
  void withdraw(Qp& qp) { take_out(qp); }  // the other way round
  void set_timer(Qp& qp, std::uint64_t at_ns) override;
  void overran(CompletionQueue& cq) override;
  bool owns_inbox(QueuePair& qp) override;
  // Before a queue pair goes: no list, timer or job knows it any more.
  void forget(Qp& qp);
  // Before a CQ goes: an overrun that was not handled yet is nobody's.
  void forget(CompletionQueue& cq) { std::erase(overrun_, &cq); }

  struct Counters {
    std::uint64_t turns = 0, sleeps = 0, doorbells = 0, requests = 0, wakes = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct RunList {  // the runnable queue pairs of one tenant
    Tenant* tenant;
    std::vector<Qp*> queue_pairs;
    std::size_t next = 0;
  };
  struct Timer {
    std::uint64_t at_ns;
    std::uint32_t qpn;
    bool operator>(const Timer& other) const { return at_ns > other.at_ns; }
  };

  bool run_tasks();
  bool run_finished_jobs();
  bool look_at_doorbells();
  void flush_held_events();
  bool serve_control();
  void expel(Guest& guest);
  bool run_queue_pairs();
  bool run_list(RunList& list);
  bool run_timers();
  void handle_overruns();
  // The queue pair is not looked at any more, until somebody rings. False: it has something to do after all.
  bool park(RunList& list, std::size_t index);
  void take_out(Qp& qp);  // of its tenant's list
  void park_all();
  bool anything_waiting();
  void sleep();
  bool wait_for_events();
  void say_asleep(bool asleep);

  control::ServicePage& page_;
  std::vector<control::ServicePage*> mirrors_;
  Fabric fabric_;
  MediatedPorts ports_{fabric_};
  engine::Engine<MediatedPorts> engine_{ports_};
  std::unique_ptr<DirectDesk> direct_;
  std::unique_ptr<ControlDesk> desk_;
  std::unique_ptr<FarDesk> far_;  // nullptr: no other hosts

  std::vector<Guest*> guests_;
  std::vector<RunList> lists_;
  std::size_t runnable_count_ = 0;
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  std::vector<CompletionQueue*> overrun_;
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
