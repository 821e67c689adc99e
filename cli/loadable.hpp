// What keeps the dynamic loader from putting libvrdma into a program.
#pragma once

#include <string>

namespace vrdma::cli {

// Why the program that execvp() would start as `name` cannot load libvrdma, in words that follow its name; "" where it can, as far
// as its file tells, or where there is no such program.
std::string why_not_loadable(const std::string& name);
// The interpreter that its first line, or its ELF header, names and that is not there, for which execvp() says ENOENT, as for no program; else "".
std::string missing_interpreter(const std::string& name);

}  // namespace vrdma::cli
