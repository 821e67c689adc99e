// Survives SIGBUS on guests' memory. A guest may punch holes into its files or its memory may be exhausted: the service's
// access to such a page then gets a private zero page instead of a crash, and the thread learns that it happened. The page is
// lent for the one access: restore() puts the file back, so that neither mappings nor memory of the service add up.
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
  // Where this thread had the last of them.
  static std::uintptr_t where();

  // After a survived one, by the thread that had it.
  static void restore();

  // Addresses at which a bus error is a guest's doing: [begin, begin + bytes) maps `fd` from `file_offset`. page_bytes: of the
  // mapping (huge pages are replaced whole). False: no room, and nothing is guarded.
  static bool add(std::byte* begin, std::size_t bytes, std::size_t page_bytes, int fd, std::uint64_t file_offset);
  static void remove(std::byte* begin);
};

}  // namespace vrdma::svc
