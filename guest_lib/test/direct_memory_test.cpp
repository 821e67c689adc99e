// What direct mode maps of registered memory beside the program, and that it lets go of it. And memory of a program that has the library in
// another namespace.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

constexpr std::size_t buffer_bytes = 1 << 20;
constexpr int all_rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// What the memory window holds, in bytes. 0: this process has none.
std::uint64_t window_bytes() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find("vrdma-window") == std::string::npos) continue;
    struct stat file {};
    REQUIRE(::stat(entry.path().c_str(), &file) == 0);
    return static_cast<std::uint64_t>(file.st_blocks) * 512;
  }
  return 0;
}

bool is_mapped(const char* name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(name) != std::string::npos) return true;
  return false;
}

// A memfd of the program's, registered.
struct OwnFile {
  OwnFile(ibv_pd* pd, const char* name) : fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    REQUIRE(::ftruncate(fd, buffer_bytes) == 0);
    memory = ::mmap(nullptr, buffer_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(memory != MAP_FAILED);
    mr = ibv_reg_mr(pd, memory, buffer_bytes, all_rights);
    REQUIRE(mr != nullptr);
  }
  ~OwnFile() { ::close(fd); }
  OwnFile(const OwnFile&) = delete;
  void let_go() {
    CHECK(ibv_dereg_mr(mr) == 0);
    ::munmap(memory, buffer_bytes);
  }
  // What nobody can do to a file that somebody has mapped for writing.
  bool can_be_sealed() const { return ::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0; }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory); }

  int fd;
  void* memory = nullptr;
  ibv_mr* mr = nullptr;
};

// How many memory windows, of whatever process, are mapped here.
std::size_t windows_mapped() {
  std::set<std::string> inodes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, rights, offset, device, inode, name;
    words >> range >> rights >> offset >> device >> inode >> name;
    if (name == "/memfd:vrdma-window") inodes.insert(inode);
  }
  return inodes.size();
}

// Another process, with memory that this one may write to: a memfd, and pages.
class FileOwner {
 public:
  FileOwner() {
    REQUIRE((::pipe(to_) == 0 && ::pipe(from_) == 0));
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ != 0) {
      read_from(from_[0], told);
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      serve();
    } catch (...) {  // a check that failed: this is not the process to go on with the other tests
    }
    ::_exit(1);
  }
  ~FileOwner() {
    kill();
    for (const int fd : {to_[0], to_[1], from_[0], from_[1]}) ::close(fd);
  }
  FileOwner(const FileOwner&) = delete;
  struct Told {
    std::uint32_t qpn;
    std::uint16_t lid;
    std::uint64_t pages, file;
    std::uint32_t pages_key, file_key;
  } told{};
  void meet(const ibv_qp* qp, std::uint16_t lid) { ask({Wish::meet, qp->qp_num, lid}); }
  // It deregisters the file, and unmaps it; whether it can seal it then.
  void let_go() { ask({Wish::let_go_of_file, 0, 0}); }
  bool seal() {
    ask({Wish::seal, 0, 0});
    return answer_ != 0;
  }
  // It deregisters all that lies in its memory window.
  void let_go_of_pages() { ask({Wish::let_go_of_pages, 0, 0}); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  template <class T>
  static void read_from(int fd, T& to) {
    REQUIRE(::read(fd, &to, sizeof(to)) == sizeof(to));
  }
  template <class T>
  static void write_to(int fd, const T& from) {
    REQUIRE(::write(fd, &from, sizeof(from)) == sizeof(from));
  }
  enum class Wish { meet, let_go_of_file, seal, let_go_of_pages };
  struct Asked {
    Wish wish;
    std::uint32_t qpn;
    std::uint16_t lid;
  };
  void ask(const Asked& words) {
    write_to(to_[1], words);
    read_from(from_[0], answer_);
  }
  [[noreturn]] void serve() {
    Device device;
    Pages pages(device);
    OwnFile file(device.pd, "theirs");
    const CqPtr cq = make_cq(device);
    const QpPtr qp = make_qp(device, cq.get());
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
    write_to(from_[1], Told{qp->qp_num, port.lid, pages.address(), file.address(), pages.mr->rkey, file.mr->rkey});
    for (;;) {
      Asked asked{};
      read_from(to_[0], asked);
      int answer = 1;
      switch (asked.wish) {
        case Wish::meet: connect(qp.get(), asked.qpn, {}, 0, asked.lid); break;
        case Wish::let_go_of_file: file.let_go(); break;
        case Wish::seal: answer = file.can_be_sealed() ? 1 : 0; break;
        case Wish::let_go_of_pages:
          for (ibv_mr** mr : {&pages.mr, &device.mr}) REQUIRE(ibv_dereg_mr(std::exchange(*mr, nullptr)) == 0);
          break;
      }
      write_to(from_[1], answer);
    }
  }

  pid_t pid_ = 0;
  int to_[2], from_[2];
  int answer_ = 0;
};

// This one's end.
struct FileWriter {
  explicit FileWriter(FileOwner& owner) : owner_(owner) {
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(device.context, 1, &port) == 0);
    connect(qp.get(), owner.told.qpn, {}, 0, owner.told.lid);
    owner.meet(qp.get(), port.lid);
  }
  void write(std::uint64_t address, std::uint32_t key) const {
    REQUIRE(post_write(qp.get(), pages.sge(0, 8), address, key) == 0);
    CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);
  }
  // Until it has mapped the owner's file. False: nobody can be direct where this process runs, as is said aloud.
  bool maps_the_file() const {
    std::string because;
    eventually("the file is mapped here, or may not be", [&] {
      write(owner_.told.file, owner_.told.file_key);
      write(owner_.told.pages, owner_.told.pages_key);
      return is_mapped("memfd:theirs") || (mode_of(qp.get(), &because) != "direct" && is_apart(because));
    });
    if (is_apart(because)) MESSAGE("SKIP: processes cannot be direct here: ", because);
    return is_mapped("memfd:theirs");
  }

  Device device;
  Pages pages{device};
  CqPtr cq = make_cq(device);
  QpPtr qp = make_qp(device, cq.get());

 private:
  FileOwner& owner_;
};

// A few messages from there, each of which may have it mapped for the next.
void write_from(const Pair& pair, const void* memory, const ibv_mr* mr) {
  for (int i = 0; i < 3; ++i) {
    eventually("the connection is direct", [&] { return mode_of(pair.a.get()) == "direct"; });
    REQUIRE(post_write(pair.a.get(), {reinterpret_cast<std::uintptr_t>(memory), 64, mr->lkey}, pair.far.address(), pair.far.mr->rkey) == 0);
    CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  }
}

}  // namespace

// As registration caches do, and programs that free() first.
TEST_CASE("memory that is unmapped before it is deregistered is given up with its registration") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  const std::uint64_t before = window_bytes();
  REQUIRE(before != 0);
  for (int i = 0; i < 4; ++i) {
    void* const memory = ::mmap(nullptr, buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    std::memset(memory, 1, buffer_bytes);
    ibv_mr* const mr = ibv_reg_mr(pair.device.pd, memory, buffer_bytes, all_rights);
    REQUIRE(mr != nullptr);
    write_from(pair, memory, mr);
    REQUIRE(window_bytes() >= before + buffer_bytes);
    ::munmap(memory, buffer_bytes);
    CHECK(ibv_dereg_mr(mr) == 0);
  }
  CHECK(window_bytes() == before);
}

TEST_CASE("a program's file is its own again when its registration has ended") {
  Service service;
  service.start(with_direct);
  Pair pair;
  if (!pair.become_direct()) return;
  for (int i = 0; i < 4; ++i) {
    OwnFile near(pair.device.pd, "mine, near"), far(pair.device.pd, "mine, far");
    write_from(pair, near.memory, near.mr);
    for (int k = 0; k < 3; ++k) {
      eventually("the connection is direct", [&] { return mode_of(pair.a.get()) == "direct"; });
      REQUIRE(post_write(pair.a.get(), pair.near.sge(0, 64), far.address(), far.mr->rkey) == 0);
      CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
    }
    near.let_go();
    far.let_go();
    CHECK_FALSE(is_mapped("memfd:mine"));
    CHECK(near.can_be_sealed());
    CHECK(far.can_be_sealed());
  }
}

TEST_CASE("a peer that has written to a file lets go of it with its next message, once it is not registered any more") {
  Service service;
  service.start(with_direct);
  FileOwner owner;
  FileWriter writer(owner);
  if (!writer.maps_the_file()) return;
  owner.let_go();
  eventually("it is let go", [&] { return writer.write(owner.told.pages, owner.told.pages_key), !is_mapped("memfd:theirs"); });
  CHECK(owner.seal());
}

// A program that registers one buffer for each message would have it mapped anew for each.
TEST_CASE("a peer's memory window stays mapped when the last region in it is deregistered") {
  Service service;
  service.start(with_direct);
  FileOwner owner;
  FileWriter writer(owner);
  const std::size_t own = windows_mapped();
  if (!writer.maps_the_file()) return;
  const auto write_directly = [&](std::uint64_t address, std::uint32_t key) {
    eventually("the connection is direct", [&] { return mode_of(writer.qp.get()) == "direct"; });
    writer.write(address, key);
  };
  eventually("it is mapped", [&] { return write_directly(owner.told.pages, owner.told.pages_key), windows_mapped() == own + 1; });
  owner.let_go_of_pages();
  for (int i = 0; i < 10; ++i) write_directly(owner.told.file, owner.told.file_key);
  CHECK(windows_mapped() == own + 1);
  CHECK(is_mapped("memfd:theirs"));
}

TEST_CASE("what a killed peer had registered is let go of by who only polls") {
  Service service;
  service.start(with_direct);
  FileOwner owner;
  FileWriter writer(owner);
  if (!writer.maps_the_file()) return;
  owner.kill();
  eventually("it is let go", [&] {
    ibv_wc wc{};
    CHECK(ibv_poll_cq(writer.cq.get(), 1, &wc) == 0);
    return !is_mapped("memfd:theirs");
  });
}

TEST_CASE("A fork's child has the memory that its parent has registered by a library of another namespace, whose C library knows of no fork") {
  Service service;
  service.start();
  CHECK(in_child([] {
          ::alarm(60);
          Dl_info here{};
          if (::dladdr(reinterpret_cast<void*>(&ibv_dereg_mr), &here) == 0) return 1;
          void* const library = ::dlmopen(LM_ID_NEWLM, here.dli_fname, RTLD_NOW);
          if (library == nullptr) return 2;
          const auto in_it = [library](auto* function, const char* name) { return reinterpret_cast<decltype(function)>(::dlsym(library, name)); };
          in_it(&::setenv, "setenv")("VRDMA_SOCKET", std::getenv("VRDMA_SOCKET"), 1);  // it has an environment of its own, too
          int count = 0;
          ibv_device** const list = in_it(&ibv_get_device_list, "ibv_get_device_list")(&count);
          if (count != 1) return 3;
          ibv_context* const context = in_it(&ibv_open_device, "ibv_open_device")(list[0]);
          if (context == nullptr) return 4;
          ibv_pd* const pd = in_it(&ibv_alloc_pd, "ibv_alloc_pd")(context);
          void* const memory = ::mmap(nullptr, buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
          std::memset(memory, 'm', buffer_bytes);
          using Register = ibv_mr*(ibv_pd*, void*, std::size_t, int);  // a macro of verbs.h's has its name
          if (reinterpret_cast<Register*>(::dlsym(library, "ibv_reg_mr"))(pd, memory, buffer_bytes, all_rights) == nullptr) return 5;
          return in_child([memory] {
            const std::string_view bytes(static_cast<const char*>(memory), buffer_bytes);
            return bytes.find_first_not_of('m') == bytes.npos ? 0 : 6;
          });
        }) == 0);
}
