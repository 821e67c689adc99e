#include "guest_agent/bar_pages.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

namespace vrdma::agent {

using vmci::UniqueFd;

namespace {

struct Line {  // of /proc/PID/maps
  std::uint64_t first, end, offset, device, inode;
};

bool overlap(std::uint64_t one, std::uint64_t one_bytes, std::uint64_t two, std::uint64_t two_bytes) { return one < two + two_bytes && two < one + one_bytes; }

enum class Maps { gone, unknown, read };
Maps gone_or_unknown() { return errno == ENOENT || errno == ESRCH ? Maps::gone : Maps::unknown; }

template <class Take>
Maps read_maps(int folder, Take&& take) {
  const int fd = ::openat(folder, "maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return gone_or_unknown();
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(::fdopen(fd, "r"), [](FILE* file) { return file == nullptr ? 0 : std::fclose(file); });
  if (maps == nullptr) {
    ::close(fd);
    return Maps::unknown;
  }
  char text[512];
  bool any = false;
  for (bool begins = true; std::fgets(text, sizeof(text), maps.get()) != nullptr;) {
    unsigned long long first, end, offset, inode;
    unsigned major, minor;
    any = true;
    if (begins && std::sscanf(text, "%llx-%llx %*s %llx %x:%x %llu", &first, &end, &offset, &major, &minor, &inode) == 6)
      take(Line{first, end, offset, gnu_dev_makedev(major, minor), inode});
    begins = std::strchr(text, '\n') != nullptr;  // a path may be longer than `text`
  }
  if (std::ferror(maps.get()) != 0) return gone_or_unknown();
  return any ? Maps::read : Maps::gone;
}

// Of a process, by its folder. The first thread's list is empty once that has ended; others may go on.
template <class Take>
Maps for_each_mapping(int process, Take&& take) {
  if (const Maps first = read_maps(process, take); first != Maps::gone) return first;
  const int fd = ::openat(process, "task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return gone_or_unknown();
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::fdopendir(fd), [](DIR* folder) { return folder == nullptr ? 0 : ::closedir(folder); });
  if (tasks == nullptr) {
    ::close(fd);
    return Maps::unknown;
  }
  while (const dirent* const task = ::readdir(tasks.get())) {
    if (task->d_name[0] < '1' || task->d_name[0] > '9') continue;
    const UniqueFd folder(::openat(fd, task->d_name, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!folder) {
      if (gone_or_unknown() == Maps::unknown) return Maps::unknown;
      continue;
    }
    if (const Maps answer = read_maps(folder.get(), take); answer != Maps::gone) return answer;
  }
  return Maps::gone;
}

}  // namespace

BarPages::BarPages(const Device& device) : bar_(device.bar), bytes_(device.bar_bytes), file_(device.bar_file) {
  struct stat status;
  if (::fstat(file_, &status) == 0) device_ = status.st_dev, inode_ = status.st_ino;
  free({vm::bar_bytes, bytes_ - vm::bar_bytes});
  const UniqueFd self(::open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC));
  const auto here = reinterpret_cast<std::uintptr_t>(bar_);
  for_each_mapping(self.get(), [&](const Line& line) {
    if (line.first <= here && here < line.end) first_in_maps_ = line.offset + (here - line.first);
  });
  look_who_maps();
}

std::optional<std::vector<BarPages::Part>> BarPages::mapped_by(int process) const {
  std::vector<Part> parts;
  const Maps answer = for_each_mapping(process, [&](const Line& line) {
    if (line.inode != inode_ || line.device != device_ || line.offset < first_in_maps_ + vm::bar_bytes) return;
    parts.push_back({line.offset - first_in_maps_, line.end - line.first});
  });
  if (answer == Maps::gone) return std::nullopt;
  if (answer == Maps::unknown) return std::vector<Part>{{0, bytes_}};  // what cannot be told may be in use
  return parts;
}

void BarPages::look_who_maps() {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(::opendir("/proc"), [](DIR* folder) { return folder == nullptr ? 0 : ::closedir(folder); });
  if (all == nullptr) return;
  while (const dirent* const entry = ::readdir(all.get())) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    UniqueFd process(::openat(::dirfd(all.get()), entry->d_name, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!process) continue;
    // One that keeps its list even from root cannot have had the device of root either.
    if (const UniqueFd maps(::openat(process.get(), "maps", O_RDONLY | O_CLOEXEC)); !maps && (errno == EACCES || errno == EPERM)) continue;
    const auto parts = mapped_by(process.get());
    if (!parts) continue;
    struct stat status;
    if (!parts->empty() && ::fstat(process.get(), &status) == 0 && status.st_uid != 0) user_before_ = status.st_uid;
    for (const Part& part : *parts) keep_for(part, process.get());
  }
}

// A process has most of it mapped twice, and one page is mapped by all of them: each page is in one place of `mapped_` only.
void BarPages::keep_for(Part part, int process) {
  const auto known = [&] { return UniqueFd(::fcntl(process, F_DUPFD_CLOEXEC, 0)); };
  for (auto& one : mapped_)
    if (overlap(one.part.offset, one.part.bytes, part.offset, part.bytes)) one.processes.push_back(known());
  for (const Part& taken : reserve(part)) {
    mapped_.push_back({taken, {}});
    mapped_.back().processes.push_back(known());
  }
}

void BarPages::free(Part part) {
  auto at = free_.emplace(part.offset, part.bytes).first;
  if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    free_.erase(next);
  }
  if (at == free_.begin()) return;
  if (const auto before = std::prev(at); before->first + before->second == at->first) {
    before->second += at->second;
    free_.erase(at);
  }
}

// Takes the free pieces that overlap `part` out of the free list and returns them.
std::vector<BarPages::Part> BarPages::reserve(Part part) {
  std::vector<Part> taken;
  const std::uint64_t end = part.offset + part.bytes;
  auto at = free_.upper_bound(part.offset);
  if (at != free_.begin()) --at;
  while (at != free_.end() && at->first < end) {
    const Part had{at->first, at->second};
    const std::uint64_t had_end = had.offset + had.bytes;
    if (had_end <= part.offset) {
      ++at;
      continue;
    }
    at = free_.erase(at);
    const std::uint64_t first = std::max(had.offset, part.offset);
    taken.push_back({first, std::min(had_end, end) - first});
    if (had.offset < part.offset) free_.emplace(had.offset, part.offset - had.offset);
    if (had_end > end) at = free_.emplace(end, had_end - end).first;
  }
  return taken;
}

void BarPages::reclaim() {
  std::vector<Mapped> still;
  for (auto& one : mapped_) {
    // Parts of it that are unmapped wait for the rest.
    const bool used = std::any_of(one.processes.begin(), one.processes.end(), [&](const UniqueFd& process) {
      const auto parts = mapped_by(process.get());
      return parts && std::any_of(parts->begin(), parts->end(),
                                  [&](const Part& part) { return overlap(part.offset, part.bytes, one.part.offset, one.part.bytes); });
    });
    if (used)
      still.push_back(std::move(one));
    else
      free(one.part);
  }
  mapped_ = std::move(still);
}

Result<BarPages::Slice> BarPages::take(std::uint64_t bytes) {
  if (bytes == 0 || bytes > bytes_) return bytes == 0 ? Errno{EINVAL} : Errno{ENOMEM};
  bytes = page_ceiling(bytes);
  reclaim();
  // The smallest place that is large enough: the large ones stay whole.
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at)
    if (at->second >= bytes && (best == free_.end() || at->second < best->second)) best = at;
  if (best == free_.end()) return Errno{ENOMEM};
  Slice slice;
  slice.pages_ = this;
  slice.offset_ = best->first;
  slice.bytes_ = bytes;
  reserve({slice.offset_, bytes});
  std::memset(slice.data(), 0, bytes);
  return slice;
}

Result<UniqueFd> BarPages::descriptor(const Slice& slice, vmci::Writable writable) const {
  UniqueFd fd(::open(("/proc/self/fd/" + std::to_string(file_)).c_str(), (writable == vmci::Writable::yes ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (!fd || ::lseek(fd.get(), static_cast<off_t>(slice.offset()), SEEK_SET) < 0) return last_error();
  return fd;
}

void BarPages::give_back(Slice slice, int process) {
  if (!slice) return;
  mapped_.push_back({{slice.offset_, slice.bytes_}, {}});
  mapped_.back().processes.emplace_back(::fcntl(process, F_DUPFD_CLOEXEC, 0));
  slice.pages_ = nullptr;
}

std::uint64_t BarPages::free_bytes() {
  reclaim();
  std::uint64_t bytes = 0;
  for (const auto& [offset, length] : free_) bytes += length;
  return bytes;
}

BarPages::Slice& BarPages::Slice::operator=(Slice&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  pages_ = std::exchange(other.pages_, nullptr);
  offset_ = other.offset_;
  bytes_ = other.bytes_;
  return *this;
}

void BarPages::Slice::give_back() {
  if (BarPages* const pages = std::exchange(pages_, nullptr)) pages->free({offset_, bytes_});
}

}  // namespace vrdma::agent
