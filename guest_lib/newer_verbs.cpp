// Verbs that rdma-core has had since version 59 (IBVERBS_1.15 to 1.18). The headers here may not know them, so this file declares by
// itself what it needs, in the layout that rdma-core gives it; the manual pages ibv_reg_mr_ex(3) and ibv_alloc_buf(3) are the source.
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/domains.hpp"

struct ibv_comp_cntr;
struct ibv_comp_cntr_caps;
struct ibv_comp_cntr_init_attr;
struct ibv_context;
struct ibv_dm;
struct ibv_dmah;
struct ibv_dmah_init_attr;
struct ibv_mr;
struct ibv_mr_init_attr;
struct ibv_pd;
struct ibv_qp;
struct ibv_qp_attach_comp_cntr_attr;

// What ibv_alloc_buf() gives: memory for one protection domain.
struct ibv_buf {
  ibv_pd* pd;
  std::byte* address;
  std::size_t bytes;
};

extern "C" ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t bytes, std::uint64_t iova, unsigned int access);

namespace {

struct Registration {
  std::size_t bytes;
  int access;
  std::uint64_t mask;
  std::uint64_t iova;
  std::byte* address;
  int fd;
  std::uint64_t fd_offset;
  ibv_dmah* dmah;
  const ibv_buf* buffer;
};
static_assert(offsetof(Registration, mask) == 16 && offsetof(Registration, dmah) == 56 && offsetof(Registration, buffer) == 64);
using vrdma::guest::same_protection_domain;

constexpr std::uint64_t has_iova = 1, has_address = 2, has_buffer = 32;

template <class T>
T* fails(int why) {
  errno = why;
  return nullptr;
}

bool covers(const ibv_buf& buffer, const std::byte* address, std::size_t bytes) {
  const auto offset = reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(buffer.address);
  return offset <= buffer.bytes && bytes <= buffer.bytes - offset;
}

}  // namespace

// Of memory at an address, with an iova of its own where it has one. EOPNOTSUPP: of a dma-buf (FD), with a DMA handle (DMAH), or with
// what is not known here. EINVAL: no address, a buffer of another protection domain, or a range beyond the buffer.
VRDMA_EXPORT ibv_mr* ibv_reg_mr_ex(ibv_pd* pd, ibv_mr_init_attr* attributes) {
  const auto& wanted = *reinterpret_cast<const Registration*>(attributes);
  if ((wanted.mask & ~(has_iova | has_address | has_buffer)) != 0) return fails<ibv_mr>(EOPNOTSUPP);
  if ((wanted.mask & has_address) == 0) return fails<ibv_mr>(EINVAL);
  if ((wanted.mask & has_buffer) != 0 &&
      (wanted.buffer == nullptr || !same_protection_domain(wanted.buffer->pd, pd) || !covers(*wanted.buffer, wanted.address, wanted.bytes)))
    return fails<ibv_mr>(EINVAL);
  const std::uint64_t iova = (wanted.mask & has_iova) != 0 ? wanted.iova : reinterpret_cast<std::uintptr_t>(wanted.address);
  return ibv_reg_mr_iova2(pd, wanted.address, wanted.bytes, iova, static_cast<unsigned>(wanted.access));
}

// Whole pages of their own, which the host service can map.
VRDMA_EXPORT void* ibv_alloc_buf(ibv_pd* pd, std::size_t bytes, ibv_buf** buffer) {
  if (bytes == 0) return fails<void>(EINVAL);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  *buffer = new (std::nothrow) ibv_buf{pd, static_cast<std::byte*>(memory), bytes};
  if (*buffer != nullptr) return memory;
  ::munmap(memory, bytes);
  return fails<void>(ENOMEM);
}

VRDMA_EXPORT void ibv_free_buf(ibv_buf* buffer) {
  if (buffer == nullptr) return;
  ::munmap(buffer->address, buffer->bytes);
  delete buffer;
}

VRDMA_EXPORT ibv_mr* ibv_reg_buf_mr(ibv_pd* pd, ibv_buf* buffer, void* address, std::size_t bytes, int access) {
  if (buffer == nullptr || !same_protection_domain(buffer->pd, pd) || !covers(*buffer, static_cast<const std::byte*>(address), bytes))
    return fails<ibv_mr>(EINVAL);
  return ibv_reg_mr_iova2(pd, address, bytes, reinterpret_cast<std::uintptr_t>(address), static_cast<unsigned>(access));
}

// There is no device memory, and no steering of what a device writes.
VRDMA_EXPORT int ibv_dm_export_dmabuf_fd(ibv_dm*) {
  errno = EOPNOTSUPP;
  return -1;
}
VRDMA_EXPORT ibv_dmah* ibv_alloc_dmah(ibv_context*, ibv_dmah_init_attr*) { return fails<ibv_dmah>(EOPNOTSUPP); }
VRDMA_EXPORT int ibv_dealloc_dmah(ibv_dmah*) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_export_buf_dmabuf_fd(ibv_buf*) {
  errno = ENODATA;  // it is ordinary memory
  return -1;
}

// Nor are there counters that a device counts completions in.
VRDMA_EXPORT int _ibv_query_comp_cntr_caps(ibv_context*, ibv_comp_cntr_caps*, std::size_t) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT ibv_comp_cntr* ibv_create_comp_cntr(ibv_context*, ibv_comp_cntr_init_attr*) { return fails<ibv_comp_cntr>(EOPNOTSUPP); }
VRDMA_EXPORT int ibv_destroy_comp_cntr(ibv_comp_cntr*) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_set_comp_cntr(ibv_comp_cntr*, std::uint64_t) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_set_err_comp_cntr(ibv_comp_cntr*, std::uint64_t) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_inc_comp_cntr(ibv_comp_cntr*, std::uint64_t) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_inc_err_comp_cntr(ibv_comp_cntr*, std::uint64_t) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_read_comp_cntr(ibv_comp_cntr*, std::uint64_t*) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_read_err_comp_cntr(ibv_comp_cntr*, std::uint64_t*) { return errno = EOPNOTSUPP; }
VRDMA_EXPORT int ibv_qp_attach_comp_cntr(ibv_qp*, ibv_comp_cntr*, ibv_qp_attach_comp_cntr_attr*) { return errno = EOPNOTSUPP; }
