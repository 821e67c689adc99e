#include "vmkernel_svc/machines/machines.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "vmci_channel/own_folder.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/machines/keeper.hpp"
#include "vmkernel_svc/machines/plain.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string place_of(const std::string& folder) {
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // it was named with a slash at its end
  return path.parent_path();
}

std::string distrust(const std::string& path) {
  return fmt::format("{} is not looked at: others than root and user {}, as whom this service runs, have made it or can write it; if it is meant, give it to one of them, "
                     "and chmod go-w", path, ::geteuid());
}

// Throws std::runtime_error with a message for a person.
MachineSpec read_spec(const fs::path& folder) {
  for (const fs::path& path : {folder, folder / "vm.json"})
    if (!vmci::is_ours_or_roots(path)) throw std::runtime_error(distrust(path));
  const fs::path file = folder / "vm.json";
  const auto refuse = [&](const std::string& what) { return std::runtime_error(fmt::format("{}: {}", file.string(), what)); };
  std::ifstream in(file);
  if (!in) throw refuse("cannot be read");
  MachineSpec spec{folder.filename(), folder, "", ::geteuid()};
  try {
    const json document = json::parse(in);
    for (const auto& [key, value] : document.items()) {
      if (key == "ram") spec.ram = value.get<std::string>();
      else if (key == "tenant") spec.tenant = value.get<uid_t>();
      else if (key == "plain") spec.plain = value.get<bool>();
      else if (key == "vectors") spec.vectors = value.get<std::uint32_t>();
      else if (key == "bar_bytes") spec.bar_bytes = value.get<std::uint64_t>();
      else throw refuse(fmt::format("unknown key \"{}\": known are bar_bytes, plain, ram, tenant, vectors", key));
    }
  } catch (const json::exception& error) {
    throw refuse(error.what());
  }
  if (spec.bar_bytes != 0 && (!std::has_single_bit(spec.bar_bytes) || spec.bar_bytes < vm::lent_bar_bytes_min || spec.bar_bytes > vm::lent_bar_bytes_max))
    throw refuse(fmt::format("\"bar_bytes\" must be a power of two from {} to {}", vm::lent_bar_bytes_min, vm::lent_bar_bytes_max));
  if (spec.bar_bytes != 0 && !spec.ram.empty()) throw refuse("\"bar_bytes\" is of a machine whose RAM is its own: it has no \"ram\"");
  if (spec.ram.empty() ? !spec.plain && spec.bar_bytes == 0 : spec.ram.front() != '/') throw refuse("\"ram\" must be the path of the file that is the machine's RAM, from / on");
  if (spec.vectors < vm::fixed_vectors || spec.vectors > vm::vectors_max) throw refuse(fmt::format("\"vectors\" must be from {} to {}", vm::fixed_vectors, vm::vectors_max));
  return spec;
}

}  // namespace

Machines::Machines(std::string folder, MachinePort::Service service)
    : folder_(std::move(folder)), service_(std::move(service)), changes_(service_.io) {
  vmci::UniqueFd notices(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  boost::system::error_code error;
  if (!notices || changes_.assign(notices.get(), error)) {
    log::warn("cannot watch {} (out of inotify instances?): machines added later are not seen", folder_);
  } else {
    notices.release();
    await_changes();
  }
  if (const std::string holder = hold(); !holder.empty())
    throw std::runtime_error(fmt::format("{} is served already, by {}: stop that vrdmad, or give another --vm-folder", folder_, holder));
  look();
}

Machines::~Machines() { stop_watching(changes_); }

std::vector<MachineStatus> Machines::status() const {
  std::vector<MachineStatus> all;
  for (const auto& [name, port] : ports_) all.push_back(port->status());
  return all;
}

bool Machines::any_running() const {
  return std::any_of(ports_.begin(), ports_.end(), [](const auto& port) { return port.second->running(); });
}

// Where the place that it is in is others' to write, they could put another one there while we look.
bool Machines::is_trusted() const { return vmci::is_ours_or_roots(folder_) && vmci::others_keep_ours_in(place_of(folder_)); }

// The folder, each machine's, and, as long as there is none that is looked at, the place where it would appear.
void Machines::watch() {
  if (!changes_.is_open()) return;
  const auto add = [this](const fs::path& path, std::uint32_t what) {
    return ::inotify_add_watch(changes_.native_handle(), path.c_str(), what | IN_ONLYDIR);
  };
  std::error_code error;
  if (!fs::is_directory(folder_, error) || !is_trusted()) beside_ = add(fs::path(folder_).parent_path(), IN_CREATE | IN_MOVED_TO | IN_ATTRIB);
  if (!fs::is_directory(folder_, error) || !is_trusted()) return;
  own_ = add(folder_, IN_CREATE | IN_MOVED_TO | IN_DELETE | IN_MOVED_FROM | IN_ATTRIB);
  for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
    std::error_code missing;
    if (at->is_directory(missing)) add(at->path(), IN_CLOSE_WRITE | IN_MOVED_TO | IN_DELETE | IN_MOVED_FROM | IN_ATTRIB);
  }
}

void Machines::await_changes() {
  changes_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (error) return;
    if (take_changes()) look();
    await_changes();
  });
}

// Whether they concern machines: what else happens beside a folder that is not there yet is not looked into.
bool Machines::take_changes() {
  const std::string name = fs::path(folder_).filename();
  bool concerned = false;
  alignas(inotify_event) std::array<char, 4096> events;
  for (ssize_t got; (got = ::read(changes_.native_handle(), events.data(), events.size())) > 0;)
    for (ssize_t at = 0; at < got;) {
      const auto* const event = reinterpret_cast<const inotify_event*>(events.data() + at);
      // Whose a machine's sockets are we say ourselves.
      const bool by_us = (event->mask & IN_ATTRIB) != 0 && event->wd != own_ && event->wd != beside_ && (event->len == 0 || std::strcmp(event->name, "vm.json") != 0);
      concerned |= !by_us && (event->wd != beside_ || (event->len != 0 ? name == event->name : (event->mask & IN_ATTRIB) != 0) || (event->mask & IN_Q_OVERFLOW) != 0);
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  return concerned;
}

// The lock is that of an open file, which ends with the process that has it, however that ends.
std::string Machines::hold() {
  struct stat status;
  if (held_ && ::fstat(held_.get(), &status) == 0 && status.st_nlink != 0) return "";
  held_.reset();  // of a folder that somebody has removed
  std::error_code error;
  if (!fs::is_directory(folder_, error) || !is_trusted()) return "";
  const std::string path = folder_ + "/.vrdmad";
  const auto doubt = [&](const char* what, const char* consequence) {
    const std::string text = fmt::format("cannot {} {} ({}): {}", what, path, std::strerror(errno), consequence);
    if (auto& known = complaints_["."]; known != text) log::warn("{}", known = text);
    return "";
  };
  constexpr const char* unnoticed = "another vrdmad that serves the same folder would not be noticed";
  vmci::UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return doubt("open", unnoticed);
  std::array<char, 32> text{};
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return doubt("lock", unnoticed);
    // Who has it may be about to write.
    [[maybe_unused]] const auto got = ::pread(file.get(), text.data(), text.size() - 1, 0);
    const std::string pid(text.data(), std::strspn(text.data(), "0123456789"));
    return pid.empty() ? "another process" : "process " + pid;
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(file.get(), 0) != 0 || ::pwrite(file.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size()))
    doubt("write", "who finds it locked does not learn by whom");
  held_ = std::move(file);
  return "";
}

void Machines::look() {
  watch();  // first: what changes from here on is noticed
  if (const std::string holder = hold(); !holder.empty()) {
    if (auto& known = complaints_["."]; known != holder) log::warn("{} is served already, by {}: no machine of it is served here", folder_, known = holder);
    return;
  }
  std::error_code error;
  if (fs::is_directory(folder_, error) && !is_trusted()) {
    const std::string text = distrust(vmci::is_ours_or_roots(folder_) ? place_of(folder_) : folder_) + "; the machines in it are not served";
    if (auto& known = complaints_["."]; known != text) log::warn("{}", known = text);
    return;
  }
  std::set<std::string> there;
  for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    std::error_code missing;
    if (!fs::exists(at->path() / "vm.json", missing)) continue;
    there.insert(name);
    try {
      const MachineSpec spec = read_spec(at->path());
      const auto found = ports_.find(name);
      if (found != ports_.end() && found->second->spec() == spec) continue;
      if (found != ports_.end()) {
        const uid_t tenant = found->second->spec().tenant;
        ports_.erase(found);
        Keeper(folder_).drop(Keeper::name_of(name, tenant));
      }
      ports_.emplace(name, std::make_unique<MachinePort>(spec, service_));
      complaints_.erase(name);
      log::info("machine {}: served at {}/{}", name, spec.folder, spec.plain ? Plain::bar_name : "ivshmem.sock");
    } catch (const std::exception& failure) {
      // A machine that runs goes on as it is.
      if (auto& known = complaints_[name]; known != failure.what()) log::warn("{}", known = failure.what());
    }
  }
  // Who is not seen, as no descriptor is left to look with, is not removed.
  if (error && error != std::errc::no_such_file_or_directory) {
    const std::string text = fmt::format("cannot read {} ({}): machines that were removed are served on", folder_, error.message());
    if (auto& known = complaints_["."]; known != text) log::warn("{}", known = text);
    return service_.changed();
  }
  for (auto port = ports_.begin(); port != ports_.end();) {
    if (there.contains(port->first)) {
      ++port;
      continue;
    }
    log::info("machine {}: removed", port->first);
    const std::string folder = port->second->spec().folder;
    const std::string kept_as = Keeper::name_of(port->first, port->second->spec().tenant);
    port = ports_.erase(port);
    Keeper(folder_).drop(kept_as);
    fs::remove(folder + "/" + Plain::bar_name, error);
    fs::remove(folder, error);  // if nothing of anybody else is in it
  }
  service_.changed();
}

}  // namespace vrdma::svc
