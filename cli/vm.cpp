#include "cli/vm.hpp"

#include <fmt/format.h>
#include <linux/magic.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cli/fail.hpp"
#include "cli/output.hpp"
#include "cli/query.hpp"
#include "cli/service.hpp"
#include "cli/vm_arguments.hpp"
#include "cli/vm_folder.hpp"
#include "cli/vm_uml.hpp"
#include "vrdma/printable.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::uint64_t memory_least = 64 * mib;  // less boots no kernel
constexpr std::uint64_t memory_most = std::uint64_t{1} << 52;  // as far as an x86-64 processor's physical addresses reach
constexpr int seen_tries = 200;
constexpr auto seen_pause = std::chrono::milliseconds(10);
constexpr std::size_t path_characters = 107;      // of a unix socket
constexpr std::size_t name_characters = sizeof(vm::Welcome::name) - 1;

// The service's answer, where one answers; and where its machines are.
struct Place {
  std::string folder;
  std::string socket;  // of the service that was asked
  json state;          // its answer; null: none answers
};

std::string told_folder(const std::string& folder) {
  constexpr const char* replacement = "\xEF\xBF\xBD";  // U+FFFD: in JSON for what is not UTF-8
  if (folder.find(replacement) != std::string::npos && !fs::exists(folder))
    fail(fmt::format("the service's folder of machines, {}, has a name that is not UTF-8: give it by --vm-folder", folder));
  return folder;
}

Place find_place(const VmOptions& options) {
  Place place;
  std::string& socket = place.socket;
  if (auto service = find_service(options.socket)) {
    socket = service->path;
    place.state = query(*service);
  } else {
    // The host's, where root asks: a private service leaves when it is idle, and takes no machines along.
    const auto paths = service_paths(options.socket);
    socket = ::geteuid() == 0 ? paths.back() : paths.front();
  }
  if (!options.folder.empty()) place.folder = fs::absolute(options.folder).lexically_normal();
  else if (place.state.is_object() && place.state.at("service").contains("vm_folder")) place.folder = told_folder(place.state.at("service").at("vm_folder"));
  else place.folder = fs::absolute(socket).lexically_normal().parent_path() / "vm";
  while (place.folder.size() > 1 && place.folder.back() == '/') place.folder.pop_back();
  return place;
}

// What the service says of a machine; null where it says nothing.
json state_of(const Place& place, const std::string& name) {
  if (place.state.is_object() && place.state.contains("vms"))
    for (const auto& vm : place.state.at("vms"))
      if (vm.at("name") == name) return vm;
  return nullptr;
}

// Of machines of other users the service says nothing to who is neither root nor its own user.
bool is_hidden(const Place& place, const VmRecord& record) {
  if (!place.state.is_object()) return false;
  const json& service = place.state.at("service");
  std::error_code missing;
  if (service.value("all", true) || !fs::equivalent(service.value("vm_folder", ""), place.folder, missing)) return false;
  return !knows_user(place.state) || record.tenant.value_or(service.at("uid").get<uid_t>()) != ::geteuid();
}

Vm machine_of(const VmFolder& folder, const VmRecord& record) {
  return {record.name,
          folder.link(record.name, record.plain),
          record.ram,
          record.memory_bytes,
          record.plain,
          record.vectors,
          record.private_ram() ? record.bar_bytes : vm::bar_bytes};
}

// Until the service, which watches the folder, has seen a machine there.
void await_service(Place& place, const VmFolder& folder, const VmRecord& record) {
  if (!place.state.is_object() || is_hidden(place, record)) return;
  for (int tries = 0; tries < seen_tries; ++tries) {
    auto service = find_service(place.socket);
    if (!service) return;
    place.state = query(*service);
    if (state_of(place, record.name).is_object()) return;
    std::this_thread::sleep_for(seen_pause);
  }
  fmt::print(stderr, "vrdma: the service at {} does not serve the machine: is it older than this vrdma, or has it another --vm-folder than {}?\n",
             place.socket, folder.path());
}

json describe(const Place& place, const VmFolder& folder, const VmRecord& record) {
  const Vm vm = machine_of(folder, record);
  json out{{"name", record.name}, {"tenant", nullptr}, {"plain", record.plain}, {"link", vm.link}, {"state", "not served"}};
  if (!record.ram.empty()) out["memory_bytes"] = record.memory_bytes, out["ram"] = record.ram;
  if (record.private_ram()) out["bar_bytes"] = record.bar_bytes;
  if (record.tenant) out["tenant"] = *record.tenant;
  if (is_hidden(place, record)) out["state"] = "unknown (another user's)";
  else if (const json state = state_of(place, record.name); state.is_object())
    for (const char* key : {"state", "tenant", "processes", "version"})
      if (state.contains(key)) out[key] = state.at(key);
  return out;
}

std::string line_of(const json& vm) {
  std::string out = fmt::format("vm {} state \"{}\"", vm.at("name").get<std::string>(), vm.at("state").get<std::string>());
  if (!vm.at("tenant").is_null()) out += fmt::format(" tenant {}", vm.at("tenant").dump());
  if (vm.contains("processes")) out += fmt::format(" processes {}", vm.at("processes").dump());
  if (vm.contains("version") && vm.at("version").is_string() && vm.at("version") != "") out += " version " + without_controls(vm.at("version").get<std::string>());
  if (vm.contains("ram")) {
    const auto bytes = vm.at("memory_bytes").get<std::uint64_t>();
    out += fmt::format(" memory {} ram {}{}", bytes, vm.at("ram").get<std::string>(),
                       bytes == 0 ? " (gone: remove the machine and add it again)" : "");
  }
  if (vm.contains("bar_bytes")) out += fmt::format(" ram private bar {}", vm.at("bar_bytes").get<std::uint64_t>());
  return out + fmt::format(" link {}\n", vm.at("link").get<std::string>());
}

// Option and value on one line, as people read them, each but the last to be continued.
std::string lines_of(const std::vector<std::string>& words) {
  std::string out;
  for (std::size_t at = 0; at + 1 < words.size(); at += 2)
    out += fmt::format("    {} {}{}\n", words[at], shell_quoted(words[at + 1]), at + 2 < words.size() ? " \\" : "");
  return out;
}

// The system's libvirt runs QEMU as a user of its own, who can open the link and the RAM of a machine that is his.
std::string libvirt_user_hint(const json& described, const std::string& name) {
  for (const char* const user : {"libvirt-qemu", "qemu"})  // Debian's, Fedora's
    if (const passwd* const found = ::getpwnam(user); found != nullptr)
      return described.at("tenant") == found->pw_uid
                 ? ""
                 : fmt::format(
                       "\nqemu:///system runs QEMU as {1} here, who cannot open this machine's files: for it, remove the machine and add it with\n"
                       "\"vrdma vm add {0} --tenant {1}\" and the other options. Where AppArmor or SELinux confines QEMU, see vrdma-vm(1).\n",
                       name, user);
  return "";
}

std::string for_libvirt(const Vm& vm) {
  std::string hint = "\nFor libvirt, to be merged into the domain by \"virsh edit\"";
  if (const std::string files = vm.ram.empty() ? (vm.plain ? "link" : "") : vm.plain ? "RAM, nor the link" : "RAM"; !files.empty())
    hint += fmt::format(" (it cannot name the file that is the {}, hence the arguments past it;\nits QEMU must be allowed to open {})", files,
                        vm.ram.empty() ? "that file" : vm.plain ? "both" : "that file and the link");
  return hint + ":\n\n";
}

void print_how_to_start(const json& described, const Vm& vm, bool as_json) {
  constexpr const char* inside = "\nIn the VM, as root: vrdma-guestd. Then every user there has \"vrdma run\".\n";
  const bool uml = vm.ram.empty() && !described.contains("bar_bytes");
  if (uml) {
    const std::vector<std::string> words{"vrdma", "vm", "uml", vm.name, "--", "linux.uml", "mem=512M"};
    json out = described;
    out["uml"] = words;
    std::string line = "   ";
    for (const auto& word : words) line += " " + word;
    print_all(as_json
                  ? json_text(out)
                  : line_of(described) + "\nUser Mode Linux, started with vrdmad running, and with what else it needs:\n\n" + line + " …\n" + inside);
    return;
  }
  if (as_json) {
    json out = described;
    out["qemu"] = qemu_arguments(vm);
    if (!vm.plain) out["qemu_interrupts"] = qemu_interrupt_arguments();
    out["libvirt"] = libvirt_xml(vm);
    return print_all(json_text(out));
  }
  std::string text = line_of(described) +
                     (vm.plain ? "\nQEMU's arguments, once vrdmad has made the link:\n\n" : "\nQEMU's arguments, with vrdmad running:\n\n") +
                     lines_of(qemu_arguments(vm));
  if (!vm.plain)
    text += "\nFor interrupts in place of polling also these, and intel_iommu=on for the VM's kernel:\n\n" + lines_of(qemu_interrupt_arguments());
  else if (!vm.ram.empty())
    text += "\nA machine that reboots ends (-action reboot=shutdown): nobody would tell vrdmad of the reset, whose writes for peers would go on "
            "into the next kernel's memory.\n";
  print_all(text + for_libvirt(vm) + libvirt_xml(vm) + libvirt_user_hint(described, vm.name) + inside);
}

void check_memory(std::uint64_t bytes) {
  if (bytes < memory_least || bytes > memory_most || bytes % mib != 0)
    throw WrongUsage(fmt::format("a machine cannot have {} bytes of memory: give whole MiB, at least {}M and at most {}G, like --memory 2G", bytes,
                                 memory_least / mib, memory_most >> 30));
}

void check_bar(std::uint64_t bytes) {
  if (!std::has_single_bit(bytes) || bytes < vm::lent_bar_bytes_min || bytes > vm::lent_bar_bytes_max)
    throw WrongUsage(fmt::format("a device's BAR cannot have {} bytes: give a power of two from {}M to {}G, like --bar 256M", bytes,
                                 vm::lent_bar_bytes_min / mib, vm::lent_bar_bytes_max >> 30));
}

// Pages of a disk are written to it, again and again.
void note_disk(const VmRecord& record) {
  struct statfs filesystem;
  if (record.ram.empty() || ::statfs(record.ram.c_str(), &filesystem) != 0 || filesystem.f_type == TMPFS_MAGIC ||
      filesystem.f_type == HUGETLBFS_MAGIC)
    return;
  fmt::print(stderr,
             "vrdma: note: {} lies on no tmpfs: the kernel writes the machine's memory to that file system, and reads it back, as it does with any "
             "file. Keep it on a tmpfs, as /dev/shm is, or on a hugetlbfs\n",
             record.ram);
}

// The file takes its memory as the machine touches it. Where there is no more, QEMU is killed by SIGBUS, which says nothing to anybody.
void note_little_room(const VmRecord& record) {
  std::error_code error;
  const fs::path folder = fs::path(record.ram).parent_path();
  const auto room = fs::space(folder, error);
  if (record.ram.empty() || error || room.available >= record.memory_bytes) return;
  fmt::print(stderr,
             "vrdma: note: {} has {} MiB left, less than the machine's {}: QEMU will end by a bus error when they are used up. Make it larger "
             "(mount -o remount,size=…; docker run --shm-size …), or give another folder's file by --ram\n",
             folder.string(), room.available / mib, record.memory_bytes / mib);
}

void write_down(VmFolder& folder, const VmRecord& record, bool ram_must_be_new) {
  const VmFolder::Lock held = folder.lock();
  folder.require_free(record.name);  // said before its RAM file is in the way
  if (!record.ram.empty()) folder.require_unused(record.ram);
  const bool made = !record.ram.empty() && make_ram_file(record, ram_must_be_new);
  try {
    folder.add(record);
  } catch (...) {
    if (made) ::unlink(record.ram.c_str());
    throw;
  }
}

}  // namespace

std::string vm_name_error(const std::string& name) {
  constexpr const char* allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (!name.empty() && name.size() <= name_characters && name.find_first_not_of(allowed) == std::string::npos && name.front() != '.' &&
      name.front() != '-')
    return {};
  return fmt::format("\"{}\" cannot name a machine: 1 to {} letters, digits, dots, underscores and hyphens, of which dot and hyphen do not begin it",
                     name, name_characters);
}

std::string vm_default_ram(const std::string& name) { return "/dev/shm/vrdma-vm-" + name + ".ram"; }

int vm_add(const VmOptions& options) {
  check_memory(options.memory_bytes);
  const std::uint64_t bar_bytes = options.private_ram ? options.bar_bytes.value_or(vm_default_bar_bytes) : 0;
  if (options.private_ram) check_bar(bar_bytes);
  if (options.tenant == static_cast<uid_t>(-1))
    fail(fmt::format("{} is no user's uid: give the tenant's, as \"id -u USER\" says it", *options.tenant));
  Place place = find_place(options);
  VmFolder folder(place.folder);
  if (const auto link = folder.link(options.name); link.size() > path_characters)
    fail(fmt::format("{} has {} characters, and a socket's path at most {}: choose a shorter name, or another --vm-folder", link, link.size(),
                     path_characters));
  VmRecord record{options.name, options.ram.empty() ? vm_default_ram(options.name) : fs::absolute(options.ram).lexically_normal().string(),
                  options.memory_bytes, options.tenant, options.plain || options.uml};
  if (options.uml || options.private_ram) record.ram.clear(), record.memory_bytes = 0;
  record.bar_bytes = bar_bytes;
  write_down(folder, record, options.ram.empty());
  await_service(place, folder, record);
  print_how_to_start(describe(place, folder, record), machine_of(folder, record), options.json);
  if (!options.json) note_little_room(record), note_disk(record);
  return 0;
}

int vm_list(const VmOptions& options) {
  const Place place = find_place(options);
  std::error_code missing;
  if (!options.socket.empty() && place.state.is_null() && !fs::exists(place.folder, missing)) throw unreachable(options.socket);
  if (!options.folder.empty() && !fs::exists(place.folder, missing))
    fail(fmt::format("there is no folder {}: name the service's folder of machines by --vm-folder", place.folder));
  const VmFolder folder(place.folder);
  json all = json::array();
  std::string text;
  int code = 0;
  for (const auto& name : folder.names()) {
    try {
      all.push_back(describe(place, folder, folder.read(name)));
      text += line_of(all.back());
    } catch (const std::runtime_error& error) {  // that registration is broken; the others are not
      fmt::print(stderr, "vrdma: {}\n", error.what());
      code = 1;
    }
  }
  print_all(options.json ? json_text(all) : text);
  return code;
}

int vm_show(const VmOptions& options) {
  const Place place = find_place(options);
  const VmFolder folder(place.folder);
  const VmRecord record = folder.read(options.name);
  if (record.memory_bytes == 0 && !record.ram.empty())
    fail(fmt::format("the RAM file {} of machine \"{}\" has gone: remove the machine and add it again", record.ram, record.name));
  print_how_to_start(describe(place, folder, record), machine_of(folder, record), options.json);
  return 0;
}

int vm_uml(const VmOptions& options) {
  Place place = find_place(options);
  const VmFolder folder(place.folder);
  const VmRecord record = folder.read(options.name);
  if (!record.uml()) fail(fmt::format("machine \"{0}\" is one of QEMU's: \"vrdma vm show {0}\" says how it is started", record.name));
  await_service(place, folder, record);
  std::vector<std::string> command = options.command;
  if (command.front() == "--") command.erase(command.begin());
  if (command.empty()) fail("there is no kernel to start: give it after --, like linux.uml mem=512M");
  return run_uml(folder.link(record.name, /*plain=*/true), folder.launcher(record.name), command);
}

int vm_remove(const VmOptions& options) {
  const Place place = find_place(options);
  VmFolder folder(place.folder);
  std::string ram;
  bool is_broken = false;
  try {
    ram = folder.read(options.name).ram;
  } catch (const std::runtime_error&) {
    is_broken = true;  // it can be removed all the same, and one that is not there is refused there
  }
  folder.remove(options.name);
  const json known = state_of(place, options.name);
  const std::string state = known.is_object() ? known.value("state", "") : "";
  if (state == "connected" || state == "attached" || state == "paused")
    fmt::print(stderr,
               "vrdma: note: {} runs: {}it is not found again, not even if it is added anew, until it is switched off and started anew\n",
               options.name, known.value("processes", 0u) != 0 ? "its programs have lost their device, and " : "");
  // It may as well be that of a machine of the same name in another folder.
  if (struct stat status; is_broken && ::lstat(vm_default_ram(options.name).c_str(), &status) == 0)
    fmt::print(stderr,
               "vrdma: note: {0} is left, as the registration did not say whose it is, and keeps a machine \"{1}\" from being added: if it was this "
               "machine's RAM, remove it, too: rm {0}\n",
               vm_default_ram(options.name), options.name);
  // Ours, as `add` made it. A VM that still runs keeps its pages; they are freed at its end.
  if (ram == vm_default_ram(options.name) && ::unlink(ram.c_str()) != 0 && errno != ENOENT)
    fail(fmt::format("the machine is removed, but not its RAM file {} ({})", ram, std::strerror(errno)));
  return 0;
}

}  // namespace vrdma::cli
