// What `vrdma show` says of the test's own service.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "doctest/doctest.h"

namespace vrdma::test {

// `what` as on the command line; all of it without.
inline nlohmann::json show(const char* what = "") {
  const std::string command = std::string(VRDMA_PATH) + " show " + what + " --json";
  std::string text;
  FILE* const out = ::popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  char block[4096];
  for (std::size_t got; (got = std::fread(block, 1, sizeof(block), out)) != 0;) text.append(block, got);
  REQUIRE(::pclose(out) == 0);
  return nlohmann::json::parse(text);
}

}  // namespace vrdma::test
