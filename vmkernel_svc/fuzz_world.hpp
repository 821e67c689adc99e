// The service without sockets and threads, for the fuzz targets: a shard that is turned by hand, a victim that minds its own
// business, and whatever guests the target lets in. One for the whole process; every input starts and ends with the victim alone.
//
// check() is the verdict: nothing of the victim has changed, and whoever left has given back all that the service keeps count of.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/engine/fuzz_input.hpp"
#include "vmkernel_svc/packet_desk.hpp"

namespace vrdma::svc {

class FuzzWorld {
 public:
  static FuzzWorld& instance();
  FuzzWorld(const FuzzWorld&) = delete;
  ~FuzzWorld();

  Shard& shard() { return shard_; }
  ControlDesk& desk() { return desk_; }
  PacketDesk& packets() { return packets_; }

  Guest* find(std::uint32_t id);
  // Another guest, of a tenant of its own; nullptr where the service refuses it.
  Guest* attach(const control::AttachRequest& request);
  void turn(int times);

  // Steps that an input may take with a guest, each as its header in fuzz_world.cpp says.
  void step_request(Guest& guest, FuzzInput& input);
  void step_work_request(Guest& guest, FuzzInput& input);
  void step_scribble(Guest& guest, FuzzInput& input);
  void step_doorbell(Guest& guest, FuzzInput& input);

  // While the others are still there: the victim's datagrams find their way.
  void check_routes();
  // All other guests must be gone.
  void check();

 private:
  struct Counts {
    std::size_t guests, regions, qpns, groups, pairs, jobs;
    bool operator==(const Counts&) const = default;
  };
  FuzzWorld();
  Counts counts();
  template <control::Request R>
  typename control::Message<R>::ReplyBody ask(Guest& guest, const typename control::Message<R>::RequestBody& body);
  std::uint32_t bring_up(std::uint32_t pd, std::uint32_t cq, engine::QpType type);
  void put(Guest& guest, std::uint64_t tag, std::uint32_t word, std::uint32_t user, std::uint32_t slots, std::span<const std::byte> rest);
  void name_connections(Guest& guest, control::Request request, std::span<std::byte> body);
  void name_management(Guest& guest, control::Request request, std::span<std::byte> body);
  std::uint32_t qpn(Guest& guest, std::uint32_t from_input);
  std::uint16_t lid(Guest& guest, std::uint16_t from_input);
  std::uint32_t key(Guest& guest, std::uint32_t from_input);

  Config config_;
  control::ServicePage service_page_{};
  Shard shard_;
  ControlDesk desk_;
  vmci::Segment page_;
  PacketDesk packets_;
  Guest* victim_ = nullptr;
  QueuePair* victim_rc_ = nullptr;
  QueuePair* victim_ud_ = nullptr;
  std::uint32_t victim_key_ = 0;
  vmci::Segment victim_memory_;
  std::vector<std::byte> victim_arena_;  // as it has to stay
  Counts alone_{};
  Tenant victim_tenant_{};
};

constexpr uid_t guest_uid = 1001;  // of all who are not the victim

// The victim's memory has this in every byte.
constexpr std::byte victim_byte{0xa5};

// Like assert(), in every build.
void fuzz_require(bool holds, const char* what);

}  // namespace vrdma::svc
