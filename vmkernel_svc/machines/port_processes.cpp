// The processes of a machine: each is a connection of the server, and what it asks and is told goes over the link.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "vmkernel_svc/machines/port_session.hpp"

namespace vrdma::svc {

namespace {

constexpr std::size_t processes_max = 4096;
constexpr std::size_t segments_max = 64;              // lent and not used yet, of one process
constexpr std::size_t segment_parts_max = 1 << 22;    // of one segment: 16 GiB in single pages
constexpr std::uint64_t lent_times_max = 4;           // a program may have the same page at several addresses, but not for ever

}  // namespace

void MachinePort::open(std::uint32_t connection, std::span<const std::byte> body) {
  const auto who = body_of<vm::Open>(body);
  if (!who || connection <= session_->last_connection) return refuse("it opens a connection twice");
  session_->last_connection = connection;
  int ends[2];
  if (session_->processes.size() >= processes_max || ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    return session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
  vmci::UniqueFd ours(ends[0]), theirs(ends[1]);
  auto process = std::make_shared<Process>(service_.io, connection);
  process->known = std::make_shared<MachineProcess>(MachineProcess{spec_.name, spec_.tenant, who->uid, who->gid, who->pid, {}});
  process->known->interrupts = device_->interrupts();
  process->known->in_bar = session_->ram->is_bar();
  process->socket = vmci::PacketSocket(std::move(ours));
  // Called after end_session() has taken itself out of this.
  process->known->detached = [this, connection] {
    session_->processes.erase(connection);
    session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
    push();
    service_.changed();
  };
  if (!watch_copy(process->readable, process->socket.fd()))
    return session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
  session_->processes.emplace(connection, process);
  await_replies(process);
  service_.admit(vmci::PacketSocket(std::move(theirs)), process->known);
  service_.changed();
}

void MachinePort::forward(Process& process, std::span<const std::byte> packet) {
  process.end_lending();
  if (!process.socket) return;
  // Full: a process has one request under way at a time, and its agent lets nobody have more than a few.
  if (const auto sent = process.socket.send(packet); !sent) process.hang_up();
}

void MachinePort::append(Process& process, std::uint32_t segment, std::span<const std::byte> body) {
  if (body.empty() || body.size() % sizeof(vm::Run) != 0) return refuse("it lends memory in parts of runs");
  if (!process.lending || process.lending->first != segment) {
    process.end_lending();
    if (process.known->segments.size() >= segments_max) return refuse("it lends memory and does not use it");
    process.lending.emplace(segment, PinnedPages(session_->ram));
  }
  PinnedPages& pages = process.lending->second;
  const std::size_t parts_max = segment == vm::segment_arena ? static_cast<std::size_t>(service_.arena_bytes / vm::page_bytes) : segment_parts_max;
  for (std::size_t at = 0; at < body.size(); at += sizeof(vm::Run)) {
    vm::Run run;
    std::memcpy(&run, body.data() + at, sizeof(run));
    if (pages.part_count() >= parts_max || pages.bytes() > lent_times_max * session_->ram->bytes() || !pages.append(run)) return refuse("it lends memory that is not its own");
  }
}

// What the service answers goes to the process; the descriptors are pipes that it is to read, and become streams.
void MachinePort::await_replies(const std::shared_ptr<Process>& process) {
  process->readable.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_, process](const boost::system::error_code& error) {
        if (error || !*alive || !process->socket) return;
        std::array<std::byte, sizeof(control::Head) + control::body_bytes_max> packet;
        auto received = process->socket.receive(packet);
        if (!received && value(received.error()) == EAGAIN) return await_replies(process);
        if (!received || received->bytes == 0) return process->hang_up();
        const std::uint32_t first = process->next_stream;
        auto& pipes = received->descriptors;
        std::vector<vmci::UniqueFd> documents;
        std::vector<std::shared_ptr<Stream>> streams;
        bool complete = !received->descriptors_missing;
        for (auto& pipe : pipes) {
          if (struct stat status; ::fstat(pipe.get(), &status) == 0 && S_ISREG(status.st_mode)) {
            documents.push_back(std::move(pipe));  // all of it is there
            continue;
          }
          streams.push_back(std::make_shared<Stream>(service_.io, first + static_cast<std::uint32_t>(streams.size())));
          complete = complete && ::fcntl(pipe.get(), F_SETFL, O_NONBLOCK) == 0 && watch_copy(streams.back()->pipe, pipe.get());
        }
        if (complete) {
          process->next_stream += static_cast<std::uint32_t>(streams.size());
          session_->link.send(vm::Frame::reply, process->connection, std::span(packet).first(received->bytes), first,
                              static_cast<std::uint16_t>(pipes.size()));
          for (const auto& stream : streams) {
            process->streams.emplace(stream->number, stream);
            await_stream(process, stream);
          }
          for (const auto& document : documents) send_document(*process, document);
        } else {  // without what it needs the answer is worth nothing
          for (const auto& stream : streams) stop_watching(stream->pipe);
          control::Head refusal;
          std::memcpy(&refusal, packet.data(), sizeof(refusal));
          refusal.status = EMFILE;
          refusal.record.word = 0;
          session_->link.send(vm::Frame::reply, process->connection, std::as_bytes(std::span(&refusal, 1)), first);
        }
        push();
        if (session_->link.unsent_bytes() > unsent_bytes_busy)
          session_->held.push_back(process);
        else
          await_replies(process);
      });
}

void MachinePort::send_document(Process& process, const vmci::UniqueFd& document) {
  const std::uint32_t number = process.next_stream++;
  std::array<std::byte, vm::frame_bytes_max> bytes;
  off_t at = 0;
  for (ssize_t got; (got = ::pread(document.get(), bytes.data(), bytes.size(), at)) > 0; at += got)
    session_->link.send(vm::Frame::stream, process.connection, std::span(bytes).first(static_cast<std::size_t>(got)), number);
  session_->link.send(vm::Frame::stream_end, process.connection, std::span<const std::byte>{}, number);
}

void MachinePort::await_stream(const std::shared_ptr<Process>& process, const std::shared_ptr<Stream>& stream) {
  stream->pipe.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_, process, stream](const boost::system::error_code& error) {
        if (error || !*alive || !stream->pipe.is_open()) return;
        std::array<std::byte, 4096> bytes;
        const ssize_t got = ::read(stream->pipe.native_handle(), bytes.data(), bytes.size());
        if (got > 0) {
          session_->link.send(vm::Frame::stream, process->connection, std::span(bytes).first(static_cast<std::size_t>(got)), stream->number);
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
          stop_watching(stream->pipe);
          process->streams.erase(stream->number);
          session_->link.send(vm::Frame::stream_end, process->connection, std::span<const std::byte>{}, stream->number);
        }
        push();
        if (stream->pipe.is_open()) await_stream(process, stream);
      });
}

}  // namespace vrdma::svc
