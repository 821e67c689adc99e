// Where memory lies in the machine's RAM: page frames, as the kernel tells root. They hold only for pages that are pinned
// (pinned.hpp); of others they are stale when they are read. Any thread; never blocks.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::agent {

using Runs = std::vector<vm::Run>;

constexpr std::uint64_t page_floor(std::uint64_t address) { return address & ~std::uint64_t{vm::page_bytes - 1}; }
constexpr std::uint64_t page_ceiling(std::uint64_t address) { return page_floor(address + vm::page_bytes - 1); }

constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, from Linux 5.14 on

// Which pages may be told. own: private ones that this process alone has. Not those of files, whether it may write to them or not, nor the kernel's (the
// page of zeroes that is read where nothing was written yet), nor what another shares since a fork, or by chance (KSM): what the service wrote
// there, others would read. Pages that are pinned for writing and private are own.
enum class Pages { any, own };

// The page table of one program: what a process runs after an exec is another one, which this does not show.
class Pagemap {
 public:
  Pagemap() = default;
  // process: its folder in /proc, open.
  static Result<Pagemap> of(int process);
  static Result<Pagemap> of_self();
  explicit operator bool() const { return static_cast<bool>(fd_); }

  // The frames of [address, address + bytes), both multiples of the page size. EFAULT: some page is not present.
  // EPERM: the kernel hides frames (no CAP_SYS_ADMIN). EACCES: some page is not of those.
  Result<Runs> runs(std::uint64_t address, std::uint64_t bytes, Pages which = Pages::any) const;

 private:
  vmci::UniqueFd fd_;
};

// Appends what entries of a pagemap say; as Pagemap::runs().
Status append_frames(std::span<const std::uint64_t> entries, Runs& runs, Pages which = Pages::any);

// Where RAM ends below 4 GiB, and how much there is from there on, holes before its end included, by the text of /proc/iomem. Memory that was
// plugged in (DIMMs) counts, whether it is in use or not.
struct RamExtent {
  std::uint64_t low_end = 0, high_bytes = 0;
  static RamExtent of(std::istream& iomem);
};

// Where the part of the machine's memory begins in which an address lies, by the same text: one DIMM, say, or all that it booted with from
// 4 GiB on. 0: in none.
std::uint64_t part_begin(std::istream& iomem, std::uint64_t address);

}  // namespace vrdma::agent
