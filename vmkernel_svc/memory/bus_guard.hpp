// Survives SIGBUS on guests' memory. A guest may punch holes into its files or its memory may be exhausted: the service's
// access to such a page then gets a private zero page instead of a crash, and the thread learns that it happened.
//
// install() once at start. Ranges are registered by the thread that maps them; the handler itself only reads lock-free state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vrdma::svc {

class BusGuard {
 public:
  static void install();
  // Bus errors that this thread has survived so far: compare before and after touching a guest's memory.
  static std::uint64_t survived();

  // Addresses at which a bus error is a guest's doing. page_bytes: of the mapping (huge pages are replaced whole).
  static void add(std::byte* begin, std::size_t bytes, std::size_t page_bytes);
  static void remove(std::byte* begin);
};

}  // namespace vrdma::svc
