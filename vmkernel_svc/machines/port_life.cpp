// A machine's life, as the service sees it: it comes and goes, stands still, is saved, and comes back.

#include <boost/asio/post.hpp>

#include "vmkernel_svc/machines/port_session.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/machines/qemu.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

namespace {

constexpr std::chrono::milliseconds thaw_every{10};   // a thaw looks at every queue pair
constexpr std::chrono::milliseconds silence_max{vm::agent_silence_ms};
constexpr std::uint32_t beats_unheard_max = 20;       // of an agent that nobody tells about, heartbeat_ms each

}  // namespace

void MachinePort::came() {
  run_state_.qemu_came();
  beats_unheard_ = 0;
  if (!session_ && !kept_) epoch_ = random_number(), write_line();  // an agent that this QEMU loads knows another one
  service_.changed();
}

void MachinePort::went() {
  const bool saved = run_state_.saved(), unsound = run_state_.unsound();
  run_state_.qemu_came();  // there is none
  if (session_ && session_->page != nullptr && (saved || kept_) && service_.keep.count() != 0) {
    log::info("machine {}: is saved, and kept for {} s", spec_.name, service_.keep.count());
    kept_ = true;
    // Who has it again has loaded it.
    std::atomic_ref(session_->page->machine_generation).store(0, std::memory_order_relaxed);
    keep_for_a_while();
    return service_.changed();
  }
  if (unsound) log::warn("machine {}: was saved while the service still wrote to it, and is not kept: stop it before it is saved", spec_.name);
  frozen_ = silent_ = false;
  forget();
}

void MachinePort::keep_for_a_while() {
  keeping_.expires_after(service_.keep);
  keeping_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive || !kept_) return;
    // What is loaded, or waits to go on, is heard of again.
    if (device_->monitored() && run_state_.known() && (run_state_.loading() || restored())) return keep_for_a_while();
    log::info("machine {}: did not come back", spec_.name);
    drop_kept();
  });
}

void MachinePort::take_news(const MonitorNews& news) {
  look_at_clock();
  switch (news.kind) {
    case MonitorNews::Kind::reset:
      if (session_) log::info("machine {}: is reset", spec_.name);
      return forget();
    case MonitorNews::Kind::stopped:
      run_state_.stopped();
      break;
    case MonitorNews::Kind::suspended:
      run_state_.suspended();
      break;
    case MonitorNews::Kind::woken:
      if (!run_state_.woken()) break;
      [[fallthrough]];
    case MonitorNews::Kind::resumed:
      if (kept_ && !run_state_.loading() && !restored()) drop_kept();
      if (!session_) forget();  // nobody knows whether the agent's boot is of now
      run_state_.resumed();
      kept_ = false;
      break;
    case MonitorNews::Kind::migration:
      run_state_.migrated(news.text, news.at_us);
      if (clock_.set_lately()) run_state_.clock_was_set();
      break;
    case MonitorNews::Kind::run_state:
      run_state_.ran_as(news.text);
      if (!kept_ || run_state_.loading()) break;
      if (!restored()) return drop_kept();
      kept_ = news.text != "running";  // it was loaded before anybody was told
      break;
    case MonitorNews::Kind::answer:
      if (news.text == std::to_string(asked_)) run_state_.answered();
      break;
  }
  settle();
}

void MachinePort::look_at_clock() {
  if (clock_.look()) run_state_.clock_was_set();
}

// It boots anew, or does not come.
void MachinePort::drop_kept() {
  log::info("machine {}: what was kept of it is given up", spec_.name);
  run_state_.thawed();
  frozen_ = false;
  forget(session_->boot);
}

// True: the machine is the one that the service has seen last. The number is changed in one step, as the machine may be loaded under us.
bool MachinePort::renew_generation() {
  if (!session_) return true;
  if (session_->page == nullptr) return boot_of_agent() == session_->boot;
  std::uint64_t expected = session_->generation;
  session_->generation = random_number();  // once it was another, it stays that
  return std::atomic_ref(session_->page->machine_generation).compare_exchange_strong(expected, session_->generation) &&
         boot_of_agent() == session_->boot;
}

// Whether the machine that was saved has been loaded into this QEMU.
bool MachinePort::restored() const {
  return std::atomic_ref(session_->page->machine_generation).load(std::memory_order_relaxed) == session_->generation && boot_of_agent() == session_->boot;
}

// What the monitor has said last counts, not how often it has changed its mind.
void MachinePort::settle() {
  const bool still = run_state_.still() || silent_;
  if (changing_ || kept_ || still == frozen_) return;
  if (still) return freeze();
  if (std::chrono::steady_clock::now() >= thaw_again_) return thaw();
  resting_.expires_at(thaw_again_);
  resting_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (!error && *alive) settle();
  });
}

// The shard is through with it.
void MachinePort::changed_over() {
  changing_ = false;
  settle();
}

void MachinePort::freeze() {
  frozen_ = changing_ = true;
  beats_unheard_ = 0;
  if (session_)
    for (auto& [connection, process] : session_->processes) process->known->frozen = true;
  const auto page = session_ ? session_->page : nullptr;
  service_.shard.submit([this, alive = alive_, &io = service_.io, name = spec_.name, page](Shard& shard) {
    if (page != nullptr) shard.end_mirror(*page);
    for (auto& [id, guest] : shard.fabric().guests)
      if (guest->machine && guest->machine->name == name) shard.freeze(*guest);
    boost::asio::post(io, [this, alive] {
      if (!*alive) return;
      if (frozen_) {
        (void)renew_generation();  // who is not the same any more is told so when it goes on
        // That was the last write: a page that went out before may lack it.
        look_at_clock();
        run_state_.frozen(clock_.now_us());
        device_->ask(++asked_);
      }
      changed_over();
    });
  });
  service_.changed();
}

void MachinePort::thaw() {
  frozen_ = false;
  keeping_.cancel();
  run_state_.thawed();
  thaw_again_ = std::chrono::steady_clock::now() + thaw_every;
  if (!renew_generation()) {
    log::warn("machine {}: goes on from another state than it had: its programs lose their device", spec_.name);
    return forget();
  }
  write_line();
  if (session_) std::atomic_ref(device_->header().service.accepted).store(session_->boot, std::memory_order_release);
  if (session_) {
    changing_ = true;
    service_.shard.submit([this, alive = alive_, &io = service_.io, name = spec_.name, ram = session_->ram, page = session_->page](Shard& shard) {
      if (page != nullptr) {
        std::atomic_ref(page->shards[0].sleeping).store(0, std::memory_order_relaxed);
        shard.mirror(*page);
      }
      for (auto& [id, guest] : shard.fabric().guests)
        if (guest->machine && guest->machine->name == name) shard.thaw(*guest);
      boost::asio::post(io, [this, alive] {
        if (*alive) changed_over();
      });
    });
    for (auto& [connection, process] : session_->processes) {
      process->known->frozen = false;
      if (const auto thawed = std::exchange(process->known->thawed, {})) thawed();
    }
  }  // guests of a session that has ended meanwhile are on their way out, and stay frozen
  push();
  look();
  service_.changed();
}

// A machine of which nobody tells may be reset, or stand still, or its agent got no processor.
void MachinePort::look_at_heart() {
  // Pairs with the agent's release (S4): `boot` is that of whose heart beats.
  const std::uint64_t heart = std::atomic_ref(device_->header().agent.heartbeat).load(std::memory_order_acquire);
  const bool lent = session_ && session_->page != nullptr, another = session_ && boot_of_agent() != session_->boot;
  const auto now = std::chrono::steady_clock::now();
  if (std::exchange(heart_, heart) != heart || another || !lent) heard_at_ = now;
  const bool silent = now > heard_at_ + silence_max && !device_->monitored() && !kept_;
  if (std::exchange(silent_, silent) == silent) return;
  if (silent) log::info("machine {}: its agent's heart stands still: it is left alone until that beats", spec_.name);
  // What another agent finds is ended, not gone on with: look() sees to that.
  if (another && !run_state_.still()) frozen_ = false;
  else settle();
}

// A machine that is said to stand still, or to be saved, and whose monitor has gone: that it runs again is told by its agent's heart alone,
// and too late to go on with it.
void MachinePort::end_unheard() {
  if (!device_->connected() || device_->monitored()) return;
  const std::uint64_t heart = std::atomic_ref(device_->header().agent.heartbeat).load(std::memory_order_relaxed);
  if (std::exchange(heart_seen_, heart) == heart || ++beats_unheard_ < beats_unheard_max) return;
  log::warn("machine {}: it runs, and no monitor has said so: its programs lose their device", spec_.name);
  run_state_.qemu_came();
  frozen_ = false;
  forget();
}

}  // namespace vrdma::svc
