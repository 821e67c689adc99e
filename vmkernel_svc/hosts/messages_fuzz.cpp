// Fuzz target: any bytes as a message between hosts are refused with a reason, or are a message that reads the same once written.
#include <cstdlib>
#include <string_view>

#include "vmkernel_svc/hosts/messages.hpp"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  using namespace vrdma::hosts;
  std::string why;
  const auto message = decode({reinterpret_cast<const char*>(data), bytes}, why);
  if (!message) return why.empty() ? std::abort(), 0 : 0;
  const std::string text = encode(*message);
  const auto again = decode(text, why);
  if (!again || encode(*again) != text) std::abort();
  // A state that was decoded can be taken in, or refused, whatever is in it.
  const Delta* const delta = std::holds_alternative<Append>(*message) && std::get<Append>(*message).delta ? &*std::get<Append>(*message).delta
                             : std::holds_alternative<Lease>(*message)                                    ? &std::get<Lease>(*message).news
                                                                                                          : nullptr;
  if (delta == nullptr) return 0;
  State state;
  if (!state.apply(*delta)) return 0;
  for (const auto& [name, host] : state.hosts())
    if (state.holder(host.lids.first) != &host || state.is_free(host.lids)) std::abort();
  return 0;
}
