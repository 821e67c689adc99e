#include "vmci_channel/journal.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace vmci {

bool journal_reads_stderr() {
  const char* const stream = std::getenv("JOURNAL_STREAM");
  std::uintmax_t device = 0, inode = 0;
  struct stat ours;
  return stream != nullptr && std::sscanf(stream, "%" SCNuMAX ":%" SCNuMAX, &device, &inode) == 2 && ::fstat(STDERR_FILENO, &ours) == 0 &&
         ours.st_dev == device && ours.st_ino == inode;
}

std::string journal_prefix(char priority) { return journal_reads_stderr() ? std::string{'<', priority, '>'} : std::string(); }

}  // namespace vmci
