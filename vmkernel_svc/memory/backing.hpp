// A guest's shareable file (its window, a memfd of the application, the arena of an allocator) as the service reaches it:
// mapped in aligned chunks, on demand, each chunk for as long as a registration lies in it.
//
// Used by the shard that owns the guest, and its destructor by whoever detaches it there.
#pragma once

#include <cstdint>
#include <map>

#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Backing {
 public:
  static constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 28;

  // fd: checked here to be sealed against shrinking. EPERM otherwise.
  static Result<Backing> adopt(vmci::UniqueFd fd);

  // The service's address of `offset` in the file; the mapping stays until put(offset). `bytes` must not cross a chunk's end.
  Result<std::byte*> get(std::uint64_t offset, std::uint64_t bytes);
  void put(std::uint64_t offset);

  std::uint64_t bytes() const { return bytes_; }
  bool in_use() const { return !chunks_.empty(); }
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
  std::map<std::uint64_t, Chunk> chunks_;  // by file offset / chunk_bytes
};

}  // namespace vrdma::svc
