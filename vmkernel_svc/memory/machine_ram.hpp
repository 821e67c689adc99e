// The RAM of a virtual machine, mapped whole from the file that QEMU keeps it in, and what the machine has pinned of it.
//
// Physical addresses are the file's offsets up to the hole below 4 GiB; what lies behind 4 GiB follows (QEMU's memory map of the
// pc and q35 machines); User Mode Linux has no such hole, and says 0. The machine says how much that is, and proves it by a word that the service must find.
//
// A machine whose RAM is nobody's but its own lends pages of its device's BAR instead, all but those of the link.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

class MachineRam {
 public:
  // What a machine's kernel sees: how far RAM goes beyond 4 GiB, and where it ends below (0: unknown). Memory that was plugged in beside the
  // file counts there, too.
  struct Seen {
    std::uint64_t high_bytes = 0, low_end = 0;
  };
  // Of a file of so many bytes. EINVAL: it cannot be as was seen.
  static Result<vm::RamLayout> layout_of(std::uint64_t bytes, Seen seen);
  // ENODEV: an empty file; EINVAL as layout_of().
  static Result<std::shared_ptr<MachineRam>> map(vmci::UniqueFd file, Seen seen);
  // ENODEV: the BAR has room for the link only.
  static Result<std::shared_ptr<MachineRam>> map_bar(int bar);
  ~MachineRam();

  // Where pages of the machine's physical memory lie in the file, if all of them are RAM; or pages of the BAR, if they may be lent.
  std::optional<std::uint64_t> offset_of(vm::Run run) const;

  std::byte* data() const { return mapping_.data(); }
  std::uint64_t bytes() const { return mapping_.bytes(); }
  const vm::RamLayout& layout() const { return layout_; }
  bool is_bar() const { return lent_from_ != 0; }
  int fd() const { return fd_.get(); }
  std::uint64_t page_bytes() const { return page_bytes_; }  // of huge ones, where the file lies on a hugetlbfs

  MachineRam(const MachineRam&) = delete;
  MachineRam& operator=(const MachineRam&) = delete;

 private:
  MachineRam() = default;
  vmci::UniqueFd fd_;
  vmci::Mapping mapping_;
  vm::RamLayout layout_;
  std::uint64_t lent_from_ = 0;  // what lies before is the link's; 0: all of it is RAM
  std::uint64_t page_bytes_ = vm::page_bytes;
};

// Pages that a machine has pinned, as one range of bytes. Each run was checked to be RAM of that machine.
class PinnedPages {
 public:
  explicit PinnedPages(std::shared_ptr<MachineRam> ram) : ram_(std::move(ram)) {}

  bool append(vm::Run run);  // false: not RAM of the machine
  std::uint64_t bytes() const { return parts_.empty() ? 0 : parts_.back().end; }
  std::size_t part_count() const { return parts_.size(); }

  // From `offset` < bytes() on, as far as it lies in one piece.
  std::span<std::byte> at(std::uint64_t offset) const;
  int fd() const { return ram_->fd(); }  // of the file, or the BAR, in which they lie, …
  std::uint64_t file_offset(std::uint64_t offset) const { return static_cast<std::uint64_t>(at(offset).data() - ram_->data()); }  // … and where
  std::uint64_t page_bytes() const { return ram_->page_bytes(); }
  // All of it in one piece, at other addresses of the service. ENOMEM; EINVAL: parts of huge pages.
  Result<vmci::Segment> segment() const;

 private:
  struct Part {
    std::uint64_t end;         // of it, in the range of bytes
    std::uint64_t ram_offset;  // of its beginning
  };
  std::shared_ptr<MachineRam> ram_;
  std::vector<Part> parts_;  // ascending
};

}  // namespace vrdma::svc
