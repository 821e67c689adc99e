// Which of the guests' memory the HCA has.
#include <fmt/format.h>

#include <algorithm>

#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"

namespace vrdma::svc {

using remote::HcaKind;
using remote::HcaMessage;
using remote::HcaRegistration;

namespace {
constexpr std::uint64_t at_once_max = std::uint64_t{16} << 20;  // more takes its time, in another thread
constexpr std::size_t gathered_pieces_max = 4096;
}  // namespace

HcaDesk::Registered& HcaDesk::registered(std::uint32_t slot, const Region& region) {
  Registered& known = registered_[slot];
  if (known.domain == nullptr) {
    known.pd = region.pd;
    known.domain = device_->domain(region.pd);
    if (known.domain == nullptr) known.refusal = device_->name() + " gives no protection domain";
    known.pieces.resize(region.pieces.size());
  }
  return known;
}

// --- as a whole -----------------------------------------------------------------------------------------------

// Maps all of a region in one piece at addresses of its own, which stay while the HCA has it. False: its pieces are not whole pages of
// files, or those who may map have mapped enough.
bool HcaDesk::gather(Registered& known, const Region& region, HcaRegistration& registration) {
  const Guest& guest = *region.guest;
  if (region.pieces.size() > gathered_pieces_max) return false;
  std::vector<vmci::Mapping::Part> parts;
  std::uint64_t page_bytes = 0, skipped = 0;
  for (const Piece& piece : region.pieces) {
    const auto backing = guest.backings.find(piece.backing);
    if (piece.host == nullptr || backing == guest.backings.end()) return false;
    const bool first = &piece == &region.pieces.front(), last = &piece == &region.pieces.back();
    if (first) page_bytes = backing->second.page_bytes();
    auto part = backing->second.in_file(piece.backing_offset, piece.bytes);
    const std::uint64_t before = part.offset % page_bytes, beyond = (part.offset + part.bytes) % page_bytes;
    if (backing->second.page_bytes() != page_bytes || (before != 0 && !first) || (beyond != 0 && !last)) return false;
    if (first) skipped = before;
    part.offset -= before;
    part.bytes += before + (beyond != 0 ? page_bytes - beyond : 0);
    if (!parts.empty() && parts.back().fd == part.fd && parts.back().offset + parts.back().bytes == part.offset) parts.back().bytes += part.bytes;
    else parts.push_back(part);
  }
  Tenant& tenant = *guest.tenant;
  if (tenant.mappings + parts.size() > tenant.quota.mappings || fabric_.mappings + parts.size() > fabric_.mappings_max) return false;
  auto mapping = vmci::Mapping::gather(parts, page_bytes);
  if (!mapping) return false;
  registration.own = std::move(*mapping);
  registration.memory = registration.own.data() + skipped;
  known.mapped = {&tenant, parts.size()};
  tenant.mappings += parts.size();
  fabric_.mappings += parts.size();
  return true;
}

void HcaDesk::unmap(Mapped& mapped) {
  const Mapped now = std::exchange(mapped, {});
  if (now.tenant == nullptr) return;
  now.tenant->mappings -= now.parts;
  fabric_.mappings -= now.parts;
}

// nullptr: there is none.
HcaRegistration* HcaDesk::whole(Registered& known, const Region& region) {
  if (!std::exchange(known.tried, true) && known.domain != nullptr && std::ranges::all_of(region.pieces, [](const Piece& piece) { return piece.host != nullptr; })) {
    auto registration = std::make_shared<HcaRegistration>();
    registration->pd = known.domain->pd;
    registration->bytes = region.bytes;
    registration->iova = region.iova;
    registration->access = static_cast<int>(region.access & (engine::access_local_write | engine::access_remote_any));
    const bool takes_time = region.bytes > at_once_max, in_one = region.pieces.size() == 1;
    const bool apart = (takes_time || !in_one) && gather(known, region, *registration);
    if (!apart && !in_one) return nullptr;
    if (!apart) registration->memory = region.pieces.front().host;
    known.whole = std::move(registration);
    // What only lies in the mappings of its guest may go with these: it is not left to another thread.
    if (apart && takes_time) device_->registrar().register_soon(known.whole);
    else device_->registrar().register_now(*known.whole);
  }
  if (known.whole == nullptr || known.whole->state() != HcaRegistration::State::refused || !known.refusal.empty()) return known.whole.get();
  if (region.pieces.size() != 1) return known.whole.reset(), unmap(known.mapped), nullptr;  // piece by piece, perhaps
  device_->explain_refusal(region.bytes, known.whole->error());
  ++counters_.refused;
  log::warn("HCA: {}; connections that use it go over tcp", device_->refusal);
  known.refusal = device_->refusal;
  return known.whole.get();
}

bool HcaDesk::leaves(Key key) const {
  return std::ranges::any_of(leaving_, [&](const Leaving& one) { return one.key == key; });
}

// The registrar has news.
void HcaDesk::look_at_registrations() {
  bool kept = false;
  std::erase_if(leaving_, [&](Leaving& one) {
    if (one.registration->state() != HcaRegistration::State::gone && one.registration->state() != HcaRegistration::State::kept) return false;
    kept |= one.registration->state() == HcaRegistration::State::kept;
    unmap(one.mapped);
    device_->release(one.pd);
    return true;
  });
  for (auto& [number, c] : connections_)
    if (std::exchange(c->awaits_memory, false)) wake(*c);
  for (auto& shared : shared_) shared->awaits_memory = false;
  if (kept && device_->present()) device_lost(fmt::format("{} does not let go of memory", device_->name()));
}

// With the device.
void HcaDesk::forget_all_registrations() {
  device_->registrar().finish();
  for (auto& one : leaving_) unmap(one.mapped);
  leaving_.clear();
  for (auto& [slot, known] : registered_) {
    if (known.whole != nullptr) device_->registrar().take_back_now(*known.whole);
    unmap(known.mapped);
    for (auto& piece : known.pieces)
      if (piece.mr != nullptr) device_->deregister(piece.mr);
  }
  registered_.clear();
}

// --- for one operation, and no more -----------------------------------------------------------------------------

HcaDesk::Reach HcaDesk::reach(std::uint32_t slot, const Region& region, std::uint64_t offset) {
  const Piece& from = region.piece_at(offset);
  const std::uint64_t here = from.bytes - (offset - from.offset);
  if (from.host == nullptr || leaves(region.key)) return {nullptr, here};
  Registered& known = registered(slot, region);
  if (const HcaRegistration* const all = whole(known, region); all != nullptr) {
    awaited_ |= all->state() == HcaRegistration::State::asked;
    if (!known.refusal.empty()) refused_ = known.refusal;
    return {all->mr(), region.bytes - offset};
  }
  if (!known.refusal.empty()) refused_ = known.refusal;
  auto& piece = known.pieces[static_cast<std::size_t>(&from - region.pieces.data())];
  if (std::exchange(piece.tried, true) || known.domain == nullptr) return {piece.mr, here};
  piece.mr = device_->register_memory(*known.domain, from.host, from.bytes, region.iova + from.offset, static_cast<int>(region.access & engine::access_local_write));
  if (piece.mr != nullptr) return {piece.mr, here};
  ++counters_.refused;
  log::warn("HCA: {}; connections that use it go over tcp", device_->refusal);
  refused_ = known.refusal = device_->refusal;
  return {nullptr, here};
}

HcaDesk::Forgotten HcaDesk::forget_region(std::uint32_t slot) {
  const Key key = fabric_.regions.slot(slot).key;
  if (const auto found = registered_.find(slot); found != registered_.end()) {
    Registered known = std::move(found->second);
    registered_.erase(found);
    if (device_) {
      bool kept = false;
      const bool soon = known.whole != nullptr && known.whole->bytes > at_once_max;
      if (soon) {
        leaving_.push_back({known.whole, known.pd, key, known.mapped});
        device_->registrar().take_back_soon(std::move(known.whole));
      } else {
        if (known.whole != nullptr) device_->registrar().take_back_now(*known.whole), kept = known.whole->state() == HcaRegistration::State::kept;
        for (const auto& piece : known.pieces) kept |= piece.mr != nullptr && !device_->deregister(piece.mr);
        unmap(known.mapped);
        if (known.domain != nullptr) device_->release(known.pd);
      }
      // Not a byte may be written once the guest hears that it is gone; with the device goes all that it has.
      if (kept && device_->present()) device_lost(fmt::format("{} does not let go of memory", device_->name()));
    }
    for (const remote::HostId host : known.askers) {
      if (far_.session(host) == 0) continue;
      HcaMessage news{};
      news.rkey = key.value;
      say(host, 0, 0, HcaKind::revoke, news);
      revoking_[key.value].insert(host);
      ++counters_.revoked;
    }
  }
  return leaves(key) ? Forgotten::held : revoking_.contains(key.value) ? Forgotten::known : Forgotten::yes;
}

std::size_t HcaDesk::registration_count() const {
  std::size_t count = 0;
  for (const auto& [slot, known] : registered_) {
    count += known.whole != nullptr && known.whole->mr() != nullptr;
    for (const auto& piece : known.pieces) count += piece.mr != nullptr;
  }
  return count;
}

std::size_t HcaDesk::being_registered() const {
  return leaving_.size() + static_cast<std::size_t>(std::ranges::count_if(registered_, [](const auto& one) {
           return one.second.whole != nullptr && one.second.whole->state() == HcaRegistration::State::asked;
         }));
}

}  // namespace vrdma::svc
