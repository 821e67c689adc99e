// What hosts say to one another: JSON objects, one a frame. Anything that decode() returns is bounded and well formed; who may say
// it, and whether it is true, is for the receiver to judge.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "vmkernel_svc/hosts/state.hpp"

namespace vrdma::hosts {

constexpr std::uint32_t protocol_major = 1, protocol_minor = 1;  // 1: partitions
constexpr std::size_t frame_bytes_max = 8u << 20;         // a subnet of tens of thousands of hosts
constexpr std::size_t first_frame_bytes_max = 64u << 10;  // of somebody who has not said hello
constexpr std::size_t managers_max = 15;

struct Endpoint {
  std::string name, address;
  std::uint16_t port = 0;
  bool operator==(const Endpoint&) const = default;
};
std::vector<std::string> names_of(const std::vector<Endpoint>& managers);
std::string listed(std::vector<Endpoint> managers);  // by name: for people, and to see whether two lists are the same

// The first of each side on a connection.
struct Hello {
  std::uint32_t major = protocol_major, minor = protocol_minor;
  std::string version;  // of the program, for people
  std::string name;     // must be that of the certificate
  std::string run;      // a number of this process: two with one name are two hosts
  std::string address;  // where it listens; empty: a tool
  std::uint16_t port = 0, carrier_port = 0;
  std::vector<Endpoint> managers;  // who leads the subnet, as it knows them
  bool manages = false;            // it is one of them
};
struct Ping { std::uint64_t sequence = 0; };
struct Pong { std::uint64_t sequence = 0; };
struct Goodbye { std::string why; };

// A tool of another host asks to be called back at its host's own port.
struct Probe { std::string address; std::uint16_t port = 0; };
struct Probed { std::string error; };  // empty: it was reached
// An administrator's: take a host out of the subnet, and let nobody in by that certificate (empty: none is known), even if nobody came with it yet.
struct Remove { std::string name, serial = {}; };
struct RemoveReply { std::string error, leader; std::uint16_t port = 0; };  // leader: the address of who can do it
// An administrator's: who is in a partition. No `members` to take out: the whole partition goes. `pkey` 0: only to be told.
struct ChangePartition { std::uint16_t pkey = 0; bool add = false; std::vector<Membership> members; };
constexpr const char* no_leader = "the subnet has no leader now: a majority of its managers must run";  // error of these, perhaps for some seconds
struct PartitionsReply { std::string error, leader; std::uint16_t port = 0; Partitions partitions; };

// Consensus of the managers (consensus.hpp). `blank`: the number of one that has no state; 0: it has one, or is older than such numbers.
// `origin`: the number of the subnet that it belongs to; 0: not known to it. None in an AppendReply: it is older than such numbers.
struct VoteRequest { std::uint64_t term = 0; StateId last; bool trial = false; std::uint64_t origin = 0; };
struct VoteReply { std::uint64_t term = 0; bool granted = false, trial = false; std::uint64_t blank = 0, origin = 0; };
struct Append { std::uint64_t term = 0, sequence = 0; std::optional<Delta> delta; std::uint64_t blank = 0, origin = 0; };  // blank: whom alone it makes one that has
struct AppendReply { std::uint64_t term = 0, sequence = 0; StateId at; std::uint64_t blank = 0; std::optional<std::uint64_t> origin = {}; };

// Members and the manager that leads (member.hpp, manager.hpp).
struct Renew {
  std::uint64_t sequence = 0;
  std::string run, address;
  std::uint16_t port = 0, carrier_port = 0, lids_wanted = 0;
  LidRange held = no_lids;  // what it had before, by its own file
  StateId known;            // which state of the subnet it has
};
struct Lease { std::uint64_t sequence = 0; std::uint32_t lease_ms = 0; LidRange lids = no_lids; Delta news; };
struct Refused { std::uint64_t sequence = 0; std::string why; };
struct Redirect { std::uint64_t sequence = 0; std::string leader; };  // empty: there is none now

using Message = std::variant<Hello, Ping, Pong, Goodbye, Probe, Probed, Remove, RemoveReply, ChangePartition, PartitionsReply, VoteRequest, VoteReply, Append, AppendReply, Renew, Lease,
                             Refused, Redirect>;

std::string encode(const Message& message);
// nullopt: not a message of this protocol, with the reason.
std::optional<Message> decode(std::string_view text, std::string& why);

// A Delta as JSON text: what the file has, too.
std::string encode(const Delta& delta);
std::optional<Delta> decode_delta(std::string_view text, std::string& why);

}  // namespace vrdma::hosts
