// The P_Keys of tenants on this host: a table for each, which its guests' ports show, and from which a queue pair has its key by
// pkey_index. Keys are compared where a peer is looked up (MediatedPorts), and what was found is forgotten when a table changes:
// a message costs nothing.
//
// Used by the shard's thread only.
#pragma once

#include "vmkernel_svc/hosts/partitions.hpp"

namespace vrdma::svc {

class Fabric;
class Shard;
struct Tenant;

// True: its table is another than before.
bool give_pkeys(const Fabric& fabric, Tenant& tenant);
// Who is in which partition from now on. Guests whose table changes are told by an event; connections between those who have no
// partition in common any more are silent from here on, as if the switch dropped their packets.
void use_partitions(Shard& shard, const hosts::Partitions& partitions);

}  // namespace vrdma::svc
