#include "guest_lib/memory/vma.hpp"

#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "guest_lib/memory/raw_file.hpp"
#include "guest_lib/memory/threads.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/found_once.hpp"

namespace vrdma::memory {
namespace {

// struct procmap_query of linux/fs.h, which many systems' headers do not have yet.
struct ProcmapQuery {
  std::uint64_t size, flags, address;
  std::uint64_t vma_begin, vma_end, vma_flags, vma_page_bytes, vma_offset, inode;
  std::uint32_t device_major, device_minor, name_bytes, build_id_bytes;
  std::uint64_t name_address, build_id_address;
};
static_assert(sizeof(ProcmapQuery) == 104);
constexpr unsigned long procmap_query = _IOWR('f', 17, ProcmapQuery);
constexpr std::uint64_t covering_or_next = 0x10;
constexpr std::uint64_t flag_readable = 1, flag_writable = 2, flag_executable = 4, flag_shared = 8;

ssize_t read_retrying(int fd, char* to, std::size_t bytes, off_t position) {
  ssize_t got;
  do {
    got = raw_pread(fd, to, bytes, position);
  } while (got < 0 && errno == EINTR);
  return got;
}

// Its number may be another file's by now, as programs close what they do not know, and in a fork's child it shows the parent. Any thread looks at
// these, one at a time changes them: what does not belong together is no file of ours.
struct KeptMaps {
  std::atomic<int> fd{-1};
  std::atomic<pid_t> process{0};
  std::atomic<dev_t> device{0};
  std::atomic<ino_t> inode{0};
  std::atomic<OwnNumbers::Serial> serial{0};
  // Who reads the text: the file has one place where reading goes on, and goes there by counting bytes of what is mapped by then.
  std::mutex text;

  bool is_at(int number) const {
    struct stat status;
    return number >= 0 && raw_fstat(number, status) && status.st_ino == inode.load(std::memory_order_relaxed) && status.st_dev == device.load(std::memory_order_relaxed);
  }
  // -1: there is none.
  int number() const {
    const int now = fd.load(std::memory_order_relaxed);
    return process.load(std::memory_order_relaxed) == ::getpid() && is_at(now) ? now : -1;
  }
};
constinit KeptMaps kept_maps;

class Fields {
 public:
  Fields(const char* begin, const char* end) : at_(begin), end_(end) {}
  template <class T>
  bool number(T& value, int base, char terminator) {
    const auto [next, error] = std::from_chars(at_, end_, value, base);
    if (error != std::errc{}) return false;
    at_ = next;
    if (at_ == end_) return terminator == ' ';  // the inode of an unnamed mapping may end its line
    return *at_++ == terminator;
  }
  const char* take(std::size_t count) {
    if (static_cast<std::size_t>(end_ - at_) < count) return nullptr;
    const char* taken = at_;
    at_ += count;
    return taken;
  }

 private:
  const char* at_;
  const char* end_;
};

bool parse(const char* begin, const char* end, Vma& vma) {
  Fields fields(begin, end);
  if (!fields.number(vma.range.begin, 16, '-') || !fields.number(vma.range.end, 16, ' ')) return false;
  const char* permissions = fields.take(5);
  if (permissions == nullptr) return false;
  vma.readable = permissions[0] == 'r';
  vma.writable = permissions[1] == 'w';
  vma.executable = permissions[2] == 'x';
  vma.shared = permissions[3] == 's';
  return fields.number(vma.file_offset, 16, ' ') && fields.number(vma.file.device_major, 16, ':') &&
         fields.number(vma.file.device_minor, 16, ' ') && fields.number(vma.file.inode, 10, ' ');
}

}  // namespace

Result<FileId> file_id(int fd) {
  struct stat status;
  if (!raw_fstat(fd, status)) return last_error();
  return FileId{major(status.st_dev), minor(status.st_dev), status.st_ino};
}

int Vma::protection() const {
  return (readable ? PROT_READ : 0) | (writable ? PROT_WRITE : 0) | (executable ? PROT_EXEC : 0);
}

// Not that of /proc/self, which is the first thread's, and empty once that has ended (pthread_exit in main).
static vmci::UniqueFd open_maps() {
  vmci::UniqueFd fd = raw_open("/proc/thread-self/maps", O_RDONLY);
  return fd ? std::move(fd) : raw_open("/proc/self/maps", O_RDONLY);
}

void keep_maps() {
  if (kept_maps.number() >= 0) return;
  // That of a thread cannot be read any more when that has ended.
  for (const char* const path : {"/proc/self/maps", "/proc/thread-self/maps"}) {
    vmci::UniqueFd fd = raw_open(path, O_RDONLY);
    char first;
    struct stat status;
    if (!fd || read_retrying(fd.get(), &first, 1, 0) != 1) continue;
    OwnFd::move_high(fd);
    if (!raw_fstat(fd.get(), status)) continue;
    if (kept_maps.process.exchange(::getpid(), std::memory_order_relaxed) != ::getpid()) std::construct_at(&kept_maps.text);  // a fork may have left it locked
    kept_maps.device.store(status.st_dev, std::memory_order_relaxed);
    kept_maps.inode.store(status.st_ino, std::memory_order_relaxed);
    kept_maps.serial.store(OwnNumbers::hold(fd.get()), std::memory_order_relaxed);
    kept_maps.fd.store(fd.release(), std::memory_order_relaxed);
    return;
  }
}

void forget_maps() {
  const int inherited = kept_maps.fd.exchange(-1, std::memory_order_relaxed);
  if (OwnNumbers::let_go(inherited, kept_maps.serial.load(std::memory_order_relaxed)) && kept_maps.is_at(inherited)) ::close(inherited);
}

Result<VmaReader> VmaReader::open(Method method) {
  // Opened for each walk where that is possible: readers of one descriptor are in each other's way.
  vmci::UniqueFd maps = open_maps();
  const Errno refused = maps ? Errno{} : last_error();
  const int shared = maps ? -1 : kept_maps.number();
  if (!maps && shared < 0) return refused;
  // Made where the caller has it: with a name it would be copied from here, and callers may have small stacks.
  return Result<VmaReader>(boost::system::in_place_value, std::move(maps), shared, method);
}

Result<Vma> VmaReader::at_or_after(std::uint64_t address) {
  if (!text_) {
    auto found = query(address);
    if (found || found.error() != Errno{ENOTTY}) return found;
    text_ = true;
  }
  return scan(address);
}

Result<Vma> VmaReader::query(std::uint64_t address) {
  ProcmapQuery q{};
  q.size = sizeof q;
  q.flags = covering_or_next;
  q.address = address;
  // EINVAL can only mean a kernel that takes the number for something else: the arguments are right.
  if (::ioctl(file(), procmap_query, &q) != 0) return errno == ENOENT ? Errno{ENOENT} : Errno{ENOTTY};
  if (q.vma_end <= address || q.vma_begin >= q.vma_end) return Errno{EIO};
  Vma vma;
  vma.range = {q.vma_begin, q.vma_end};
  vma.file_offset = q.vma_offset;
  vma.file = {q.device_major, q.device_minor, q.inode};
  vma.readable = (q.vma_flags & flag_readable) != 0;
  vma.writable = (q.vma_flags & flag_writable) != 0;
  vma.executable = (q.vma_flags & flag_executable) != 0;
  vma.shared = (q.vma_flags & flag_shared) != 0;
  return vma;
}

Result<Vma> VmaReader::scan(std::uint64_t address) {
  if (maps_) return scan_from_here(address);
  const SignalsBlocked signals;
  const std::lock_guard lock(kept_maps.text);
  starts_over_ = true;
  return scan_from_here(address);
}

Result<Vma> VmaReader::scan_from_here(std::uint64_t address) {
  if (address < last_address_) {
    start_over();
    have_current_ = false;
  }
  last_address_ = address;
  while (!have_current_ || current_.range.end <= address) {
    auto next = next_line();
    if (!next) return !have_current_ && next.error() == Errno{ENOENT} ? Errno{EIO} : next.error();  // no mapping at all is no answer
    current_ = *next;
    have_current_ = true;
  }
  return current_;
}

void VmaReader::start_over() {
  position_ = 0;
  head_ = tail_ = 0;
  within_line_ = false;
}

Result<Vma> VmaReader::next_line() {
  for (;;) {
    const char* const begin = buffer_ + head_;
    const char* const newline = static_cast<const char*>(std::memchr(begin, '\n', tail_ - head_));
    const bool fills_buffer = tail_ - head_ == buffer_bytes;  // what is wanted of it comes before the path
    if (newline != nullptr || fills_buffer) {
      const char* const end = newline != nullptr ? newline : buffer_ + tail_;
      head_ = newline != nullptr ? static_cast<std::size_t>(newline + 1 - buffer_) : tail_;
      if (std::exchange(within_line_, newline == nullptr)) continue;
      Vma vma;
      if (!parse(begin, end, vma)) return Errno{EIO};
      return vma;
    }
    if (std::exchange(starts_over_, false)) start_over();  // others may have read since
    std::memmove(buffer_, buffer_ + head_, tail_ - head_);
    tail_ -= head_;
    head_ = 0;
    const ssize_t got = read_retrying(file(), buffer_ + tail_, buffer_bytes - tail_, position_);
    if (got < 0) return last_error();
    if (got == 0) return Errno{ENOENT};
    position_ += got;
    tail_ += static_cast<std::size_t>(got);
  }
}

static std::uint64_t ask_page_bytes() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

std::uint64_t page_bytes() { return vmci::found_once<ask_page_bytes>(); }

Result<std::uint64_t> count_mappings() {
  const vmci::UniqueFd maps = open_maps();
  if (!maps) return last_error();
  std::uint64_t lines = 0;
  char buffer[4096];  // the kernel gives a page at most in one go
  for (off_t position = 0;;) {
    const ssize_t got = read_retrying(maps.get(), buffer, sizeof buffer, position);
    if (got < 0) return last_error();
    if (got == 0) return lines;
    position += got;
    for (const char* at = buffer;
         (at = static_cast<const char*>(std::memchr(at, '\n', static_cast<std::size_t>(buffer + got - at)))) != nullptr;
         ++at)
      ++lines;
  }
}

}  // namespace vrdma::memory
