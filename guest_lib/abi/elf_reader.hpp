// Test only: what a 64-bit ELF file asks of the loader and offers to it, read from the file itself.
#pragma once

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace vrdma {

struct VersionedSymbol {
  std::string name;
  std::string version;  // "" for the base version
  auto operator<=>(const VersionedSymbol&) const = default;
};

struct ElfFile {
  std::string soname;
  std::vector<std::string> needed;
  std::vector<std::string> version_nodes;  // defined by this file
  std::vector<VersionedSymbol> exports;    // defined, global or weak, visible
  std::vector<VersionedSymbol> imports;    // undefined
  bool bind_now = false;
  bool no_delete = false;
};

// Nothing when the file cannot be read or is no 64-bit ELF with a dynamic section. Trusts the file otherwise: it reads
// what this machine's linker wrote.
inline std::optional<ElfFile> read_elf(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), {});
  if (bytes.size() < sizeof(Elf64_Ehdr) || std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0 ||
      bytes[EI_CLASS] != ELFCLASS64)
    return std::nullopt;
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(bytes.data());
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes.data() + header->e_shoff);
  const auto section_of = [&](Elf64_Word type) -> const Elf64_Shdr* {
    for (unsigned i = 0; i < header->e_shnum; ++i)
      if (sections[i].sh_type == type) return &sections[i];
    return nullptr;
  };
  const auto data_of = [&](const Elf64_Shdr* section) { return bytes.data() + section->sh_offset; };

  const Elf64_Shdr* dynamic = section_of(SHT_DYNAMIC);
  const Elf64_Shdr* symbols = section_of(SHT_DYNSYM);
  if (dynamic == nullptr || symbols == nullptr) return std::nullopt;
  const char* strings = data_of(&sections[symbols->sh_link]);

  ElfFile file;
  for (const auto* entry = reinterpret_cast<const Elf64_Dyn*>(data_of(dynamic)); entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_NEEDED) file.needed.emplace_back(strings + entry->d_un.d_val);
    if (entry->d_tag == DT_SONAME) file.soname = strings + entry->d_un.d_val;
    if (entry->d_tag == DT_FLAGS_1) {
      file.bind_now = (entry->d_un.d_val & DF_1_NOW) != 0;
      file.no_delete = (entry->d_un.d_val & DF_1_NODELETE) != 0;
    }
  }

  std::vector<std::string> version_names(VER_NDX_GLOBAL + 1);
  const auto name_version = [&](unsigned index, const char* name) {
    if (version_names.size() <= index) version_names.resize(index + 1);
    version_names[index] = name;
  };
  if (const Elf64_Shdr* section = section_of(SHT_GNU_verdef)) {
    const char* at = data_of(section);
    for (unsigned left = section->sh_info; left > 0; --left) {
      const auto* definition = reinterpret_cast<const Elf64_Verdef*>(at);
      const auto* name = reinterpret_cast<const Elf64_Verdaux*>(at + definition->vd_aux);
      if ((definition->vd_flags & VER_FLG_BASE) == 0) {
        name_version(definition->vd_ndx, strings + name->vda_name);
        file.version_nodes.emplace_back(strings + name->vda_name);
      }
      at += definition->vd_next;
    }
  }
  if (const Elf64_Shdr* section = section_of(SHT_GNU_verneed)) {
    const char* at = data_of(section);
    for (unsigned left = section->sh_info; left > 0; --left) {
      const auto* need = reinterpret_cast<const Elf64_Verneed*>(at);
      const char* version_at = at + need->vn_aux;
      for (unsigned i = 0; i < need->vn_cnt; ++i) {
        const auto* version = reinterpret_cast<const Elf64_Vernaux*>(version_at);
        name_version(version->vna_other & 0x7fff, strings + version->vna_name);
        version_at += version->vna_next;
      }
      at += need->vn_next;
    }
  }

  const Elf64_Shdr* versions = section_of(SHT_GNU_versym);
  const auto* version_of = versions != nullptr ? reinterpret_cast<const Elf64_Half*>(data_of(versions)) : nullptr;
  const auto* symbol = reinterpret_cast<const Elf64_Sym*>(data_of(symbols));
  for (std::size_t i = 1; i < symbols->sh_size / sizeof(Elf64_Sym); ++i) {
    if (ELF64_ST_BIND(symbol[i].st_info) == STB_LOCAL) continue;
    const unsigned version = version_of != nullptr ? version_of[i] & 0x7fffu : 0u;
    VersionedSymbol found{strings + symbol[i].st_name, version < version_names.size() ? version_names[version] : ""};
    if (symbol[i].st_shndx == SHN_UNDEF)
      file.imports.push_back(found);
    else if (found.name != found.version)  // a node's own absolute symbol is no export
      file.exports.push_back(found);
  }
  return file;
}

}  // namespace vrdma
