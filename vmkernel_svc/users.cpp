#include "vmkernel_svc/users.hpp"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <sstream>

namespace vrdma::svc {

namespace {
std::string whole_file(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
}  // namespace

// A range is mapped to one that the parent maps, and no two overlap: as many as there are uids are all of them. Where the map cannot be read
// it is not known to be complete.
std::optional<uid_t> overflow_uid(const std::string& uid_map, const std::string& overflow) {
  constexpr std::uint64_t all = 0xffffffff;  // -1 is none
  std::uint64_t mapped = 0;
  std::istringstream lines(uid_map);
  for (std::uint64_t inside, outside, count; lines >> inside >> outside >> count;) mapped += count;
  if (mapped >= all) return std::nullopt;
  uid_t uid = 65534;
  if (std::istringstream number(overflow); !(number >> uid)) uid = 65534;
  return uid;
}

bool may_be_several(uid_t uid) {
  static const std::optional<uid_t> unmapped = overflow_uid(whole_file("/proc/self/uid_map"), whole_file("/proc/sys/kernel/overflowuid"));
  return uid == unmapped;
}

}  // namespace vrdma::svc
