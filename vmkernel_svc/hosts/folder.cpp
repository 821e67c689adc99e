// The files of certificates.hpp.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <stdexcept>

#include "vmkernel_svc/hosts/certificates.hpp"
#include "vrdma/write_all.hpp"

namespace vrdma::hosts {

namespace {
[[noreturn]] void refuse(const std::filesystem::path& file, const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", file.string(), what));
}
}  // namespace

std::string read_file(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (stream && stream.peek() == std::ifstream::traits_type::eof() && !stream.bad()) return {};  // to take nothing over is a failure to a stream
  constexpr std::size_t most = 64u << 20, part = 64u << 10;  // what has no end, as /dev/zero, is told too
  std::string content;
  for (std::size_t got = part; got == part && stream;) {
    content.resize(content.size() + part);
    stream.read(content.data() + content.size() - part, part);
    got = static_cast<std::size_t>(stream.gcount());
    content.resize(content.size() - part + got);
    if (content.size() > most) refuse(file, "is longer than 64 MiB, and none of vrdma's files");
  }
  if (!stream.eof()) refuse(file, fmt::format("cannot be read ({})", std::strerror(errno)));
  return content;
}

void save_new(const std::filesystem::path& file, const std::string& text, For whom) {
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, whom == For::owner ? 0600 : 0644);
  if (fd < 0)
    refuse(file, errno == EEXIST ? "is there already: remove it first if it is to be replaced" : fmt::format("cannot be made ({})", std::strerror(errno)));
  const bool good = vrdma::write_all(fd, text) && ::fsync(fd) == 0;
  const int why = errno;
  ::close(fd);
  if (good) return;
  ::unlink(file.c_str());
  refuse(file, fmt::format("cannot be written ({})", std::strerror(why)));
}

X509Ptr load_certificate(const std::filesystem::path& file) { return certificate_from_pem(read_file(file), file.string()); }

KeyPtr load_key(const std::filesystem::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) refuse(file, fmt::format("cannot be read ({})", std::strerror(errno)));
  if ((status.st_mode & 077) != 0) refuse(file, fmt::format("others may read this key (mode {:04o}): chmod 600 it, and make another if they have", status.st_mode & 07777));
  if (status.st_uid != ::geteuid() && status.st_uid != 0) refuse(file, fmt::format("belongs to uid {}: it must be ours", status.st_uid));
  return key_from_pem(read_file(file), file.string());
}

Identity load_authority(const Folder& folder) {
  std::error_code error;
  if (!std::filesystem::exists(folder / "authority.key", error) && !error)
    refuse(folder, "the subnet's authority is not here: hosts are added and removed, and partitions changed, where \"vrdma host init\" was run");
  Identity authority{load_certificate(folder / "ca.pem"), load_key(folder / "authority.key")};
  if (X509_check_private_key(authority.certificate.get(), authority.key.get()) != 1) refuse(folder, "authority.key does not fit ca.pem");
  return authority;
}

Identity load_host(const Folder& folder) {
  if (!std::filesystem::exists(folder / "host.pem"))
    refuse(folder, "no certificate of this host here: \"vrdma host init\" begins a subnet, \"vrdma host join\" joins one");
  Identity host{load_certificate(folder / "host.pem"), load_key(folder / "host.key")};
  if (X509_check_private_key(host.certificate.get(), host.key.get()) != 1) refuse(folder, "host.key does not fit host.pem");
  const auto authority = load_certificate(folder / "ca.pem");
  if (const auto why = refusal(host.certificate.get(), authority.get(), std::time(nullptr)); !why.empty()) refuse(folder / "host.pem", why);
  return host;
}

}  // namespace vrdma::hosts
