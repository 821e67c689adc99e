#include "vmkernel_svc/shard.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <stdexcept>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/events.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::svc {

namespace {
constexpr std::int64_t quantum_bytes = 128 * 1024;  // of a tenant in one round
constexpr std::int64_t turn_bytes = 64 * 1024;      // of a queue pair in one turn
constexpr std::int32_t turn_wqes = 32;
// What moves no bytes, as bytes that move in about that time: one WQE, a turn in vain (RNR, say), a look at an empty queue. So that the others of a
// round of some 20 µs are not kept waiting by however many queue pairs with messages of no bytes.
constexpr std::int64_t wqe_bytes = 1024, vain_turn_bytes = 512, look_bytes = 64;
constexpr int looks_per_turn = 8;
constexpr std::uint32_t idle_turns_max = 16'000;    // then the queue pair rings when it has something
constexpr std::uint32_t idle_turns_crowded = 64;
// Where the processor is shared with a guest that polls, a yield and the way back take longer than a guest elsewhere to answer.
constexpr std::uint32_t answer_patience_us = 2;
constexpr std::uint64_t turns_between_looks = 1024;  // at the clock, while receivers of direct connections may sleep
constexpr std::uint64_t try_again_ns = 50'000;  // what has to wait, where other shards are kept from their work meanwhile
constexpr std::size_t crowd = 64;                   // queue pairs looked at without being rung
// Guests that have nothing are looked at less often, where there are more than a few: one of them in so many ns, of which a look takes an eighth.
constexpr std::size_t few_guests = 4;
constexpr std::uint32_t silent_looks_max = 1024;
constexpr std::uint64_t ns_per_silent_look = 40;
std::uint64_t cycles_per_silent_look() { return std::max(vmci::cycles_per_us() * ns_per_silent_look / 1000, std::uint64_t{1}); }
}  // namespace

Shard::Shard(const Config& config, control::ServicePage& page)
    : number_(0), page_(page), common_(std::make_shared<Common>(config)), shards_(common_->shards), fabric_(common_->fabric),
      direct_(std::make_unique<DirectDesk>(*this)), desk_(std::make_unique<ControlDesk>(*this)),
      cycles_per_silent_look_(cycles_per_silent_look()) {
  make_descriptors();
  shards_.add(*this);
}

Shard::Shard(Shard& first)
    : number_(static_cast<std::uint32_t>(first.shards_.all().size())), page_(first.page_), common_(first.common_), shards_(common_->shards),
      fabric_(common_->fabric), desk_(std::make_unique<ControlDesk>(first)), cycles_per_silent_look_(cycles_per_silent_look()) {
  make_descriptors();
  shards_.add(*this);
}

Shard::~Shard() {
  Task* task;
  while (tasks_.pop(task)) delete task;
  if (is_first()) {
    while (!fabric_.guests.empty()) desk_->detach(*fabric_.guests.begin()->second);
    fabric_.far = nullptr;
    far_.reset();
  }
  ProcessJob* job;
  while (jobs_.pop(job)) delete job;
}

void Shard::join(std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier) {
  far_ = std::make_unique<FarDesk>(fabric_, *this, ports_, engine_, std::move(directory), std::move(carrier));
  fabric_.far = far_.get();
  // Level-triggered: what one turn leaves unread wakes the next.
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, far_->carrier().descriptor(), &event) != 0)
    throw std::runtime_error("cannot watch the carrier's sockets: too many open files?");
}

// --- other threads --------------------------------------------------------------------------------------------

void Shard::submit(Task task) {
  tasks_.push(new Task(std::move(task)));
  wake();
}

void Shard::finished(ProcessJob* job) {
  jobs_.push(job);
  wake();
}

void Shard::stop() {
  stopping_.store(true, std::memory_order_release);
  wake();
}

// --- the loop -------------------------------------------------------------------------------------------------

void Shard::run() {
  while (!stopping_.load(std::memory_order_acquire)) {
    if (turn()) {
      backoff_.stay_busy();
      patience_us_ = ports_.take_answer_expected() ? answer_patience_us : 0;
    } else if (!backoff_.tired()) {
      backoff_.idle(patience_us_);
    } else {
      sleep();
    }
  }
}

bool Shard::turn() {
  shards_.turnstile.enter(number_);
  bool worked = own_turn();
  const bool due = must_be_alone();
  shards_.turnstile.leave(number_);
  if (!due) return worked;
  shards_.turnstile.alone([&] { worked |= common_turn(); });
  if (!is_first()) shards_.first().wake();  // there may be something for its desks
  return worked;
}

bool Shard::own_turn() {
  ++counters_.turns;
  bool worked = run_finished_jobs();
  worked |= look_at_doorbells();
  if (far_ != nullptr) worked |= far_->turn();
  // With a processor of its own it looks at queue pairs more often than at what is rare: an empty queue costs one load, the rest
  // of a turn several. Where others wait for the processor it is quick to give it away.
  for (int look = backoff_.alone() ? looks_per_turn : 1; look > 0; --look) worked |= run_queue_pairs();
  if (far_ != nullptr) far_->flush();  // after this turn the processor may be given away
  worked |= run_timers();
  if (direct_) {
    if (direct_->waiting() && !direct_->in_doubt()) worked |= direct_->settle();
    if (direct_->watching() && counters_.turns % turns_between_looks == 0) direct_->look(vmci::monotonic_ns());
    direct_->give_inboxes();
  }
  return worked;
}

bool Shard::must_be_alone() {
  if (!tasks_.empty() || !apart_.empty() || !changing_windows_.empty() || !leaving_.empty()) return true;
  const bool in_doubt = direct_ && direct_->in_doubt();
  if (!control_due_ && !in_doubt) return false;
  if (shards_.count() == 1) return true;
  // What must wait for somebody else does not keep all shards from their work by being tried.
  const std::uint64_t now = vmci::monotonic_ns();
  const bool tried_long_ago = now - tried_ns_ >= try_again_ns;
  const auto is_due = [&](const Guest* guest) {
    return guest->control_held && guest->is_heard() && (guest->held_since_ns == 0 || tried_long_ago);
  };
  if (!(in_doubt && tried_long_ago) && !std::any_of(guests_.begin(), guests_.end(), is_due)) return false;
  tried_ns_ = now;
  return true;
}

bool Shard::common_turn() {
  bool worked = run_tasks();
  unite();
  worked |= change_windows();
  worked |= let_go_on();
  // After the queue pairs, so that what a guest posted before it asked has had its turn.
  worked |= serve_control();
  if (direct_ && direct_->in_doubt()) worked |= direct_->settle();
  return worked;
}

bool Shard::run_tasks() {
  if (tasks_.empty()) return false;
  constexpr int tasks_per_turn = 16;  // the queue pairs come in between, however many ask
  Task* task;
  for (int left = tasks_per_turn; left > 0 && tasks_.pop(task); --left) {
    (*task)(*this);
    delete task;
  }
  return true;
}

bool Shard::run_finished_jobs() {
  if (jobs_.empty()) return false;
  ProcessJob* raw;
  while (jobs_.pop(raw)) {
    std::unique_ptr<ProcessJob> job(raw);
    if (job->then) {
      shards_.first().submit([job = std::shared_ptr(std::move(job))](Shard&) { job->then(*job); });
      continue;
    }
    Qp* const qp = fabric_.jobs.find(job->sequence);
    Guest* const guest = fabric_.guest(job->of);
    Shard* const now = qp != nullptr ? shards_.of(*qp) : guest != nullptr ? &of(*guest) : this;
    if (now != this) {  // they have moved meanwhile
      job->shard = now->number_;
      now->finished(job.release());
      continue;
    }
    if (Region* region = fabric_.regions.at(job->slot, job->generation)) region->job_ends();
    if (guest != nullptr) --guest->jobs, ++guest->jobs_ended, ports_.call_next(*guest);
    if (qp == nullptr) continue;  // given up
    // Its guest goes in a moment, and with it whoever waits for this: the peer of one that has ended is told so, and not of bad memory.
    if (job->gone) continue;
    fabric_.jobs.remove(job->sequence);
    qp->port.finished_job = std::move(job);
    make_runnable(*qp);
  }
  return true;
}

bool Shard::look_at_doorbells() {
  bool worked = false;
  control_due_ = events_held_ = false;
  for (std::size_t i = 0; i < attended_;) {
    Guest& guest = *guests_[i];
    if (look_at(guest)) {
      worked = true;
    } else if (++guest.silent_looks > silent_looks_max && guests_.size() > few_guests) {
      std::swap(guests_[i], guests_[--attended_]);
      continue;
    }
    ++i;
  }
  if (attended_ < guests_.size()) worked |= look_at_silent();
  if (events_held_) flush_held_events();
  return worked;
}

// As many as the time since the last ones pays for: what they cost the others does not grow with their number.
bool Shard::look_at_silent() {
  bool worked = false;
  const std::uint64_t now = vmci::cycles();
  std::size_t left = guests_.size() - attended_;
  for (; left > 0 && now - silent_looked_ >= cycles_per_silent_look_; --left) {
    silent_looked_ += cycles_per_silent_look_;
    if (next_silent_ < attended_ || next_silent_ >= guests_.size()) next_silent_ = attended_;
    Guest& guest = *guests_[next_silent_];
    worked |= look_at(guest);
    if (guest.silent_looks == 0) std::swap(guests_[next_silent_], guests_[attended_++]);
    ++next_silent_;
  }
  if (left == 0) silent_looked_ = now;  // the rest of the time is nobody's
  return worked;
}

// Whether it rang. Guest::silent_looks begins anew while there is, or it is owed, anything.
bool Shard::look_at(Guest& guest) {
  if (guest.broken) {
    expel(guest);
    return false;
  }
  if (guest.events_held) events_held_ = true, guest.silent_looks = 0;
  if (!guest.is_heard()) return false;
  if (guest.notices_held) fabric_.vmci.flush(guest), guest.silent_looks = 0;
  const bool rings = guest.doorbell.any();
  if (rings) {
    guest.silent_looks = 0;
    guest.doorbell.take([&](std::uint32_t member) {
      ++counters_.doorbells;
      if (member == 0) {
        guest.control_held = true;
        return;
      }
      if (guest.copier && member == guest.copier->doorbell()) {
        if (!guest.copier->collect()) ++guest.protocol_errors, guest.broken = true;
        return;
      }
      if (member >= guest.by_doorbell.size() || guest.by_doorbell[member] == nullptr) return;  // a bit without a queue pair
      Qp& qp = guest.by_doorbell[member]->core;
      make_runnable(qp);
      if (Qp* const sender = std::exchange(qp.port.waiting_sender, nullptr)) {
        sender->port.waiting_at = nullptr;
        if (qp.state != engine::QpState::err) qp.port.owner->watch_receives(false);
        make_runnable(*sender);
      }
    });
  }
  if (guest.control_held) control_due_ = true, guest.silent_looks = 0;
  return rings;
}

// Also while there is always something to do: who has emptied a full pipe waits for the rest.
void Shard::flush_held_events() {
  const std::uint64_t now = vmci::monotonic_ns();
  if (now < held_events_check_ns_) return;
  held_events_check_ns_ = now + held_events_patience_ns;
  for (Guest* guest : guests_) flush_events(*guest);
}

bool Shard::serve_control() {
  bool worked = false;
  for (std::size_t i = 0; i < guests_.size(); ++i)
    if (guests_[i]->control_held && guests_[i]->is_heard()) worked |= desk_->serve(*guests_[i]);
  return worked;
}

void Shard::let_go(Guest& guest, std::function<void()> gone) {
  desk_->end(guest);
  leaving_.emplace_back(guest.id, std::move(gone));
}

bool Shard::let_go_on() {
  if (leaving_.empty()) return false;
  auto [id, gone] = std::move(leaving_.front());
  leaving_.pop_front();
  Guest* const guest = fabric_.guest(id);
  if (guest != nullptr && !desk_->detach(*guest, ControlDesk::slice_ns)) leaving_.emplace_back(id, std::move(gone));
  else gone();
  return true;
}

// The guest is not looked at any more; the server finds its socket closed and takes it out of the world.
void Shard::expel(Guest& guest) {
  if (!guest.socket) return;
  log::warn("{} (uid {}, pid {}) does not speak the channel's protocol: detached", guest.name, guest.credentials.uid,
               guest.credentials.pid);
  ::shutdown(guest.socket.get(), SHUT_RDWR);
  vmci::UniqueFd(guest.socket.release()).reset();  // the server has another copy
}

bool Shard::run_queue_pairs() {
  bool worked = false;
  for (std::size_t i = 0; i < running_.size(); ++i) {  // there may be more meanwhile
    RunList& list = *running_[i];
    if (list.queue_pairs.empty()) continue;
    list.deficit_bytes = std::min(list.deficit_bytes + quantum_bytes, quantum_bytes);
    worked |= run_list(list);
  }
  std::erase_if(running_, [](RunList* list) { return !(list->running = !list->queue_pairs.empty()); });
  return worked;
}

bool Shard::run_list(RunList& list) {
  bool worked = false;
  const bool others_wait = running_.size() > 1;  // who is alone pays for bytes alone: its rounds need not be shorter
  for (std::size_t turns = list.queue_pairs.size(); turns > 0 && list.deficit_bytes > 0 && !list.queue_pairs.empty(); --turns) {
    Qp& qp = list.queue_pairs.current();
    if (qp.port.link != nullptr && !direct_->may_run(*qp.port.owner)) continue;  // it is out of the list
    auto progress = engine::Progress::idle;
    const auto flood = qp.port.link != nullptr ? direct_->flood(*qp.port.owner) : DirectDesk::Flood::none;
    if (flood >= DirectDesk::Flood::waits) {
      worked = true;
      if (flood == DirectDesk::Flood::waits) list.queue_pairs.pass();
      continue;
    }
    std::int64_t moved = 0, cost = look_bytes;
    if (engine_.may_have_work(qp) || qp.port.hca != nullptr) {
      const std::int32_t wqes_max = flood == DirectDesk::Flood::to_boundary ? 1 : turn_wqes;
      engine::Budget budget{turn_bytes, wqes_max};
      progress = qp.port.hca == nullptr ? engine_.run(qp, budget) : far_->hca()->run(qp, budget);
      ports_.announce();
      moved = turn_bytes - budget.bytes;
      cost = std::max({moved, (wqes_max - budget.wqes) * wqe_bytes, vain_turn_bytes});
      list.moved_bytes += static_cast<std::uint64_t>(moved);
    }
    list.deficit_bytes -= others_wait ? cost : moved;
    if (progress == engine::Progress::worked) {
      qp.port.idle_turns = 0;
      worked = true;
      if (qp.port.link == nullptr || !direct_->rest(*qp.port.owner, 0)) list.queue_pairs.pass();
    } else if (++qp.port.idle_turns, qp.port.link != nullptr && direct_->rest(*qp.port.owner, qp.port.idle_turns)) {
      continue;  // likewise
    } else if (qp.port.idle_turns > (runnable_count_ > crowd ? idle_turns_crowded : idle_turns_max)) {
      if (!park(list, qp)) list.queue_pairs.pass();
    } else {
      list.queue_pairs.pass();
    }
  }
  return worked;
}

bool Shard::run_timers() {
  if (timers_.empty()) return false;
  bool worked = false;
  const std::uint64_t now = vmci::monotonic_ns();
  for (Timers::Timer timer; timers_.take_due(now, timer);) {
    Qp* const qp = set_for(timer);
    if (qp == nullptr) continue;
    qp->port.wake_ns = 0;
    make_runnable(*qp);
    worked = true;
  }
  return worked;
}

void Shard::change_window(Qp& qp) { changing_windows_.push_back(qp.qpn.value); }

// Alone.
bool Shard::change_windows() {
  constexpr std::uint64_t look_again_ns = 50'000;
  const std::vector<std::uint32_t> changing = std::exchange(changing_windows_, {});
  for (const std::uint32_t qpn : changing) {
    const auto found = fabric_.by_qpn.find(qpn);
    if (found == fabric_.by_qpn.end()) continue;
    Qp& qp = found->second->core;
    if (&of(*found->second->guest) != this) {  // moved meanwhile: it asks there
      make_runnable(qp);
      continue;
    }
    if (!engine_.busy(qp) || !qp.operation.rule->local || qp.port.window_changed) continue;  // it flushes, or asked twice
    qp.port.window_changed = desk_->change_window(*found->second);
    if (qp.port.window_changed) make_runnable(qp);
    else set_timer(qp, vmci::monotonic_ns() + look_again_ns);
  }
  return !changing.empty();
}

void Shard::forget(CompletionQueue& cq) { of(*cq.guest).ports_.announce(); }

// --- run lists ------------------------------------------------------------------------------------------------

void Shard::make_runnable(Qp& qp) {
  qp.port.idle_turns = 0;
  if (qp.port.runnable) return;
  if (qp.port.owner == nullptr) [[unlikely]] return fabric_.far->make_runnable(*qp.port.stand_in);
  Shard& shard = of(*qp.port.owner->guest);
  shard.take_in(qp);
  if (&shard != this) [[unlikely]] shard.wake();
}

void Shard::take_in(Qp& qp) {
  if (qp.port.owner->guest->frozen) return;
  qp.port.runnable = true;
  qp.port.owner->watch_sends(false);
  ++runnable_count_;
  RunList& list = lists_[qp.port.owner->guest->tenant];
  list.queue_pairs.add(qp);
  if (!std::exchange(list.running, true)) running_.push_back(&list);
}

// Takes a queue pair out of its list, unless something was posted in the meantime.
bool Shard::park(RunList& list, Qp& qp) {
  if (qp.port.link != nullptr && qp.port.owner->guest->held_since_ns == 0 && direct_->hand_out(*qp.port.owner)) return true;
  qp.port.owner->watch_sends(true);  // with a fence
  if (engine_.may_take_sends(qp)) {
    qp.port.owner->watch_sends(false);
    qp.port.idle_turns = 0;
    return false;
  }
  qp.port.runnable = false;
  --runnable_count_;
  list.queue_pairs.remove(qp);
  return true;
}

void Shard::park_all() {
  for (std::size_t of = 0; of < running_.size(); ++of) {
    RunList& list = *running_[of];
    for (std::size_t i = list.queue_pairs.size(); i > 0; --i)
      if (i <= list.queue_pairs.size()) park(list, list.queue_pairs.at(i - 1));  // a connection that is handed out takes two along
  }
}

void Shard::set_timer(Qp& qp, std::uint64_t at_ns) {
  if (qp.port.owner == nullptr) [[unlikely]] return fabric_.far->set_timer(*qp.port.stand_in, at_ns);
  if (qp.port.wake_ns == at_ns) return;
  Shard& shard = of(*qp.port.owner->guest);
  shard.take_timer(qp, at_ns);
  if (&shard != this) [[unlikely]] shard.wake();
}

void Shard::take_timer(Qp& qp, std::uint64_t at_ns) {
  qp.port.wake_ns = at_ns;
  timers_.add({at_ns, qp.qpn.value}, fabric_.by_qpn.size(), [this](const Timers::Timer& timer) { return set_for(timer) != nullptr; });
}

// nullptr: it has been replaced, or its queue pair has moved or gone.
Shard::Qp* Shard::set_for(const Timers::Timer& timer) {
  const auto found = fabric_.by_qpn.find(timer.qpn);
  if (found == fabric_.by_qpn.end() || &of(*found->second->guest) != this || found->second->core.port.wake_ns != timer.at_ns) return nullptr;
  return &found->second->core;
}

void Shard::overran(CompletionQueue& cq) {
  if (cq.overrun) return;
  cq.overrun = true;
  ports_.announce();  // who is told of it finds what had room
  raise_async(*cq.guest, cq.context, static_cast<std::uint32_t>(engine::AsyncEvent::cq_err), cq.handle);
  // At once: in a moment the sender of what could not be received, say, is in ERR for that, and would not be told of this.
  for (QueuePair* const user : cq.users) engine_.fail(user->core, engine::AsyncEvent::qp_fatal);
}

bool Shard::owns_inbox(QueuePair& qp) { return direct_->take_inbox(qp); }

void Shard::take_out(Qp& qp) {
  if (!std::exchange(qp.port.runnable, false)) return;
  Shard& shard = *shards_.of(qp);
  for (RunList* const list : shard.running_) {
    if (!list->queue_pairs.remove(qp)) continue;
    --shard.runnable_count_;
    return;
  }
}

void Shard::forget(Qp& qp) {
  take_out(qp);
  if (Qp* const receiver = std::exchange(qp.port.waiting_at, nullptr)) receiver->port.waiting_sender = nullptr;
  if (Qp* const sender = std::exchange(qp.port.waiting_sender, nullptr)) sender->port.waiting_at = nullptr;
}

}  // namespace vrdma::svc
