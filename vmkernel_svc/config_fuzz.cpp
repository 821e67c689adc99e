// Fuzz target: any text as a configuration is taken or refused with a message, never anything else.
#include <stdexcept>
#include <string>

#include "vmkernel_svc/config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  try {
    vrdma::svc::Config config;
    config.read_text(std::string(reinterpret_cast<const char*>(data), bytes), "fuzz");
    config.check();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
