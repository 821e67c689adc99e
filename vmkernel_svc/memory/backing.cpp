#include "vmkernel_svc/memory/backing.hpp"

#include <sys/statfs.h>
#include <sys/vfs.h>

#include <algorithm>

#include "vmkernel_svc/memory/bus_guard.hpp"

namespace vrdma::svc {

Result<Backing> Backing::adopt(vmci::UniqueFd fd) {
  auto size = vmci::memory_file_bytes(fd.get());
  if (!size) return size.error();
  Backing backing;
  backing.bytes_ = *size;
  struct statfs filesystem;
  if (::fstatfs(fd.get(), &filesystem) == 0 && filesystem.f_bsize > 4096)
    backing.page_bytes_ = static_cast<std::uint64_t>(filesystem.f_bsize);
  if (backing.page_bytes_ != 4096) backing.bytes_ -= backing.bytes_ % backing.page_bytes_;  // what ends in the midst of a huge page is neither mapped nor unmapped in part
  backing.chunk_bytes_ = std::max(backing.chunk_bytes_, backing.page_bytes_);
  backing.lendable_ = vmci::sealed_bytes(fd.get()).has_value() && backing.page_bytes_ == 4096;
  backing.fd_ = std::move(fd);
  return backing;
}

Backing Backing::adopt(PinnedPages pages) {
  Backing backing;
  backing.bytes_ = pages.bytes();
  backing.page_bytes_ = pages.page_bytes();
  backing.pinned_ = std::move(pages);
  return backing;
}

std::uint64_t Backing::contiguous_bytes(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset >= bytes_) return 0;
  if (pinned_) return std::min(bytes, pinned_->at(offset).size());
  return std::min(bytes, chunk_bytes_ - offset % chunk_bytes_);
}

vmci::Mapping::Part Backing::in_file(std::uint64_t offset, std::uint64_t bytes) const {
  if (pinned_) return {pinned_->fd(), pinned_->file_offset(offset), bytes};
  return {fd_.get(), offset, bytes};
}

Result<std::byte*> Backing::get(std::uint64_t offset, std::uint64_t bytes) {
  if (offset > bytes_ || bytes > bytes_ - offset) return Errno{ERANGE};
  if (bytes == 0) return Errno{EINVAL};
  if (pinned_) {
    const auto here = pinned_->at(offset);
    if (bytes > here.size()) return Errno{EINVAL};
    ++pinned_users_;
    return here.data();
  }
  const std::uint64_t index = offset / chunk_bytes_;
  if ((offset + bytes - 1) / chunk_bytes_ != index) return Errno{EINVAL};
  auto found = chunks_.find(index);
  if (found == chunks_.end()) {
    const std::uint64_t begin = index * chunk_bytes_;
    const std::uint64_t length = std::min(chunk_bytes_, bytes_ - begin);
    auto mapping = vmci::Mapping::map(fd_.get(), begin, length, vmci::Writable::yes);
    if (!mapping) return mapping.error();
    if (!BusGuard::add(mapping->data(), length, page_bytes_, fd_.get(), begin)) return Errno{ENOMEM};
    found = chunks_.emplace(index, Chunk{std::move(*mapping), 0}).first;
  }
  ++found->second.users;
  return found->second.mapping.data() + (offset - index * chunk_bytes_);
}

void Backing::put(std::uint64_t offset) {
  if (pinned_) {
    --pinned_users_;
    return;
  }
  const auto found = chunks_.find(offset / chunk_bytes_);
  if (found == chunks_.end() || --found->second.users != 0) return;
  BusGuard::remove(found->second.mapping.data());
  chunks_.erase(found);
}

Backing::~Backing() {
  for (auto& [index, chunk] : chunks_) BusGuard::remove(chunk.mapping.data());
}

}  // namespace vrdma::svc
