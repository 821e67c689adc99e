#include "guest_lib/on_demand.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <optional>

#include "guest_lib/domains.hpp"
#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

struct Known {
  ibv_pd* pd;
  std::uint64_t address, bytes, iova;
  std::uint32_t access;
};
// By their keys; under the process's mutex, which is locked across a fork. Never destroyed: other threads may deregister while the program ends.
std::map<std::uint32_t, Known>& known() {
  static auto* const made = new std::map<std::uint32_t, Known>;
  return *made;
}

bool populated(memory::Range pages, bool write) {
  return ::syscall(SYS_madvise, pages.begin, pages.bytes(), write ? memory::populate_write : memory::populate_read) == 0;
}

// A kernel before Linux 5.14 cannot: there the first request brings the pages. Its EINVAL is also what a mapping that may not be read is.
Status populate(std::uint64_t address, std::uint64_t bytes, bool write) {
  if (populated(memory::whole_pages_around({address, address + bytes}), write)) return ok();
  const auto here = reinterpret_cast<std::uintptr_t>(&bytes);
  const bool can = populated(memory::whole_pages_around({here, here + 1}), false);
  return can ? Status(Errno{EFAULT}) : ok();
}

std::optional<Known> find(std::uint32_t key) {
  std::lock_guard lock(Process::instance().mutex);
  const auto found = known().find(key);
  return found == known().end() ? std::nullopt : std::optional(found->second);
}

Status advise(ibv_pd* pd, ibv_advise_mr_advice advice, bool wait, const ibv_sge& range) {
  const auto mr = find(range.lkey);
  if (!mr || !same_protection_domain(mr->pd, pd)) return Errno{ENOENT};
  const bool write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
  if (write && (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0) return Errno{EPERM};
  const std::uint64_t offset = range.addr - mr->iova;
  if (range.addr < mr->iova || offset > mr->bytes || range.length > mr->bytes - offset) return Errno{EFAULT};
  if (range.length == 0 || advice == IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT) return ok();
  const Status there = populate(mr->address + offset, range.length, write);
  return wait ? there : ok();  // who does not wait is not told what came of it
}

}  // namespace

bool offers_on_demand(const Attachment& attachment) { return attachment.bar() < 0; }

void report_on_demand(ibv_device_attr_ex& to) {
  constexpr std::uint32_t datagrams = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
  constexpr std::uint32_t all = datagrams | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC;
  to.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
  to.odp_caps.per_transport_caps = {all, datagrams | IBV_ODP_SUPPORT_WRITE, datagrams};
  to.xrc_odp_caps = all;
}

void know_on_demand(const Mr& mr) {
  std::lock_guard lock(Process::instance().mutex);
  known()[mr.verbs.lkey] = {mr.verbs.pd, mr.registration.address, mr.registration.bytes, mr.iova, mr.access};
}

void forget_on_demand(const Mr& mr) {
  std::lock_guard lock(Process::instance().mutex);
  known().erase(mr.verbs.lkey);
}

int advise_mr(ibv_pd* pd, ibv_advise_mr_advice advice, std::uint32_t flags, ibv_sge* ranges, std::uint32_t count) {
  return as_int([&]() -> Status {
    if (advice != IBV_ADVISE_MR_ADVICE_PREFETCH && advice != IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE && advice != IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT)
      return Errno{EOPNOTSUPP};
    if ((flags & ~std::uint32_t{IBV_ADVISE_MR_FLAG_FLUSH}) != 0 || count == 0) return Errno{EINVAL};
    for (std::uint32_t i = 0; i < count; ++i)
      if (Status advised = advise(pd, advice, (flags & IBV_ADVISE_MR_FLAG_FLUSH) != 0, ranges[i]); !advised) return advised;
    return ok();
  });
}

}  // namespace vrdma::guest
