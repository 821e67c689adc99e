// Survives SIGBUS on guests' memory. A guest may punch holes into its files or its memory may be exhausted: the service's
// access to such a page then gets a private zero page instead of a crash. Who moves a guest's bytes does so within an Access: that
// learns of it, and the page is lent for it only: the file is back afterwards, so that neither mappings nor memory of the service add
// up; where it cannot be mapped any more, each later access fails like this one. Elsewhere (rings, doorbells) what the guest has lost is zeroes from then on.
//
// install() once at start. Any thread; the handler itself only reads lock-free state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vrdma::svc {

class BusGuard {
 public:
  static void install();

  // By the thread that touches the memory, which stays mapped meanwhile; not nested.
  class Access {
   public:
    Access();
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

    bool failed() const;           // so far
    std::uintptr_t where() const;  // the last time
  };

  // Addresses at which a bus error is a guest's doing: [begin, begin + bytes) maps `fd` from `file_offset`; -1: nothing that pages
  // could be had from again. page_bytes: of the mapping (huge pages are replaced whole). False: no room, and nothing is guarded.
  static bool add(std::byte* begin, std::size_t bytes, std::size_t page_bytes, int fd, std::uint64_t file_offset);
  static void remove(std::byte* begin);
};

}  // namespace vrdma::svc
