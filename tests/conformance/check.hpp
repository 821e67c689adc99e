// Checks for a test body: what failed, where, with which values.
//
// A failing check reports to the runner and to the other process, then ends this process at once with _exit: no destructor
// runs, because destroying a verbs object while an event is unacknowledged would block, and the report would be lost.
// Any thread, and a forked child, may fail. Nothing here knows verbs beyond the names of its enumerations.
#pragma once

#include <infiniband/verbs.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace vrdma::conformance {

[[noreturn]] void fail(const char* file, int line, const std::string& text);
// The device lacks what the test needs; the reason is printed. Skipping is never silent.
[[noreturn]] void skip(const std::string& reason);

std::string errno_name(int error);
std::string hex(std::uint64_t value);

inline std::string show(const char* value) { return value; }
template <class T>
std::string show(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, ibv_wc_status>) {
    return ibv_wc_status_str(value);
  } else if constexpr (std::is_same_v<T, ibv_event_type>) {
    return ibv_event_type_str(value);
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T> || std::is_floating_point_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_array_v<T>) {
    return std::string(value);
  } else if constexpr (std::is_pointer_v<T> && !std::is_convertible_v<T, std::string_view>) {
    return hex(reinterpret_cast<std::uint64_t>(value));
  } else {
    return std::string(std::string_view(value));
  }
}

template <class... Ts>
std::string text(const Ts&... parts) {
  std::string out;
  ((out += show(parts)), ...);
  return out;
}

// Says in a failure's report what a loop or a table was at: `Note note("size ", size);`. Per thread, nested.
class Note {
 public:
  template <class... Ts>
  explicit Note(const Ts&... parts) {
    push(text(parts...));
  }
  ~Note();
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

 private:
  static void push(std::string note);
};

template <class T>
concept PlainInteger = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>;

template <class A, class B>
bool same(const A& a, const B& b) {
  if constexpr (PlainInteger<A> && PlainInteger<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}
template <class A, class B>
bool at_least(const A& a, const B& b) {
  if constexpr (PlainInteger<A> && PlainInteger<B>) {
    return std::cmp_greater_equal(a, b);
  } else {
    return a >= b;
  }
}

template <class A, class B>
void expect_same(const char* file, int line, const char* what, const A& a, const B& b, bool wanted) {
  if (same(a, b) != wanted) {
    fail(file, line, text(what, wanted ? ": got " : ": both are ", show(a), wanted ? ", expected " + show(b) : ""));
  }
}
template <class A, class B>
void expect_at_least(const char* file, int line, const char* what, const A& a, const B& b) {
  if (!at_least(a, b)) fail(file, line, text(what, ": got ", show(a), ", expected at least ", show(b)));
}
inline void expect_errno(const char* file, int line, const char* what, int got, int wanted) {
  if (got != wanted) fail(file, line, text(what, ": answered ", errno_name(got), ", expected ", errno_name(wanted)));
}
// For pointer verbs: NULL and errno. `pointer` is evaluated by the caller with errno cleared first.
void expect_null(const char* file, int line, const char* what, const void* pointer, int error, int wanted);

}  // namespace vrdma::conformance

#define EXPECT(condition)                                                                  \
  do {                                                                                     \
    if (!(condition)) ::vrdma::conformance::fail(__FILE__, __LINE__, #condition " is not so"); \
  } while (false)
#define EXPECT_EQ(a, b) ::vrdma::conformance::expect_same(__FILE__, __LINE__, #a, (a), (b), true)
#define EXPECT_NE(a, b) ::vrdma::conformance::expect_same(__FILE__, __LINE__, #a " and " #b, (a), (b), false)
#define EXPECT_GE(a, b) ::vrdma::conformance::expect_at_least(__FILE__, __LINE__, #a, (a), (b))
// An int verb answered exactly this errno (0 for success).
#define EXPECT_ERRNO(call, error) ::vrdma::conformance::expect_errno(__FILE__, __LINE__, #call, (call), (error))
#define EXPECT_OK(call) EXPECT_ERRNO(call, 0)
// A pointer verb answered NULL and set errno.
#define EXPECT_NULL(call, error)                                                                    \
  do {                                                                                              \
    errno = 0;                                                                                      \
    const void* const expect_pointer = (call);                                                      \
    ::vrdma::conformance::expect_null(__FILE__, __LINE__, #call, expect_pointer, errno, (error));   \
  } while (false)
// A verb of the -1-and-errno family.
#define EXPECT_MINUS_ONE(call, error)                                                                            \
  do {                                                                                                           \
    errno = 0;                                                                                                   \
    const auto expect_rc = (call);                                                                               \
    const int expect_error = errno;                                                                              \
    ::vrdma::conformance::expect_same(__FILE__, __LINE__, #call, expect_rc, -1, true);                           \
    ::vrdma::conformance::expect_errno(__FILE__, __LINE__, "errno after " #call, expect_error, (error));         \
  } while (false)
