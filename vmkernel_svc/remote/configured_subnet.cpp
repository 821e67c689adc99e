#include "vmkernel_svc/remote/configured_subnet.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::remote {

namespace {

std::vector<std::byte> read_secret(const std::string& path) {
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(fmt::format("the subnet's secret {}: {}", path, why)); };
  const vmci::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file) refuse(fmt::format("cannot be read ({}): make it with \"head -c 32 /dev/urandom\", and copy it to every host", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) refuse("it is no file");
  if (status.st_uid != ::geteuid() && status.st_uid != 0) refuse(fmt::format("it belongs to uid {}: it must be vrdmad's own, or root's", status.st_uid));
  if ((status.st_mode & 077) != 0) refuse(fmt::format("others may read it (mode {:04o}): chmod 0600", status.st_mode & 07777));
  std::vector<std::byte> secret(4096);
  const ssize_t bytes = ::read(file.get(), secret.data(), secret.size());
  if (bytes < 32) refuse("it has fewer than 32 bytes: make it with \"head -c 32 /dev/urandom\"");
  secret.resize(static_cast<std::size_t>(bytes));
  return secret;
}

// One key for each pair of hosts, so that no host passes for another.
std::array<std::byte, 32> pair_key(const std::vector<std::byte>& secret, const std::string& one, const std::string& other) {
  const auto& [low, high] = std::minmax(one, other);
  std::string text;
  for (const std::string* name : {&low, &high}) text += static_cast<char>(name->size()) + *name;
  std::array<std::byte, 32> key;
  unsigned int bytes = 0;
  if (HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), reinterpret_cast<const unsigned char*>(text.data()), text.size(),
           reinterpret_cast<unsigned char*>(key.data()), &bytes) == nullptr || bytes != key.size())
    throw std::runtime_error("OpenSSL does not offer HMAC with SHA-256");
  return key;
}

}  // namespace

ConfiguredSubnet::ConfiguredSubnet(const svc::RemoteConfig& config) {
  const auto secret = read_secret(config.secret_file);
  for (const auto& host : config.hosts) {
    const LidRange lids{host.lid_first, host.lid_last};
    if (host.name == config.name) {
      ours_ = lids;
      continue;
    }
    PeerHost peer{static_cast<HostId>(others_.size()), host.name, host.address, host.port, pair_key(secret, config.name, host.name), true};
    others_.push_back({lids, std::make_shared<const PeerHost>(std::move(peer))});
  }
}

std::optional<HostId> ConfiguredSubnet::host_of(std::uint16_t lid) const {
  for (const Entry& entry : others_)
    if (lid >= entry.lids.first && lid <= entry.lids.last) return entry.host->id;
  return std::nullopt;
}

std::vector<LidHolder> ConfiguredSubnet::holders() const {
  std::vector<LidHolder> all;
  for (const Entry& entry : others_) all.push_back({entry.host->id, entry.lids});
  std::ranges::sort(all, {}, [](const LidHolder& holder) { return holder.lids.first; });
  return all;
}

std::shared_ptr<const PeerHost> ConfiguredSubnet::host(HostId id) const { return id < others_.size() ? others_[id].host : nullptr; }

std::optional<LidRange> ConfiguredSubnet::written(HostId id) const { return id < others_.size() ? std::optional(others_[id].lids) : std::nullopt; }

std::shared_ptr<const PeerHost> ConfiguredSubnet::host_named(std::string_view name) const {
  for (const Entry& entry : others_)
    if (entry.host->name == name) return entry.host;
  return nullptr;
}

}  // namespace vrdma::remote
