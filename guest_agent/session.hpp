// The agent's side of the link's session (vrdma/vm_link.hpp): when it begins, whether the service still lives, and what both
// agreed upon. One thread; never blocks.
//
//   absent ──service is ready: boot──▶ asked ──accepted == boot: hello──▶ greeted ──welcome──▶ open
//      ▲                                                                     │                  │
//      └──────────── another epoch, a heart that stands still, a broken link ┴──────────────────┘
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "guest_agent/ballast.hpp"
#include "guest_agent/bar_pages.hpp"
#include "guest_agent/device.hpp"
#include "guest_agent/pinned.hpp"
#include "guest_agent/vectors.hpp"
#include "vmci_channel/vm_link.hpp"
#include "vrdma/control.hpp"

namespace vrdma::agent {

// The service and this agent, or this machine, do not fit together: trying again changes nothing.
struct Unsuitable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Session {
 public:
  enum class State { absent, asked, greeted, open };
  enum class News {
    none,
    accepted,  // the service has let go of everything of earlier sessions
    lost,
    waits,  // there has been no service for long; once for each time
  };

  // ballast_bytes_max: of memory that is held while other memory is looked for. meanwhile: called again and again while that takes time.
  Session(const Device& device, std::uint64_t patience_ns, std::uint64_t ballast_bytes_max, std::function<void()> meanwhile)
      : device_(device), patience_ns_(patience_ns), vectors_(vm::fixed_vectors, device.vectors), ballast_(ballast_bytes_max), meanwhile_(std::move(meanwhile)) {}

  State state() const { return state_; }
  bool linked() const { return state_ == State::greeted || state_ == State::open; }
  // Looks at the service's line and does what it calls for. Throws Unsuitable; std::runtime_error if nothing can be pinned here.
  News look(std::uint64_t now_ns);
  // Begins a new session, whatever there was, if the service is ready for one. to_leave: it goes no further than that the service accepts it.
  void begin(bool to_leave = false);
  // The answer to hello. False: it breaks the protocol. A service that has no memory of the machine is asked again, as patiently.
  bool take_welcome(std::span<const std::byte> body, std::uint64_t now_ns);
  void lose();

  // While linked().
  vmci::VmLinkEnd& link() { return *link_; }
  void flush() {
    if (link_->flush()) device_.ring(vm::link_vector);
  }
  void ring_doorbell() const { device_.ring(vm::doorbell_vector); }
  const Device& device() const { return device_; }
  // Of those that the service can ring. A lease must end before this does.
  Vectors::Lease lend_vector();

  // While open: the machine's copy of the ServicePage, for reading only; what welcome said.
  int page_fd() const { return page_to_read_.get(); }
  // The service writes to that page, or did when the last session was lost.
  bool page_lent() const { return page_ != nullptr; }
  // Where memory is lent of the BAR; else null.
  BarPages* bar() const { return in_bar_ ? bar_.get() : nullptr; }
  BarPages* bar_ever() const { return bar_.get(); }  // or was, in an earlier session
  // Whether programs of that user are served: where memory is of the BAR, they are root's and one other user's, the first that comes.
  bool admits(uid_t user);
  std::uint64_t arena_bytes() const { return arena_bytes_; }
  std::uint64_t ram_page_bytes() const { return ram_page_bytes_; }
  // Whether these pages lie in the file that the service has. Not those of memory that was plugged in.
  bool may_lend(const Runs& runs) const;
  bool may_lend(const vm::Run& run) const { return !ram_ || ram_->offset_of(run).has_value(); }
  // A segment that may be lent, of huge pages where the machine's RAM has such; errors as PinnedSegment::make(). EFAULT: it would be of memory
  // that was plugged in; that was said. Looking for other takes up to ten seconds.
  Result<PinnedSegment> make_segment(const char* name, std::uint64_t bytes) { return lendable(name, bytes, ram_page_bytes_, vmci::HandedOut::writable); }
  const std::string& machine() const { return machine_; }

 private:
  struct ServiceNow {
    std::uint32_t magic;
    std::uint16_t major, minor;
    std::uint64_t epoch, accepted, heartbeat;
  };
  ServiceNow service() const;
  void greet();
  Result<PinnedSegment> lendable(const char* name, std::uint64_t bytes, std::uint64_t page_bytes, vmci::HandedOut handed_out);
  bool believe_plugged_in(std::uint64_t page);  // false: it cannot be
  void beat(std::uint64_t now_ns) const;
  News say_that_it_waits(std::uint64_t now_ns);
  std::optional<std::uint64_t> make_page();  // its number; none: EFAULT, as make_segment()
  void mark_alive();
  void mark_dead();

  Device device_;
  std::uint64_t patience_ns_;
  Vectors vectors_;
  State state_ = State::absent;
  std::uint64_t not_before_ns_ = 0;  // absent: when the service may be asked again
  std::optional<std::uint64_t> waiting_since_ns_;  // absent or asked
  bool said_that_it_waits_ = false;
  std::uint64_t epoch_ = 0, boot_ = 0;
  std::uint64_t heartbeat_ = 0, heartbeat_ns_ = 0;  // the last one, and when it was first seen
  std::uint64_t last_look_ns_ = 0;
  std::optional<vmci::VmLinkEnd> link_;
  bool in_bar_ = false;  // of this session
  std::unique_ptr<BarPages> bar_;  // once it was
  std::optional<uid_t> bar_user_;
  control::ServicePage* page_ = nullptr;
  PinnedSegment pinned_page_;  // kept when the session is lost, until the next one is accepted: the service may still write to it
  // In the BAR, one of each session: programs that have lost theirs may still read it, and must find the mark there.
  std::vector<BarPages::Slice> bar_pages_;
  bool marked_alive_ = false;
  vmci::UniqueFd page_to_read_;
  std::uint64_t arena_bytes_ = 0, ram_page_bytes_ = vm::page_bytes;
  std::optional<vm::RamLayout> ram_;  // of the last Welcome; or what is left to believe of it, where the service did not find the proof
  bool said_plugged_in_ = false;  // in vain, for a session
  bool to_leave_ = false;
  Ballast ballast_;  // kept for a while: programs come in crowds
  std::uint64_t ballast_until_ns_ = 0;
  std::function<void()> meanwhile_;
  std::string machine_;
};

}  // namespace vrdma::agent
