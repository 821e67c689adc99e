// What a MachinePort knows of its agent's session and of the machine's processes in it. Private to port.cpp, port_life.cpp and
// port_processes.cpp; the server's thread.
#pragma once

#include <sys/random.h>

#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "vmkernel_svc/machines/port.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

constexpr std::uint64_t unsent_bytes_max = 4 << 20;   // an agent that reads nothing loses its session, …
constexpr std::uint64_t unsent_bytes_busy = 1 << 20;  // … and before that the service's replies wait

inline std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0)
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  return number;
}

template <class Body>
std::optional<Body> body_of(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(Body)) return std::nullopt;
  Body body;
  std::memcpy(&body, bytes.data(), sizeof(body));
  return body;
}

// A pipe of the service that a process of the machine reads.
struct MachinePort::Stream {
  Stream(boost::asio::io_context& io, std::uint32_t number_in) : number(number_in), pipe(io) {}
  std::uint32_t number;
  boost::asio::posix::stream_descriptor pipe;
};

struct MachinePort::Process {
  Process(boost::asio::io_context& io, std::uint32_t connection_in) : connection(connection_in), readable(io) {}
  std::uint32_t connection;
  std::shared_ptr<MachineProcess> known;
  vmci::PacketSocket socket;                        // our end of the pair
  boost::asio::posix::stream_descriptor readable;   // a duplicate
  std::map<std::uint32_t, std::shared_ptr<Stream>> streams;
  std::uint32_t next_stream = 1;
  std::optional<std::pair<std::uint32_t, PinnedPages>> lending;  // the segment whose runs are coming in

  // All runs of that segment have come: a packet may use it.
  void end_lending() {
    if (!lending) return;
    auto& [number, pages] = *lending;
    known->segments.insert_or_assign(number, std::move(pages));
    lending.reset();
  }
  void hang_up() {
    stop_watching(readable);
    socket = {};
    for (auto& [number, stream] : streams) stop_watching(stream->pipe);
    streams.clear();
  }
};

struct MachinePort::Session {
  Session(std::uint64_t boot_in, std::byte* bar) : boot(boot_in), link(bar, vmci::VmLinkEnd::Who::service) {}
  std::uint64_t boot;
  std::uint64_t generation = random_number();       // what stands in `page`: another number with each freeze and thaw
  vmci::VmLinkEnd link;
  std::shared_ptr<MachineRam> ram;                  // from hello on
  control::ServicePage* page = nullptr;             // the machine's copy, in its RAM
  std::string version;
  std::map<std::uint32_t, std::shared_ptr<Process>> processes;
  std::vector<std::shared_ptr<Process>> held;       // whose replies wait for room in the link
  std::uint32_t last_connection = 0;
  bool broken = false;
};

}  // namespace vrdma::svc
