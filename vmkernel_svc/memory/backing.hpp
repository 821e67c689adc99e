// Memory of a guest as the service reaches it: a shareable file (its window, a memfd of the application, the arena of an
// allocator), mapped in aligned chunks, on demand, each chunk for as long as a registration lies in it; or pages that a virtual
// machine has pinned, somewhere in its RAM.
//
// Used by the shard that owns the guest, and its destructor by whoever detaches it there.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/memory/machine_ram.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Backing {
 public:
  // fd: a memfd, or a file of tmpfs or hugetlbfs; EPERM otherwise. It may shrink: bus errors on it are survived (BusGuard).
  static Result<Backing> adopt(vmci::UniqueFd fd);

  static Backing adopt(PinnedPages pages);

  // How many of `bytes` from `offset` on lie in one piece here. 0: beyond the end.
  std::uint64_t contiguous_bytes(std::uint64_t offset, std::uint64_t bytes) const;
  // The service's address of `offset` in it; the mapping stays until put(offset). `bytes`: at most contiguous_bytes().
  Result<std::byte*> get(std::uint64_t offset, std::uint64_t bytes);
  void put(std::uint64_t offset);

  std::uint64_t bytes() const { return bytes_; }
  // The same bytes as those of a file, to be mapped once more elsewhere. `bytes`: at most contiguous_bytes().
  vmci::Mapping::Part in_file(std::uint64_t offset, std::uint64_t bytes) const;
  std::uint64_t page_bytes() const { return page_bytes_; }  // in which the file is mapped
  // To be mapped by another process, which must not be hurt by it; -1: not for others. A file that can be cut, or on huge pages, which
  // may not come when they are touched, is not.
  int lendable_fd() const { return lendable_ ? fd_.get() : -1; }
  bool in_use() const { return !chunks_.empty() || pinned_users_ != 0; }
  std::size_t mapping_count() const { return chunks_.size(); }

  Backing(Backing&&) = default;
  Backing& operator=(Backing&&) = default;
  ~Backing();

 private:
  struct Chunk {
    vmci::Mapping mapping;
    std::uint32_t users = 0;
  };
  Backing() = default;

  vmci::UniqueFd fd_;
  std::uint64_t bytes_ = 0;
  std::uint64_t page_bytes_ = 4096;
  std::uint64_t chunk_bytes_ = std::uint64_t{1} << 28;  // or one page, if that is larger
  bool lendable_ = false;
  std::map<std::uint64_t, Chunk> chunks_;  // by file offset / chunk_bytes_
  std::optional<PinnedPages> pinned_;
  std::uint32_t pinned_users_ = 0;
};

}  // namespace vrdma::svc
