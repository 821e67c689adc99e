// An allocator of blocks that fill huge pages: what is looked up at random, by a key, else costs the translation of a page each time.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace vrdma::svc {

constexpr std::size_t huge_page_bytes = std::size_t{1} << 21;

// Blocks of a huge page and more are aligned to it, and of huge pages where the kernel has some (transparent_hugepage not "never").
template <class T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <class U>
  HugePages(const HugePages<U>&) {}
  template <class U>
  bool operator==(const HugePages<U>&) const {
    return true;
  }
  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    void* const block = ::operator new(bytes, alignment(bytes));
    if (bytes >= huge_page_bytes) (void)::madvise(block, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(block);
  }
  void deallocate(T* block, std::size_t count) { ::operator delete(block, alignment(count * sizeof(T))); }

 private:
  static std::align_val_t alignment(std::size_t bytes) { return std::align_val_t{bytes < huge_page_bytes ? alignof(T) : huge_page_bytes}; }
};

}  // namespace vrdma::svc
