#include "guest_agent/shared_pages.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <cstdio>
#include <istream>
#include <span>
#include <sstream>
#include <string>

#include "guest_agent/text_file.hpp"
#include "vmci_channel/page_pin.hpp"
#include "vmci_channel/segment.hpp"

namespace vrdma::agent {

Result<SharedMapping> shared_mapping(std::istream& maps, std::uint64_t address, std::uint64_t bytes) {
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0, offset = 0, inode = 0;
    char rights[5] = {};
    SharedMapping found;
    if (std::sscanf(line.c_str(), "%llx-%llx %4s %llx %x:%x %llu", &begin, &end, rights, &offset, &found.device_major, &found.device_minor, &inode) != 7) continue;
    if (address < begin || address >= end) continue;
    if (bytes > end - address || rights[1] != 'w' || rights[3] != 's') break;
    found.begin = begin, found.end = end, found.offset = offset, found.inode = inode;
    return found;
  }
  return Errno{EACCES};
}

Result<SharedPages> pin_shared(int process, std::uint64_t address, std::uint64_t bytes) {
  const auto maps = read_all(process, "maps");
  if (!maps) return maps.error();
  std::istringstream lines(*maps);
  const auto mapping = shared_mapping(lines, address, bytes);
  if (!mapping) return mapping.error();
  char name[64];
  std::snprintf(name, sizeof(name), "map_files/%llx-%llx", static_cast<unsigned long long>(mapping->begin), static_cast<unsigned long long>(mapping->end));
  const vmci::UniqueFd file(::openat(process, name, O_RDWR | O_CLOEXEC));
  if (!file) return last_error();
  // By now it may be another file, one that the process could only read.
  struct stat of {};
  struct statfs volume {};
  if (::fstat(file.get(), &of) != 0 || ::fstatfs(file.get(), &volume) != 0) return last_error();
  if (of.st_ino != mapping->inode || major(of.st_dev) != mapping->device_major || minor(of.st_dev) != mapping->device_minor) return Errno{EACCES};
  const auto magic = static_cast<std::uint32_t>(volume.f_type);
  const std::uint64_t offset = mapping->offset + (address - mapping->begin), page = static_cast<std::uint64_t>(volume.f_bsize);
  if ((magic != TMPFS_MAGIC && magic != HUGETLBFS_MAGIC) || page == 0 || offset % page != 0 || bytes % page != 0) return Errno{EACCES};
  const auto own = vmci::Mapping::map(file.get(), offset, bytes, vmci::Writable::yes);
  if (!own) return own.error();
  auto ring = vmci::pin_pages(std::span(own->data(), bytes));
  if (!ring) return ring.error();
  const auto self = Pagemap::of_self();
  if (!self) return self.error();
  auto runs = self->runs(reinterpret_cast<std::uintptr_t>(own->data()), bytes);
  if (!runs) return runs.error();
  return SharedPages{std::move(*ring), std::move(*runs)};
}

}  // namespace vrdma::agent
