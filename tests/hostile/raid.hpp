// What a hostile guest does with its time: a raid attaches, makes real objects and strikes until it is thrown out or has struck
// often enough; hostile_guest.cpp starts raids until the time is over. One thread.
#pragma once

#include "tests/hostile/property.hpp"

namespace vrdma::hostile {

struct Raid {
  std::string path;
  Dice dice;
  std::uint64_t until_ms;
  std::uint64_t number = 0;  // of this guest among the test's
  std::uint64_t attached = 0, blows = 0;
  test::FakeMachine* machine = nullptr;  // whose process it is to be; nullptr: a process of this host
  Intruder intrude(const char* name) { return machine != nullptr ? Intruder(*machine, name) : Intruder(path, name); }
  bool over() const { return now_ms() >= until_ms; }
};

void raid_rings(Raid& raid);        // raid_queues.cpp
void raid_events(Raid& raid);
void raid_control(Raid& raid);      // raid_requests.cpp
void raid_socket(Raid& raid);
void raid_flood(Raid& raid);
void raid_descriptors(Raid& raid);  // raid_memory.cpp
void raid_memory(Raid& raid);
void raid_copies(Raid& raid);
void raid_machine_bar(Raid& raid);  // raid_machine.cpp
void raid_machine_frames(Raid& raid);
void raid_machine_bells(Raid& raid);
void raid_machine_rings(Raid& raid);

// A userfaultfd that holds up the kernel too, opened before privileges go: what a guest without any does by FUSE. -1: none.
extern int faults;
int open_userfaultfd();
// A page that nobody supplies before it is told to or ends; without a userfaultfd there is none.
class UnsuppliedPage {
 public:
  UnsuppliedPage();
  ~UnsuppliedPage();
  void supply();
  UnsuppliedPage(const UnsuppliedPage&) = delete;
  UnsuppliedPage& operator=(const UnsuppliedPage&) = delete;
  std::byte* data() const { return page_; }

 private:
  std::byte* page_ = nullptr;
};

// Something like a WQE: mostly right, with a field or two that is not (raid_queues.cpp).
void strike_with_wqe(Raid& raid, Property& own);
void strike_with_receive(Raid& raid, Intruder& in, Property& own);

// Reads completions in the only way that matters to the service: says that all are taken.
inline void pretend_to_poll(Intruder& in, Property& own) {
  for (const auto& cq : own.cqs) reinterpret_cast<CqShared*>(in.arena() + cq.offset)->consumed += 64;
}

}  // namespace vrdma::hostile
