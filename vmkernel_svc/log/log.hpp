// Lines of the log, from any thread. spdlog::info() and its like would compile all that fmt can format once more in each file that calls
// them, which takes 2 to 3 s; here fmt's library does it.
#pragma once

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>

#include "vrdma/printable.hpp"

namespace vrdma::log {

// Nothing is thrown: a line for which there is no memory is lost, as spdlog's own are.
inline void line(spdlog::level::level_enum level, fmt::string_view text, fmt::format_args args) noexcept try {
  if (spdlog::should_log(level)) spdlog::log(level, without_controls(fmt::vformat(text, args)));
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
// What whoever may connect can cause as often as it likes: a few lines in a second, the first, lest it fills the disk. One for each place, static.
class Sparing {
 public:
  static constexpr std::uint32_t lines_of_trouble = 5, lines_of_ordinary_life = 20;  // a job of many programs begins at once
  constexpr explicit Sparing(std::uint32_t lines_a_second = lines_of_trouble) : lines_max_(lines_a_second) {}

  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) {
    line(spdlog::level::warn, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) {
    line(spdlog::level::info, text, fmt::make_format_args(args...));
  }

 private:
  void line(spdlog::level::level_enum level, fmt::string_view text, fmt::format_args args) noexcept {
    const std::int64_t second = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (second_.exchange(second, std::memory_order_relaxed) != second) {
      lines_.store(0, std::memory_order_relaxed);
      if (const std::uint64_t left_out = left_out_.exchange(0, std::memory_order_relaxed); left_out != 0)
        log::line(level, "{} such lines were left out", fmt::make_format_args(left_out));
    }
    if (lines_.fetch_add(1, std::memory_order_relaxed) < lines_max_)
      log::line(level, text, args);
    else
      left_out_.fetch_add(1, std::memory_order_relaxed);
  }

  const std::uint32_t lines_max_;
  std::atomic<std::int64_t> second_{-1};
  std::atomic<std::uint32_t> lines_{0};
  std::atomic<std::uint64_t> left_out_{0};
};
template <class... Args>
void error(fmt::format_string<Args...> text, Args&&... args) {
  line(spdlog::level::err, text, fmt::make_format_args(args...));
}

}  // namespace vrdma::log
