// What the built library is to the loader: as good as libibverbs.so.1 for every client, and nothing besides.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <glob.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>

#include "guest_lib/abi/elf_reader.hpp"

using namespace vrdma;

namespace {

std::set<VersionedSymbol> listed_exports() {
  std::set<VersionedSymbol> listed;
  std::ifstream file(VRDMA_EXPORTS);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    VersionedSymbol symbol;
    words >> symbol.name >> symbol.version;
    listed.insert(symbol);
    if (symbol.version != "IBVERBS_PRIVATE_34" || symbol.name == "verbs_register_driver_34") continue;
    for (const char* const release : {"22", "25", "33", "57", "59", "64", "65"}) listed.insert({symbol.name, std::string("IBVERBS_PRIVATE_") + release});
  }
  return listed;
}

const std::set<std::string> interposed = {
    "madvise", "mremap", "memfd_create", "memalign", "aligned_alloc", "posix_memalign", "valloc",
    "open", "open64", "__open", "__open64", "openat", "openat64", "__open_2", "__open64_2", "__openat_2", "__openat64_2",
    "fopen", "fopen64", "stat", "stat64", "lstat", "lstat64", "fstatat", "fstatat64", "__xstat", "__xstat64",
    "__lxstat", "__lxstat64", "__fxstatat", "__fxstatat64", "statx", "access", "eaccess", "euidaccess", "faccessat",
    "realpath", "__realpath_chk", "canonicalize_file_name", "readlink", "readlinkat", "__readlink_chk",
    "__readlinkat_chk", "opendir", "closedir", "readdir", "readdir64", "readdir_r", "readdir64_r", "rewinddir",
    "socket", "connect", "send", "sendto", "sendmsg", "read", "__read_chk", "readv", "write", "writev", "ioctl", "close", "closefrom", "close_range", "dup2", "dup3", "fstat", "fstat64", "__fxstat", "__fxstat64",
    "seekdir", "telldir", "dirfd", "fdopendir", "scandir", "scandir64", "scandirat", "scandirat64", "glob", "glob64", "ftw", "ftw64", "nftw", "nftw64", "chdir", "fchdir", "getcwd", "__getcwd_chk", "get_current_dir_name"};

ElfFile read_required(const char* path) {
  const auto elf = read_elf(path);
  REQUIRE_MESSAGE(elf.has_value(), path);
  return *elf;
}

// "GLIBC_2.35" as 2035; 0 for any other name.
int glibc_version(const std::string& version) {
  int major = 0, minor = 0;
  return std::sscanf(version.c_str(), "GLIBC_%d.%d", &major, &minor) >= 2 ? major * 1000 + minor : 0;
}

std::set<VersionedSymbol> exports_of(const ElfFile& elf) { return {elf.exports.begin(), elf.exports.end()}; }

std::vector<std::string> files_like(const char* pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern, 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

}  // namespace

TEST_CASE("the library is libibverbs.so.1, needs libc only, binds at load and stays loaded") {
  for (const char* path : {VRDMA_LIBRARY, VRDMA_COMPLETE_LIBRARY}) {
    INFO(std::string(path));
    const ElfFile elf = read_required(path);
    CHECK(elf.soname == "libibverbs.so.1");
    CHECK(elf.bind_now);
    CHECK(elf.no_delete);
    CHECK(!elf.needed.empty());
    for (const auto& needed : elf.needed) {
      INFO(needed);
      const bool part_of_libc = needed == "libc.so.6" || needed == "libpthread.so.0" || needed == "libdl.so.2" || needed.starts_with("ld-linux-");
      CHECK(part_of_libc);
    }
  }
}

TEST_CASE("no symbol of a C library newer than 2.28 is wanted") {
  int checked = 0;
  for (const char* path : {VRDMA_LIBRARY, VRDMA_COMPLETE_LIBRARY})
    for (const auto& import : read_required(path).imports) {
      INFO(std::string(path) << ": " << import.name << "@" << import.version);
      CHECK(glibc_version(import.version) <= 2028);
      checked += glibc_version(import.version) != 0;
    }
  CHECK(checked > 20);
}

TEST_CASE("the library's own calls reach no other library that stands in for sockets, polls and files") {
  const std::set<std::string> names{
      "accept", "accept4", "bind", "close", "connect", "dup", "dup2", "dup3", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_wait",
      "fcntl", "fcntl64", "getpeername", "getsockname", "getsockopt", "ioctl", "listen", "poll", "ppoll", "read", "readv", "recv", "recvfrom", "recvmsg", "select",
      "send", "sendmsg", "sendto", "setsockopt", "shutdown", "socket", "socketpair", "write", "writev"};
  for (const auto& import : read_required(VRDMA_LIBRARY).imports) {
    INFO(import.name);
    CHECK(!names.contains(import.name));
  }
}

// Posting, and what stands in for madvise(2), mremap(2) and fork(2), must not end a thread that is being cancelled: it may hold locks, and the
// program ends where an unwinding meets `noexcept`. So the names of pthreads(7), but for those that come where cancellation is off: messages
// of stdio's, and what waits for a verb's end.
TEST_CASE("the library calls nothing of libc's that is a cancellation point") {
  const std::set<std::string> names{
      "__pread64_chk", "__pread_chk", "clock_nanosleep", "copy_file_range", "creat", "creat64", "epoll_pwait", "epoll_wait", "fallocate", "fallocate64",
      "fcntl", "fcntl64", "fdatasync", "fsync", "lockf", "lockf64", "msgrcv", "msgsnd", "msync", "nanosleep", "open", "open64", "openat", "openat64",
      "pause", "posix_fallocate", "posix_fallocate64", "pread", "pread64", "preadv", "preadv2", "preadv64", "preadv64v2", "pselect", "pwrite",
      "pwrite64", "pwritev", "pwritev2", "pwritev64", "pwritev64v2", "readv", "select", "sem_timedwait", "sem_wait", "sigpause", "sigsuspend", "sigtimedwait",
      "sigwait", "sigwaitinfo", "sleep", "splice", "sync_file_range", "system", "tcdrain", "tee", "usleep", "vmsplice", "wait", "wait3", "wait4", "waitid",
      "waitpid", "writev"};
  for (const auto& import : read_required(VRDMA_LIBRARY).imports) {
    INFO(import.name);
    CHECK(!names.contains(import.name));
  }
}

TEST_CASE("nothing is exported beyond the list and the interposers, which have no version") {
  const auto listed = listed_exports();
  REQUIRE(listed.size() > 100);
  for (const char* path : {VRDMA_LIBRARY, VRDMA_COMPLETE_LIBRARY}) {
    std::set<std::string> interposers;
    for (const auto& symbol : exports_of(read_required(path))) {
      INFO(std::string(path) << ": " << symbol.name << "@" << symbol.version);
      if (symbol.version.empty()) {
        CHECK(interposed.contains(symbol.name));
        interposers.insert(symbol.name);
      } else {
        CHECK(listed.contains(symbol));
      }
    }
    CHECK(interposers == interposed);
  }
}

TEST_CASE("every listed symbol is exported under its version") {
  const auto exports = exports_of(read_required(VRDMA_COMPLETE_LIBRARY));
  for (const auto& symbol : listed_exports()) {
    INFO(symbol.name << "@" << symbol.version);
    CHECK(exports.contains(symbol));
  }
}

TEST_CASE("the list is what the machine's libibverbs exports, but for the 1.0 wrappers of verbs that moved to 1.1 and what later ones have") {
  const auto real = read_elf("/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0");
  if (!real) {
    MESSAGE("SKIPPED: libibverbs 1.14.44 is not installed");
    return;
  }
  const auto listed = listed_exports();
  const auto theirs = exports_of(*real);
  // That libmlx5 of rdma-core 56, 59, 62, 64 and 65 binds, or that of releases before 34; and all of the versions that came with those.
  const std::set<std::string> others{
      "ibv_cmd_query_device", "ibv_cmd_query_device_ex", "ibv_get_fw_ver",
      "ibv_cmd_create_cq_ex2", "ibv_cmd_alloc_dmah", "ibv_cmd_free_dmah", "ibv_cmd_reg_mr_ex", "ibv_cmd_export_dmabuf_fd", "ibv_cmd_query_port_speed",
      "ibv_dmabuf_heap_alloc", "ibv_dmabuf_heap_cc_shared_init", "ibv_dmabuf_heap_destroy", "ibv_dmabuf_heap_free", "ibv_cmd_create_comp_cntr",
      "ibv_cmd_destroy_comp_cntr", "ibv_cmd_inc_comp_cntr", "ibv_cmd_inc_err_comp_cntr", "ibv_cmd_qp_attach_comp_cntr", "ibv_cmd_query_comp_cntr_caps",
      "ibv_cmd_read_comp_cntr", "ibv_cmd_read_err_comp_cntr", "ibv_cmd_set_comp_cntr", "ibv_cmd_set_err_comp_cntr", "ibv_wr_opcode_str"};
  const std::set<std::string> other_versions{"IBVERBS_1.15",       "IBVERBS_1.16",       "IBVERBS_1.17",       "IBVERBS_1.18",       "IBVERBS_PRIVATE_22", "IBVERBS_PRIVATE_25",
                                             "IBVERBS_PRIVATE_33", "IBVERBS_PRIVATE_57", "IBVERBS_PRIVATE_59", "IBVERBS_PRIVATE_64", "IBVERBS_PRIVATE_65"};
  for (const auto& symbol : listed) {
    INFO(symbol.name << "@" << symbol.version);
    const bool is_other = others.contains(symbol.name) || other_versions.contains(symbol.version);
    CHECK(theirs.contains(symbol) != is_other);
  }
  for (const auto& symbol : theirs) {
    INFO(symbol.name << "@" << symbol.version);
    const bool wrapper = symbol.version == "IBVERBS_1.0" && theirs.contains({symbol.name, "IBVERBS_1.1"});
    const bool is_listed = listed.contains(symbol);
    CHECK(is_listed != wrapper);
  }
}

TEST_CASE("every client on this machine finds what it imports from libibverbs") {
  const auto exports = exports_of(read_required(VRDMA_COMPLETE_LIBRARY));
  int clients = 0;
  for (const char* pattern :
       {"/usr/bin/ib_*", "/usr/bin/ibv_*", "/usr/bin/raw_ethernet_*", "/usr/bin/qperf", "/usr/bin/rping",
        "/usr/bin/ucmatose", "/usr/bin/udaddy", "/usr/bin/mckey", "/usr/bin/rdma_*", "/usr/bin/r*stream",
        "/usr/bin/cmtime", "/usr/bin/fio", "/usr/lib/x86_64-linux-gnu/libmlx[45].so.1", "/usr/lib/x86_64-linux-gnu/libefa.so.1",
        "/usr/lib/x86_64-linux-gnu/libmana.so.1", "/usr/lib/x86_64-linux-gnu/librdmacm.so.1",
        "/usr/lib/x86_64-linux-gnu/ucx/*.so", "/usr/lib/x86_64-linux-gnu/libfabric.so.1",
        "/usr/lib/python3/dist-packages/pyverbs/*.so", "/usr/lib/python3/dist-packages/pyverbs/providers/*/*.so"}) {
    for (const auto& path : files_like(pattern)) {
      const auto elf = read_elf(path);
      if (!elf) continue;
      bool client = false;
      for (const auto& import : elf->imports) {
        if (!import.version.starts_with("IBVERBS_")) continue;
        client = true;
        INFO(std::string(path) << ": " << import.name << "@" << import.version);
        CHECK(exports.contains(import));
      }
      clients += client;
    }
  }
  MESSAGE("clients checked: " << clients);
  if (files_like("/usr/bin/ibv_devinfo").empty()) {
    MESSAGE("SKIPPED: no client is installed");
    return;
  }
  CHECK(clients > 0);
}

TEST_CASE("the library loads by dlopen and dlvsym finds symbols by version") {
  void* library = dlopen(VRDMA_COMPLETE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  REQUIRE_MESSAGE(library != nullptr, dlerror());
  CHECK(dlvsym(library, "ibv_get_device_list", "IBVERBS_1.1") != nullptr);
  CHECK(dlvsym(library, "ibv_reg_mr_iova2", "IBVERBS_1.8") != nullptr);
  CHECK(dlvsym(library, "ibv_get_device_list", "IBVERBS_1.0") == nullptr);
  CHECK(dlsym(library, "_ZN5vrdma14find_syntheticEPKc") == nullptr);
  const auto opcode_text = reinterpret_cast<const char* (*)(int)>(dlsym(library, "ibv_wr_opcode_str"));
  REQUIRE(static_cast<bool>(opcode_text));
  CHECK(std::string(opcode_text(IBV_WR_RDMA_READ)) == "rdma-read");
  for (const int unnamed : {-1, 12, 13, 16}) CHECK(std::string(opcode_text(unnamed)) == "unknown");
}
