#include "vmkernel_svc/memory/machine_ram.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <iterator>

#include "vmkernel_svc/memory/bus_guard.hpp"

namespace vrdma::svc {

namespace {
// Parts of a machine's RAM at other addresses: their file, too, may be made smaller. The queues that were there are zeroes then.
struct Guarded {
  std::byte* begin;
  explicit Guarded(std::byte* at) : begin(at) {}
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { BusGuard::remove(begin); }
};
}

// QEMU's pc and q35 have all RAM below the hole, or up to 2, 2.75, 3 or 3.5 GiB of it, or what max-ram-below-4g says.
Result<vm::RamLayout> MachineRam::layout_of(std::uint64_t bytes, Seen seen) {
  constexpr std::uint64_t firmware_max = std::uint64_t{128} << 20;  // at the end of what lies below; as large as the smallest DIMM
  constexpr std::uint64_t always_low = std::uint64_t{2} << 30;
  if (seen.high_bytes % vm::page_bytes != 0) return Errno{EINVAL};
  if (seen.low_end == 0) {
    if (seen.high_bytes > bytes || (seen.high_bytes != 0 && bytes <= always_low)) return Errno{EINVAL};
    return vm::RamLayout{bytes - seen.high_bytes, seen.high_bytes};
  }
  constexpr std::uint64_t usual[] = {std::uint64_t{2} << 30, std::uint64_t{0xb0000000}, std::uint64_t{3} << 30, std::uint64_t{0xe0000000}};
  if (seen.high_bytes <= bytes)
    if (const std::uint64_t low = bytes - seen.high_bytes; low >= seen.low_end && (low - seen.low_end < firmware_max || std::ranges::find(usual, low) != std::end(usual)))
      return vm::RamLayout{low, seen.high_bytes};
  const std::uint64_t low = std::min(bytes, (seen.low_end + firmware_max - 1) / firmware_max * firmware_max);
  return vm::RamLayout{low, bytes - low};
}

Result<std::shared_ptr<MachineRam>> MachineRam::map(vmci::UniqueFd file, Seen seen) {
  std::shared_ptr<MachineRam> ram(new MachineRam);
  ram->fd_ = std::move(file);
  struct stat status;
  if (::fstat(ram->fd_.get(), &status) != 0) return last_error();
  const auto bytes = static_cast<std::uint64_t>(status.st_size) / vm::page_bytes * vm::page_bytes;
  if (!S_ISREG(status.st_mode) || bytes == 0) return Errno{ENODEV};
  const auto layout = layout_of(bytes, seen);
  if (!layout) return layout.error();
  auto mapping = vmci::Mapping::map(ram->fd_.get(), 0, bytes, vmci::Writable::yes);
  if (!mapping) return mapping.error();
  // The file may be made smaller under us, by whoever runs the machine.
  struct statfs filesystem;
  const bool huge = ::fstatfs(ram->fd_.get(), &filesystem) == 0 && filesystem.f_type == HUGETLBFS_MAGIC;
  if (huge) ram->page_bytes_ = static_cast<std::uint64_t>(filesystem.f_bsize);
  if (!BusGuard::add(mapping->data(), bytes, ram->page_bytes_, ram->fd_.get(), 0)) return Errno{ENOMEM};
  ram->mapping_ = std::move(*mapping);
  ram->layout_ = *layout;
  return ram;
}

Result<std::shared_ptr<MachineRam>> MachineRam::map_bar(int bar) {
  vmci::UniqueFd file(::fcntl(bar, F_DUPFD_CLOEXEC, 0));
  if (!file) return last_error();
  auto ram = map(std::move(file), {});
  if (!ram) return ram.error();
  if ((*ram)->bytes() <= vm::bar_bytes) return Errno{ENODEV};
  (*ram)->lent_from_ = vm::bar_bytes;
  return ram;
}

MachineRam::~MachineRam() {
  if (mapping_) BusGuard::remove(mapping_.data());
}

std::optional<std::uint64_t> MachineRam::offset_of(vm::Run run) const {
  if (run.page < lent_from_ / vm::page_bytes) return std::nullopt;
  return layout_.offset_of(run);
}

bool PinnedPages::append(vm::Run run) {
  const auto offset = ram_->offset_of(run);
  if (!offset) return false;
  const std::uint64_t begin = bytes(), length = run.pages * vm::page_bytes;
  if (!parts_.empty()) {
    Part& last = parts_.back();
    const std::uint64_t last_begin = parts_.size() == 1 ? 0 : parts_[parts_.size() - 2].end;
    if (last.ram_offset + (last.end - last_begin) == *offset) {
      last.end += length;
      return true;
    }
  }
  parts_.push_back({begin + length, *offset});
  return true;
}

std::span<std::byte> PinnedPages::at(std::uint64_t offset) const {
  const auto part = std::upper_bound(parts_.begin(), parts_.end(), offset, [](std::uint64_t value, const Part& p) { return value < p.end; });
  const std::uint64_t begin = part == parts_.begin() ? 0 : std::prev(part)->end;
  return {ram_->data() + part->ram_offset + (offset - begin), part->end - offset};
}

Result<vmci::Segment> PinnedPages::segment() const {
  std::vector<vmci::Mapping::Part> files;
  std::uint64_t begin = 0;
  for (const Part& part : parts_) {
    files.push_back({ram_->fd(), part.ram_offset, part.end - begin});
    begin = part.end;
  }
  if (files.empty()) return Errno{EINVAL};
  auto mapping = vmci::Mapping::gather(files, ram_->page_bytes());
  if (!mapping) return mapping.error();
  if (!BusGuard::add(mapping->data(), bytes(), ram_->page_bytes(), -1, 0)) return Errno{ENOMEM};
  const auto guarded = std::make_shared<Guarded>(mapping->data());
  return vmci::Segment::over(std::move(*mapping), guarded);
}

}  // namespace vrdma::svc
