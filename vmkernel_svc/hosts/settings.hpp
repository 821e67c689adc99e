// The section "hosts" of the configuration.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "vmkernel_svc/hosts/outbox.hpp"

namespace vrdma::hosts {

struct SessionLimits {
  std::uint64_t opening_ms = 10'000;  // for all of TLS and hello
  std::uint64_t silence_ms = 20'000;  // after which a host is gone; a quarter of it: a ping
};

struct EtcdSettings {
  std::vector<std::string> endpoints;  // "http://10.0.0.9:2379"
  std::string prefix = "vrdma";        // of the subnet's keys
  std::string ca_file, certificate_file, key_file;  // PEM; of https
};
struct EtcdEndpoint {
  std::string host, port;
  bool tls = false;
};
// nullopt: not "http://HOST:PORT" or "https://HOST:PORT".
std::optional<EtcdEndpoint> etcd_endpoint(const std::string& text);

struct Settings {
  std::string name;              // that of the certificate where it is empty
  std::string address;           // numeric IP: where it listens, and what others dial
  std::uint16_t port = 28250;    // the first of PVRDMA's range for hosts
  std::uint16_t carrier_port = 0;  // 0: the one after port
  bool encrypt = false;          // data to and from other hosts, which is authenticated in any case
  std::uint16_t lids = 256;      // how many it asks for
  std::filesystem::path folder = "/var/lib/vrdma/subnet";
  std::vector<Endpoint> peers;   // who may lead the subnet; the same list on each of them
  std::optional<std::pair<std::string, std::uint16_t>> seed;  // whom to ask that
  std::optional<EtcdSettings> etcd;  // in place of these two: whoever has it may lead
  Timing timing;
  SessionLimits limits;
  std::string version;           // of the program
};

}  // namespace vrdma::hosts
