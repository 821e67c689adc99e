// How verbs report what went wrong, and the wall that no exception passes on its way into C.
//
//   as_int        +errno             ibv_modify_qp, ibv_destroy_cq …
//   as_ptr        nullptr, errno     ibv_create_qp, ibv_reg_mr …
//   as_minus_one  -1, errno          ibv_query_gid, ibv_get_cq_event …
//   as_count      -1, errno          open, read: what a system call gives otherwise
//
// Each takes a callable that returns a Status or Result. errno is set on every failure, as libibverbs does, and is what it was before on
// success: programs destroy what they have made after an error, and say that one then. A thread is not cancelled inside.
#pragma once

#include <cerrno>
#include <new>
#include <utility>

#include "guest_lib/cancellation.hpp"
#include "vrdma/result.hpp"

namespace vrdma::guest {

namespace detail {
template <class Function>
auto walled(Function&& function) noexcept -> decltype(function()) {
  const CancellationOff cancellation_off;
  const int errno_before = errno;
  try {
    auto result = std::forward<Function>(function)();
    if (result) errno = errno_before;
    return result;
  } catch (const std::bad_alloc&) {
    return Errno{ENOMEM};
  } catch (...) {
    return Errno{EIO};
  }
}
}  // namespace detail

template <class Function>
int as_int(Function&& function) noexcept {
  const Status status = detail::walled(std::forward<Function>(function));
  return status ? 0 : (errno = value(status.error()));
}

template <class Function>
auto as_ptr(Function&& function) noexcept -> decltype(*function()) {
  auto result = detail::walled(std::forward<Function>(function));
  if (result) return *result;
  errno = value(result.error());
  return nullptr;
}

template <class Function>
int as_minus_one(Function&& function) noexcept {
  const Status status = detail::walled(std::forward<Function>(function));
  if (status) return 0;
  errno = value(status.error());
  return -1;
}

template <class Function>
auto as_count(Function&& function) noexcept -> std::remove_cvref_t<decltype(*function())> {
  const auto result = detail::walled(std::forward<Function>(function));
  if (result) return *result;
  errno = value(result.error());
  return -1;
}

}  // namespace vrdma::guest
