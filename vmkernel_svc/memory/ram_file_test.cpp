#include "vmkernel_svc/memory/ram_file.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

namespace vrdma::svc {
namespace {

namespace fs = std::filesystem;

struct Folder {
  fs::path path = fs::canonical(fs::temp_directory_path()) / ("vrdma-ram-file-" + std::to_string(::getpid()));
  Folder() {
    fs::remove_all(path);
    fs::create_directories(path / "of");
    std::ofstream(path / "of" / "ram") << "RAM";
  }
  ~Folder() { fs::remove_all(path); }
  int opens(const char* name, uid_t tenant = ::geteuid()) const {
    const auto file = open_ram_file(path / name, tenant);
    return file ? 0 : value(file.error());
  }
};

TEST_CASE("A machine's RAM is a regular file, and no link to one") {
  const Folder folder;
  CHECK(folder.opens("of/ram") == 0);
  CHECK(folder.opens("of/none") == ENOENT);
  fs::create_symlink(folder.path / "of" / "ram", folder.path / "of" / "link");
  CHECK(folder.opens("of/link") == ELOOP);
  CHECK(folder.opens("of") == EISDIR);
  REQUIRE(::mkfifo((folder.path / "of" / "pipe").c_str(), 0600) == 0);
  CHECK(folder.opens("of/pipe") == ENODEV);  // and nobody waits for its other end
  const auto device = open_ram_file("/dev/null", ::geteuid());
  REQUIRE(!device);
  CHECK(value(device.error()) == ENODEV);
}

TEST_CASE("A machine's RAM is its tenant's, or the service's where nobody can have led the path there") {
  const Folder folder;
  const uid_t tenant = ::geteuid() + 4711;
  CHECK(folder.opens("of/ram", tenant) == 0);
  fs::create_directory_symlink(folder.path / "of", folder.path / "tenants");
  CHECK(folder.opens("tenants/ram", tenant) == EPERM);
  CHECK(folder.opens("tenants/ram") == 0);
  if (::geteuid() != 0) {
    MESSAGE("SKIPPED: only root gives files away");
    return;
  }
  REQUIRE(::chown((folder.path / "of" / "ram").c_str(), tenant, static_cast<gid_t>(-1)) == 0);
  CHECK(folder.opens("of/ram", tenant) == 0);
  CHECK(folder.opens("of/ram") == EPERM);
  CHECK(folder.opens("of/ram", tenant + 1) == EPERM);
}

}  // namespace
}  // namespace vrdma::svc
