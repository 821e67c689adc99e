#include "vmci_channel/segment.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <bit>
#include <boost/interprocess/anonymous_shared_memory.hpp>
#include <boost/interprocess/detail/os_file_functions.hpp>
#include <boost/interprocess/exceptions.hpp>
#include <cstddef>
#include <new>

#include "vmci_channel/memcheck.hpp"

namespace vmci {

namespace bip = boost::interprocess;
using vrdma::Errno;
using vrdma::Result;

namespace {
// What mapped_region asks of a memory mappable: here any descriptor.
struct DescriptorMappable {
  int fd;
  bip::mapping_handle_t get_mapping_handle() const { return bip::ipcdetail::mapping_handle_from_file_handle(fd); }
};
}  // namespace

Result<Mapping> Mapping::map(int fd, std::uint64_t offset, std::uint64_t bytes, Writable writable) try {
  Mapping mapping;
  mapping.region_ = bip::mapped_region(DescriptorMappable{fd}, writable == Writable::yes ? bip::read_write : bip::read_only,
                                       static_cast<bip::offset_t>(offset), bytes, nullptr, MAP_SHARED | MAP_NORESERVE);
  return mapping;
} catch (const bip::interprocess_exception& error) {
  return Errno{error.get_native_error() != 0 ? error.get_native_error() : ENOMEM};
}

Result<Mapping> Mapping::gather(std::span<const Part> parts, std::uint64_t page_bytes) try {
  std::uint64_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  Mapping mapping;
  if (page_bytes > 4096) mapping.spare_bytes_ = page_bytes;
  mapping.region_ = bip::anonymous_shared_memory(bytes + mapping.spare_bytes_);  // holds the addresses; every page from data() on is replaced
  if (const std::uint64_t beyond = reinterpret_cast<std::uintptr_t>(mapping.region_.get_address()) % page_bytes; beyond != 0)
    mapping.skipped_bytes_ = page_bytes - beyond;
  std::byte* at = mapping.data();
  for (const Part& part : parts) {
    if (::mmap(at, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, part.fd, static_cast<off_t>(part.offset)) == MAP_FAILED)
      return vrdma::last_error();
    at += part.bytes;
  }
  return mapping;
} catch (const bip::interprocess_exception& error) {
  return Errno{error.get_native_error() != 0 ? error.get_native_error() : ENOMEM};
}

void Mapping::abandon() {
  if (region_.get_address() != nullptr) memcheck::hide(region_.get_address(), region_.get_size());
  // mapped_region offers no release(): one that is never destroyed has it. Not from the heap, where it would be a leak.
  alignas(bip::mapped_region) static std::byte abandoned[sizeof(bip::mapped_region)];
  ::new (abandoned) bip::mapped_region(std::move(region_));
}

Result<Segment> Segment::create(const char* name, std::uint64_t bytes, HandedOut handed_out, std::uint64_t page_bytes) {
  Segment segment;
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (page_bytes > 4096) flags |= MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(page_bytes)) << MFD_HUGE_SHIFT;
  segment.fd_.reset(::memfd_create(name, flags));
  if (!segment.fd_) return vrdma::last_error();
  if (::ftruncate(segment.fd_.get(), static_cast<off_t>(bytes)) != 0) return vrdma::last_error();
  auto mapping = Mapping::map(segment.fd_.get(), 0, bytes, Writable::yes);
  if (!mapping) return mapping.error();
  segment.mapping_ = std::move(*mapping);
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (handed_out == HandedOut::read_only) seals |= F_SEAL_FUTURE_WRITE;
  if (::fcntl(segment.fd_.get(), F_ADD_SEALS, seals) != 0) return vrdma::last_error();
  return segment;
}

Result<UniqueFd> create_sealed(const char* name, std::uint64_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return vrdma::last_error();
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return vrdma::last_error();
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return vrdma::last_error();
  return fd;
}

Result<std::uint64_t> sealed_bytes(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return Errno{EPERM};
  struct stat status;
  if (::fstat(fd, &status) != 0) return vrdma::last_error();
  return static_cast<std::uint64_t>(status.st_size);
}

Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Writable writable) {
  const auto sealed = sealed_bytes(fd.get());
  if (!sealed) return sealed.error();
  if (bytes > *sealed) return Errno{EPROTO};
  return Mapping::map(fd.get(), 0, *sealed, writable);
}

Result<std::uint64_t> memory_file_bytes(int fd) {
  struct statfs filesystem;
  struct stat status;
  if (::fstatfs(fd, &filesystem) != 0 || ::fstat(fd, &status) != 0) return vrdma::last_error();
  const bool memory = filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == HUGETLBFS_MAGIC;
  if (!memory || !S_ISREG(status.st_mode)) return Errno{EPERM};
  return static_cast<std::uint64_t>(status.st_size);
}

Result<Segment> Segment::adopt(UniqueFd fd, std::uint64_t bytes, Writable writable) {
  auto mapping = map_sealed(fd, bytes, writable);
  if (!mapping) return mapping.error();
  Segment segment;
  segment.fd_ = std::move(fd);
  segment.mapping_ = std::move(*mapping);
  return segment;
}

}  // namespace vmci
