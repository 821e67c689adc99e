// What Valgrind's memcheck cannot know of our memory, told by its client requests: a few instructions that do nothing outside of it, and
// that other tools of Valgrind pass over. Its leak check reads all that it takes for readable: a whole sparse segment, which that brings into being,
// and in a fork's child an address range that is not mapped there.
//
// Any thread, also in a fork handler.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vmci_channel/arch.hpp"

namespace vmci::memcheck {

// As in <valgrind/valgrind.h>, whose sequences and numbers are promised not to change.
inline void request(std::uint64_t number, const void* first, std::uint64_t second = 0) {
  const volatile std::uint64_t arguments[6] = {number, reinterpret_cast<std::uintptr_t>(first), second, 0, 0, 0};
  client_request(arguments);
}

constexpr std::uint64_t of_memcheck = std::uint64_t{'M'} << 24 | std::uint64_t{'C'} << 16;

// Nobody reads or writes there before it is shown.
inline void hide(const void* memory, std::size_t bytes) { request(of_memcheck, memory, bytes); }
inline void show(const void* memory, std::size_t bytes) { request(of_memcheck + 2, memory, bytes); }

// A block of an allocator that is made of malloc's: of its block, memcheck would see a pointer to the middle only.
inline void allocated(const void* block, std::size_t bytes) { request(0x1301, block, bytes); }
inline void released(const void* block) { request(0x1302, block); }

}  // namespace vmci::memcheck
