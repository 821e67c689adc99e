// A program may post and return from main: an adapter has read its memory within microseconds. Memory that the service reaches through the
// process goes with it, so the end of exit(3) gives the service a moment to carry out what it has not come to yet. (All other memory outlives the
// process in the service's hands. _exit(2) and SIGKILL wait for nobody.)
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <mutex>

#include "guest_lib/attachment.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/own_process.hpp"
#include "guest_lib/process.hpp"
#include "guest_lib/single_thread.hpp"
#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

namespace {

constexpr std::uint64_t patience_ns = 100'000'000;  // what waits for its peer may wait longer; it does not get that time
constexpr std::uint64_t lock_patience_ns = 10'000'000;  // of that, for who has a lock: it polls, or posts, or is below this on the same stack
constexpr timespec look_again_after{0, 50'000};

// Other threads post and poll until the very end. locked: what is said of one whose lock somebody has.
bool is_carried_out(Qp& qp, bool locked) {
  const std::unique_lock posting(qp.send_lock, std::try_to_lock);
  if (!posting) return locked;
  if (!qp.send.any_outstanding()) return true;
  const std::uint32_t posted = qp.send.position();
  if (qp.direct != nullptr && qp.direct->connection.has_run(qp.send)) return true;
  if (qp.datagrams != nullptr && qp.datagrams->has_run(qp.send)) return true;
  const std::unique_lock polling(Cq::of(qp.base().send_cq).lock, std::try_to_lock);
  if (!polling) return locked;
  vmci::LaneReader lane = qp.send_lane.reader;  // a copy: nothing is taken
  std::uint32_t done = posted - 1;
  for (const Cqe* entry = lane.next(); entry != nullptr; entry = lane.next()) {
    done = entry->queue_position;
    lane.pop();
  }
  return done == posted;
}

// Where somebody has one of these locks all the while, as who was interrupted by the handler that ends the process, nothing is waited for. A child by
// a bare system call has none of the rings mapped (MADV_DONTFORK), and has posted nothing.
[[gnu::destructor]] void let_last_posts_go() {
  if (OwnProcess::is_visitor()) return;
  Process& process = Process::instance();
  const std::unique_lock here(process.mutex, std::try_to_lock);
  const auto attachment = here ? process.attachment : nullptr;
  if (attachment == nullptr) return;
  const std::unique_lock registering(attachment->registration_mutex(), std::try_to_lock);
  const std::unique_lock objects(attachment->objects_mutex(), std::try_to_lock);
  if (!registering || !objects || !attachment->process_memory_known()) return;
  const std::uint64_t begun = vmci::monotonic_ns();
  const auto waited_ns = [begun] { return vmci::monotonic_ns() - begun; };
  for (const auto& [handle, qp] : attachment->qps)
    while (!attachment->liveness().gone() && !is_carried_out(*qp, single_threaded() || waited_ns() >= lock_patience_ns) && waited_ns() < patience_ns)
      ::syscall(SYS_nanosleep, &look_again_after, nullptr);
}

}  // namespace

}  // namespace vrdma::guest
