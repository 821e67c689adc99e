// The file that a machine keeps its RAM in, opened as what it has to be. Whoever runs the machine may have put something else in its
// place since somebody named it: a link to another machine's RAM, or a file whose pages somebody hands out when he likes.
#pragma once

#include <sys/types.h>

#include <string>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

// tenant: whose machine it is. What open(2) says; ELOOP: a link; ENODEV: no regular file; EPERM: it belongs to neither that user nor to the
// service's and root, or it is one of theirs and a link is on the way; EMEDIUMTYPE: its pages are another process's or host's to give.
Result<vmci::UniqueFd> open_ram_file(const std::string& path, uid_t tenant);
// For a person, of an error of the above.
const char* ram_file_remedy(int error);

}  // namespace vrdma::svc
