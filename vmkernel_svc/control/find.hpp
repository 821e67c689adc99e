// Objects by the handles that guests name. Used by the desk's files only.
#pragma once

#include <algorithm>
#include <bit>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

template <class T>
T* find(Table<T>& table, std::uint32_t handle) {
  const auto found = table.find(handle);
  return found == table.end() ? nullptr : found->second.get();
}
// Objects refer only to objects of their own context, so that closing one leaves nothing behind that points into it.
template <class T>
T* find_in(Table<T>& table, std::uint32_t handle, std::uint32_t context) {
  T* const found = find(table, handle);
  return found != nullptr && found->context == context ? found : nullptr;
}

constexpr std::uint32_t power_of_two(std::uint32_t n) { return std::bit_ceil(std::max(n, 2u)); }

}  // namespace vrdma::svc
