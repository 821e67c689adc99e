#include "guest_lib/device_memory.hpp"

#include <sys/mman.h>

#include <cstring>

#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

constexpr std::uint64_t word_bytes = 4;  // an adapter's memory is accessed by words: offsets and sizes that are none are refused as there

bool inside(const Dm& dm, std::uint64_t offset, std::size_t bytes) { return offset <= dm.bytes && bytes <= dm.bytes - offset; }

int copy(Dm& dm, std::uint64_t offset, std::size_t bytes, void* out, const void* in) {
  return as_int([&]() -> Status {
    if (!inside(dm, offset, bytes)) return Errno{EFAULT};
    if (offset % word_bytes != 0 || bytes % word_bytes != 0) return Errno{EINVAL};
    if (in != nullptr) std::memcpy(dm.memory + offset, in, bytes);
    else std::memcpy(out, dm.memory + offset, bytes);
    return ok();
  });
}
int copy_to(ibv_dm* to, std::uint64_t offset, const void* from, std::size_t bytes) { return copy(Dm::of(to), offset, bytes, nullptr, from); }
int copy_from(void* to, ibv_dm* from, std::uint64_t offset, std::size_t bytes) { return copy(Dm::of(from), offset, bytes, to, nullptr); }

Result<ibv_dm*> make(ibv_context* context, const ibv_alloc_dm_attr& wanted) {
  const std::uint64_t page = memory::page_bytes();
  if (wanted.comp_mask != 0 || wanted.length == 0 || wanted.log_align_req >= 64 || (std::uint64_t{1} << wanted.log_align_req) > page) return Errno{EINVAL};
  if (wanted.length > device_memory_bytes_max) return Errno{ENOMEM};
  if (auto attachment = Context::of(context).usable(); !attachment) return attachment.error();
  auto dm = std::make_unique<Dm>();
  const std::uint64_t mapped = memory::page_ceiling(wanted.length) + page;
  void* const memory = memory::raw_mmap(0, mapped, memory::read_write, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return last_error();
  dm->verbs = {context, copy_to, copy_from, 0, 0};
  dm->memory = static_cast<std::byte*>(memory);
  dm->bytes = wanted.length;
  dm->mapped_bytes = mapped;
  return &dm.release()->verbs;
}

}  // namespace

ibv_dm* alloc_dm(ibv_context* context, ibv_alloc_dm_attr* wanted) {
  return as_ptr([&] { return make(context, *wanted); });
}

int free_dm(ibv_dm* verbs) {
  return as_int([&]() -> Status {
    Dm& dm = Dm::of(verbs);
    if (dm.users.load(std::memory_order_relaxed) != 0) return Errno{EBUSY};
    memory::raw_munmap(reinterpret_cast<std::uintptr_t>(dm.memory), dm.mapped_bytes);
    delete &dm;
    return ok();
  });
}

ibv_mr* reg_dm_mr(ibv_pd* pd, ibv_dm* verbs, std::uint64_t offset, std::size_t bytes, unsigned int access) {
  return as_ptr([&]() -> Result<ibv_mr*> {
    constexpr unsigned int allowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                                     IBV_ACCESS_ZERO_BASED | IBV_ACCESS_OPTIONAL_RANGE;
    Dm& dm = Dm::of(verbs);
    if (!inside(dm, offset, bytes) || (access & IBV_ACCESS_ZERO_BASED) == 0 || (access & ~allowed) != 0) return Errno{EINVAL};
    // Programs may ask for a region of nothing (rdma-core's suite does): it has a byte of the spare page, which nobody may write to.
    const bool empty = bytes == 0;
    auto made = make_mr(pd, empty ? dm.memory + dm.mapped_bytes - memory::page_bytes() : dm.memory + offset, empty ? 1 : bytes, 0,
                        empty ? unsigned{IBV_ACCESS_ZERO_BASED} : access);
    if (!made) return made.error();
    (*made)->addr = nullptr;
    (*made)->length = bytes;
    Mr::of(*made).device_memory = &dm;
    dm.users.fetch_add(1, std::memory_order_relaxed);
    return *made;
  });
}

}  // namespace vrdma::guest
