// Completion and asynchronous events: 16-byte records in pipes of which the guest holds only the read end (DESIGN.md D4). A
// full pipe keeps the record back; flush_events() tries again. Nothing here blocks.
#pragma once

#include <cstdint>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

// A completion was written to `cq`: if the CQ is armed for it, claims the arm and sends the event.
void raise_if_armed(CompletionQueue& cq, bool solicited_or_error);
void raise_async(Guest& guest, std::uint32_t context, std::uint32_t event, Handle handle);
// Sends what full pipes held back. True while something is still held.
bool flush_events(Guest& guest);

}  // namespace vrdma::svc
