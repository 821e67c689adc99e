#include "guest_agent/ballast.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "vmci_channel/memory_room.hpp"

namespace vrdma::agent {

namespace {
// What other programs may ask for meanwhile.
constexpr std::uint64_t reserve_bytes_min = std::uint64_t{16} << 20, reserve_bytes_max = std::uint64_t{256} << 20;
}  // namespace

void Ballast::Unmap::operator()(std::byte* block) const { ::munmap(block, block_bytes); }

Result<std::uint64_t> Ballast::grow(std::uint64_t wanted_bytes, const MayLend& may_lend, const std::function<void()>& take) {
  // What is held counts as available, as the kernel may take it.
  const vmci::MemoryLeft left = vmci::memory_left();
  const std::uint64_t reserve = std::clamp(left.all_bytes / 16, reserve_bytes_min, reserve_bytes_max);
  if (held_bytes_ + block_bytes > bytes_max_ || left.available_bytes < held_bytes_ + block_bytes + reserve + wanted_bytes) return Errno{ENOMEM};
  void* const mapped = ::mmap(nullptr, block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return last_error();
  std::unique_ptr<std::byte, Unmap> block(static_cast<std::byte*>(mapped));
  // In huge pages it would be of wherever such are whole, and leave the rest.
  ::madvise(block.get(), block_bytes, MADV_NOHUGEPAGE);
  if (::madvise(block.get(), block_bytes, populate_write) != 0)
    for (std::uint64_t at = 0; at < block_bytes; at += vm::page_bytes) block.get()[at] = std::byte{1};
  take();
  const auto self = Pagemap::of_self();
  if (!self) return self.error();
  const auto runs = self->runs(reinterpret_cast<std::uintptr_t>(block.get()), block_bytes);
  if (!runs) return runs.error();
  std::uint64_t given_back = 0;
  std::byte* at = block.get();
  for (const vm::Run& run : *runs) {
    const std::uint64_t bytes = run.pages * vm::page_bytes;
    const bool lendable = may_lend(run);
    ::madvise(at, bytes, lendable ? MADV_DONTNEED : MADV_FREE);
    if (lendable) given_back += bytes;
    at += bytes;
  }
  held_bytes_ += block_bytes - given_back;
  blocks_.push_back(std::move(block));
  return given_back;
}

}  // namespace vrdma::agent
