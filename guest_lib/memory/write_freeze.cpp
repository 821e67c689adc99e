#include "guest_lib/memory/write_freeze.hpp"

#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "guest_lib/memory/raw_file.hpp"
#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/never_destroyed.hpp"

namespace vrdma::memory {
namespace {

constexpr std::uint64_t feature_wp = 1 << 0;               // UFFD_FEATURE_PAGEFAULT_FLAG_WP
constexpr std::uint64_t feature_wp_shmem = 1 << 12;        // UFFD_FEATURE_WP_HUGETLBFS_SHMEM, Linux 5.19
constexpr std::uint64_t feature_wp_unpopulated = 1 << 13;  // Linux 6.4: pages that are not there are protected as well
constexpr unsigned long device_new = _IO(0xAA, 0x00);      // USERFAULTFD_IOC_NEW

Result<vmci::UniqueFd> open_userfaultfd() {
  constexpr int flags = O_CLOEXEC | O_NONBLOCK;
  vmci::UniqueFd fd(static_cast<int>(::syscall(SYS_userfaultfd, flags)));
  if (fd) return fd;
  const Errno refused = last_error();
  const vmci::UniqueFd device = raw_open("/dev/userfaultfd", O_RDWR);
  if (!device) return refused;
  fd.reset(::ioctl(device.get(), device_new, flags));
  if (!fd) return last_error();
  return fd;
}

// The kernel tells its features only to a descriptor that asks for none, and each descriptor may ask once. They stay what they are, and to
// close one of these is dear: the kernel walks all mappings of the process.
Result<std::uint64_t> kernel_features() {
  static std::atomic<std::uint64_t> known{0};  // 0: not asked yet; there are always some
  if (const std::uint64_t before = known.load(std::memory_order_relaxed); before != 0) return before;
  auto fd = open_userfaultfd();
  if (!fd) return fd.error();
  uffdio_api api{UFFD_API, 0, 0};
  if (::ioctl(fd->get(), UFFDIO_API, &api) != 0) return last_error();
  known.store(api.features, std::memory_order_relaxed);
  return api.features;
}

Result<vmci::UniqueFd> open_with(std::uint64_t features) {
  auto fd = open_userfaultfd();
  if (!fd) return fd.error();
  uffdio_api api{UFFD_API, features, 0};
  if (::ioctl(fd->get(), UFFDIO_API, &api) != 0) return last_error();
  return fd;
}

struct Choice {
  std::uint64_t features;
  bool populate_first;
  bool may_keep;  // Linux 5.12 and later: it has an inode of its own
};
Result<Choice> choose(WriteFreeze::Memory memory) {
  auto features = kernel_features();
  if (!features) return features.error();
  if ((*features & feature_wp) == 0) return Errno{ENOSYS};
  if (memory == WriteFreeze::Memory::window) {
    if ((*features & feature_wp_shmem) == 0) return Errno{ENOSYS};
    return Choice{feature_wp | feature_wp_shmem, false, true};
  }
  const std::uint64_t unpopulated = *features & feature_wp_unpopulated;
  return Choice{feature_wp | unpopulated, unpopulated == 0, (*features & feature_wp_shmem) != 0};
}

}  // namespace

// One of each kind is kept for the next time: to close it is what is dear. Its number may be another file's by now, as programs close
// what they do not know, and in a fork's child it leads to the parent's memory.
struct WriteFreeze::Kept {
  enum State { none, changing, kept };
  std::atomic<State> state{none};
  // Of whoever has made it `changing`.
  pid_t process = 0;
  OwnFd fd;

  OwnFd take() {
    State now = kept;
    if (!state.compare_exchange_strong(now, changing, std::memory_order_acquire)) return {};  // K1: pairs with K2
    OwnFd taken = std::move(fd);
    if (process != ::getpid() || !taken.intact()) taken.reset();
    state.store(none, std::memory_order_release);
    return taken;
  }
  void keep(OwnFd one) {
    State now = none;
    if (!state.compare_exchange_strong(now, changing, std::memory_order_acquire)) return;
    process = ::getpid();
    fd = std::move(one);
    state.store(kept, std::memory_order_release);  // K2
  }
  static NeverDestroyed<Kept[2]> all;
};
constinit NeverDestroyed<WriteFreeze::Kept[2]> WriteFreeze::Kept::all;

WriteFreeze::Kept& WriteFreeze::kept_of(Memory memory) {
  return Kept::all.it[memory == Memory::window ? 1 : 0];
}

Result<WriteFreeze> WriteFreeze::freeze(Range range, Memory memory) {
  const auto choice = choose(memory);
  if (!choice) return choice.error();
  OwnFd fd = kept_of(memory).take();
  if (!fd) {
    auto opened = open_with(choice->features);
    if (!opened) return opened.error();
    fd.reset(std::move(*opened));
  }
  uffdio_register registration{};
  registration.range = {range.begin, range.bytes()};
  registration.mode = UFFDIO_REGISTER_MODE_WP;
  if (::ioctl(fd.get(), UFFDIO_REGISTER, &registration) != 0) return last_error();  // and closed, which ends whatever it has registered
  // Protection sticks to pages only: without WP_UNPOPULATED a page that is not there could appear, written, at any
  // moment.
  if (choice->populate_first && ::syscall(SYS_madvise, range.begin, range.bytes(), populate_read) != 0)
    return last_error();
  WriteFreeze frozen(std::move(fd), range, choice->may_keep ? &kept_of(memory) : nullptr);
  uffdio_writeprotect protect{{range.begin, range.bytes()}, UFFDIO_WRITEPROTECT_MODE_WP};
  while (::ioctl(frozen.fd_.get(), UFFDIO_WRITEPROTECT, &protect) != 0)
    if (errno != EAGAIN) return last_error();  // EAGAIN: the mappings are changing just now
  // A process that writes through /proc/PID/mem has its page before it copies, and holds the mappings for reading from one to the other:
  // to change them is to have waited for it.
  void* const drained = raw_mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (drained == MAP_FAILED) return last_error();
  raw_munmap(reinterpret_cast<std::uint64_t>(drained), 4096);
  return frozen;
}

WriteFreeze::~WriteFreeze() {
  if (!fd_) return;
  if (!replaced_) {
    uffdio_writeprotect release{{range_.begin, range_.bytes()}, 0};
    while (::ioctl(fd_.get(), UFFDIO_WRITEPROTECT, &release) != 0 && errno == EAGAIN) {
    }
  }
  uffdio_range all{range_.begin, range_.bytes()};
  ::ioctl(fd_.get(), UFFDIO_WAKE, &all);
  // What has replaced the range is not registered with it.
  if (keeper_ != nullptr && (replaced_ || ::ioctl(fd_.get(), UFFDIO_UNREGISTER, &all) == 0)) keeper_->keep(std::move(fd_));
}

void WriteFreeze::replaced() {
  replaced_ = true;
}

}  // namespace vrdma::memory
