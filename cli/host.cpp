#include "cli/host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "cli/fail.hpp"
#include "cli/host_talk.hpp"
#include "cli/output.hpp"
#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/certificates.hpp"

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;
using namespace hosts;

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error) fs::permissions(folder, fs::perms::owner_all, error);
  if (error) throw std::runtime_error(fmt::format("cannot make the folder {} ({}): run as the service's user, or give another --folder", folder.string(), error.message()));
}

// Nothing was there; what an attempt that fails has made is taken away again.
class NewFiles {
 public:
  ~NewFiles() {
    for (const auto& file : made_) {
      std::error_code ignored;
      fs::remove(file, ignored);
    }
  }
  void save(const fs::path& file, const std::string& text, For whom) {
    save_new(file, text, whom);
    made_.push_back(file);
  }
  void keep() { made_.clear(); }

 private:
  std::vector<fs::path> made_;
};

// A host has another certificate of the same name and authority here: it is replaced.
bool is_renewal(const fs::path& folder, const Invitation& invitation) {
  if (!fs::exists(folder / "host.pem") || !fs::exists(folder / "host.key") || !fs::exists(folder / "ca.pem")) return false;
  const auto before = describe(load_certificate(folder / "host.pem").get()), after = describe(invitation.host.certificate.get());
  const auto authority = describe(load_certificate(folder / "ca.pem").get());
  return before.name == after.name && before.serial != after.serial && authority.fingerprint == describe(invitation.authority.get()).fingerprint;
}

std::int64_t last_day(int days, const Identity& authority) {
  return std::min<std::int64_t>(std::time(nullptr) + std::int64_t{days} * 86400, describe(authority.certificate.get()).not_after_s);
}

// Clocks differ.
std::int64_t first_day() { return std::time(nullptr) - 86400; }

std::string section(const std::string& address, const std::string& folder, const std::string& seed) {
  const auto ours = address_and_port(address.empty() ? "" : address);
  std::string text = fmt::format("\"hosts\": {{ \"address\": \"{}\", \"folder\": \"{}\"", ours ? ours->first : "ADDRESS OF THIS HOST", folder);
  if (ours && ours->second != default_port) text += fmt::format(", \"port\": {}", ours->second);
  if (!seed.empty()) text += fmt::format(", \"seed\": \"{}\"", seed);
  return text + " }";
}

void check_address(const std::string& address) {
  const auto parsed = address_and_port(address);
  if (const auto why = no_place(parsed ? parsed->first : address); !why.empty()) throw WrongUsage(fmt::format("--address \"{}\", {}", address, why));
  if (!parsed) throw WrongUsage(fmt::format("--address \"{}\": give a numeric address, with a port or without, as in 10.0.0.1:28250", address));
}

void check_name(const std::string& name) {
  if (const auto why = host_name_error(name); !why.empty()) throw WrongUsage(fmt::format("\"{}\": {}", name, why));
}

// Of a host that is not there yet.
void check_new(const HostOptions& options) {
  check_name(options.name);
  if (!options.address.empty()) check_address(options.address);
}

std::string word(Role role) { return role == Role::authority ? "authority" : role == Role::admin ? "administrator" : "host"; }

nlohmann::json as_json(const CertificateInfo& info) {
  return {{"name", info.name},     {"role", word(info.role)}, {"authority", info.issuer},       {"serial", info.serial},
          {"sha256", info.fingerprint}, {"from", day_of(info.not_before_s)}, {"until", day_of(info.not_after_s)}};
}
std::string as_line(const CertificateInfo& info) {
  return fmt::format("{} {} authority {} until {} serial {} sha256 {}\n", word(info.role), info.name, info.issuer, day_of(info.not_after_s), info.serial, info.fingerprint);
}

}  // namespace

int host_init(const HostOptions& options) {
  check_new(options);
  const fs::path folder = fs::absolute(options.folder);
  make_folder(folder);
  const Identity authority = make_authority(authority_days);
  const Identity host = issue(authority, options.name, Role::host, first_day(), last_day(options.days, authority));
  NewFiles files;
  files.save(folder / "authority.key", to_pem(authority.key.get()), For::owner);
  files.save(folder / "ca.pem", to_pem(authority.certificate.get()), For::everybody);
  files.save(folder / "host.key", to_pem(host.key.get()), For::owner);
  files.save(folder / "host.pem", to_pem(host.certificate.get()), For::everybody);
  make_folder(folder / "issued");
  files.save(folder / "issued" / (options.name + ".pem"), to_pem(host.certificate.get()), For::everybody);
  files.keep();
  print_all(fmt::format("A new subnet, \"{}\", and its first host, \"{}\", in {}.\n"
                        "Put this into the configuration of vrdmad, and start it:\n\n    {}\n\n"
                        "Another host: vrdma host add NAME{}. Who has {} can add hosts: keep a copy where it is safe.\n",
                        describe(authority.certificate.get()).name, options.name, folder.string(), section(options.address, folder.string(), ""),
                        folder == subnet_folder ? "" : " --folder " + folder.string(), (folder / "authority.key").string()));
  return 0;
}

int host_add(const HostOptions& options) {
  check_new(options);
  const fs::path folder = options.folder;
  Invitation invitation;
  const Identity authority = load_authority(folder);
  const fs::path issued = folder / "issued" / (options.name + ".pem");
  if (fs::exists(issued))
    throw std::runtime_error(fmt::format("\"{}\" was added already ({}): two hosts with one name are refused. Take another name, or take that one out first by \"vrdma host remove {} --address ADDRESS OF A MANAGER\"",
                                         options.name, issued.string(), options.name));
  invitation.host = issue(authority, options.name, Role::host, first_day(), last_day(options.days, authority));
  invitation.authority = load_certificate(folder / "ca.pem");
  if (const auto seed = address_and_port(options.address)) invitation.seed = with_port(seed->first, seed->second);
  const std::string file = options.file.empty() ? options.name + ".invitation" : options.file;
  make_folder(folder / "issued");
  NewFiles files;
  files.save(file, write_invitation(invitation), For::owner);
  files.save(issued, to_pem(invitation.host.certificate.get()), For::everybody);
  files.keep();
  print_all(fmt::format("{} lets a host join as \"{}\". Bring it there by a safe way, and run there:\n\n    vrdma host join {}\n\n"
                        "Whoever has the file is that host: remove it when it is done.\n",
                        file, options.name, fs::path(file).filename().string()));
  return 0;
}

int host_join(const HostOptions& options) {
  if (!options.address.empty()) check_address(options.address);
  const fs::path folder = fs::absolute(options.folder);
  const Invitation invitation = read_invitation(read_file(options.file), options.file);
  if (const auto why = refusal(invitation.host.certificate.get(), invitation.authority.get(), std::time(nullptr)); !why.empty())
    throw std::runtime_error(fmt::format("{}: {}", options.file, why));
  make_folder(folder);
  const bool renewal = is_renewal(folder, invitation);
  const std::string beside = renewal ? ".new" : "";
  NewFiles files;
  if (renewal) fs::remove(folder / "host.key.new"), fs::remove(folder / "host.pem.new");  // of an attempt that was killed
  files.save(folder / ("host.key" + beside), to_pem(invitation.host.key.get()), For::owner);
  files.save(folder / ("host.pem" + beside), to_pem(invitation.host.certificate.get()), For::everybody);
  if (renewal) {
    fs::rename(folder / "host.key.new", folder / "host.key");
    fs::rename(folder / "host.pem.new", folder / "host.pem");
  } else {
    files.save(folder / "ca.pem", to_pem(invitation.authority.get()), For::everybody);
  }
  files.keep();
  if (renewal) {
    print_all(fmt::format("\"{}\" has another certificate now: restart vrdmad, and remove {}.\n", describe(invitation.host.certificate.get()).name, options.file));
    return 0;
  }
  print_all(fmt::format("This host is \"{}\" now. Put this into the configuration of vrdmad, start it, and remove {}:\n\n    {}\n",
                        describe(invitation.host.certificate.get()).name, options.file, section(options.address, folder.string(), invitation.seed)));
  return 0;
}

int host_list(const HostOptions& options) {
  const fs::path folder = fs::path(options.folder) / "issued";
  if (!fs::exists(folder)) throw std::runtime_error(fmt::format("{}: no certificates were made here; \"vrdma show hosts\" says who is in the subnet", folder.string()));
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".pem") found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  nlohmann::json out = nlohmann::json::array();
  std::string text;
  for (const auto& file : found) {
    const auto info = describe(load_certificate(file).get());
    out.push_back(as_json(info));
    text += as_line(info);
  }
  print_all(options.json ? json_text(out) : text);
  return 0;
}

int host_show(const HostOptions& options) {
  const fs::path folder = options.folder;
  const fs::path file = options.name.empty() ? folder / "host.pem" : folder / "issued" / (options.name + ".pem");
  std::error_code error;
  if (!fs::exists(file, error) && !error)  // else load_certificate() says what is wrong
    throw std::runtime_error(options.name.empty()
                                 ? fmt::format("{}: no certificate of this host here: \"vrdma host init\" begins a subnet, \"vrdma host join\" joins one", folder.string())
                                 : fmt::format("{} is not there: \"vrdma host list\" names the certificates that were made here", file.string()));
  const auto certificate = load_certificate(file);
  const auto authority = load_certificate(folder / "ca.pem");
  const auto info = describe(certificate.get());
  const std::string why = refusal(certificate.get(), authority.get(), std::time(nullptr));
  auto out = as_json(info);
  out["problem"] = why;
  print_all(options.json ? json_text(out) : as_line(info) + (why.empty() ? "" : "problem: " + why + "\n"));
  return why.empty() ? 0 : 1;
}

namespace {

std::pair<std::string, std::uint16_t> leader_near(const HostOptions& options) {
  check_address(options.address);
  return *address_and_port(options.address);
}

// An administrator for an hour, by the authority's key.
Tls as_admin(const fs::path& folder) {
  const Identity authority = load_authority(folder);
  return Tls(issue(authority, "administrator", Role::admin, first_day(), std::time(nullptr) + 3600), load_certificate(folder / "ca.pem"));
}

void print(const Partitions& partitions, bool as_json) {
  nlohmann::json out = nlohmann::json::object();
  std::string text;
  for (const Membership& one : partitions.memberships()) {
    out[pkey_text(one.pkey)].push_back(one.member());
    text += fmt::format("partition {} pkey {} {} member {}\n", pkey_text(partition_of(one.pkey)), pkey_text(one.pkey), (one.pkey & pkey_full) != 0 ? "full" : "limited", one.member());
  }
  print_all(as_json ? json_text(out) : text.empty() ? "no partitions: everybody is a full member of the default one, 0xffff\n" : text);
}

int change_partition(const HostOptions& options, bool add) {
  const auto [address, port] = leader_near(options);
  const auto pkey = pkey_of(options.pkey);
  if (!pkey)
    throw WrongUsage(fmt::format("\"{}\" is no P_Key: 0x and four digits, as in 0x8001 for full members of partition 1, or 0x0001 for limited ones", options.pkey));
  ChangePartition change{*pkey, add, {}};
  for (const auto& member : options.members) {
    const auto one = membership_of(*pkey, member);
    if (!one) throw WrongUsage(fmt::format("\"{}\" is no member: give a uid, or a host and a uid, as in 1000, b/1000, b/* or *", member));
    change.members.push_back(*one);
  }
  Tls tls = as_admin(options.folder);
  print(ask_partitions(tls, address, port, change), options.json);
  return 0;
}

}  // namespace

int partition_add(const HostOptions& options) { return change_partition(options, true); }
int partition_remove(const HostOptions& options) { return change_partition(options, false); }

int partition_list(const HostOptions& options) {
  const auto [address, port] = leader_near(options);
  const auto tls = Tls::of_host(options.folder);
  print(ask_partitions(*tls, address, port, {}), options.json);
  return 0;
}

int host_remove(const HostOptions& options) {
  check_name(options.name);
  const fs::path folder = options.folder;
  const auto [address, port] = leader_near(options);
  Tls tls = as_admin(folder);
  const fs::path issued = folder / "issued" / (options.name + ".pem");
  const bool known = fs::exists(issued);
  // Its host may not have come yet: an invitation that was lost, or seen by others.
  std::string serial;
  if (known) try {
    serial = describe(load_certificate(issued).get()).serial;
  } catch (const std::runtime_error&) {
    // A host that has joined is removed by its name.
  }
  const bool was_last = ask_removal(tls, address, port, options.name, serial);
  std::error_code ignored;
  if (known) fs::rename(issued, folder / "issued" / fmt::format("{}.removed-{}", options.name, std::time(nullptr)), ignored);
  print_all(fmt::format("\"{}\" is out of the subnet: its certificate is refused, its LIDs go to others when no lease can be left\n", options.name));
  if (was_last)
    tell("vrdma: note: it was the only manager of the subnet, which nobody leads now: make it another certificate by \"vrdma host add {0}\", take that by \"vrdma host "
         "join {0}.invitation\" there, and restart its vrdmad\n", options.name);
  return 0;
}

}  // namespace vrdma::cli
