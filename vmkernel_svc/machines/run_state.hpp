// What a machine's QEMU is about, by the news of its monitor: whether nothing may touch the machine's memory now, and, once QEMU has
// ended, whether the machine is saved somewhere and may come back. Plain data; no clock, no socket.
//
//   QEMU's dirty log does not see what the service writes. So from the beginning of a migration on (it begins to copy pages when it
//   says "active"), or while the processors stand still (savevm, loadvm, the end of a migration), the machine is to be frozen:
//
//     STOP … RESUME                                     still
//     SUSPEND … WAKEUP                                  still: a suspended adapter is off. It may be saved so, without a STOP
//     MIGRATION setup, active … failed or cancelled     being saved; goes on
//     MIGRATION setup, active … completed, QEMU ends    saved: a QEMU that is started with -incoming may go on with it
//
//   Events come late. A migration whose first page went out before the machine was frozen may lack what the service wrote in
//   between: what was saved is then no state that the service can go on from, and counts as if nothing had been saved. That it went out
//   later is known where QEMU has answered, before it said "active", a question that was asked once the machine was frozen; else by QEMU's
//   clock, which is this host's wall clock, unless that was set meanwhile.
#pragma once

#include <cstdint>
#include <string_view>

namespace vrdma::svc {

class RunState {
 public:
  void qemu_came() { *this = {}; }

  // To freeze, or to thaw if it was. Called when the news have been taken.
  bool still() const { return stands() || saving_; }
  // QEMU may end: the machine is saved.
  bool saved() const { return saved_ && sound(); }
  // A machine that was saved was not frozen early enough.
  bool unsound() const { return saved_ && !sound(); }
  // QEMU loads a machine, or waits for one, and has not yet let it run.
  bool loading() const { return loading_; }
  // It has said what it is about.
  bool known() const { return known_; }

  void frozen(std::uint64_t at_us) { frozen_at_us_ = at_us, answered_ = false; }  // from now on nothing touches the memory
  void answered() { answered_ = frozen_at_us_ != 0; }  // a question that was asked after that
  void thawed() { frozen_at_us_ = 0, answered_ = false; }
  void clock_was_set() { by_clock_ = false; }

  void ran_as(std::string_view run_state) {
    known_ = true;
    loading_ = run_state == "inmigrate";
    suspended_ = run_state == "suspended";
    if (loading_) saving_ = false;  // that was its own, too
  }
  void stopped() { stopped_ = true; }
  void suspended() { suspended_ = true; }
  // True: and so it has resumed.
  bool woken() {
    suspended_ = false;
    return !stopped_;
  }
  void resumed() {
    if (saved_) saving_ = saved_ = false;  // it goes on here; what was saved is its past
    stopped_ = suspended_ = loading_ = false;
  }
  void migrated(std::string_view status, std::uint64_t at_us) {
    if (loading_) return;  // its own
    if (status == "setup") {
      saving_ = true;
      saved_ = false;
      copied_from_us_ = 0;
      by_clock_ = true;
      proven_ = false;
    } else if (!saving_) {
      return;
    } else if (status == "active") {
      copied_from_us_ = at_us;
      proven_ = answered_;
    } else if (status == "failed" || status == "cancelled") {
      saving_ = false;
    } else if (status == "completed") {
      // A machine that runs nevertheless has been saved in the background, as it was some time ago.
      saved_ = stands();
      saving_ = stands();
    }
  }

 private:
  bool stands() const { return stopped_ || suspended_; }
  bool sound() const { return proven_ || (by_clock_ && frozen_at_us_ != 0 && frozen_at_us_ <= copied_from_us_); }

  bool stopped_ = false, suspended_ = false, saving_ = false, saved_ = false, loading_ = false, known_ = false;
  bool answered_ = false;             // since it is frozen
  bool proven_ = false;               // the first page went out after that
  bool by_clock_ = true;              // the times can be compared
  std::uint64_t frozen_at_us_ = 0;    // 0: not frozen, or not known yet
  std::uint64_t copied_from_us_ = 0;  // no page went out before
};

}  // namespace vrdma::svc
