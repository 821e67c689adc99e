// Memory and descriptors that are not what they seem, that change, or that never answer.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <thread>

#include "tests/hostile/raid.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::hostile {

// Descriptors that are no memory, and memory that changes under the service.
void raid_descriptors(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in = raid.intrude("descriptors");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  ++raid.attached;
  std::vector<int> odd;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) odd.push_back(ends[0]), ::close(ends[1]);
  odd.push_back(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  odd.push_back(::open("/", O_PATH | O_CLOEXEC));
  odd.push_back(::open("/dev/zero", O_RDWR | O_CLOEXEC));
  odd.push_back(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  const int inner = ::epoll_create1(EPOLL_CLOEXEC);
  ::epoll_ctl(inner, EPOLL_CTL_ADD, epoll, &event);
  odd.push_back(epoll), odd.push_back(inner);
  odd.push_back(in.socket().fd());
  odd.push_back(in.descriptor(1));  // the service page: sealed, but not for writing
  const int empty = Property::sealed_file(0);
  const int frozen = Property::sealed_file(1 << 16);
  if (frozen >= 0) ::fcntl(frozen, F_ADD_SEALS, F_SEAL_WRITE);
  odd.push_back(empty), odd.push_back(frozen);
  for (int fd : odd) {
    const auto added = in.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&fd, 1));
    if (!added) continue;
    StageExtentsRequest stage{};
    stage.count = stage.clear_first = 1;
    stage.extents[0] = {0x10000, 4096, dice.one_in(2) ? 0 : dice.nasty(), added->backing, 0};
    in.call<Request::stage_extents>(stage);
    in.call<Request::reg_mr>({own.pd, all_access, 0x10000, 4096, 0x10000});
    ++raid.blows;
  }
  for (int fd : odd)
    if (fd != in.socket().fd() && fd != in.descriptor(1)) ::close(fd);

  constexpr std::uint64_t bytes = 4 << 20;
  if (own.add(bytes, Property::sealed_file(bytes)) == nullptr || own.add(bytes, Property::loose_file(bytes)) == nullptr) return;
  // Huge pages that do not exist: every touch is a bus error.
  own.add(64 << 20, Property::sealed_file(64 << 20, MFD_HUGETLB));
  // A file far larger than memory, registered here and there.
  if (const int vast = Property::sealed_file(std::uint64_t{1} << 45); vast >= 0) {
    const auto added = in.call_on_socket<Request::add_backing>({0, 0, 0}, std::span(&vast, 1));
    for (std::uint64_t i = 0; added && i < 3000 && !raid.over(); ++i, ++raid.blows) {
      StageExtentsRequest stage{};
      stage.count = stage.clear_first = 1;
      stage.extents[0] = {0x10000, 4096, i << 28, added->backing, 0};
      if (!in.call<Request::stage_extents>(stage) || !in.call<Request::reg_mr>({own.pd, all_access, 0x10000, 4096, 0x10000})) break;
    }
    ::close(vast);
  }
  for (int i = 0; i < 2000 && !raid.over() && !in.expelled(); ++i, ++raid.blows) {
    strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    Memory& memory = dice.of(own.memories);
    if (memory.fd >= 0) ::fallocate(memory.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, dice.below(memory.bytes) & ~4095u, 1 << 20);
    if (memory.fd >= 0 && dice.one_in(20)) (void)!::ftruncate(memory.fd, dice.one_in(2) ? memory.bytes : dice.below(memory.bytes));
    if (dice.one_in(16)) {
      OwnedQp& qp = dice.of(own.qps);
      own.change_state(qp, 0);
      own.connect(qp, qp.made.qpn);
    }
    pretend_to_poll(in, own);
  }
}

int faults = -1;

int open_userfaultfd() {
  const int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
  uffdio_api api{UFFD_API, 0, 0};
  if (fd >= 0 && ::ioctl(fd, UFFDIO_API, &api) == 0) return fd;
  std::printf("SKIP  pages that nobody supplies: userfaultfd says %s\n", std::strerror(errno));
  return -1;
}

UnsuppliedPage::UnsuppliedPage() {
  if (faults < 0) return;
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uffdio_register range{{reinterpret_cast<std::uint64_t>(page), 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
  if (page != MAP_FAILED && ::ioctl(faults, UFFDIO_REGISTER, &range) == 0) page_ = static_cast<std::byte*>(page);
}
void UnsuppliedPage::supply() {
  const uffdio_range range{reinterpret_cast<std::uint64_t>(page_), 4096};
  if (page_ != nullptr) ::ioctl(faults, UFFDIO_UNREGISTER, &range);
}
UnsuppliedPage::~UnsuppliedPage() {
  supply();
  if (page_ != nullptr) ::munmap(page_, 4096);
}

// Memory of the process: gone, forbidden, or behind a userfaultfd that nobody answers.
void raid_memory(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in = raid.intrude("memory");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  ++raid.attached;
  constexpr std::uint64_t bytes = 1 << 20;
  if (own.add(bytes, -1) == nullptr || own.add(bytes, -1) == nullptr || own.add(bytes, Property::sealed_file(bytes)) == nullptr) return;
  const uffdio_range unsupplied{reinterpret_cast<std::uint64_t>(own.memories[0].address), bytes};
  uffdio_register registration{unsupplied, UFFDIO_REGISTER_MODE_MISSING, 0};
  const bool held_up = faults >= 0 && ::ioctl(faults, UFFDIO_REGISTER, &registration) == 0;
  std::thread holder;
  if (held_up && dice.one_in(2)) {  // holds the lock of the arena's file while ranges of it come and go
    holder = std::thread([&] {
      [[maybe_unused]] const auto written = ::pwrite(in.descriptor(0), own.memories[0].address, 4096, 1 << 20);
    });
    for (int i = 0; i < 50 && !raid.over(); ++i, ++raid.blows)
      if (const auto cq = in.call<Request::create_cq>({own.context, 64, 0, 0})) (void)in.call<Request::destroy_cq>({cq->cq, 0});
  }
  if (dice.one_in(2)) {  // sleeps in the middle of it all; a child wakes it
    const pid_t self = ::getpid();
    const pid_t child = ::fork();
    if (child == 0) {
      ::usleep(200'000 + dice.below(300'000));
      ::kill(self, SIGSTOP);
      ::usleep(300'000);
      ::kill(self, SIGCONT);
      ::_exit(0);
    }
  }
  const std::uint64_t leave_ms = now_ms() + 1500;
  for (int i = 0; i < 4000 && !raid.over() && now_ms() < leave_ms && !in.expelled(); ++i, ++raid.blows) {
    strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    Memory& memory = own.memories[1];
    switch (dice.below(24)) {
      case 0: ::mprotect(memory.address + (dice.below(bytes) & ~4095u), 4096, PROT_NONE); break;
      case 1: ::mprotect(memory.address, bytes, PROT_READ | PROT_WRITE); break;
      case 2: ::munmap(memory.address + (dice.below(bytes) & ~4095u), 4096); break;
      case 3: ::mmap(memory.address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0); break;
      case 4: {
        OwnedQp& qp = dice.of(own.qps);
        own.change_state(qp, dice.one_in(2) ? 0 : 6);
        if (dice.one_in(2)) own.change_state(qp, 0), own.connect(qp, qp.made.qpn, 31);
        break;
      }
      case 5:
        if (dice.one_in(30)) in.put(static_cast<std::uint32_t>(Request::dereg_mr), 8, {}, 1);
        break;
      default: break;
    }
    pretend_to_poll(in, own);
  }
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
  if (held_up) ::ioctl(faults, UFFDIO_UNREGISTER, &unsupplied);
  if (holder.joinable()) holder.join();
}

// A thread that copies for the service as it likes: bytes that nobody wrote, answers that nobody asked for, twice, or never.
void raid_copies(Raid& raid) {
  Dice& dice = raid.dice;
  Intruder in = raid.intrude("copies");
  Property own(in);
  if (!in.attached() || !own.make()) return;
  constexpr std::uint64_t bytes = 1 << 18;
  std::uint64_t probe[2] = {dice.any(), 0};
  ReachProcessRequest ask{reinterpret_cast<std::uint64_t>(probe), ~probe[0]};  // a lie: what it sees is somebody else's memory
  if (dice.one_in(8)) ask.probe_address = dice.nasty();
  const UnsuppliedPage nowhere;
  if (dice.one_in(8) && nowhere.data() != nullptr) ask.probe_address = reinterpret_cast<std::uint64_t>(nowhere.data());
  std::vector<vmci::UniqueFd> given;
  const auto reply = in.call_on_socket<Request::reach_process>(ask, {}, &given);
  if (dice.one_in(2)) (void)in.call_on_socket<Request::reach_process>(ask);
  if (!reply || reply->way != reach_by_guest || given.size() != 1) return;
  own.reached = true;
  if (own.add(bytes, -1) == nullptr || own.add(bytes, -1) == nullptr) return;
  ++raid.attached;
  auto segment = vmci::Mapping::map(given[0].get(), 0, copying::segment_bytes, vmci::Writable::yes);
  if (!segment) return;
  std::byte* const base = segment->data();
  auto& header = *reinterpret_cast<copying::Header*>(base);
  vmci::RecordReader jobs(base + copying::jobs_offset, copying::job_slots);
  vmci::RecordWriter answers(base + copying::answers_offset, copying::answer_slots);
  const std::uint64_t leave_ms = now_ms() + 1500;
  const bool lazy = dice.one_in(8);  // never answers
  for (int i = 0; i < 4000 && !raid.over() && now_ms() < leave_ms && !in.expelled(); ++i, ++raid.blows) {
    if (dice.one_in(2)) strike_with_receive(raid, in, own);
    strike_with_wqe(raid, own);
    pretend_to_poll(in, own);
    if (dice.one_in(64)) {
      OwnedQp& qp = dice.of(own.qps);
      own.change_state(qp, 0), own.connect(qp, qp.made.qpn, 31);
    }
    header.guest.sleeping = dice.below(2);
    if (lazy) continue;
    alignas(64) std::byte record[copying::job_record_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    while (jobs.peek(record, copying::job_record_slots_max, slots) == vmci::RecordReader::Peek::ready) {
      jobs.advance(slots);
      std::uint64_t number;
      std::memcpy(&number, record, sizeof(number));
      if (dice.one_in(4)) dice.fill(std::span(base + copying::bounce_offset + dice.below(copying::slot_count * copying::bounce_bytes - 64), 64));
      answers.set_freed(answers.position());  // whether they were read or not
      answers.publish(dice.one_in(800) ? dice.nasty() : number, dice.one_in(16) ? static_cast<std::uint32_t>(dice.nasty()) : 0,
                      static_cast<std::uint32_t>(dice.any()) & control_user_mask, dice.one_in(800) ? 1 + dice.below(31) : 1);
      in.ring(reply->doorbell);
    }
    if (!dice.one_in(400)) continue;
    switch (dice.below(5)) {
      case 0: dice.fill(std::span(base + dice.below(copying::bounce_offset - 256), 256)); break;
      case 1: answers.publish(dice.below(1000), 0, 0, 1); break;  // to nothing
      case 2: ::fallocate(given[0].get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, copying::segment_bytes); break;
      case 3: {
        [[maybe_unused]] const int refused = ::ftruncate(given[0].get(), 0);
        break;
      }
      default: header.service.news = header.service.answers_taken = static_cast<std::uint32_t>(dice.any());
    }
    in.ring(reply->doorbell);
  }
}

}  // namespace vrdma::hostile
