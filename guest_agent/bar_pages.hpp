// Pages of the device's BAR that the agent lends, where the machine's RAM is nobody's but its own (vm::service_lends_bar): queues lie in
// them, and memory of programs moves there. One thread.
//
// Who is given a descriptor of the BAR can map all of it: the kernel hands out no part of one. So a program can reach what others of this
// machine have there, and the agent serves the programs of one user (Session::admits).
//
// A program keeps what it has mapped for as long as it likes: its own memory may be in there, which it goes on using when the service, the
// agent or its connection have gone. So pages that come back are lent again when nothing maps them any more, which the kernel tells
// (/proc/PID/maps), also of those that an earlier agent has lent.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "guest_agent/device.hpp"
#include "guest_agent/frames.hpp"
#include "vmci_channel/segment.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

class BarPages {
 public:
  // bytes: of the BAR, of which the first vm::bar_bytes are the link's. Looks who has pages of it mapped already.
  explicit BarPages(const Device& device);
  BarPages(const BarPages&) = delete;
  BarPages& operator=(const BarPages&) = delete;

  // Gives itself back when it ends; the pages end before its BarPages does.
  class Slice {
   public:
    Slice() = default;
    Slice(Slice&& other) noexcept { *this = std::move(other); }
    Slice& operator=(Slice&& other) noexcept;
    ~Slice() { give_back(); }
    explicit operator bool() const { return pages_ != nullptr; }
    std::uint64_t offset() const { return offset_; }
    std::uint64_t bytes() const { return bytes_; }
    std::byte* data() const { return pages_->bar_ + offset_; }
    Runs runs() const { return {{offset_ / vm::page_bytes, bytes_ / vm::page_bytes}}; }

   private:
    friend BarPages;
    void give_back();
    BarPages* pages_ = nullptr;
    std::uint64_t offset_ = 0, bytes_ = 0;
  };

  // Zero, in one piece. ENOMEM: so many are not free.
  Result<Slice> take(std::uint64_t bytes);
  // A descriptor of the BAR whose position is the slice's beginning, of a description of its own.
  Result<vmci::UniqueFd> descriptor(const Slice& slice, vmci::Writable writable) const;
  // As if it ended, but for a process that may have it mapped. process: its folder in /proc.
  void give_back(Slice slice, int process);

  std::uint64_t free_bytes();
  std::uint64_t bytes() const { return bytes_; }
  // Of a program that had some mapped when this began; none: nobody had.
  std::optional<uid_t> user_before() const { return user_before_; }

 private:
  struct Part {
    std::uint64_t offset, bytes;
  };
  struct Mapped {  // by processes that may go on using it
    Part part;
    std::vector<vmci::UniqueFd> processes;
  };
  void look_who_maps();
  void keep_for(Part part, int process);
  void reclaim();
  void free(Part part);
  std::vector<Part> reserve(Part part);  // what of it was free
  // What a process has mapped, the link apart. none: it has gone.
  std::optional<std::vector<Part>> mapped_by(int process) const;

  std::byte* bar_;
  std::uint64_t bytes_;
  int file_;
  std::uint64_t device_ = 0, inode_ = 0;  // of the file
  std::uint64_t first_in_maps_ = 0;       // what /proc/PID/maps says for the BAR's beginning: its physical address, with a real one
  std::map<std::uint64_t, std::uint64_t> free_;  // offset: bytes
  std::vector<Mapped> mapped_;
  std::optional<uid_t> user_before_;
};

}  // namespace vrdma::agent
