// Memory regions: what a key names, where its bytes are, and the table that finds them.
//
// A Region is a list of pieces in ascending order: each either mapped in the service (host) or reached through the guest's
// process. Slots of the table are reused, generations are not: a Place (region, generation) that outlived its region is
// noticed. Shards look things up in their turns; who changes the table is alone (turnstile.hpp).
#pragma once

#include <atomic>
#include <boost/container/deque.hpp>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <optional>
#include <vector>

#include "vmkernel_svc/memory/huge_pages.hpp"
#include "vrdma/access.hpp"
#include "vrdma/ids.hpp"

namespace vrdma::svc {

struct Guest;
struct ProtectionDomain;

struct Piece {
  std::uint64_t offset;       // from the region's start
  std::uint64_t bytes;
  std::byte* host;            // nullptr: by the guest's process
  std::uint64_t address;      // in the guest
  std::uint32_t backing;      // which of the guest's files holds it, where host is set
  std::uint64_t backing_offset;
};

// Who looks one up reads its first cache line.
struct alignas(64) Region {
  std::uint64_t generation = 0;  // 0: free slot
  std::uint64_t pd = 0;          // service-wide number of the PD
  std::uint64_t iova = 0;
  std::uint64_t bytes = 0;
  std::uint32_t access = 0;
  Key key{};
  Guest* guest = nullptr;
  std::uint64_t address = 0;
  std::uint32_t jobs = 0;  // copies that the guest's worker has under way: the region cannot go before they are back. Any shard counts
  void job_begins() { std::atomic_ref(jobs).fetch_add(1, std::memory_order_relaxed); }
  void job_ends() { std::atomic_ref(jobs).fetch_sub(1, std::memory_order_relaxed); }
  // It names addresses of the guest's process, and holds no memory.
  static bool on_demand(std::uint32_t access) { return (access & access_on_demand) != 0; }
  std::uint64_t bytes_held() const { return on_demand(access) ? 0 : bytes; }
  bool frozen = false;     // its guest is (Guest::frozen): nobody copies from or to it for now
  bool leaving = false;    // it goes, or becomes another one, once its jobs are back: nobody begins anything there any more
  std::vector<Piece> pieces;
  ProtectionDomain* domain = nullptr;  // that of the number above; not a window's

  // A memory window has no pieces: it is bound to a part of another region of its guest's, or to nothing.
  static constexpr std::uint32_t is_window = 1u << 31;  // in `access`, where no guest puts it
  std::uint32_t windows = 0;            // bound to this region, which stays what it is meanwhile
  std::uint32_t window_slot = 0;        // of the region that it is bound to, …
  std::uint64_t window_generation = 0;  // … 0: to none
  std::uint64_t window_offset = 0;
  std::uint32_t window_qpn = 0;         // type 2: the queue pair that alone may use it

  // The piece that holds `offset`. offset < bytes.
  const Piece& piece_at(std::uint64_t offset) const {
    if (pieces.size() == 1) return pieces.front();
    std::size_t low = 0, high = pieces.size();
    while (high - low > 1) {
      const std::size_t middle = (low + high) / 2;
      (pieces[middle].offset <= offset ? low : high) = middle;
    }
    return pieces[low];
  }
};

class RegionTable {
 public:
  RegionTable();

  // Before add() or add_window(). False: there is no memory for one more; nothing has changed.
  bool make_room();
  // A free slot with a new generation and an unguessable key that no other region has or had recently.
  Region& add(std::uint32_t& slot);
  // A memory window, bound to nothing: its keys are its first one and those that differ from it in the last 8 bits. nullptr: there are too many
  // windows to find one more soon.
  Region* add_window(std::uint32_t& slot);
  // To [offset, offset + bytes) of the region in slot `of`, which requests name by `iova` and on. Of `key` only those 8 bits count, as on adapters.
  void bind_window(std::uint32_t slot, Key key, std::uint32_t access, std::uint64_t iova, std::uint64_t bytes, std::uint32_t of, std::uint64_t offset, std::uint32_t qpn);
  // From now on nobody reaches anything by it. In a turn, too: nobody else's queue pairs look further than at its protection domain.
  void unbind_window(Region& window);
  // IBA 10.6.7.2.5: of type 2, by a request to a queue pair of that protection domain. False: the key is none of a window that is bound to it.
  bool invalidate_window(Key key, std::uint64_t pd, std::uint32_t qpn);
  // Gives the region in `slot` a new generation: what was found before must be found again. The key stays, as programs that
  // change only rights or translation expect (IBA 11.2.8.3 leaves it open).
  void renew(std::uint32_t slot) { regions_[slot].generation = next_generation_++; }
  void remove(std::uint32_t slot);

  Region* at(std::uint32_t slot, std::uint64_t generation) {
    if (slot >= regions_.size()) return nullptr;
    Region& region = regions_[slot];
    return region.generation == generation ? &region : nullptr;
  }
  Region& slot(std::uint32_t slot) { return regions_[slot]; }
  // Where the bytes at `offset` of a region that was found are: a window has none of its own. No region: it, or what it was bound to, is gone.
  struct Reached {
    Region* region;
    std::uint32_t slot;
    std::uint64_t offset;
  };
  Reached reach(std::uint32_t slot, std::uint64_t generation, std::uint64_t offset) {
    Region* const region = at(slot, generation);
    if (region == nullptr || (region->access & Region::is_window) == 0) [[likely]] return {region, slot, offset};
    const bool bound = region->window_generation != 0;
    return {bound ? at(region->window_slot, region->window_generation) : nullptr, region->window_slot, region->window_offset + offset};
  }
  std::optional<std::uint32_t> find(Key key) const {
    const auto found = by_key_.find(key.value);
    if (found == by_key_.end()) [[unlikely]] return find_window(key);
    return found->second;
  }
  std::size_t size() const { return by_key_.size() + windows_.size(); }

 private:
  std::uint32_t new_key();
  Region& take_slot(std::uint32_t& slot);
  void give_back(std::uint32_t slot);
  std::optional<std::uint32_t> find_window(Key key) const {
    const auto found = windows_.find(key.value >> window_key_bits);
    if (found == windows_.end() || regions_[found->second].key != key) return std::nullopt;
    return found->second;
  }

  static constexpr unsigned window_key_bits = 8;
  using Blocks = boost::container::deque_options<boost::container::block_bytes<huge_page_bytes>>::type;
  boost::container::deque<Region, HugePages<Region>, Blocks> regions_;  // addresses stay
  std::vector<std::uint32_t> free_;
  boost::unordered_flat_map<std::uint32_t, std::uint32_t> by_key_;   // but for windows
  boost::unordered_flat_map<std::uint32_t, std::uint32_t> windows_;  // by what their keys have in common
  std::vector<std::uint32_t> resting_;  // keys removed of late, not to be given again soon
  std::size_t resting_next_ = 0;
  boost::unordered_flat_map<std::uint32_t, std::uint32_t> resting_count_;
  std::uint64_t next_generation_ = 1;
};

}  // namespace vrdma::svc
