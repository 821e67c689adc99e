#include "cli/service.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/private_folder.hpp"
#include "cli/query.hpp"
#include "vmci_channel/own_folder.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {

// Whether a private service is in a pid namespace (a sandbox's, a container's) that this process is outside of: it ends with that, and does not see
// processes here. One of which that cannot be told is ours.
bool is_apart(const Service& service) {
  const auto peer = service.socket.peer();
  const ino_t here = pid_namespace("self");
  if (!peer || here == 0 || service.path == host_socket || service.path.ends_with(socket_in(fmt::format("/pid-{}", here)))) return false;
  if (peer->pid > 0) {
    const ino_t there = pid_namespace(std::to_string(peer->pid));
    return there != 0 && there != here;
  }
  try {  // above us, as that of a sandbox's caller, or beside us
    return !query(service).at("service").value("sees_caller", true);
  } catch (const std::exception&) {
    return false;
  }
}

// Whether a private service would be somebody else's. Its name below /tmp is anybody's to take, the one for where the first is taken, too.
bool is_foreign_folder(const std::string& socket) {
  const std::string folder = fs::path(socket).parent_path();
  struct stat status;
  return ::lstat(folder.c_str(), &status) == 0 && !vmci::is_own_folder(folder);
}

}  // namespace

const char* named_socket() {
  const char* const named = std::getenv("VRDMA_SOCKET");
  return named != nullptr && *named != '\0' ? named : nullptr;
}

bool is_private(const Service& service) {
  for (const auto& folder : {private_folder(), mediated_folder()})
    for (const auto& path : private_sockets(folder))
      if (service.path == path) return true;
  return false;
}

std::vector<std::string> service_paths(const std::string& wanted) {
  if (!wanted.empty()) return {wanted};
  if (const char* const named = named_socket()) return {named};
  auto paths = private_sockets(private_folder());
  paths.push_back(host_socket);
  return paths;
}

ChosenBy chosen_by(const std::string& wanted) { return !wanted.empty() || named_socket() != nullptr ? ChosenBy::user : ChosenBy::search; }

Result<Service> connect_to(const std::string& path, ChosenBy who) {
  const bool is_found_private = who == ChosenBy::search && path != host_socket;
  if (is_found_private && is_foreign_folder(path)) return Errno{EREMOTE};
  auto socket = vmci::PacketSocket::connect(path);
  if (!socket) {  // any other file refuses like a socket that nobody serves, or that is not for this user
    std::error_code missing;
    const auto type = fs::status(path, missing).type();
    return type == fs::file_type::regular || type == fs::file_type::directory ? Errno{ENOTSOCK} : socket.error();
  }
  if (is_found_private && !vmci::is_own_or_roots(*socket)) return Errno{EREMOTE};
  Service service{path, std::move(*socket)};
  if (who == ChosenBy::search && is_apart(service)) return Errno{ESRCH};
  return service;
}

Result<Service> find_service(const std::string& wanted) {
  Errno last{ENOENT};
  for (const auto& path : service_paths(wanted)) {
    auto found = connect_to(path, chosen_by(wanted));
    if (found) return found;
    last = found.error();
  }
  return last;
}

Result<Service> find_service_to_show(const std::string& wanted) {
  auto found = find_service(wanted);
  if (!found && chosen_by(wanted) == ChosenBy::search)
    for (const auto& path : private_sockets(mediated_folder()))
      if (auto mediated = connect_to(path, ChosenBy::search)) return mediated;
  return found;
}

const char* service_error(int error) {
  switch (error) {
    case ESRCH:
      return "which is in another pid namespace";
    case EREMOTE:
      return "whose folder is not one that only you can write";
    default:
      return std::strerror(error);
  }
}

const char* service_remedy(int error) {
  switch (error) {
    case ESRCH:
      return "\"vrdma run\" starts one beside it, for programs here";
    case EREMOTE:
      return "remove that folder, or set XDG_RUNTIME_DIR to a folder of yours";
    case ENOENT:
    case ECONNREFUSED:
      return "start vrdmad, or use \"vrdma run\"";
    case EACCES:
    case EPERM:
      return "its permissions do not admit this user; see \"socket_mode\" in vrdmad.conf(5)";
    case EAFNOSUPPORT:
      return "this program may have no Unix sockets: its unit's RestrictAddressFamilies needs AF_UNIX";
    case ENAMETOOLONG:
      return "a socket's path has at most 107 characters";
    case EPROTOTYPE:
    case ENOTSOCK:
      return "that is not a socket of vrdmad; check the path";
    case EAGAIN:
      return "too many are waiting to attach; try again";
    default:
      return "check the path";
  }
}

std::runtime_error unreachable(const std::string& wanted) {
  std::string tried;
  int last = ENOENT;
  for (const auto& path : service_paths(wanted)) {
    const auto service = connect_to(path, chosen_by(wanted));
    const int error = service ? EAGAIN : value(service.error());
    if (tried.empty() || error != ENOENT) last = error;  // the remedy is that of the path which exists
    tried += fmt::format("{}{} ({})", tried.empty() ? "" : " or ", path, service_error(error));
  }
  return std::runtime_error(fmt::format("cannot reach the host service at {}: {}", tried, service_remedy(last)));
}

}  // namespace vrdma::cli
