#include "vmkernel_svc/guest_mail.hpp"

#include <unistd.h>

#include <cstring>

#include "vmci_channel/arch.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

bool put_datagram(Guest& guest, control::Head head, std::uint32_t user_bits, std::span<const std::byte> body,
                  std::uint32_t keep_free_slots) {
  if (guest.frozen) return false;
  auto& cursor = guest.control.header().creator;
  // C3: pairs with the guest's release of its cursor: it has read the slots before it.
  const std::uint32_t consumed = std::atomic_ref(cursor.consumed).load(std::memory_order_acquire);
  if (guest.replies.position() - consumed <= guest.replies.slot_count()) guest.replies.set_freed(consumed);
  const auto slots = static_cast<std::uint32_t>((sizeof(head) + body.size() + slot_bytes - 1) / slot_bytes);
  if (!guest.replies.has_room(slots + keep_free_slots)) return false;
  const auto words = std::as_bytes(std::span(&head, 1)).subspan(sizeof(RecordHead));
  guest.replies.write(sizeof(RecordHead), words);
  guest.replies.write(sizeof(head), body);
  guest.replies.publish(head.record.tag, static_cast<std::uint32_t>(body.size()), user_bits, slots);
  VRDMA_CRASH_POINT("service.control.replied");
  vmci::store_load_fence();  // K1: pairs with the guest's fence between `waiting` and its last look
  if (std::atomic_ref(cursor.waiting).load(std::memory_order_relaxed) != 0) {
    const char one = 1;
    [[maybe_unused]] const auto written = ::write(guest.wake_pipe.get(), &one, 1);  // full: it is awake already
  }
  return true;
}

}  // namespace vrdma::svc
