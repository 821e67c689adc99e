// Programs that close descriptors which they do not know, as daemons do, after they have opened the device, and then open files of their
// own. Each is a process of its own.
#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

constexpr int numbers = 1024;  // what the programs are limited to

// Programs and libraries from before glibc 2.34 do not declare them.
extern "C" void closefrom(int first) noexcept;
extern "C" int close_range(unsigned first, unsigned last, int flags) noexcept;

bool failed = false;
#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) failed = true, std::fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
  } while (false)

// What `program` does in a process of its own; it has a minute.
template <class Program>
void in_process(const Program& program) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const rlimit limit{numbers, numbers};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    try {
      program();
    } catch (...) {  // a REQUIRE
      failed = true;
    }
    ::_exit(failed ? 1 : 0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);
}

std::set<int> open_now() {
  std::set<int> open;
  for (int fd = 0; fd < numbers; ++fd)
    if (::fcntl(fd, F_GETFD) >= 0) open.insert(fd);
  return open;
}

// The program's own files: at every number that is free, as low as they come, up to beyond all that libvrdma had. Each says whether
// anybody has read, written or closed it.
class Files {
 public:
  Files() {
    for (int fd = -1; fd < 800;) {
      fd = static_cast<int>(::syscall(SYS_memfd_create, "program", MFD_CLOEXEC));
      if (fd < 0) break;
      EXPECT(::write(fd, text, sizeof(text)) == static_cast<ssize_t>(sizeof(text)));
      struct stat status;
      EXPECT(::fstat(fd, &status) == 0);
      files_.push_back({fd, status.st_ino});
    }
    EXPECT(files_.size() > 500);
  }
  void check() const {
    for (const auto& [fd, inode] : files_) {
      struct stat status {};
      char now[sizeof(text)] = {};
      const bool untouched = ::fstat(fd, &status) == 0 && status.st_ino == inode && status.st_size == sizeof(text) && ::lseek(fd, 0, SEEK_CUR) == sizeof(text) &&
                             ::pread(fd, now, sizeof(now), 0) == sizeof(now) && std::memcmp(now, text, sizeof(now)) == 0;
      if (!untouched) std::fprintf(stderr, "descriptor %d\n", fd);
      EXPECT(untouched);
    }
  }
  // As anybody closes files; not all of them, so that there is room for others.
  void close_some() {
    for (int i = 0; i < 100; ++i) {
      EXPECT(::close(files_.back().fd) == 0);
      files_.pop_back();
    }
  }

 private:
  static constexpr char text[] = "this is the program's own, and nobody else's";
  struct File {
    int fd;
    ino_t inode;
  };
  std::vector<File> files_;
};

// Sends, receives and waits for the events of both, and makes and destroys objects of every kind that has descriptors.
void use(const Device& device) {
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  REQUIRE(channel != nullptr);
  const CqPtr sent = make_cq(device), received = make_cq(device, 256, channel.get());
  const QpPtr a = make_qp(device, sent.get()), b = make_qp(device, received.get());
  connect(a.get(), b->qp_num);
  connect(b.get(), a->qp_num);
  for (std::uint64_t i = 0; i < 50; ++i) {
    EXPECT(ibv_req_notify_cq(received.get(), 0) == 0);
    EXPECT(post_recv(device, b.get(), i) == 0);
    EXPECT(post_send(device, a.get(), i) == 0);
    ibv_cq* from = nullptr;
    void* cq_context = nullptr;
    EXPECT(ibv_get_cq_event(channel.get(), &from, &cq_context) == 0);
    ibv_ack_cq_events(received.get(), 1);
    EXPECT(collect(sent.get(), 1).front().status == IBV_WC_SUCCESS);
    EXPECT(collect(received.get(), 1).front().status == IBV_WC_SUCCESS);
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 10 == 0 ? 5 : 0));  // the service sleeps meanwhile
  }
  for (int i = 0; i < 3; ++i) const Pages pages(device);
}

void closes_by_closefrom() { closefrom(3); }
void closes_by_range() { EXPECT(close_range(3, ~0u, 0) == 0); }
void closes_by_unsharing_range() { EXPECT(close_range(3, ~0u, CLOSE_RANGE_UNSHARE) == 0); }
void closes_one_by_one() {
  for (int fd = 3; fd < numbers; ++fd) ::close(fd);
}
// As who makes sure that what is inherited leads nowhere.
void puts_null_everywhere() {
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 3; fd < numbers; ++fd)
    if (fd != null) ::dup2(null, fd);
  for (int fd = 3; fd < numbers; ++fd) ::close(fd);
}

struct Way {
  const char* name;
  void (*close_all)();
};
constexpr Way ways[] = {{"closefrom", closes_by_closefrom},
                        {"close_range", closes_by_range},
                        {"close_range with CLOSE_RANGE_UNSHARE", closes_by_unsharing_range},
                        {"close up to the limit", closes_one_by_one},
                        {"dup2 up to the limit", puts_null_everywhere}};

}  // namespace

TEST_CASE("a program that closes all that it does not know goes on with verbs, and its files stay its own") {
  for (const char* configuration : {R"({"direct": "mediated"})", R"({"direct": "mediated", "process_memory": "guest"})", with_direct})
    for (const Way& way : ways) {
      INFO(std::string(way.name) << " " << configuration);
      Service service;
      service.start(configuration);
      in_process([&] {
        std::optional<Files> files;
        {
          const Device device;
          const Pair pair;
          if (configuration == with_direct) (void)pair.become_direct();
          use(device);
          way.close_all();
          files.emplace();
          files->close_some();
          use(device);
          const int more = ::open("/dev/null", O_RDWR | O_CLOEXEC);
          EXPECT(more < 800);
          EXPECT(::close(more) == 0);
          EXPECT(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
          EXPECT(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
        }
        files->check();
      });
    }
}

TEST_CASE("what is closed by a bare system call is found out before anybody sleeps, and no file of the program's is touched") {
  Service service;
  service.start(R"({"direct": "mediated"})");
  in_process([] {
    // Never destroyed, as what is left of it here is errors.
    const Device& device = *new Device;
    ibv_comp_channel* const channel = ibv_create_comp_channel(device.context);
    ibv_cq* const cq = ibv_create_cq(device.context, 16, nullptr, channel, 0);
    REQUIRE(cq != nullptr);
    const std::set<int> known{device.context->cmd_fd, device.context->async_fd, channel->fd};
    for (const int fd : open_now())
      if (fd > 2 && !known.contains(fd)) EXPECT(::syscall(SYS_close, fd) == 0);
    Files files;
    files.close_some();  // which must not pass for libvrdma's
    ibv_async_event event{};
    EXPECT(ibv_get_async_event(device.context, &event) == 0);
    EXPECT(event.event_type == IBV_EVENT_DEVICE_FATAL);
    EXPECT(ibv_create_comp_channel(device.context) == nullptr);
    EXPECT(ibv_alloc_pd(device.context) == nullptr);
    EXPECT(ibv_destroy_cq(cq) == 0);
    EXPECT(ibv_destroy_comp_channel(channel) == 0);
    EXPECT(ibv_dereg_mr(device.mr) == 0);
    EXPECT(ibv_dealloc_pd(device.pd) == 0);
    EXPECT(ibv_close_device(device.context) == 0);
    files.check();
    const Device another;  // a new attachment
    use(another);
    files.check();
  });
}

TEST_CASE("a request that finds the socket closed by a bare system call fails, and does not wait") {
  Service service;
  service.start(R"({"direct": "mediated"})");
  in_process([] {
    const Device& device = *new Device;
    EXPECT(::syscall(SYS_close_range, 3, ~0u, 0) == 0);
    const Files files;
    EXPECT(ibv_create_comp_channel(device.context) == nullptr);
    EXPECT(errno == EIO);
    EXPECT(ibv_alloc_pd(device.context) == nullptr);
    EXPECT(ibv_dereg_mr(device.mr) == 0);
    EXPECT(ibv_dealloc_pd(device.pd) == 0);
    EXPECT(ibv_close_device(device.context) == 0);
    files.check();
  });
}

TEST_CASE("a program's own numbers are closed as ever, also where it closes the descriptors of a context and a channel twice") {
  Service service;
  service.start();
  in_process([] {
    const Device& device = *new Device;
    ibv_comp_channel* const channel = ibv_create_comp_channel(device.context);
    for (const int fd : {channel->fd, device.context->async_fd, device.context->cmd_fd}) EXPECT(::close(fd) == 0);
    const Files files;
    EXPECT(ibv_destroy_comp_channel(channel) == 0);
    EXPECT(ibv_dereg_mr(device.mr) == 0);
    EXPECT(ibv_dealloc_pd(device.pd) == 0);
    EXPECT(ibv_close_device(device.context) == 0);
    files.check();
  });
}

TEST_CASE("the lowest numbers are the program's, and a daemon's dup2 onto 0 to 2 hurts nobody") {
  Service service;
  service.start();
  in_process([] {
    std::set<int> low{0, 1};
    for (const int fd : low) ::close(fd);
    const Device device;
    use(device);
    const int null = ::open("/dev/null", O_RDWR);
    for (const int fd : low) EXPECT(::syscall(SYS_dup3, null, fd, O_CLOEXEC) == (null == fd ? -1 : fd));  // as from within the C library: daemon(3)
    use(device);
  });
}

TEST_CASE("a child that closes everything, after fork or vfork, hurts neither its parent nor its own files") {
  for (const char* configuration : {R"({"direct": "mediated"})", with_direct}) {
    INFO(configuration);
    Service service;
    service.start(configuration);
    in_process([] {
      const std::set<int> before = open_now();
      const Device device;
      const Pair pair;
      use(device);
      std::set<int> ours;
      for (const int fd : open_now())
        if (!before.contains(fd)) ours.insert(fd);
      // Closed by exec, all of them.
      for (const int fd : ours) EXPECT((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);

      // A daemon's second half, which goes on with what it has inherited.
      for (const Way& way : ways) {
        const pid_t child = ::fork();
        if (child == 0) {
          way.close_all();
          Files files;
          files.close_some();
          ibv_port_attr port{};
          EXPECT(ibv_query_port(device.context, 1, &port) == 0);  // attaches anew
          {
            const Device own;
            use(own);
          }
          EXPECT(ibv_close_device(device.context) == 0);
          files.check();
          ::_exit(failed ? 1 : 0);
        }
        int status = 0;
        EXPECT(::waitpid(child, &status, 0) == child);
        if (status != 0) std::fprintf(stderr, "%s\n", way.name);
        EXPECT(status == 0);
        use(device);
      }

      // What is started gets what it is to have at the number that it is to have it at, whatever this process has there, and nothing else.
      const int one = *ours.rbegin();
      const std::string script = "for fd in /proc/self/fd/*; do case ${fd##*/} in 0|1|2|" + std::to_string(one) + ") ;; *) [ ! -e $fd ] || exit 1 ;; esac; done; [ /proc/self/fd/" +
                                 std::to_string(one) + " -ef /dev/null ]";
      const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      const pid_t started = ::vfork();
      if (started == 0) {
        for (int fd = STDERR_FILENO + 1; fd < null; ++fd) ::close(fd);  // what whoever runs this test left open
        closefrom(null + 1);
        ::dup2(null, one);
        ::close(null);
        ::execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
        ::_exit(127);
      }
      int status = 0;
      EXPECT(::waitpid(started, &status, 0) == started);
      EXPECT(status == 0);
      use(device);
      EXPECT(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
      EXPECT(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
    });
  }
}
