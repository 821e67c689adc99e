// What other ways between two processes cost, where Debian has no program that says so:
//   peer_bench socket unix|tcp poll|sleep SECONDS BYTES [CPU CPU]   BYTES there and back; half a round trip
//   peer_bench stream unix|tcp SECONDS BYTES [CPU CPU]              by send(2) of BYTES; GB/s
//   mpirun -n 2 … peer_bench mpi latency|stream|rate SECONDS BYTES [CPU CPU]   by MPI_Send, MPI_Recv; windows of 64 MPI_Isend
// Open MPI is loaded when asked for, so that nothing depends on it. Prints a JSON object.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "children.hpp"
#include "figures.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace {

using bench::start;
using vmci::UniqueFd;

constexpr std::size_t samples_max = 200'000, bytes_max = 64 << 20;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "peer_bench: %s (%s)\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

void run_on(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (::sched_setaffinity(0, sizeof(set), &set) != 0) fail("cannot run on processor " + std::to_string(cpu));
}

struct Ends {
  UniqueFd client, server;
};

Ends connected(const std::string& kind) {
  if (kind == "unix") {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) fail("socketpair");
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  if (::bind(listener.get(), at, bytes) != 0 || ::listen(listener.get(), 1) != 0 || ::getsockname(listener.get(), at, &bytes) != 0) fail("a listener");
  UniqueFd client(::socket(AF_INET, SOCK_STREAM, 0));
  if (::connect(client.get(), at, bytes) != 0) fail("connect");
  UniqueFd server(::accept(listener.get(), nullptr, nullptr));
  const int on = 1;
  for (const int fd : {client.get(), server.get()})
    if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) fail("TCP_NODELAY");
  return {std::move(client), std::move(server)};
}

void send_all(int fd, const char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) fail("send");
    data += sent, bytes -= static_cast<std::size_t>(sent);
  }
}

// False when the other side has shut down.
bool receive_all(int fd, char* data, std::size_t bytes, bool polls) {
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, data, bytes, polls ? MSG_DONTWAIT : 0);
    if (got == 0) return false;
    if (got < 0 && errno == EAGAIN) continue;
    if (got < 0) fail("recv");
    data += got, bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

struct Ask {
  std::string what, kind;
  bool polls = false;
  double seconds = 0;
  std::size_t bytes = 0;
  int cpus[2] = {-1, -1};
};

void print_rate(const std::string& what, std::uint64_t messages, std::size_t bytes, double seconds) {
  char text[100];
  std::snprintf(text, sizeof(text), "\"gb_per_s\": %.6g, \"mmsg_per_s\": %.6g", static_cast<double>(messages) * static_cast<double>(bytes) / seconds / 1e9,
                static_cast<double>(messages) / seconds / 1e6);
  bench::print(what, text);
}

int sockets(const Ask& ask) {
  Ends ends = connected(ask.kind);
  const bool streams = ask.what == "stream";
  const pid_t server = start([&] {
    run_on(ask.cpus[1]);
    ends.client = UniqueFd();
    std::vector<char> buffer(ask.bytes);
    while (receive_all(ends.server.get(), buffer.data(), ask.bytes, ask.polls))
      if (!streams) send_all(ends.server.get(), buffer.data(), ask.bytes);
    if (streams) send_all(ends.server.get(), "x", 1);
  });
  run_on(ask.cpus[0]);
  ends.server = UniqueFd();
  std::vector<char> buffer(ask.bytes, 'x');
  const std::string name = ask.kind + "-" + ask.what;
  if (streams) {
    const bench::Clock clock;
    std::uint64_t sent = 0;
    for (; sent == 0 || clock.seconds() < ask.seconds; ++sent) send_all(ends.client.get(), buffer.data(), ask.bytes);
    if (::shutdown(ends.client.get(), SHUT_WR) != 0 || !receive_all(ends.client.get(), buffer.data(), 1, false)) fail("the end of the stream");
    print_rate(name, sent, ask.bytes, clock.seconds());
  } else {
    bench::Samples samples(ask.seconds, samples_max);
    while (samples.more()) {
      const std::uint64_t before = vmci::cycles();
      send_all(ends.client.get(), buffer.data(), ask.bytes);
      if (!receive_all(ends.client.get(), buffer.data(), ask.bytes, ask.polls)) fail("the other side left");
      samples.add(vmci::cycles() - before);
    }
    ::shutdown(ends.client.get(), SHUT_WR);
    bench::print(name, samples.json(2));
  }
  ::waitpid(server, nullptr, 0);
  return 0;
}

// Of Open MPI's binary interface, the same since 2.0: handles are addresses of objects in its library.
class Mpi {
 public:
  Mpi() : library_(::dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL)) {
    if (library_ == nullptr) fail(std::string("cannot load Open MPI: ") + ::dlerror());
    function<int(int*, char***)>("MPI_Init")(nullptr, nullptr);
    world_ = symbol("ompi_mpi_comm_world");
    byte_ = symbol("ompi_mpi_byte");
    send_ = function<int(const void*, int, void*, int, int, void*)>("MPI_Send");
    receive_ = function<int(void*, int, void*, int, int, void*, void*)>("MPI_Recv");
    isend_ = function<int(const void*, int, void*, int, int, void*, void**)>("MPI_Isend");
    ireceive_ = function<int(void*, int, void*, int, int, void*, void**)>("MPI_Irecv");
    wait_all_ = function<int(int, void**, void*)>("MPI_Waitall");
    function<int(void*, int*)>("MPI_Comm_rank")(world_, &rank);
  }
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;
  ~Mpi() { function<int()>("MPI_Finalize")(); }

  void send(const char* data, std::size_t bytes) { send_(data, static_cast<int>(bytes), byte_, 1 - rank, 0, world_); }
  void receive(char* data, std::size_t bytes) { receive_(data, static_cast<int>(bytes), byte_, 1 - rank, 0, world_, nullptr); }
  // `count` at once, all from or into one buffer.
  void window(char* data, std::size_t bytes, int count) {
    void* requests[64];
    for (int i = 0; i < count; ++i) {
      if (rank == 0) isend_(data, static_cast<int>(bytes), byte_, 1, 0, world_, &requests[i]);
      else ireceive_(data, static_cast<int>(bytes), byte_, 0, 0, world_, &requests[i]);
    }
    wait_all_(count, requests, nullptr);
  }
  int rank = 0;

 private:
  void* symbol(const char* name) {
    void* const found = ::dlsym(library_, name);
    if (found == nullptr) fail(std::string("Open MPI has no ") + name);
    return found;
  }
  template <class Type>
  Type* function(const char* name) {
    return reinterpret_cast<Type*>(symbol(name));
  }
  void* library_;
  void *world_, *byte_;
  int (*send_)(const void*, int, void*, int, int, void*);
  int (*receive_)(void*, int, void*, int, int, void*, void*);
  int (*isend_)(const void*, int, void*, int, int, void*, void**);
  int (*ireceive_)(void*, int, void*, int, int, void*, void**);
  int (*wait_all_)(int, void**, void*);
};

int mpi(const Ask& ask) {
  Mpi mpi;
  run_on(ask.cpus[mpi.rank]);
  std::vector<char> buffer(std::max(ask.bytes, sizeof(std::uint64_t)), 'x');
  constexpr int window = 64;
  // Before each turn rank 0 says whether there is one.
  const auto goes_on = [&](bool more) {
    char said = more;
    if (mpi.rank == 0) mpi.send(&said, 1);
    else mpi.receive(&said, 1);
    return said != 0;
  };
  if (ask.what == "latency") {
    constexpr int turn = 100;
    bench::Samples samples(ask.seconds, samples_max);
    while (goes_on(samples.more()))
      for (int i = 0; i < turn; ++i) {
        const std::uint64_t before = vmci::cycles();
        if (mpi.rank == 0) mpi.send(buffer.data(), ask.bytes), mpi.receive(buffer.data(), ask.bytes);
        else mpi.receive(buffer.data(), ask.bytes), mpi.send(buffer.data(), ask.bytes);
        samples.add(vmci::cycles() - before);
      }
    if (mpi.rank == 0) bench::print("mpi-latency", samples.json(2));
    return 0;
  }
  const bench::Clock clock;
  std::uint64_t messages = 0;
  for (; goes_on(messages == 0 || clock.seconds() < ask.seconds); messages += window) {
    mpi.window(buffer.data(), ask.bytes, window);
    char done = 1;  // the receiver has all of it
    if (mpi.rank == 0) mpi.receive(&done, 1);
    else mpi.send(&done, 1);
  }
  if (mpi.rank == 0) print_rate("mpi-" + ask.what, messages, ask.bytes, clock.seconds());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string what = argc > 1 ? words[0] : "";
  const std::size_t numbers = what == "socket" ? 3 : what == "mpi" || what == "stream" ? 2 : 0;  // where they begin
  Ask ask;
  if (numbers != 0 && (words.size() == numbers + 2 || words.size() == numbers + 4)) {
    ask.kind = words[1];
    ask.what = what == "socket" ? "latency" : what == "mpi" ? words[1] : what;
    ask.polls = what == "socket" && words[2] == "poll";
    ask.seconds = std::atof(words[numbers].c_str());
    ask.bytes = std::strtoul(words[numbers + 1].c_str(), nullptr, 0);
    for (std::size_t i = 0; i < 2 && words.size() == numbers + 4; ++i) ask.cpus[i] = std::atoi(words[numbers + 2 + i].c_str());
    const bool known = what == "mpi" ? ask.what == "latency" || ask.what == "stream" || ask.what == "rate" : ask.kind == "unix" || ask.kind == "tcp";
    if (known && ask.seconds > 0 && ask.seconds <= 60 && ask.bytes > 0 && ask.bytes <= bytes_max) {
      ::alarm(120);
      return what == "mpi" ? mpi(ask) : sockets(ask);
    }
  }
  std::fprintf(stderr, "usage: peer_bench socket unix|tcp poll|sleep SECONDS (at most 60) BYTES [CPU CPU] | stream unix|tcp SECONDS BYTES [CPU CPU] |\n"
                       "       mpi latency|stream|rate SECONDS BYTES [CPU CPU]\n");
  return 2;
}
