// Extended completion queues (ibv_create_cq_ex, ibv_start_poll … ibv_end_poll): one completion at a time, whose fields are read by
// functions. The same completion queue underneath, so that ibv_poll_cq and events work on it as on any other.
//
// From start_poll to end_poll one thread has the queue to itself; a start_poll that finds nothing needs no end_poll.
#include "guest_lib/cq_ex.hpp"

#include <time.h>

#include <utility>

#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

Cq& of(ibv_cq_ex* cq) { return Cq::of(reinterpret_cast<ibv_cq*>(cq)); }

// What came of a poll for one completion: 0, ENOENT: there is none, or why it cannot be told.
int take(Cq& cq, int got) {
  if (got < 0) return errno;
  if (got == 0) return ENOENT;
  cq.verbs.wr_id = cq.current.wr_id;
  cq.verbs.status = cq.current.status;
  if (cq.timed && cq.current_time_ns == 0) cq.current_time_ns = cq.clock_ns();
  return 0;
}

constexpr int comparisons = 5;  // of clocks that are two: what is between them is only as exact as the quickest answer was

struct ClockComparison {
  std::uint64_t ahead_ns, took_ns;
};
Result<ClockComparison> compare_clocks(Attachment& attachment, std::uint32_t context) {
  const std::uint64_t before_ns = vmci::monotonic_ns();
  auto reply = attachment.call<control::Request::read_clock>({context, 0});
  if (!reply) return reply.error();
  const std::uint64_t took_ns = vmci::monotonic_ns() - before_ns;
  const bool one_clock = !attachment.in_machine() && reply->monotonic_ns - before_ns <= took_ns;
  return ClockComparison{one_clock ? 0 : reply->monotonic_ns - (before_ns + took_ns / 2), took_ns};
}

// So that the context's `clock_ahead_ns` is right, as long as the machine runs on.
Status know_clock(Attachment& attachment, Context& context) {
  const std::uint64_t generation = attachment.machine_generation();
  // C1: pairs with C2.
  if (context.clock_compared_in.load(std::memory_order_acquire) == generation) return ok();
  auto best = compare_clocks(attachment, context.handle);
  if (!best) return best.error();
  for (int i = 1; i < comparisons && best->ahead_ns != 0; ++i) {
    const auto next = compare_clocks(attachment, context.handle);
    if (!next) return next.error();
    if (next->took_ns < best->took_ns) best = next;
  }
  context.clock_ahead_ns.store(best->ahead_ns, std::memory_order_relaxed);
  context.clock_compared_in.store(generation, std::memory_order_release);  // C2
  return ok();
}

int start_poll(ibv_cq_ex* verbs, ibv_poll_cq_attr* attributes) {
  if (attributes->comp_mask != 0) return EINVAL;
  Cq& cq = of(verbs);
  if (cq.liveness->inherited()) return EIO;  // a thread of the parent's may have held the lock
  if (!cq.one_thread) cq.steps_lock.lock();
  cq.current_time_ns = 0;
  if (cq.timed) (void)know_clock(*cq.attachment, Context::of(cq.verbs.context));  // or what was known last
  const int error = take(cq, poll_cq(cq.base(), 1, &cq.current));
  if (error != 0 && !cq.one_thread) cq.steps_lock.unlock();
  return error;
}

int next_poll(ibv_cq_ex* verbs) {
  Cq& cq = of(verbs);
  cq.current_time_ns = 0;
  return take(cq, poll_cq_at_once(cq.base(), 1, &cq.current));
}

void end_poll(ibv_cq_ex* verbs) {
  Cq& cq = of(verbs);
  if (!cq.one_thread) cq.steps_lock.unlock();
}

constexpr std::uint32_t known_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
// IGNORE_OVERRUN is the program's word that none comes; one that breaks it is told as on other queues, and loses no completion unseen.
constexpr std::uint32_t known_flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
constexpr std::uint64_t times = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

// Before anything completes there.
Status ask_for_times(Cq& cq) {
  if (!offers_times(*cq.attachment)) return Errno{EOPNOTSUPP};
  if (auto told = cq.attachment->call<control::Request::time_cq>({cq.verbs.handle, 0}); !told) return told.error();
  if (Status known = know_clock(*cq.attachment, Context::of(cq.verbs.context)); !known) return known.error();
  cq.timed = true;
  return ok();
}

// Nanoseconds since 1970. `current` is from a moment ago, so what sets the clock meanwhile does not matter.
std::uint64_t wallclock_ns(Cq& cq) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec) - (cq.clock_ns() - cq.current_time_ns);
}

Result<ibv_cq_ex*> create(ibv_context* context, const ibv_cq_init_attr_ex& wanted) {
  const std::uint32_t flags = wanted.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? wanted.flags : 0;
  if ((wanted.wc_flags & ~std::uint64_t{IBV_CREATE_CQ_SUP_WC_FLAGS}) != 0 || (wanted.comp_mask & ~known_mask) != 0 || (flags & ~known_flags) != 0)
    return Errno{EOPNOTSUPP};
  Pd* domain = nullptr;
  if (wanted.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) {
    if (wanted.parent_domain == nullptr || wanted.parent_domain->context != context) return Errno{EINVAL};
    domain = &Pd::of(wanted.parent_domain);
    if (domain->parent_of == nullptr) return Errno{EINVAL};  // a protection domain proper says nothing to a completion queue
  }
  if (wanted.cqe > INT32_MAX || wanted.comp_vector > INT32_MAX) return Errno{EINVAL};
  ibv_cq* const made = ibv_create_cq(context, static_cast<int>(wanted.cqe), wanted.cq_context, wanted.channel, static_cast<int>(wanted.comp_vector));
  if (made == nullptr) return last_error();
  Cq& cq = Cq::of(made);
  if ((wanted.wc_flags & times) != 0) {
    if (Status told = ask_for_times(cq); !told) return ibv_destroy_cq(made), told.error();
    cq.verbs.read_completion_ts = [](ibv_cq_ex* from) { return of(from).current_time_ns; };
    cq.verbs.read_completion_wallclock_ns = [](ibv_cq_ex* from) { return wallclock_ns(of(from)); };
  }
  cq.one_thread = (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED) != 0 || (domain != nullptr && domain->thread_domain != nullptr);
  cq.parent_domain = domain;
  if (domain != nullptr) domain->users.fetch_add(1, std::memory_order_relaxed);
  cq.verbs.start_poll = start_poll;
  cq.verbs.next_poll = next_poll;
  cq.verbs.end_poll = end_poll;
  // Read from the completion as ibv_poll_cq gives it, also what was not asked for.
  cq.verbs.read_opcode = [](ibv_cq_ex* from) { return of(from).current.opcode; };
  cq.verbs.read_vendor_err = [](ibv_cq_ex* from) { return of(from).current.vendor_err; };
  cq.verbs.read_byte_len = [](ibv_cq_ex* from) { return of(from).current.byte_len; };
  cq.verbs.read_imm_data = [](ibv_cq_ex* from) { return of(from).current.imm_data; };
  cq.verbs.read_qp_num = [](ibv_cq_ex* from) { return of(from).current.qp_num; };
  cq.verbs.read_src_qp = [](ibv_cq_ex* from) { return of(from).current.src_qp; };
  cq.verbs.read_wc_flags = [](ibv_cq_ex* from) -> unsigned { return of(from).current.wc_flags; };
  cq.verbs.read_slid = [](ibv_cq_ex* from) -> std::uint32_t { return of(from).current.slid; };
  cq.verbs.read_sl = [](ibv_cq_ex* from) { return of(from).current.sl; };
  cq.verbs.read_dlid_path_bits = [](ibv_cq_ex* from) { return of(from).current.dlid_path_bits; };
  // What no completion here has: nothing is of a VLAN, matched a flow or a tag.
  cq.verbs.read_cvlan = [](ibv_cq_ex*) -> std::uint16_t { return 0; };
  cq.verbs.read_flow_tag = [](ibv_cq_ex*) -> std::uint32_t { return 0; };
  cq.verbs.read_tm_info = [](ibv_cq_ex*, ibv_wc_tm_info* info) { *info = {}; };
  return &cq.verbs;
}

}  // namespace

bool offers_times(const Attachment& attachment) { return attachment.offers(control::minor_of_times, control::minor_of_both_in_machines); }

int query_rt_values(ibv_context* context, ibv_values_ex* values) {
  return as_int([&]() -> Status {
    const std::uint32_t wanted = std::exchange(values->comp_mask, 0);
    auto attachment = Context::of(context).usable();
    if (!attachment) return attachment.error();
    if (!offers_times(**attachment)) return Errno{EOPNOTSUPP};
    if ((wanted & IBV_VALUES_MASK_RAW_CLOCK) == 0) return ok();
    Context& asked = Context::of(context);
    if (Status known = know_clock(**attachment, asked); !known) return known.error();
    std::uint64_t now_ns = vmci::monotonic_ns();
    if ((*attachment)->in_machine() || asked.clock_ahead_ns.load(std::memory_order_relaxed) != 0) {  // another clock, which alone tells what was before what
      const auto reply = (*attachment)->call<control::Request::read_clock>({asked.handle, 0});
      if (!reply) return reply.error();
      now_ns = reply->monotonic_ns;
    }
    values->raw_clock = {0, static_cast<long>(now_ns)};  // ticks, as with other providers
    values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    return ok();
  });
}

ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* wanted) {
  return as_ptr([&] { return create(context, *wanted); });
}

}  // namespace vrdma::guest
