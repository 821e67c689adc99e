#include "cli/vm_folder.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

#include "cli/fail.hpp"
#include "vmci_channel/file_system.hpp"
#include "vrdma/write_all.hpp"

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;

std::string remedy(int error) {
  switch (error) {
    case EACCES:
    case EPERM:
    case EROFS:
      return "machines are added and removed by root, or by the user of a private service";
    case ENOENT:
      return "start vrdmad, or name its folder of machines by --vm-folder";
    default:
      return "check the path";
  }
}

[[noreturn]] void fail_at(const char* what, const std::string& path, int error) {
  fail(fmt::format("cannot {} {} ({}): {}", what, path, std::strerror(error), remedy(error)));
}

void make_machine_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) fail_at("make", path, errno);
}

void write_whole(const std::string& path, const std::string& text) {
  const vmci::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd) fail_at("write", path, errno);
  if (write_all(fd.get(), text)) return;
  const int error = errno;
  ::unlink(path.c_str());
  fail_at("write", path, error);
}

}  // namespace

VmFolder::Lock VmFolder::lock() const {
  make_machine_folder(path_);
  const std::string path = path_ + "/.lock";
  Lock held{vmci::UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600))};
  if (!held.fd) fail_at("make", path, errno);
  while (::flock(held.fd.get(), LOCK_EX) != 0)
    if (errno != EINTR) fail_at("lock", path, errno);
  return held;
}

void VmFolder::require_free(const std::string& name) const {
  struct stat status;
  if (::lstat(file(name).c_str(), &status) != 0) return;
  fail(fmt::format("there is a machine \"{0}\" already in {1}: choose another name, or remove that one by \"vrdma vm remove {0}\"", name, path_));
}

void VmFolder::require_unused(const std::string& ram) const {
  for (const auto& name : names()) {
    std::string other;
    try {
      other = read(name).ram;
    } catch (const std::runtime_error&) {
      continue;  // a registration that is broken; "vrdma vm list" says so
    }
    std::error_code missing;
    if (other == ram || (!other.empty() && fs::equivalent(other, ram, missing)))
      fail(fmt::format("{} is the RAM of machine \"{}\": name another file by --ram", ram, name));
  }
}

void VmFolder::add(const VmRecord& record) {
  nlohmann::json json = nlohmann::json::object();
  if (!record.ram.empty()) json["ram"] = record.ram;
  if (record.plain) json["plain"] = true;
  if (record.private_ram()) json["bar_bytes"] = record.bar_bytes;
  if (!record.plain) json["vectors"] = record.vectors;
  if (record.tenant) json["tenant"] = *record.tenant;
  std::string text;
  try {
    text = json.dump(2) + "\n";
  } catch (const nlohmann::json::type_error&) {
    fail(fmt::format("{} is not UTF-8, as vm.json has to be: name another file by --ram", record.ram));
  }
  const std::string own = path_ + "/" + record.name;
  make_machine_folder(own);  // one that a service left behind is as good
  const std::string partial = fmt::format("{}/.vm.json.{}", own, ::getpid());
  try {
    write_whole(partial, text);
  } catch (...) {
    ::rmdir(own.c_str());
    throw;
  }
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, file(record.name).c_str(), RENAME_NOREPLACE) == 0) return;
  const int error = errno;
  ::unlink(partial.c_str());
  require_free(record.name);
  fail_at("write", file(record.name), error);
}

void VmFolder::remove(const std::string& name) {
  if (::unlink(file(name).c_str()) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) fail(fmt::format("there is no machine \"{}\" in {}: \"vrdma vm list\" names them", name, path_));
    fail_at("remove", file(name), errno);
  }
  const Lock held = lock();
  struct stat status;
  if (::lstat(file(name).c_str(), &status) == 0) return;  // somebody has added it anew
  // The service does the same when it sees that the file is gone; nobody minds who is first.
  for (const std::string& left : {link(name), link(name, /*plain=*/true), launcher(name), own(name) + "/monitor.sock"}) ::unlink(left.c_str());
  ::rmdir((path_ + "/" + name).c_str());
}

VmRecord VmFolder::read(const std::string& name) const {
  std::ifstream in(file(name));
  if (!in || fs::is_directory(file(name))) {
    const int error = in ? EISDIR : errno;
    if (error == ENOENT || error == ENOTDIR) fail(fmt::format("there is no machine \"{}\" in {}: \"vrdma vm list\" names them", name, path_));
    fail_at("read", file(name), error);
  }
  try {
    const auto json = nlohmann::json::parse(in);
    VmRecord record{name, "", 0, std::nullopt, json.value("plain", false)};
    record.bar_bytes = json.value("bar_bytes", std::uint64_t{0});
    if (json.contains("ram") || !(record.plain || record.private_ram())) record.ram = json.at("ram").get<std::string>();
    record.vectors = json.value("vectors", vm::fixed_vectors);  // of a machine that an older version has added
    if (json.contains("tenant")) record.tenant = json.at("tenant").get<std::uint32_t>();
    struct stat status;
    if (!record.ram.empty() && ::stat(record.ram.c_str(), &status) == 0) record.memory_bytes = static_cast<std::uint64_t>(status.st_size);
    return record;
  } catch (const nlohmann::json::exception& error) {
    fail(fmt::format("{} is not what \"vrdma vm add\" writes ({}): remove the machine and add it again", file(name), error.what()));
  }
}

std::vector<std::string> VmFolder::names() const {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator at(path_, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    std::error_code missing;
    if (fs::exists(file(name), missing)) out.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory) fail_at("read", path_, error.value());
  std::sort(out.begin(), out.end());
  return out;
}

bool make_ram_file(const VmRecord& record, bool must_be_new) {
  const std::string& path = record.ram;
  struct statfs filesystem;
  if (::statfs(fs::path(path).parent_path().c_str(), &filesystem) == 0 && vmci::served_by_others(filesystem.f_type))
    fail(fmt::format("{} lies on a file system that another process or host serves, and cannot be a machine's RAM: name a file on a tmpfs, as /dev/shm is, by --ram", path));
  const vmci::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) {
    struct stat status;
    if (errno != EEXIST) fail(fmt::format("cannot make {}, the machine's RAM ({}): name a file on a tmpfs that can be made, by --ram", path, std::strerror(errno)));
    if (must_be_new) fail(fmt::format("{} exists, and may be the RAM of a machine: remove it, or name another file by --ram", path));
    if (::lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode))  // a link neither: the service follows none
      fail(fmt::format("{} is no file that can be a machine's RAM", path));
    if (static_cast<std::uint64_t>(status.st_size) == record.memory_bytes) return false;
    fail(fmt::format("{} has {} bytes and --memory says {}: make them equal, or remove the file", path, status.st_size, record.memory_bytes));
  }
  try {
    if (::ftruncate(fd.get(), static_cast<off_t>(record.memory_bytes)) != 0)
      fail(fmt::format("cannot give {} {} bytes ({}): on a hugetlbfs that must be whole huge pages", path, record.memory_bytes, std::strerror(errno)));
    if (record.tenant && *record.tenant != ::geteuid() && ::fchown(fd.get(), *record.tenant, static_cast<gid_t>(-1)) != 0)
      fail(fmt::format("cannot give {} to user {} ({}): only root adds machines for others", path, *record.tenant, std::strerror(errno)));
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  return true;
}

}  // namespace vrdma::cli
