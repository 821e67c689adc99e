// TCP as the peer of the figures: messages there and back, and a stream, both by plain blocking sockets.
//   tcp_floor serve PORT                       one client, then it leaves
//   tcp_floor latency ADDRESS PORT SECONDS BYTES   BYTES there and back; half a round trip
//   tcp_floor stream ADDRESS PORT SECONDS BYTES    by send(2) of BYTES, until the other side has all
// The client prints a JSON object: nanoseconds p50, p99, p99.9, or GB/s.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "figures.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace {

constexpr std::size_t samples_max = 200'000, bytes_max = 1 << 20;

// What the client begins with: it wants every message back, or (0) only one byte when it has shut down its side.
struct Request {
  std::uint64_t echo_bytes;
};

[[noreturn]] void fail(const char* what) {
  std::perror(("tcp_floor: " + std::string(what)).c_str());
  std::exit(1);
}

// False when the other side has shut down before the first byte.
bool receive(int socket, void* data, std::size_t bytes) {
  const ssize_t got = ::recv(socket, data, bytes, MSG_WAITALL);
  if (got == 0) return false;
  if (got != static_cast<ssize_t>(bytes)) fail("recv");
  return true;
}

void send(int socket, const void* data, std::size_t bytes) {
  if (::send(socket, data, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes)) fail("send");
}

void without_delay(int socket) {
  const int on = 1;
  if (::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) fail("setsockopt");
}

sockaddr_in to(const char* address, const char* port) {
  sockaddr_in made{};
  made.sin_family = AF_INET;
  made.sin_port = htons(static_cast<std::uint16_t>(std::atoi(port)));
  if (::inet_pton(AF_INET, address, &made.sin_addr) != 1) errno = EINVAL, fail(address);
  return made;
}

int serve(const char* port) {
  const sockaddr_in any = to("0.0.0.0", port);
  const vmci::UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 || ::listen(listener.get(), 1) != 0) fail(port);
  const vmci::UniqueFd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) fail("accept");
  without_delay(client.get());
  Request request;
  if (!receive(client.get(), &request, sizeof(request)) || request.echo_bytes > bytes_max) errno = EPROTO, fail("request");
  std::vector<char> buffer(bytes_max);
  if (request.echo_bytes != 0) {
    while (receive(client.get(), buffer.data(), request.echo_bytes)) send(client.get(), buffer.data(), request.echo_bytes);
    return 0;
  }
  ssize_t got;
  while ((got = ::recv(client.get(), buffer.data(), buffer.size(), 0)) > 0) {}
  if (got < 0) fail("recv");
  send(client.get(), buffer.data(), 1);
  return 0;
}

int measure(const std::string& what, const char* address, const char* port, double seconds, std::size_t bytes) {
  const sockaddr_in server = to(address, port);
  const vmci::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server)) != 0) fail("connect");
  without_delay(socket.get());
  std::vector<char> buffer(bytes, 'x');
  const Request request{what == "latency" ? bytes : 0};
  send(socket.get(), &request, sizeof(request));
  if (what == "latency") {
    bench::Samples samples(seconds, samples_max);
    while (samples.more()) {
      const std::uint64_t before = vmci::cycles();
      send(socket.get(), buffer.data(), bytes);
      if (!receive(socket.get(), buffer.data(), bytes)) fail("the server leaves");
      samples.add(vmci::cycles() - before);
    }
    bench::print("tcp-latency", samples.json(2));
    return 0;
  }
  const bench::Clock clock;
  std::uint64_t sent = 0;
  for (; sent == 0 || clock.seconds() < seconds; sent += bytes) send(socket.get(), buffer.data(), bytes);
  if (::shutdown(socket.get(), SHUT_WR) != 0 || !receive(socket.get(), buffer.data(), 1)) fail("shutdown");
  char text[64];
  std::snprintf(text, sizeof(text), "\"gb_per_s\": %.6f", static_cast<double>(sent) / 1e9 / clock.seconds());
  bench::print("tcp-stream", text);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  ::alarm(300);
  if (what == "serve" && argc == 3) return serve(argv[2]);
  if ((what == "latency" || what == "stream") && argc == 6) {
    const double seconds = std::atof(argv[4]);
    const std::size_t bytes = std::strtoul(argv[5], nullptr, 0);
    if (seconds > 0 && seconds <= 60 && bytes > 0 && bytes <= bytes_max) return measure(what, argv[2], argv[3], seconds, bytes);
  }
  std::fprintf(stderr, "usage: tcp_floor serve PORT | latency|stream ADDRESS PORT SECONDS (at most 60) BYTES (at most 1 MiB)\n");
  return 2;
}
