#include "cli/installed.hpp"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <vector>

#include "cli/fail.hpp"
#include "cli/private_folder.hpp"

namespace vrdma::cli {

namespace fs = std::filesystem;

namespace {

fs::path own_folder() {
  std::error_code error;
  fs::path self = fs::read_symlink("/proc/self/exe", error);
  // A sandbox without /proc: what we were started as.
  if (error) self = fs::canonical(reinterpret_cast<const char*>(::getauxval(AT_EXECFN)), error);
  return self.parent_path();
}

}  // namespace

std::string program_path(const std::string& name) {
  const fs::path beside = own_folder() / name;
  if (fs::exists(beside)) return beside;
  for (const char* folder : {"/usr/local/bin/", "/usr/local/sbin/", "/usr/bin/", "/usr/sbin/"})
    if (fs::exists(folder + name)) return folder + name;
  fail(fmt::format("cannot find {}: it should stand beside vrdma in {}", name, own_folder().string()));
}

std::string library_path() {
  const std::vector<fs::path> places{own_folder().parent_path() / "lib" / "libvrdma.so", own_folder().parent_path() / VRDMA_LIBRARY_FOLDER / "libvrdma.so"};
  std::string tried;
  for (const auto& place : places) {
    std::error_code error;
    if (fs::exists(place, error)) return fs::canonical(place);
    tried += (tried.empty() ? "" : " and ") + place.string();
  }
  fail(fmt::format("cannot find libvrdma.so (looked at {}): build or install it", tried));
}

std::string preloadable(const std::string& library) {
  constexpr const char* special_to_the_loader = " :$";
  if (library.find_first_of(special_to_the_loader) == std::string::npos) return library;
  const std::string folder = private_folder();
  const std::string link = fmt::format("{}/libvrdma-{:016x}.so", folder, std::hash<std::string>{}(library));
  if (link.find_first_of(special_to_the_loader) != std::string::npos)
    fail(fmt::format("LD_PRELOAD cannot hold {}, nor a link to it in {}, because of a blank, colon or dollar sign: install vrdma "
                     "in a folder without, or set XDG_RUNTIME_DIR to one",
                     library, folder));
  make_private_folder(folder);
  std::error_code error;
  if (fs::read_symlink(link, error) == library) return link;
  const std::string fresh = fmt::format("{}.{}", link, ::getpid());
  if (::symlink(library.c_str(), fresh.c_str()) != 0 || ::rename(fresh.c_str(), link.c_str()) != 0)
    fail(fmt::format("cannot make the link {} ({})", link, std::strerror(errno)));
  return link;
}

}  // namespace vrdma::cli
