// Finding the host service, and starting a private one where there is none.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "vmci_channel/packet_socket.hpp"
#include "vrdma/result.hpp"

namespace vrdma::cli {

// Where a service may listen: $VRDMA_SOCKET alone if set; else the user's private one, then the host's. The private one of a sandbox with a pid
// namespace of its own, and the same folder, is passed over by those outside: theirs is in a folder below, pid-INODE of their namespace.
std::string private_socket();                      // $XDG_RUNTIME_DIR/vrdma/vrdmad.sock or /tmp/vrdma-UID/vrdmad.sock
constexpr const char* host_socket = "/run/vrdma/vrdmad.sock";

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
bool is_chosen(const std::string& wanted);  // by that, or VRDMA_SOCKET
// A connection to the service there. ESRCH: a private one in another pid namespace, which nobody has chosen.
Result<Service> connect_to(const std::string& path, bool chosen);
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
// As find_service(), starting a private vrdmad if none answers. Throws std::runtime_error with a message for a person.
Service find_or_start_service();
// The private vrdmad that offers no direct mode, beside the other one. Throws likewise, and where VRDMA_SOCKET names another service.
Service find_or_start_mediated_service();

// Beside this program: ../lib/libvrdma.so in the build tree, the installed place otherwise. Throws when it is in neither.
std::string library_path();
std::string program_path(const std::string& name);
// A path to `library` that LD_PRELOAD can hold, which has no quoting: where its folder's name has a blank, a link in the private
// folder. Throws when there is no such path.
std::string preloadable(const std::string& library);

}  // namespace vrdma::cli
