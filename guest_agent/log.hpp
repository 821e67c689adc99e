// What the agent tells people: one sentence a line, on standard error, where systemd's journal takes it from. Any thread.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace vrdma::agent {

[[gnu::format(printf, 1, 2)]] inline void say(const char* format, ...) {
  char line[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof(line), format, values);
  va_end(values);
  std::fprintf(stderr, "vrdma-guestd: %s\n", line);
}

}  // namespace vrdma::agent
