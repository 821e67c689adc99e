// Descriptors of the synthetic tree's directories, and what is made of them: cases for a process with libvrdma preloaded, which paths_test.cpp starts.
#include <dirent.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace {

const std::string root = "/sys/class/infiniband";

int open_folder(const std::string& path, int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC) {
  const int fd = open(path.c_str(), flags);
  REQUIRE_MESSAGE(fd >= 0, path << ": errno " << errno);
  return fd;
}

std::string text_at(int dir, const char* path) {
  const int fd = openat(dir, path, O_RDONLY);
  if (fd < 0) return "errno " + std::to_string(errno);
  char text[256];
  const ssize_t bytes = read(fd, text, sizeof text);
  close(fd);
  return std::string(text, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
}

bool is_same(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_mode == b.st_mode && a.st_nlink == b.st_nlink;
}

bool is_at(int fd, const char* path) {
  struct stat by_fd, by_path;
  return fstat(fd, &by_fd) == 0 && lstat(path, &by_path) == 0 && is_same(by_fd, by_path);
}

std::vector<std::string> names_in(DIR* stream) {
  std::vector<std::string> names;
  while (const dirent* entry = readdir(stream)) names.emplace_back(entry->d_name);
  return names;
}

std::vector<std::string> matches(const char* pattern, int flags = 0) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern, flags, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

std::vector<std::string> walked;
std::size_t walked_by_name;  // of those, how many their name alone leads to

int note(const char* path, const struct stat* status, int type, struct FTW* place) {
  if (S_ISDIR(status->st_mode) != (type == FTW_D || type == FTW_DP)) return 99;
  walked.push_back(std::to_string(place->level) + " " + (path + place->base));
  walked_by_name += access(path + place->base, F_OK) == 0;
  return 0;
}

}  // namespace

TEST_SUITE_BEGIN("preloaded" * doctest::skip());

TEST_CASE("Paths relative to a descriptor are the tree's") {
  const int fd = open_folder(root), device = openat(fd, "vrdma0", O_PATH | O_CLOEXEC), port = openat(device, "ports/1/", O_RDONLY | O_DIRECTORY);
  const int gids = openat(port, "gids", O_RDONLY);
  CHECK(text_at(fd, "vrdma0/node_type") == "1: CA\n");
  CHECK(text_at(device, "node_type") == "1: CA\n");
  CHECK(text_at(gids, "../pkeys/./0") == "0xffff\n");
  CHECK(text_at(gids, "../../../node_type") == "1: CA\n");
  CHECK(text_at(gids, "0") == text_at(AT_FDCWD, (root + "/vrdma0/ports/1/gids/0").c_str()));
  CHECK(text_at(fd, "../net/lo/mtu") == text_at(AT_FDCWD, "/sys/class/net/lo/mtu"));
  CHECK(text_at(gids, "/proc/sys/kernel/ostype") == "Linux\n");
  CHECK(text_at(fd, "nobody") == "errno " + std::to_string(ENOENT));
  CHECK(text_at(fd, "self/stat") == "errno " + std::to_string(ENOENT));
  CHECK(text_at(device, "node_type/") == "errno " + std::to_string(ENOTDIR));
  CHECK(faccessat(port, "state", R_OK, 0) == 0);
  CHECK(faccessat(port, "state", W_OK, 0) == -1);
  char link[8];
  CHECK(readlinkat(port, "state", link, sizeof link) == -1);
  CHECK(errno == EINVAL);
  for (const int each : {fd, device, port, gids}) close(each);
}

TEST_CASE("A descriptor is stated as its path is") {
  for (const std::string& path : {root, root + "/vrdma0/ports/1/gids", std::string("/dev/infiniband")}) {
    INFO(path);
    const int fd = open_folder(path);
    CHECK(is_at(fd, path.c_str()));
    struct stat by_fd, by_path;
    REQUIRE(stat(path.c_str(), &by_path) == 0);
    REQUIRE(fstatat(fd, "", &by_fd, AT_EMPTY_PATH) == 0);
    CHECK(is_same(by_fd, by_path));
    REQUIRE(fstatat(fd, ".", &by_fd, AT_SYMLINK_NOFOLLOW) == 0);
    CHECK(is_same(by_fd, by_path));
    struct statx extended;
    REQUIRE(statx(fd, "", AT_EMPTY_PATH, STATX_INO, &extended) == 0);
    CHECK(extended.stx_ino == by_path.st_ino);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    close(fd);
  }
  const int fd = open_folder(root, O_RDONLY);
  CHECK(fcntl(fd, F_GETFD) == 0);
  close(fd);
}

TEST_CASE("What is no way to use a directory fails as with the kernel's") {
  const auto error_of = [](int dir, const char* path, int flags) {
    const int fd = openat(dir, path, flags, 0600);
    if (fd >= 0) close(fd);
    return fd >= 0 ? 0 : errno;
  };
  const int fd = open_folder(root);
  CHECK(error_of(fd, "vrdma0", O_WRONLY) == EISDIR);
  CHECK(error_of(fd, "vrdma0", O_RDWR | O_DIRECTORY) == EISDIR);
  CHECK(error_of(fd, "vrdma0", O_RDONLY | O_CREAT) == EISDIR);
  CHECK(error_of(fd, "vrdma0", O_RDONLY | O_CREAT | O_EXCL) == EEXIST);
  CHECK(error_of(fd, "vrdma0/fw_ver", O_RDONLY | O_DIRECTORY) == ENOTDIR);
  CHECK(error_of(fd, "vrdma1", O_WRONLY | O_CREAT) == error_of(AT_FDCWD, (root + "/vrdma1").c_str(), O_WRONLY | O_CREAT));
  char byte;
  CHECK(read(fd, &byte, 1) == -1);
  CHECK(errno == EISDIR);
  close(fd);
}

TEST_CASE("Copies of a descriptor, here and in a fork's child, are descriptors of the same directory") {
  const int fd = open_folder(root + "/vrdma0");
  const int file = open_folder("/dev/null", O_RDONLY);
  CHECK(dup2(fd, file) == file);
  for (const int copy : {dup(fd), file, fcntl(fd, F_DUPFD, 100)}) {
    CHECK(text_at(copy, "ports/1/pkeys/0") == "0xffff\n");
    CHECK(is_at(copy, (root + "/vrdma0").c_str()));
    close(copy);
  }
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int own = openat(fd, "ports/1", O_RDONLY);
    const bool good = own >= 0 && is_at(own, (root + "/vrdma0/ports/1").c_str()) && text_at(own, "pkeys/0") == "0xffff\n" && text_at(fd, "node_type") == "1: CA\n";
    _exit(good ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(text_at(fd, "node_type") == "1: CA\n");
  close(fd);
}

TEST_CASE("A number that is another file's by now is that file, and so is /proc") {
  const int fd = open_folder(root);
  close(fd);
  for (const char* other : {"/", "/proc", "/sys/class", "/etc/passwd", "/dev/null"}) {
    INFO(std::string(other));
    const int same = open(other, O_RDONLY);
    REQUIRE(same == fd);
    CHECK(is_at(same, other));
    if (std::string(other) == "/proc") CHECK(text_at(same, "sys/kernel/ostype") == "Linux\n");
    CHECK(openat(same, "vrdma0", O_RDONLY) == -1);
    close(same);
  }
  CHECK(fstat(fd, std::vector<struct stat>(1).data()) == -1);
  CHECK(errno == EBADF);
}

TEST_CASE("Streams have descriptors, and descriptors become streams") {
  const int fd = open_folder(root + "/vrdma0/ports/1/gid_attrs");
  DIR* const stream = fdopendir(fd);
  REQUIRE(static_cast<bool>(stream));
  CHECK(dirfd(stream) == fd);
  const std::vector<std::string> all{".", "..", "types", "ndevs"};
  CHECK(names_in(stream) == all);
  CHECK(static_cast<bool>(readdir(stream) == nullptr));
  rewinddir(stream);
  CHECK(names_in(stream) == all);
  CHECK(text_at(dirfd(stream), "types/0") == "IB/RoCE v1\n");
  CHECK(closedir(stream) == 0);
  CHECK(fcntl(fd, F_GETFD) == -1);

  DIR* const opened = opendir(root.c_str());
  REQUIRE(static_cast<bool>(opened));
  CHECK(is_at(dirfd(opened), root.c_str()));
  CHECK((fcntl(dirfd(opened), F_GETFD) & FD_CLOEXEC) != 0);
  dirent** entries = nullptr;
  CHECK(scandirat(dirfd(opened), "vrdma0/device", &entries, nullptr, alphasort) == 6);
  for (int i = 0; i < 6; ++i) free(entries[i]);
  free(entries);
  closedir(opened);
}

TEST_CASE("Many streams are open at once, as many as there are descriptors") {
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int free_number = dup(0);
  close(free_number);
  const rlimit few{static_cast<rlim_t>(free_number) + 300, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::set<DIR*> streams;
  while (DIR* const stream = opendir(root.c_str())) streams.insert(stream);
  const int error = errno;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(error == EMFILE);
  CHECK(streams.size() > 250);  // some of the numbers may have been taken
  for (DIR* const stream : streams) {
    CHECK(is_at(dirfd(stream), root.c_str()));
    CHECK(names_in(stream) == std::vector<std::string>{".", "..", "vrdma0"});
    CHECK(closedir(stream) == 0);
  }
  const int next = dup(0);
  CHECK(next == free_number);  // all are closed
  close(next);
}

TEST_CASE("A descriptor can be made the working directory") {
  const int fd = open_folder(root + "/vrdma0"), before = open_folder(".", O_RDONLY);
  REQUIRE(fchdir(fd) == 0);
  char path[256];
  CHECK(getcwd(path, sizeof path) == root + "/vrdma0");
  CHECK(text_at(AT_FDCWD, "node_type") == "1: CA\n");
  const int here = open_folder(".");
  CHECK(is_at(here, path));
  close(here);
  CHECK(matches("ports/*/l*d") == std::vector<std::string>{"ports/1/lid"});
  REQUIRE(fchdir(before) == 0);
  CHECK(access("node_type", F_OK) == -1);
  close(fd);
  close(before);
}

TEST_CASE("The tree is walked through as the kernel's is") {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) found.insert(entry.path());
  CHECK(found.size() > 60);
  CHECK(found.contains(root + "/vrdma0/ports/1/gid_attrs/types/0"));

  for (const int flags : {0, +FTW_DEPTH, FTW_PHYS | FTW_CHDIR, FTW_CHDIR | FTW_DEPTH}) {
    CAPTURE(flags);
    walked.clear();
    walked_by_name = 0;
    CHECK(nftw((root + "/").c_str(), note, 8, flags) == 0);
    CHECK(walked.size() == found.size() + 1);
    CHECK(((flags & FTW_DEPTH) != 0 ? walked.back() : walked.front()) == "0 infiniband");
    CHECK(std::count(walked.begin(), walked.end(), "4 lid") == 1);
    CHECK(walked_by_name == ((flags & FTW_CHDIR) != 0 ? found.size() : 0));  // from /sys/class, a real one, no path leads into the tree
  }
  const auto stop = [](const char*, const struct stat*, int type) { return type == FTW_F ? 7 : 0; };
  CHECK(ftw(root.c_str(), stop, 1) == 7);
  CHECK(ftw((root + "/nobody").c_str(), stop, 1) == -1);
  CHECK(errno == ENOENT);
}

TEST_CASE("glob finds what is in the tree, and everything else as before") {
  using Paths = std::vector<std::string>;
  CHECK(matches("/sys/class/infiniband/*/ports/*/state") == Paths{root + "/vrdma0/ports/1/state"});
  CHECK(matches("/sys/class/infiniband/vrdma0/ports/1/gids/*").size() == 16);
  CHECK(matches("/sys/cl[a]ss/infiniband/v*0") == Paths{root + "/vrdma0"});
  CHECK(matches("{/sys/class/infiniband,/dev/infiniband}/*", GLOB_BRACE).size() == 4);
  CHECK(matches("/sys/class/infiniband/*/node*", GLOB_MARK).size() == 3);
  CHECK(matches("/sys/class/infiniband/*", GLOB_MARK) == Paths{root + "/vrdma0/"});
  CHECK(matches("/sys/class/infiniband/vrdma0/*", GLOB_ONLYDIR) == Paths{root + "/vrdma0/device", root + "/vrdma0/ports"});
  CHECK(matches("/sys/class/infiniband/*/nobody").empty());
  CHECK(matches("/proc/sys/kernel/ostyp*") == Paths{"/proc/sys/kernel/ostype"});

  glob64_t found{};
  found.gl_opendir = [](const char*) -> void* { return nullptr; };
  auto* const before = found.gl_opendir;
  REQUIRE(glob64("/dev/infiniband/u*", 0, nullptr, &found) == 0);
  REQUIRE(glob64("/dev/nul*", GLOB_APPEND, nullptr, &found) == 0);
  CHECK(Paths(found.gl_pathv, found.gl_pathv + found.gl_pathc) == Paths{"/dev/infiniband/umad0", "/dev/infiniband/uverbs0", "/dev/null"});
  CHECK(static_cast<bool>(found.gl_opendir == before));
  CHECK((found.gl_flags & GLOB_ALTDIRFUNC) == 0);
  globfree64(&found);
  found.gl_stat = stat64;  // a program's own
  found.gl_lstat = lstat64;
  CHECK(glob64("/sys/class/infiniband/*", GLOB_ALTDIRFUNC, nullptr, &found) == GLOB_NOMATCH);
}

TEST_SUITE_END();
