// Completion and asynchronous events: 16-byte records in pipes of which the guest holds only the read end (DESIGN.md D4), or in the
// ring of a channel for which a virtual machine is interrupted. What is full keeps the record back; flush_events() tries again. Nothing
// here blocks.
#pragma once

#include <cstdint>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

// A completion was written to `cq`: if the CQ is armed for it, claims the arm and sends the event.
void raise_if_armed(CompletionQueue& cq, bool solicited_or_error);
// Somebody else has claimed `arm`, or was about to, and may not have reported it: sends the event if the claim was made.
void raise_claimed(CompletionQueue& cq, std::uint32_t arm);
void raise_async(Guest& guest, std::uint32_t context, std::uint32_t event, Handle handle);
// Sends what full pipes and rings held back. True while something is still held that can be sent some time: not while the guest is frozen.
bool flush_events(Guest& guest);
// Its machine is another QEMU's, perhaps, than the one that was interrupted last: once more for every channel. One time too often does no
// harm.
void interrupt_again(Guest& guest);

}  // namespace vrdma::svc
