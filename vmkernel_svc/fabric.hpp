// Everything that the guests of one host are to each other: who has which address and QPN, which key names what, who is in
// which multicast group. Shards read it in their turns, and change it alone (turnstile.hpp), unless a member says otherwise.
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "vmkernel_svc/config.hpp"
#include "vmkernel_svc/hosts/state.hpp"
#include "vmkernel_svc/lids.hpp"
#include "vmkernel_svc/memory/pending_jobs.hpp"
#include "vmkernel_svc/memory/region.hpp"
#include "vmkernel_svc/numbers.hpp"
#include "vmkernel_svc/objects.hpp"
#include "vmkernel_svc/shards.hpp"
#include "vmkernel_svc/vmci_switch.hpp"

namespace vrdma::hosts {
class Service;
}

namespace vrdma::svc {

// What the ports ask of the shard that runs them.
class Runner {
 public:
  virtual std::uint32_t number() const = 0;
  virtual void make_runnable(MediatedPorts::Qp& qp) = 0;
  virtual void set_timer(MediatedPorts::Qp& qp, std::uint64_t at_ns) = 0;
  virtual void overran(CompletionQueue& cq) = 0;
  // Whether the receive queue of a UD queue pair is the service's for this turn. False: somebody else delivers there just now.
  virtual bool owns_inbox(QueuePair& qp) = 0;
  // The receiver's guest is another shard's: they are to be one's after this turn, and the sender to be run again.
  virtual void bring_together(MediatedPorts::Qp& sender, QueuePair& receiver) = 0;
  // Memory windows are everybody's to look up: the BIND_MW or LOCAL_INV that `qp` is at is carried out after this turn, and `qp` run again.
  virtual void change_window(MediatedPorts::Qp& qp) = 0;

 protected:
  ~Runner() = default;
};

// A virtual machine of this host, for those who ask.
struct MachineStatus {
  std::string name;
  uid_t tenant;
  const char* state;  // waiting (for QEMU), connected (QEMU is), attached (its agent is), paused, suspended (saved, its QEMU gone)
  std::uint64_t ram_bytes;
  std::size_t processes;
  std::string version;  // of its agent
  std::uint64_t bar_bytes;  // of a machine whose RAM is its own: what is lent is of its BAR; 0: of its RAM
};

// What names an XRC domain that programs of a tenant share: a file, as their kernel knows it.
struct XrcFile {
  std::uint32_t tenant;
  std::string machine;  // "": this host
  std::uint32_t user;   // in the machine
  std::uint64_t device, inode;
  auto operator<=>(const XrcFile&) const = default;
};

class FarDesk;
class ConnectionManager;
class Management;

class Fabric {
 public:
  Fabric(const Config& config_in, Shards& shards_in);
  ~Fabric();

  const Config& config;
  Shards& shards;

  std::unordered_map<std::uint32_t, std::unique_ptr<Guest>> guests;  // by VMCI context id
  Guest* guest(GuestId id) const {  // nullptr: it has gone
    const auto found = guests.find(id.value);
    return found == guests.end() ? nullptr : found->second.get();
  }
  Numbers guest_numbers{control::host_context + 1, ~std::uint32_t{0} - 1};  // their ids; not VMADDR_CID_ANY
  std::deque<DepartedGuest> departed;  // the last 256, newest first
  std::map<uid_t, Tenant> tenants;
  // All tenants' mappings and parts of arenas. The kernel allows a process so many (vm.max_map_count), and the service needs some itself:
  // without any left it does not survive a bus error (BusGuard). One tenant may have half of them in arenas.
  std::uint64_t mappings = 0;
  const std::uint64_t mappings_max;
  bool has_room_for_arena(const Tenant& tenant, std::uint64_t parts) const {
    return tenant.arena_parts + parts <= mappings_max / 2 && mappings + parts <= mappings_max;
  }
  RegionTable regions;
  boost::unordered_flat_map<std::uint32_t, QueuePair*> by_qpn;
  std::map<Gid, std::map<std::uint32_t, QueuePair*>> multicast;  // members by their numbers, in whose order they get a datagram (multicast_peer)
  std::map<XrcFile, std::weak_ptr<XrcDomain>> xrc_domains;  // that a file names
  VmciSwitch vmci{*this};
  std::unique_ptr<ConnectionManager> cm;
  std::unique_ptr<Management> management;

  // Changes whenever a queue pair appears, vanishes, or is connected elsewhere: what was found before must be found again.
  std::uint64_t topology_generation = 1;
  std::uint64_t next_pd = 1;
  PendingJobs<MediatedPorts::Qp> jobs;
  PendingJobs<MediatedPorts::Qp> waiting;  // who wants one of a worker that has no room
  std::vector<MachineStatus> machines;  // as the server said last
  hosts::Partitions partitions = config.partitions;  // as the subnet has them, or this host alone (pkeys.hpp)
  std::string host_name = config.remote.name;        // by which they know this host
  Lids lids{config.lid_first, config.hosts ? 0 : config.lid_count};
  std::uint32_t device_generation = 1;               // ServicePage::device_generation
  FarDesk* far = nullptr;               // where there are other hosts
  std::shared_ptr<const hosts::Service> hosts;  // nullptr: alone

  std::uint32_t new_qpn();
  bool may_give_lids() const;
  std::uint16_t new_lid(uid_t uid);  // 0: none left for this user, or none may be given now
  // Where the LIDs are leased (hosts/): which they are, and whether the lease stands. What was given stays given.
  void lease_lids(hosts::LidRange leased, bool may_give);

  // Whether an address vector leads to that guest, or that port: by LID on InfiniBand, by GID on Ethernet or where no LID is given.
  static bool leads_to(const Guest& guest, std::uint32_t sender_link_layer, std::uint16_t dlid, bool global, const std::uint8_t* dgid) {
    return leads_to(guest.lid, guest.gids, sender_link_layer, dlid, global, dgid);
  }
  static bool leads_to(std::uint16_t lid, const std::array<control::GidEntry, 16>& gids, std::uint32_t sender_link_layer,
                       std::uint16_t dlid, bool global, const std::uint8_t* dgid);

 private:
  std::uint32_t next_qpn_ = 0x11;
  bool may_give_lids_ = !config.hosts;
};

}  // namespace vrdma::svc
