// The addresses of a guest's virtual HCA and what a device query answers. GUIDs derive from the host's identity and the guest's
// name or number, and end in its LID.
#pragma once

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

// The subnet manager's: the last unicast LID (IBA 4.1.3), which guests would get last of all.
constexpr std::uint16_t subnet_manager_lid = 0xbfff;
std::uint64_t subnet_manager_guid();  // host order

// Of all that this host has. Host order.
std::uint64_t system_image_guid();

// Sets guid and the GID table from guest.name, id, lid and link_layer.
void assign_addresses(Guest& guest);
// The GID table that follows from the others.
std::array<control::GidEntry, 16> gids_of(std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer);
// Every GID of ours ends in its port's LID: no table leads from one to the other. dgid: 16 bytes.
inline std::uint16_t lid_of(const std::uint8_t* dgid) { return static_cast<std::uint16_t>(dgid[14] << 8 | dgid[15]); }
// A multicast group's, the same on every host.
constexpr std::uint16_t first_multicast_lid = 0xc000;
std::uint16_t multicast_lid(const Gid& group);
control::DeviceReply device_reply(const Guest& guest, const Config& config, std::uint32_t generation);

}  // namespace vrdma::svc
