#include "vmkernel_svc/memory/backing.hpp"

#include <sys/statfs.h>
#include <sys/vfs.h>

#include <algorithm>

#include "vmkernel_svc/memory/bus_guard.hpp"

namespace vrdma::svc {

Result<Backing> Backing::adopt(vmci::UniqueFd fd) {
  auto size = vmci::sealed_bytes(fd.get());
  if (!size) return size.error();
  Backing backing;
  backing.bytes_ = *size;
  struct statfs filesystem;
  if (::fstatfs(fd.get(), &filesystem) == 0 && filesystem.f_bsize > 4096)
    backing.page_bytes_ = static_cast<std::uint64_t>(filesystem.f_bsize);
  backing.fd_ = std::move(fd);
  return backing;
}

Result<std::byte*> Backing::get(std::uint64_t offset, std::uint64_t bytes) {
  if (offset > bytes_ || bytes > bytes_ - offset) return Errno{ERANGE};
  const std::uint64_t index = offset / chunk_bytes;
  if (bytes == 0 || (offset + bytes - 1) / chunk_bytes != index) return Errno{EINVAL};
  auto found = chunks_.find(index);
  if (found == chunks_.end()) {
    const std::uint64_t begin = index * chunk_bytes;
    const std::uint64_t length = std::min(chunk_bytes, bytes_ - begin);
    auto mapping = vmci::Mapping::map(fd_.get(), begin, length, vmci::Writable::yes);
    if (!mapping) return mapping.error();
    if (!BusGuard::add(mapping->data(), length, page_bytes_, fd_.get(), begin)) return Errno{ENOMEM};
    found = chunks_.emplace(index, Chunk{std::move(*mapping), 0}).first;
  }
  ++found->second.users;
  return found->second.mapping.data() + (offset - index * chunk_bytes);
}

void Backing::put(std::uint64_t offset) {
  const auto found = chunks_.find(offset / chunk_bytes);
  if (found == chunks_.end() || --found->second.users != 0) return;
  BusGuard::remove(found->second.mapping.data());
  chunks_.erase(found);
}

Backing::~Backing() {
  for (auto& [index, chunk] : chunks_) BusGuard::remove(chunk.mapping.data());
}

}  // namespace vrdma::svc
