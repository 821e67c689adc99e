// `vrdma container`: what starts a container in which programs find vrdma0.
#pragma once

#include <string>

namespace vrdma::cli {

struct ContainerOptions {
  std::string format = "options";  // "options" of podman, docker and nerdctl, "nspawn" for systemd-nspawn, "cdi": the specification of a device
  std::string link_layer;          // "", "ib" or "ethernet"
  std::string name;                // of the guests, or ""
  std::string socket;
};

// Prints them: one line of options, for $(…), or JSON. Starts a private service where none is reachable and no specification is asked for.
// Throws std::runtime_error with a message for a person.
int container(const ContainerOptions& options);

}  // namespace vrdma::cli
