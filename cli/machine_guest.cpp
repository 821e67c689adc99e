#include "cli/machine_guest.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "cli/service.hpp"
#include "vrdma/vm_device.hpp"

namespace vrdma::cli {

bool served_by_agent(const std::string& socket) {
  const auto connection = vmci::PacketSocket::connect(socket);
  if (!connection) return false;
  const auto peer = connection->peer();
  return peer && vm::word_in(fmt::format("/proc/{}/comm", peer->pid)) == "vrdma-guestd";
}

namespace {

// As far as this user may see.
bool agent_runs() {
  std::error_code error;
  for (std::filesystem::directory_iterator at("/proc", error), end; !error && at != end; at.increment(error))
    if (vm::word_in(at->path() / "comm") == "vrdma-guestd") return true;
  return false;
}

}  // namespace

Apart apart_from_host(const std::string& socket) {
  constexpr const char* cost = "programs here reach one another, not the host nor its other machines";
  const std::string device = vm::device_seen();
  if (device.empty() || served_by_agent(socket)) return {};
  if (served_by_agent(host_socket))
    return {fmt::format("{} is in front of vrdma-guestd: {}", socket, cost), "end the programs that use it: it leaves ten seconds after the last"};
  return {fmt::format("this machine has {}, and vrdma-guestd does not serve it: {}", device, cost),
          agent_runs() ? "vrdma-guestd runs, and its host does not answer: see \"vrdma vm list\" there, and here as root \"journalctl -u vrdma-guestd\""
                       : "as root: systemctl start vrdma-guestd, or vrdma-guestd &"};
}

bool is_virtual() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("flags")) return (line + ' ').find(" hypervisor ") != std::string::npos;
  return false;
}

}  // namespace vrdma::cli
