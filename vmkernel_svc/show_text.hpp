// How `vrdma show` writes things down: used by the files show*.cpp alone.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "vmkernel_svc/engine/qp.hpp"
#include "vrdma/ids.hpp"

namespace vrdma::svc::shown {

inline std::string hex(std::uint64_t value, int digits) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}
inline std::string gid_text(const Gid& gid) {
  char text[48];
  std::snprintf(text, sizeof(text), "%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x:%02x%02x", gid[0], gid[1],
                gid[2], gid[3], gid[4], gid[5], gid[6], gid[7], gid[8], gid[9], gid[10], gid[11], gid[12], gid[13], gid[14], gid[15]);
  return text;
}

inline nlohmann::json describe(const engine::QpCounters& counters) {
  nlohmann::json out;
  engine::QpCounters::for_each(counters, [&](const char* name, std::uint64_t count) { out[name] = count; });
  return out;
}

// A guest chose some of it: bytes that are not UTF-8 must not throw.
inline std::string text_of(const nlohmann::json& value) { return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }

}  // namespace vrdma::svc::shown
