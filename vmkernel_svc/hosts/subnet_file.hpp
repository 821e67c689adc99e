// What a host must not forget, in FOLDER/subnet.json: its LIDs, and what it promised and agreed to as a manager. Written whole
// beside the old one, flushed and renamed over it, so that after a crash one of the two is there.
#pragma once

#include "vmkernel_svc/hosts/certificates.hpp"
#include "vmkernel_svc/hosts/node.hpp"

namespace vrdma::hosts {

struct SubnetFile {
  Node::Memory memory;
  std::vector<Endpoint> managers;  // as learnt of a seed
};

// Nothing there: the empty one. Throws std::runtime_error with a message for a person where it is not sound.
SubnetFile load_subnet(const std::filesystem::path& file);
void save_subnet(const std::filesystem::path& file, const SubnetFile& content);

}  // namespace vrdma::hosts
