#include "cli/bench.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/installed.hpp"

namespace vrdma::cli {

namespace {

namespace fs = std::filesystem;

// The first of these that is there.
fs::path one_of(const std::vector<fs::path>& places, const char* what) {
  std::string tried;
  for (const fs::path& place : places) {
    std::error_code error;
    if (fs::exists(place, error)) return place;
    tried += (tried.empty() ? "" : " and ") + place.string();
  }
  throw std::runtime_error(fmt::format("bench: cannot find {} (looked at {}): build all targets, or install vrdma", what, tried));
}

}  // namespace

void bench(const std::vector<std::string>& arguments) {
  const fs::path self = fs::read_symlink("/proc/self/exe"), prefix = self.parent_path().parent_path();
  const fs::path script = one_of({prefix / "share" / "vrdma" / "bench" / "bench.py"}, "its scripts");
  // In the build folder, and where it is installed.
  const fs::path programs = one_of({prefix / "tests" / "verbs_bench", prefix / VRDMA_LIBRARY_FOLDER / "bench" / "verbs_bench"}, "its programs").parent_path();
  // -B: no compiled copies beside the scripts.
  std::vector<std::string> words{"python3", "-B", script, "--vrdma", self, "--library", library_path(), "--programs", programs};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  throw std::runtime_error(errno == ENOENT ? "bench: needs python3, which is not installed: apt-get install python3"
                                           : fmt::format("bench: cannot start python3 ({})", std::strerror(errno)));
}

}  // namespace vrdma::cli
