// Adds to an eventfd that somebody else holds, too: a machine's QEMU. A write(2) could block for ever there, as whoever has the
// description can make it blocking and fill it, between any look of ours and the write. A request of asynchronous I/O that names the
// eventfd has the kernel add to it, and the kernel never waits. Any thread; each has a context of its own.
#pragma once

namespace vrdma::svc {

// Whether the kernel lets this thread do so (CONFIG_AIO, fs.aio-max-nr, a filter of system calls).
bool can_signal_eventfds();
// False: not yet, as the kernel lacks room for the request; whoever counts on it tries again.
[[nodiscard]] bool signal_eventfd(int eventfd);

}  // namespace vrdma::svc
