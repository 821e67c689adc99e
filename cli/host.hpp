// `vrdma host`: keys and certificates of the hosts of a subnet, in a folder. No service has to run for it, except for `remove`
// and `partition`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vrdma::cli {

inline constexpr const char* subnet_folder = "/var/lib/vrdma/subnet";  // of certificates, where no other is named

struct HostOptions {
  std::string folder = subnet_folder;
  std::string name;
  std::string address;  // of init and join: this host's; of add: whom the new host asks first
  std::string file;     // the invitation
  int days = 1825;
  bool json = false;
  std::string pkey;                  // of a partition
  std::vector<std::string> members;  // HOST/UID
};

inline constexpr int authority_days = 7300;

// Exit codes. Throw std::runtime_error, or WrongUsage, with a message for a person.
int host_init(const HostOptions& options);
int host_add(const HostOptions& options);
int host_join(const HostOptions& options);
int host_list(const HostOptions& options);
int host_show(const HostOptions& options);
int host_remove(const HostOptions& options);
int partition_add(const HostOptions& options);
int partition_remove(const HostOptions& options);
int partition_list(const HostOptions& options);

}  // namespace vrdma::cli
