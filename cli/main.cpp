// vrdma: the command that a person types.
#include <fmt/format.h>
#include <pwd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include "cli/bench.hpp"
#include "cli/container.hpp"
#include "cli/direct.hpp"
#include "cli/doctor.hpp"
#include "cli/fail.hpp"
#include "cli/host.hpp"
#include "cli/output.hpp"
#include "cli/run.hpp"
#include "cli/show.hpp"
#include "cli/vm.hpp"
#include "vmci_channel/standard_streams.hpp"

namespace {

using namespace vrdma::cli;

constexpr int usage_error = 2;
constexpr const char* about =
    "vrdma: RDMA verbs for any process, with no HCA, no kernel module and no root.\n\n"
    "  vrdma run -- ib_send_lat              a server over the virtual HCA vrdma0 …\n"
    "  vrdma run -- ib_send_lat localhost    … and its client, unmodified\n"
    "  vrdma show                            who is attached\n"
    "  vrdma doctor                          what is missing on this machine, and what it costs\n"
    "  vrdma bench                           how fast it is here, beside what else there is\n"
    "  vrdma container                       the options of podman or docker for a container with vrdma0\n"
    "  vrdma vm add NAME                     a virtual machine, and how to start it";

void takes_guest_name(CLI::Option* option) {
  option->check([](const std::string& name) { return name.size() < 32 ? "" : "a name has at most 31 characters"; });
}

// An unset variable of a script would name the default.
CLI::Option* takes_path(CLI::Option* option) {
  return option->check([](const std::string& path) { return path.empty() ? "\"\" names nothing: leave the option out for the default" : ""; });
}

CLI::App* add_run(CLI::App& app, RunOptions& options) {
  CLI::App* const command = app.add_subcommand(
      "run", "Run a program with libvrdma in place of libibverbs. Starts a private vrdmad when no service is reachable;\n"
             "it is shared by your other `vrdma run`s, offers them direct mode and leaves by itself.");
  command->add_option("--link-layer", options.link_layer,
                      "ib or ethernet: what this guest's port of vrdma0 says it is (default: what the service is configured for, else ib)")
      ->check(CLI::IsMember({"ib", "infiniband", "ethernet"}));
  takes_guest_name(command->add_option("--name", options.name, "name of the guest: its GUID is derived from it and stays the same"));
  command->add_flag("--mediated", options.mediated,
                    "use a private vrdmad that moves all data itself; by default programs that could reach each other's memory anyway do");
  command->add_flag("--stats", options.stats, "print what the program did when it ends");
  command->add_option("command", options.command, "the program and its arguments, after --")->required();
  command->positionals_at_end();
  command->prefix_command(false);
  command->footer("Exit code: that of the program; 128 + n when signal n ended it; 127 if it was not found, 126 if it cannot be\n"
                  "executed; 125 if vrdma itself failed. Environment: VRDMA_SOCKET names the service to use.");
  return command;
}

CLI::App* add_container(CLI::App& app, ContainerOptions& options) {
  CLI::App* const command = app.add_subcommand(
      "container", "Print what starts a container in which programs find vrdma0: podman run $(vrdma container) IMAGE PROGRAM. The image's glibc\n"
                   "must be 2.28 or later; nothing has to be installed in it.");
  command->add_option("--format", options.format,
                      "options: for podman, docker and nerdctl (default); nspawn: for systemd-nspawn; cdi: a device for /etc/cdi/vrdma.json")
      ->check(CLI::IsMember({"options", "nspawn", "cdi"}));
  command->add_option("--link-layer", options.link_layer, "ib or ethernet: what the port of vrdma0 says it is there")
      ->check(CLI::IsMember({"ib", "infiniband", "ethernet"}));
  takes_guest_name(command->add_option("--name", options.name, "name of the guests there"));
  takes_path(command->add_option("-s,--socket", options.socket, "socket of the service; default: $VRDMA_SOCKET, your private one, then the host's"));
  return command;
}

CLI::App* add_show(CLI::App& app, ShowOptions& options) {
  CLI::App* const command = app.add_subcommand(
      "show", "Show what the service has, one object a line in the manner of rdma(8). Root and the service's own user see\n"
              "everything, others what is theirs.");
  command->add_option("object", options.object,
                      "devices, guests, qps, cqs, mrs, srqs, cm_ids, routes, hosts, hca, cache or counters; nothing: an overview")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(show_objects), std::end(show_objects))));
  command->add_flag("-j,--json", options.json, "print JSON");
  takes_path(command->add_option("-s,--socket", options.socket, "socket of the service; default: $VRDMA_SOCKET, your private one, then the host's"));
  return command;
}

CLI::App* add_direct(CLI::App& app, DirectOptions& options) {
  CLI::App* const command = app.add_subcommand(
      "direct", "Say whether guests may move their data themselves, where the service offers that (vrdmad --direct auto). Connections\n"
                "that stand change over between two messages. Root and the service's own user say it of everybody, others of theirs.");
  command->add_option("mode", options.mode, "auto: whoever can be direct is; mediated: everything goes through the service")
      ->required()->check(CLI::IsMember({"auto", "mediated"}));
  command->add_option("-g,--guest", options.guest, "of one guest only: its number in vrdma show guests")->check(CLI::Range(1u, 0xffffffffu));
  takes_path(command->add_option("-s,--socket", options.socket, "socket of the service; default: as for vrdma show"));
  return command;
}

// The command that was given, as a function of its options; none where `vm` was not.
using VmCommand = int (*)(const VmOptions&);

// Whether a uint64_t holds it: digits, then perhaps K to E, with B, i or iB, however written.
bool is_size(const std::string& size) {
  const std::size_t digits = std::min(size.find_first_not_of("0123456789"), size.size());
  if (digits == 0 || digits >= 16) return false;
  const std::string unit = CLI::detail::to_lower(size.substr(digits));
  constexpr std::string_view letters = "kmgtpe";
  const std::size_t power = unit.empty() ? letters.npos : letters.find(unit.front());
  const std::string rest = power == letters.npos ? unit : unit.substr(1);
  if (!rest.empty() && rest != "b" && (power == letters.npos || (rest != "i" && rest != "ib"))) return false;
  return power == letters.npos || std::stoull(size.substr(0, digits)) <= std::numeric_limits<std::uint64_t>::max() >> (10 * (power + 1));
}

// CLI::AsSizeValue takes "-1", and "0x100M"; of what else it does not take it speaks in its own words.
CLI::Option* takes_size(CLI::Option* option) {
  option->transform(CLI::AsSizeValue(false));
  return option->transform(CLI::Validator(  // before that one
      [](std::string& size) -> std::string {
        return is_size(size) ? "" : fmt::format("\"{}\" is no size: give a whole number and a unit, like 512M or 2G", size);
      },
      ""));
}

// A name becomes its uid.
CLI::Option* takes_user(CLI::Option* option) {
  return option->transform(CLI::Validator(
      [](std::string& user) -> std::string {
        const passwd* const found = ::getpwnam(user.c_str());
        if (found != nullptr) user = std::to_string(found->pw_uid);
        const bool is_number = !user.empty() && user.size() <= 10 && user.find_first_not_of("0123456789") == std::string::npos;
        return is_number && std::stoull(user) <= std::numeric_limits<uid_t>::max()
                   ? ""
                   : fmt::format("\"{}\" is no user here: give a user's name or uid", user);
      },
      ""));
}

CLI::App* add_vm(CLI::App& app, VmOptions& options, VmCommand& chosen) {
  CLI::App* const command = app.add_subcommand("vm", "Register virtual machines with the host service, and say how QEMU or libvirt starts them.");
  command->require_subcommand(0, 1);
  enum class Of { a_machine, all };
  const auto add = [&](const char* name, const char* what, VmCommand function, Of which) {
    CLI::App* const sub = command->add_subcommand(name, what);
    if (which == Of::a_machine) sub->add_option("name", options.name, "of the machine")->required()->check(vm_name_error);
    takes_path(sub->add_option("-s,--socket", options.socket, "socket of the service; default: $VRDMA_SOCKET, your private one, then the host's"));
    takes_path(sub->add_option("--vm-folder", options.folder, "folder of the machines, as the service has it; default: vm beside its socket"));
    sub->callback([&chosen, function] { chosen = function; });
    return sub;
  };
  CLI::App* const adding = add("add", "Register a machine, and print QEMU's arguments and libvirt's XML for it.", vm_add, Of::a_machine);
  takes_size(adding->add_option("--memory", options.memory_bytes, "RAM of the machine, like 512M or 2G"))->default_str("2G");
  takes_path(adding->add_option("--ram", options.ram, "the file that becomes its RAM, on a tmpfs (default: /dev/shm/vrdma-vm-NAME.ram)"));
  takes_user(adding->add_option("--tenant", options.tenant,
                                "user or uid for whose account its programs run, and as whom QEMU may run besides root "
                                "(default: that of the service)"))->type_name("USER");
  CLI::Option* const plain = adding->add_flag("--plain", options.plain, "without interrupts: QEMU's ivshmem-plain");
  CLI::Option* const private_ram =
      adding->add_flag("--private-ram", options.private_ram, "a machine whose RAM is QEMU's own (-m 1G and nothing else)")
          ->excludes("--memory", "--ram");
  takes_size(adding->add_option("--bar", options.bar_bytes,
                                "with --private-ram: how much memory its programs can share, a power of two (default: 256M)"))
      ->needs(private_ram);
  adding->add_flag("--uml", options.uml, "a machine of User Mode Linux, to be started by \"vrdma vm uml\"")
      ->excludes("--memory", "--ram")
      ->excludes(plain)
      ->excludes(private_ram);
  CLI::App* const listing = add("list", "List the machines.", vm_list, Of::all);
  CLI::App* const showing = add("show", "Say of a machine what \"add\" said, and how it is.", vm_show, Of::a_machine);
  for (CLI::App* const sub : {adding, listing, showing}) sub->add_flag("-j,--json", options.json, "print JSON");
  add("remove", "Forget a machine. Its programs lose their device; its RAM file is removed where \"add\" chose the name.", vm_remove, Of::a_machine);
  CLI::App* const uml = add("uml", "Start User Mode Linux as a machine that was added with --uml, and stay until it ends.", vm_uml, Of::a_machine);
  uml->add_option("command", options.command, "its kernel, with what that is given: linux.uml mem=512M …")->required();
  uml->positionals_at_end();
  return command;
}

using HostCommand = int (*)(const HostOptions&);

CLI::App* add_host(CLI::App& app, HostOptions& options, HostCommand& chosen) {
  CLI::App* const command = app.add_subcommand("host", "Make the keys and certificates by which hosts of a subnet trust each other.");
  command->require_subcommand(0, 1);
  const auto add = [&](const char* name, const char* what, HostCommand function) {
    CLI::App* const sub = command->add_subcommand(name, what);
    takes_path(sub->add_option("--folder", options.folder, "where they are (default: /var/lib/vrdma/subnet)"));
    sub->callback([&chosen, function] { chosen = function; });
    return sub;
  };
  CLI::App* const init = add("init", "Begin a subnet: its authority, and the certificate of this host, its first.", host_init);
  init->add_option("name", options.name, "of this host")->required();
  init->add_option("--address", options.address, "this host's, for the configuration that is printed");
  CLI::App* const adding = add("add", "Make a certificate for another host, where the authority is; a file lets that host join.", host_add);
  adding->add_option("name", options.name, "of the other host")->required();
  adding->add_option("--address", options.address, "of a host of the subnet: whom the new one asks first");
  takes_path(adding->add_option("-o,--output", options.file, "the file (default: NAME.invitation)"));
  for (CLI::App* const sub : {init, adding}) sub->add_option("--days", options.days, "how long the certificate lasts (default: 1825)")->check(CLI::Range(1, authority_days));
  CLI::App* const joining = add("join", "Take what \"add\" made, on the host that joins.", host_join);
  joining->add_option("file", options.file, "the invitation")->required();
  joining->add_option("--address", options.address, "this host's, for the configuration that is printed");
  CLI::App* const listing = add("list", "List the certificates that were made here.", host_list);
  CLI::App* const showing = add("show", "Show this host's certificate, or one that was made here.", host_show);
  showing->add_option("name", options.name, "of another host");
  for (CLI::App* const sub : {listing, showing}) sub->add_flag("-j,--json", options.json, "print JSON");
  CLI::App* const removing = add("remove", "Take a host out of the subnet for good, where the authority is.", host_remove);
  removing->add_option("name", options.name, "of the host")->required();
  removing->add_option("--address", options.address, "of a host of the subnet that runs")->required();
  CLI::App* const partition = command->add_subcommand("partition", "Say which tenants are in which partition of the subnet: who has which P_Key.");
  partition->require_subcommand(0, 1);
  const auto add_partition = [&](const char* name, const char* what, HostCommand function) {
    CLI::App* const sub = partition->add_subcommand(name, what);
    takes_path(sub->add_option("--folder", options.folder, "where the authority is; for \"list\", this host's certificate (default: /var/lib/vrdma/subnet)"));
    sub->add_option("--address", options.address, "of a host of the subnet that runs")->required();
    sub->add_flag("-j,--json", options.json, "print JSON");
    sub->callback([&chosen, function] { chosen = function; });
    return sub;
  };
  CLI::App* const entering =
      add_partition("add", "Give tenants a P_Key: 0x8001 makes them full members of partition 1, 0x0001 limited ones.", partition_add);
  CLI::App* const leaving = add_partition("remove", "Take a P_Key from tenants; without any, end the partition.", partition_remove);
  for (CLI::App* const sub : {entering, leaving}) sub->add_option("pkey", options.pkey, "0x and four digits")->required();
  entering->add_option("members", options.members, "tenants: UID, HOST/UID, HOST/* or *")->required();
  leaving->add_option("members", options.members, "tenants, as they were given it");
  add_partition("list", "List who has which P_Key.", partition_list);
  return command;
}

}  // namespace

int main(int argc, char** argv) {
  vmci::occupy_standard_streams();
  CLI::App app{about};
  app.set_version_flag("--version", "vrdma " VRDMA_VERSION);
  app.require_subcommand(0, 1);  // 1 would hide what a misspelt one was

  RunOptions run_options;
  ShowOptions show_options;
  DoctorOptions doctor_options;
  std::string metrics_socket;
  CLI::App* const run_command = add_run(app, run_options);
  CLI::App* const show_command = add_show(app, show_options);
  ContainerOptions container_options;
  CLI::App* const container_command = add_container(app, container_options);
  DirectOptions direct_options;
  CLI::App* const direct_command = add_direct(app, direct_options);
  CLI::App* const doctor_command = app.add_subcommand(
      "doctor", "Say in plain words what is missing on this machine and what it costs. Exit code 1 if programs cannot work.");
  doctor_command->add_flag("-j,--json", doctor_options.json, "print JSON");
  takes_path(doctor_command->add_option("-s,--socket", doctor_options.socket, "socket of the service to look at"));
  CLI::Option* const far_host =
      doctor_command->add_option("host", doctor_options.host, "try instead whether this host and that one reach each other: its name or address");
  takes_path(doctor_command->add_option("--folder", doctor_options.folder,
                                        "of this host's certificates (default: as the service has it, else /var/lib/vrdma/subnet)"))
      ->needs(far_host);
  CLI::App* const metrics_command = app.add_subcommand("metrics", "Print the counters as Prometheus text (for a textfile collector or a scrape).");
  takes_path(metrics_command->add_option("-s,--socket", metrics_socket, "socket of the service to look at"));

  // Its own program has the options, and their help.
  CLI::App* const bench_command = app.add_subcommand("bench", "Measure how fast RDMA is here, beside peers and floors; compare two such runs.");
  bench_command->prefix_command();
  bench_command->set_help_flag();

  VmOptions vm_options;
  VmCommand vm_command = nullptr;
  CLI::App* const vm = add_vm(app, vm_options, vm_command);

  HostOptions host_options;
  HostCommand host_command = nullptr;
  CLI::App* const host = add_host(app, host_options, host_command);

  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    std::string what = error.what();
    // An empty argument leaves a hole.
    if (what.ends_with("expected: ")) what += "\"\"";
    if (const auto hole = what.find(":  not in "); hole != what.npos) what.insert(hole + 2, "\"\"");
    // "-- --bogus" is not what was typed: it is CLI11's mark of where the program would begin.
    if (const auto mark = what.find(": -- "); error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError) && mark != what.npos) what.erase(mark + 2, 3);
    return "vrdma: " + what + "\nvrdma --help, and --help after a subcommand, say what there is\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wish) {  // --help, --version
    std::ostringstream text;
    app.exit(wish, text, text);
    try {
      print_all(text.str());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "vrdma: %s\n", error.what());
      return 1;
    }
    return 0;
  } catch (const CLI::ParseError& error) {
    app.exit(error);
    return usage_error;
  }
  try {
    if (run_command->parsed()) return run(run_options);
    if (container_command->parsed()) return container(container_options);
    if (show_command->parsed()) return show(show_options);
    if (direct_command->parsed()) return direct(direct_options);
    if (doctor_command->parsed()) return doctor(doctor_options);
    if (metrics_command->parsed()) return metrics(metrics_socket);
    if (bench_command->parsed()) bench(bench_command->remaining());
    if (vm_command != nullptr) return vm_command(vm_options);
    if (vm->parsed()) {
      std::fprintf(stderr, "vrdma: vm: nothing to do: name a subcommand, add, list, show, remove or uml (vrdma vm --help says more)\n");
      return usage_error;
    }
    if (host_command != nullptr) return host_command(host_options);
    if (host->got_subcommand("partition")) {
      std::fprintf(stderr, "vrdma: host partition: nothing to do: name a subcommand, add, remove or list (vrdma host partition --help says more)\n");
      return usage_error;
    }
    if (host->parsed()) {
      std::fprintf(stderr, "vrdma: host: nothing to do: name a subcommand, init, add, join, list, show, partition or remove "
                           "(vrdma host --help says more)\n");
      return usage_error;
    }
    std::fprintf(stderr, "vrdma: nothing to do: name a subcommand, run, container, show, direct, doctor, metrics, bench, vm or host "
                         "(vrdma --help says more)\n");
    return usage_error;
  } catch (const WrongUsage& error) {
    std::fprintf(stderr, "vrdma: %s\n", error.what());
    return usage_error;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "vrdma: %s\n", error.what());
    return run_command->parsed() ? 125 : 1;
  }
  return 0;
}
