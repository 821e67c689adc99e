// Memory for this folder's own tables, taken from the kernel and never from malloc: the application's heap may be
// frozen or on its way into the window while a table changes, and an allocator that holds its own lock may wait for us
// in madvise.
//
// Any thread. Sizes are rounded up to pages; put a pool or a monotonic buffer on top.
#pragma once

#include <memory_resource>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

class MappedMemory final : public std::pmr::memory_resource {
 public:
  // `avoided`: where none of it may come to lie, because the caller asks the kernel what is mapped there.
  explicit MappedMemory(Range avoided = {}) : avoided_(avoided) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override;
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override;
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  Range avoided_;
};

}  // namespace vrdma::memory
