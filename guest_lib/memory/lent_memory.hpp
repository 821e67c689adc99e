// Pages of a file that somebody else owns and lends piece by piece, in the window's place: of the BAR of a virtual machine's device,
// where the machine's RAM is its own. A piece stands for one range of addresses, whose pages move there.
//
// Such pages belong to a device: the kernel copies to and from them by their addresses only, cannot hold back writes to them
// (userfaultfd), and nobody but the lender can give them away. So each piece is mapped twice, at its range and, for ourselves, at its
// alias, by which its contents are reached whatever the application does to its own mapping.
//
// Not thread-safe (MemoryManager holds its lock). Takes memory only from the resource it is given; no function that copies or maps
// takes any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

struct LentPiece {
  std::uint64_t offset = 0, bytes = 0;  // in the file
  std::uint32_t backing = 0;            // what the service knows it as …
  std::uint64_t service = 0;            // … and which service
  std::byte* alias = nullptr;
  Range range;              // at most `bytes`, whole pages; those of a newer piece count first
  std::uint32_t users = 0;  // extents of registrations
};

class LentMemory {
 public:
  explicit LentMemory(std::pmr::memory_resource* resource) : pieces_(resource) {}

  // `file`: that all pieces are of; the descriptor stays the caller's. Of a file of another machine's device: EXDEV.
  Status use(int file);
  // Maps a piece for ourselves; nobody needs the lock. A child of fork does not get it.
  static Result<std::byte*> map_alias(int file, std::uint64_t offset, std::uint64_t bytes);

  // Whether the descriptor is there still: an application may close all that it finds.
  bool intact() const;
  bool holds(const Vma& vma) const { return vma.shared && vma.file == id_; }
  bool holds_in_place(const Vma& vma) const;

  LentPiece* of(std::uint64_t address);  // the newest; null: none
  const LentPiece* of(std::uint64_t address) const { return const_cast<LentMemory*>(this)->of(address); }
  std::pmr::vector<LentPiece>& pieces() { return pieces_; }

  // As Window's; each range lies in pieces.
  Status copy_from_memory(Range range) const;
  Status copy_to(void* to, Range range) const;
  Status map(Range range, int protection) const;

  // Of a piece that was just mapped, the first time: where the kernel says that the file begins.
  Status learn_from(const LentPiece& piece);

 private:
  template <class Each>
  Status for_each_part(Range range, Each&& each) const;

  OwnFd file_;
  FileId id_;
  std::uint64_t first_in_maps_ = 0;  // what the kernel says for offset 0: of a device's memory, its physical address
  bool first_known_ = false;
  std::pmr::vector<LentPiece> pieces_;
};

}  // namespace vrdma::memory
