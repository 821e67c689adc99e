// Lines of the log, from any thread. spdlog::info() and its like would compile all that fmt can format once more in each file that calls
// them, which takes 2 to 3 s; here fmt's library does it.
#pragma once

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <exception>

namespace vrdma::log {

// Nothing is thrown: a line for which there is no memory is lost, as spdlog's own are.
inline void line(spdlog::level::level_enum level, fmt::string_view text, fmt::format_args args) noexcept try {
  if (spdlog::should_log(level)) spdlog::log(level, fmt::vformat(text, args));
} catch (const std::exception& error) {
  std::fprintf(stderr, "vrdmad: a line of the log is lost: %s\n", error.what());
}

template <class... Args>
void debug(fmt::format_string<Args...> text, Args&&... args) {
  line(spdlog::level::debug, text, fmt::make_format_args(args...));
}
template <class... Args>
void info(fmt::format_string<Args...> text, Args&&... args) {
  line(spdlog::level::info, text, fmt::make_format_args(args...));
}
template <class... Args>
void warn(fmt::format_string<Args...> text, Args&&... args) {
  line(spdlog::level::warn, text, fmt::make_format_args(args...));
}
template <class... Args>
void error(fmt::format_string<Args...> text, Args&&... args) {
  line(spdlog::level::err, text, fmt::make_format_args(args...));
}

}  // namespace vrdma::log
