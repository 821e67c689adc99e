// Named crash points: places between two steps that others can see, where a test ends or stops the process.
//
//   VRDMA_CRASH_POINT("guest.post.before_publish");
//
// Compiled to nothing unless VRDMA_FAULT_POINTS is defined (the CMake option of that name, and the builds of tests/crash).
// Then VRDMA_CRASH_AT=NAME[:N][:stop] in the environment raises SIGKILL, or SIGSTOP, at the Nth passing of that point
// (default: the first). Any thread; takes no lock; the name is checked against the list when the code is compiled.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

// The one list: the crash tests walk it. A point that no workload reaches fails them.
#define VRDMA_CRASH_POINTS(X)            \
  X("guest.attach.connected")            \
  X("guest.attach.answered")             \
  X("guest.attach.mapped")               \
  X("guest.control.before_publish")      \
  X("guest.control.published")           \
  X("guest.control.before_consume")      \
  X("guest.control.consumed")            \
  X("guest.control.packet_sent")         \
  X("guest.control.packet_answered")     \
  X("guest.reg_mr.pages_moved")          \
  X("guest.reg_mr.staged")               \
  X("guest.reg_mr.answered")             \
  X("guest.dereg_mr.before_request")     \
  X("guest.dereg_mr.answered")           \
  X("guest.create_cq.answered")          \
  X("guest.create_srq.answered")         \
  X("guest.create_qp.answered")          \
  X("guest.modify_qp.before_request")    \
  X("guest.modify_qp.answered")          \
  X("guest.destroy_qp.reset")            \
  X("guest.destroy_qp.answered")         \
  X("guest.post_send.before_write")      \
  X("guest.post_send.before_publish")    \
  X("guest.post_send.published")         \
  X("guest.post_recv.before_write")      \
  X("guest.post_recv.before_publish")    \
  X("guest.post_recv.published")         \
  X("guest.post_srq.before_count")       \
  X("guest.post.doorbell_rung")          \
  X("guest.poll.before_consumed")        \
  X("guest.poll.lane_consumed")          \
  X("guest.poll.consumed")               \
  X("guest.arm.armed")                   \
  X("guest.copy.job_taken")              \
  X("guest.copy.copied")                 \
  X("guest.copy.answered")               \
  X("guest.event.read")                  \
  X("guest.event.counted")               \
  X("guest.event.acknowledged")          \
  X("service.attach.prepared")           \
  X("service.attach.added")              \
  X("service.detach.begun")              \
  X("service.detach.contexts_closed")    \
  X("service.control.executed")          \
  X("service.control.replied")           \
  X("service.control.consumed")          \
  X("service.copy.wqe_taken")            \
  X("service.copy.copied")               \
  X("service.complete.before_cqe")       \
  X("service.complete.cqe_written")      \
  X("service.complete.ready_set")        \
  X("service.event.claimed")             \
  X("service.event.sent")                \
  X("direct.guest.opened")               \
  X("direct.guest.mapped")               \
  X("direct.guest.process_opened")       \
  X("direct.guest.claimed")              \
  X("direct.guest.receive_taken")        \
  X("direct.guest.turn_named")           \
  X("direct.guest.turn_taken")           \
  X("direct.guest.copied")               \
  X("direct.guest.copied_by_process")    \
  X("direct.guest.before_cqe")           \
  X("direct.guest.cqe_written")          \
  X("direct.guest.before_record")        \
  X("direct.guest.recorded")             \
  X("direct.guest.before_arm")           \
  X("direct.guest.arm_claimed")          \
  X("direct.guest.event_sent")           \
  X("direct.guest.inbox_claimed")        \
  X("direct.guest.before_inbox_record")  \
  X("direct.guest.inbox_recorded")       \
  X("direct.guest.told")                 \
  X("direct.guest.left")                 \
  X("direct.service.offered")            \
  X("direct.service.half_handed_out")    \
  X("direct.service.handed_out")         \
  X("direct.service.inbox_given")        \
  X("direct.service.half_taken_back")

namespace vrdma::fault {

#define VRDMA_CRASH_POINT_NAME(name) std::string_view(name),
inline constexpr auto crash_points = std::to_array<std::string_view>({VRDMA_CRASH_POINTS(VRDMA_CRASH_POINT_NAME)});
#undef VRDMA_CRASH_POINT_NAME

constexpr bool is_crash_point(std::string_view name) {
  for (const auto& known : crash_points)
    if (known == name) return true;
  return false;
}

}  // namespace vrdma::fault

#ifdef VRDMA_FAULT_POINTS

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace vrdma::fault {

// What $VRDMA_CRASH_AT asks for, read once.
struct Order {
  std::string_view name;
  unsigned long passing = 1;
  int signal = SIGKILL;

  static Order read() {
    Order order;
    const char* text = std::getenv("VRDMA_CRASH_AT");
    std::string_view rest = text == nullptr ? "" : text;
    order.name = rest.substr(0, rest.find(':'));
    while (rest.find(':') != std::string_view::npos) {
      rest.remove_prefix(rest.find(':') + 1);
      if (rest == "stop")
        order.signal = SIGSTOP;
      else
        order.passing = std::strtoul(rest.data(), nullptr, 10);
    }
    return order;
  }
};

inline void pass(std::string_view name) {
  static const Order order = Order::read();
  if (order.name != name) return;
  static std::atomic<unsigned long> passed{0};
  if (passed.fetch_add(1, std::memory_order_relaxed) + 1 == order.passing) ::kill(::getpid(), order.signal);
}

}  // namespace vrdma::fault

#define VRDMA_CRASH_POINT(name)                                                                   \
  do {                                                                                            \
    static_assert(::vrdma::fault::is_crash_point(name), "add the crash point to vrdma/fault.hpp"); \
    ::vrdma::fault::pass(name);                                                                   \
  } while (false)
#else
#define VRDMA_CRASH_POINT(name) \
  static_assert(::vrdma::fault::is_crash_point(name), "add the crash point to vrdma/fault.hpp")
#endif
