// The device that this library offers. Its struct is made once and never freed: applications compare pointers from different
// lists, and the mlx5 and efa libraries read beyond the public struct.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace vrdma::guest {

ibv_device* device();

// What query_port writes; zero-filled to `bytes`, which may be less than a whole ibv_port_attr.
int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes, std::size_t bytes);
int query_device_ex(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attributes,
                    std::size_t bytes);
int query_device(ibv_context* context, ibv_device_attr* attributes);

constexpr std::uint8_t only_port = 1;

}  // namespace vrdma::guest
