// What a person may set: a JSON file, overridden by command line flags. Unknown keys and wrong types are refused by name.
// Read once at start.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/partitions.hpp"
#include "vmkernel_svc/hosts/settings.hpp"

namespace vrdma::svc {

// What is configured cannot be, or not beside what else there is: no time heals it, and who starts the service need not try again.
struct WrongConfiguration : std::runtime_error {
  using runtime_error::runtime_error;
};

struct Quota {  // of one tenant
  std::uint32_t guests = 1024;
  std::uint32_t objects = 1u << 20;              // PDs, MRs, CQs, SRQs, QPs, channels together
  std::uint64_t registered_bytes = 1ull << 42;
  std::uint64_t queue_bytes = 1ull << 34;        // arena memory in use
  std::uint32_t pieces = 1u << 21;               // that registrations consist of: 48 bytes of the service each
  std::uint32_t mappings = 8192;                 // chunks of 256 MiB of guests' files that the service has mapped
  std::uint32_t descriptors = 8192;              // of the service, on behalf of the tenant; at most a quarter of all it may have, or three where nobody else comes
  std::uint32_t memberships = 2048;              // of queue pairs in multicast groups; there are at most 8192 groups on a host
};

struct RemoteHost {  // a host of a configured subnet
  std::string name;
  std::string address;  // numeric IP
  std::uint16_t port = 28251;
  std::uint16_t lid_first = 0, lid_last = 0;
};

struct RemoteConfig {  // a subnet of hosts that is simply configured; no hosts: none
  std::string name;     // this host's
  std::string address;  // of this host, where the carrier listens and which it sends from
  std::uint16_t port = 28251;
  std::string secret_file;
  bool encrypt = false;  // payload to and from other hosts, which is authenticated in any case
  std::vector<RemoteHost> hosts;  // this one among them

  void check() const;
};

struct HcaSettings {  // the physical HCA that takes connections to other hosts
  std::string device;   // as the kernel names it; empty: the first with an active port
  std::uint8_t port = 0;  // 0: the first active one
  int gid_index = -1;   // -1: the one that suits best
  std::uint32_t mtu = 0;  // bytes, at most; 0: what the port has active
  std::uint8_t ack_timeout = 0;  // 4.096 µs × 2^n, at least, where a queue pair has less; 0: as it says
  std::string library;  // a libibverbs.so.1; empty: the system's
};

constexpr std::size_t socket_characters_max = 107;  // unix(7): what sun_path holds

constexpr std::uint32_t shards_max = 32;
std::uint32_t default_shards();  // one for every four processors, at least one

struct Config {
  std::string socket = "/run/vrdma/vrdmad.sock";
  std::uint32_t socket_mode = 0666;              // who may attach; the tenant is the peer's uid
  std::string link_layer = "infiniband";         // or "ethernet"; a guest may ask for the other
  std::uint32_t shards = default_shards();       // threads that run the engine
  std::string vm_folder;                         // of the virtual machines; empty: "vm" beside the socket
  std::string log_file;                          // empty: standard error
  std::string log_level = "info";                // trace, debug, info, warn, error, off
  std::uint64_t arena_bytes = 1ull << 30;        // per guest, sparse
  std::uint64_t machine_arena_bytes = 8ull << 20;  // of a process in a virtual machine: pinned in the machine's RAM
  std::uint32_t machine_keep_s = 600;            // how long a virtual machine that was saved may be away; 0: it is not waited for
  std::uint32_t lid_first = 1;                   // this host's block of LIDs
  std::uint32_t lid_count = 8192;
  std::uint32_t active_mtu = 4096;               // bytes: 256, 512, 1024, 2048, 4096
  std::uint8_t mtu() const { return static_cast<std::uint8_t>(std::bit_width(active_mtu) - 8); }  // enum ibv_mtu
  std::string process_memory = "auto";           // who copies what no file backs: "direct" the service, "guest" a thread of the guest
  std::string direct = "mediated";               // who moves the data of connections that allow it: "auto" the posting thread
  std::uint32_t idle_exit_s = 0;                 // leave when no guest has been attached for so long; 0: never
  bool one_user = false;                         // nobody else comes: the private service of `vrdma run` (flag only)
  int ready_fd = -1;                             // a byte is written there once the socket is served (flag only)
  Quota quota;
  RemoteConfig remote;
  hosts::Partitions partitions;                  // of tenants; where the hosts have managers, those know
  std::optional<hosts::Settings> hosts;          // who else is in the subnet; without it, nobody
  std::optional<HcaSettings> hca;                // without it, no HCA is used

  std::string machines_folder() const;

  // Applies the file at `path`. Throws std::runtime_error with a message for a person: which file, which key, what it wants.
  void read_file(const std::string& path);
  void read_text(const std::string& text, const std::string& origin);
  // Throws likewise where values contradict one another or are out of range.
  void check() const;
};

// Whether `peers`, where this host of that name is among them, have it where it listens; throws likewise.
void check_place_among_peers(const hosts::Settings& section, const std::string& name);

}  // namespace vrdma::svc
