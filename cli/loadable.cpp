#include "cli/loadable.hpp"

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::cli {

namespace {

// Where execvp() finds it: in PATH, unless the name has a slash.
std::string found(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* const variable = std::getenv("PATH");
  const std::string path = variable != nullptr ? variable : "/bin:/usr/bin";
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    std::string candidate = path.substr(begin, end - begin);
    candidate += candidate.empty() ? name : "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    begin = end + 1;
  }
  return {};
}

template <class T>
bool read_at(int fd, std::uint64_t offset, T& value) {
  return ::pread(fd, &value, sizeof(value), static_cast<off_t>(offset)) == static_cast<ssize_t>(sizeof(value));
}

// Of an ELF file the dynamic loader; "" where there is none.
template <class Head, class Segment>
std::string loader_of(int file) {
  Head head;
  if (!read_at(file, 0, head)) return {};
  for (unsigned i = 0; i < head.e_phnum; ++i) {
    Segment segment;
    if (!read_at(file, head.e_phoff + std::uint64_t{i} * head.e_phentsize, segment)) return {};
    if (segment.p_type != PT_INTERP) continue;
    std::array<char, 4096> path{};
    if (::pread(file, path.data(), std::min<std::size_t>(segment.p_filesz, path.size() - 1), static_cast<off_t>(segment.p_offset)) <= 0) return {};
    return path.data();
  }
  return {};
}

std::vector<char> section_at(int file, std::uint64_t file_bytes, const Elf64_Shdr& section) {
  if (section.sh_offset > file_bytes || section.sh_size > file_bytes - section.sh_offset) return {};
  std::vector<char> bytes(section.sh_size);
  if (::pread(file, bytes.data(), bytes.size(), static_cast<off_t>(section.sh_offset)) != static_cast<ssize_t>(bytes.size())) return {};
  return bytes;
}

// Whether the program has that function itself, as it exports it, or as its table of symbols tells, where it was not stripped.
bool defines(int file, std::uint64_t file_bytes, const Elf64_Ehdr& head, std::string_view function) {
  for (unsigned i = 0; i < head.e_shnum; ++i) {
    const auto header_at = [&](std::uint64_t which, Elf64_Shdr& out) { return read_at(file, head.e_shoff + which * sizeof(out), out); };
    Elf64_Shdr table, names;
    if (head.e_shentsize != sizeof(table) || !header_at(i, table)) return false;
    if ((table.sh_type != SHT_DYNSYM && table.sh_type != SHT_SYMTAB) || table.sh_link >= head.e_shnum || !header_at(table.sh_link, names)) continue;
    const auto text = section_at(file, file_bytes, names), symbols = section_at(file, file_bytes, table);
    const std::string_view all(text.data(), text.size());
    Elf64_Sym symbol;
    for (std::size_t at = 0; at + sizeof(symbol) <= symbols.size(); at += sizeof(symbol)) {
      std::memcpy(&symbol, symbols.data() + at, sizeof(symbol));
      if (symbol.st_shndx == SHN_UNDEF || symbol.st_name >= all.size()) continue;
      const std::string_view name = all.substr(symbol.st_name);
      if (name.starts_with(function) && name.size() > function.size() && name[function.size()] == '\0') return true;
    }
  }
  return false;
}

// What the kernel starts in its place, as its first line or its header says.
std::string interpreter_of(int file) {
  std::array<char, 256> begin{};  // as much of a line as the kernel reads
  if (::pread(file, begin.data(), begin.size() - 1, 0) <= 0) return {};
  const std::string_view text(begin.data());
  if (std::memcmp(begin.data(), ELFMAG, SELFMAG) == 0)
    return begin[EI_CLASS] == ELFCLASS64 ? loader_of<Elf64_Ehdr, Elf64_Phdr>(file) : loader_of<Elf32_Ehdr, Elf32_Phdr>(file);
  if (!text.starts_with("#!")) return {};
  const std::size_t from = std::min(text.find_first_not_of(" \t", 2), text.size());
  return std::string(text.substr(from, text.find_first_of(" \t\n", from) - from));
}

}  // namespace

std::string missing_interpreter(const std::string& name) {
  const std::string path = found(name);
  const vmci::UniqueFd file(path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return {};
  const std::string interpreter = interpreter_of(file.get());
  return !interpreter.empty() && ::access(interpreter.c_str(), F_OK) != 0 ? interpreter : "";
}

std::string why_not_loadable(const std::string& name) {
  const std::string path = found(name);
  const vmci::UniqueFd file(path.empty() ? -1 : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  Elf64_Ehdr head;
  if (!read_at(file.get(), 0, head) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0) return {};  // a script
  if (head.e_ident[EI_CLASS] != ELFCLASS64) return "is a 32-bit program, and libvrdma a 64-bit library";
  const bool changes_user = (status.st_mode & S_ISUID) != 0 && status.st_uid != ::getuid();
  const bool changes_group = (status.st_mode & S_ISGID) != 0 && status.st_gid != ::getgid();
  if (changes_user || changes_group) return "is a set-user-ID or set-group-ID program, into which the loader puts nobody else's library; for what it starts put \"vrdma run\" inside (firejail -- vrdma run -- PROGRAM)";
  if (::getuid() != 0 && ::fgetxattr(file.get(), "security.capability", nullptr, 0) > 0)
    return "has file capabilities, and the loader puts nobody else's library into such programs";
  for (unsigned i = 0; i < head.e_phnum; ++i) {
    Elf64_Phdr segment;
    if (!read_at(file.get(), head.e_phoff + std::uint64_t{i} * head.e_phentsize, segment)) return {};
    if (segment.p_type != PT_INTERP) continue;
    return defines(file.get(), static_cast<std::uint64_t>(status.st_size), head, "ibv_get_device_list") ? "has libibverbs (libibverbs.a) inside, so that it calls none that is loaded" : "";
  }
  return "is linked statically, so that it loads no library";
}

}  // namespace vrdma::cli
