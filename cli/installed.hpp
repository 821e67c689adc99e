// The other files of this installation, or of this build tree.
#pragma once

#include <string>

namespace vrdma::cli {

// Beside this program: ../lib/libvrdma.so in the build tree, the installed place otherwise. Throws when it is in neither.
std::string library_path();
std::string program_path(const std::string& name);
// A path to `library` that LD_PRELOAD can hold, which has no quoting: where its folder's name has a blank, a link in the private
// folder. Throws when there is no such path.
std::string preloadable(const std::string& library);

}  // namespace vrdma::cli
