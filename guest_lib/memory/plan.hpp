// What a range of memory consists of, and how each piece of it could be reached. Looks only; changes nothing.
//
// Any thread; takes memory only from the resource it is given.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <vector>

#include "guest_lib/memory/page_counts.hpp"
#include "guest_lib/memory/vma.hpp"
#include "guest_lib/memory/window.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

struct Piece {
  enum class Kind { process, movable, window, file };
  Kind kind = Kind::process;
  Range range;  // exact; movable: whole pages of the mapping, of which the first and the last may be registered in part
  int protection = 0;
  Vma vma;                    // as found; kind file: which file, and where in it
  std::uint32_t backing = 0;  // kind file, once announced; kind window of lent memory
  std::uint64_t backing_offset = 0;  // kind window of lent memory

  std::uint64_t file_offset() const { return vma.file_offset + (range.begin - vma.range.begin); }
};
using Plan = std::pmr::vector<Piece>;

// Which pages of which a registration has only a part may move, with what else lies in them: none; those of a buffer that malloc has mapped
// for itself, where it is the rest of that; all.
enum class PartialPages { stay, of_mapped_buffers, move };

// The pieces of `range`, ascending, without gaps. EFAULT where part of it is not mapped, not readable, or not writable
// though `writes`.
Result<Plan> make_plan(Range range, bool writes, PartialPages partial, const Window& window, std::pmr::memory_resource* resource);

// Turns what of the pieces of a kind lies in pages that are counted into process pieces.
void leave_where_counted(Plan& plan, Piece::Kind kind, const PageCounts& counts);

// Turns the movable pieces, or parts of them, that lie in a thread's stack into process pieces.
void spare_stacks(Plan& plan, const std::pmr::vector<std::uint64_t>& control_blocks);

}  // namespace vrdma::memory
