// Finding the service: where it may listen, a connection to it, and what to say where none answers. private_service.hpp starts one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "vmci_channel/packet_socket.hpp"
#include "vrdma/result.hpp"

namespace vrdma::cli {

// Where a service may listen: $VRDMA_SOCKET alone if set; else the user's private one (private_folder.hpp), then the host's. The private one of a sandbox with a pid
// namespace of its own, and the same folder, is passed over by those outside: theirs is in a folder below, pid-INODE of their namespace.
constexpr const char* host_socket = "/run/vrdma/vrdmad.sock";
const char* named_socket();  // VRDMA_SOCKET; nullptr where it names nothing

// What the service keeps a program's queues in, sparse, unless it is configured otherwise: mapped by both, and a file for the limits of those.
constexpr std::uint64_t queues_bytes = std::uint64_t{1} << 30;
// The address space for that, and for a small program.
constexpr std::uint64_t address_space_least = queues_bytes + (std::uint64_t{128} << 20);

struct Service {
  std::string path;
  vmci::PacketSocket socket;  // holding it keeps a private service from leaving as idle
};

// Where to look: `wanted` alone if it is given, else as above.
std::vector<std::string> service_paths(const std::string& wanted);
enum class ChosenBy { user, search };
ChosenBy chosen_by(const std::string& wanted);  // the user: by that, or VRDMA_SOCKET
// A connection to the service there. Of private ones that the user has not chosen, ESRCH: it is in another pid namespace; EREMOTE: it is, or could be,
// somebody else's, who would be given the program's memory.
Result<Service> connect_to(const std::string& path, ChosenBy who);
// Whether it is one that `vrdma run` has started, for its own user.
bool is_private(const Service& service);
// A connection to the first service that answers. The error is that of the last path tried.
Result<Service> find_service(const std::string& wanted = {});
// Likewise; where none answers, also the private one that moves all data itself.
Result<Service> find_service_to_show(const std::string& wanted);
// What an error of find_service() says, and what to do about it; and the whole sentence, naming every path that was tried.
const char* service_error(int error);
const char* service_remedy(int error);
std::runtime_error unreachable(const std::string& wanted);

}  // namespace vrdma::cli
