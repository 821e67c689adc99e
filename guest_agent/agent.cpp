#include "guest_agent/agent.hpp"

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "guest_agent/log.hpp"
#include "vmci_channel/arch.hpp"

namespace vrdma::agent {

using vm::Frame;
using vmci::UniqueFd;

namespace {
// Without interrupts, how often it looks at the link. It never spins: on a processor that it shares with a program that polls,
// who sleeps is let in at once when there is an event, and who yields waits for the end of a time slice.
constexpr std::uint64_t busy_ns = 2'000'000;         // for so long after something …
constexpr std::uint64_t busy_nap_ns = 50'000;        // … every so often
constexpr std::uint64_t nap_ns = 1'000'000;          // later, while there are processes
constexpr std::uint64_t idle_nap_ns = 20'000'000;    // while there are none
constexpr std::size_t unsent_bytes_max = 1 << 20;  // then processes wait with their packets
constexpr std::uint64_t accept_pause_ns = 100'000'000;
constexpr std::uint64_t goodbye_ns = 2'000'000'000;
}  // namespace

Agent::Agent(const Device& device, Options options) : options_(std::move(options)), readiness_(options_.ready_fd), session_(device, options_.patience_ns, options_.ballast_bytes_max, [this] { take_doorbells(); }) {
  // Where memory is of the BAR, nothing is pinned.
  const auto trial = device.service_lends_bar() ? Result<PinnedSegment>(PinnedSegment{}) : PinnedSegment::make("vrdma-trial", vm::page_bytes);
  if (!trial)
    throw std::runtime_error(std::string("cannot pin memory here (") + std::strerror(value(trial.error())) +
                             "): run vrdma-guestd as root, with io_uring allowed (sysctl kernel.io_uring_disabled=0)");
  if (device.interrupt >= 0 && !watch_.events.add(device.interrupt, EPOLLIN, {0, item_interrupt}))
    throw std::runtime_error("cannot wait for the device's interrupts");
}

Agent::~Agent() {
  session_.lose();
  lose();
}

void Agent::run(int stop) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // what a limit of file sizes forbids fails by itself
  if (!watch_.events.add(stop, EPOLLIN, {0, item_stop})) throw std::runtime_error("cannot wait for signals");
  while (!stopping_) {
    const std::uint64_t now_ns = vmci::monotonic_ns();
    look(now_ns);
    if (session_.linked() && receive()) busy_until_ns_ = now_ns + busy_ns;
    if (session_.linked()) session_.flush();
    look_at_listener(now_ns);
    wait(now_ns);
  }
  watch_.events.remove(stop);
  leave_in_order();
}

void Agent::look(std::uint64_t now_ns) {
  switch (session_.look(now_ns)) {
    case Session::News::lost:
      lose();
      break;
    case Session::News::accepted:
      left_behind_.clear();
      if (!session_.linked()) readiness_.waits("waits for memory that the host's vrdmad can reach");
      break;
    case Session::News::waits:
      readiness_.waits("waits for the host's vrdmad");
      break;
    case Session::News::none:
      break;
  }
}

bool Agent::receive() {
  bool anything = false;
  frames_good_ = true;
  const auto take = [&](const vm::FrameHead& head, std::span<const std::byte> body) {
    anything = true;
    if (frames_good_ && session_.linked()) frames_good_ = take_frame(head, body);
  };
  const bool whole = session_.link().receive(take);
  if (!session_.linked()) lose();  // refused for now
  if (whole && frames_good_) return anything;
  say("the host service breaks the link's protocol: beginning anew");
  session_.lose();
  lose();
  return true;
}

bool Agent::take_frame(const vm::FrameHead& head, std::span<const std::byte> body) {
  const auto kind = static_cast<Frame>(head.kind);
  if (kind == Frame::welcome) {
    if (head.connection != 0 || !session_.take_welcome(body, vmci::monotonic_ns())) return false;
    if (session_.state() == Session::State::open) listen();
    return true;
  }
  const auto found = connections_.find(head.connection);
  if (found == connections_.end()) return true;
  Connection& connection = *found->second;
  switch (kind) {
    case Frame::reply:
      return connection.take_reply(head, body);
    case Frame::stream:
      return connection.take_stream(head.item, body);
    case Frame::stream_end:
      return connection.take_stream_end(head.item);
    case Frame::closed:
      if (connection.connected()) count_out(connection);
      connections_.erase(found);
      return true;
    default:
      return true;  // a newer minor version's
  }
}

void Agent::wait(std::uint64_t now_ns) {
  const bool congested = session_.linked() && session_.link().unsent_bytes() > unsent_bytes_max;
  if (congested == packets_watched_) {
    if (congested)
      watch_.events.remove(watch_.packets.fd()), packets_watched_ = false;
    else
      packets_watched_ = watch_.events.add(watch_.packets.fd(), EPOLLIN, {0, item_packets}).has_value();
  }
  std::uint64_t timeout_ns = nap_ns;
  if (session_.device().interrupt >= 0 && session_.linked()) {
    // The rest of a flood comes without a word; so does room for ours.
    timeout_ns = session_.link().anything() ? 0 : session_.link().unsent_bytes() != 0 ? nap_ns : options_.patience_ns / 20;  // as vm::heartbeat_ms says
  } else if (now_ns < busy_until_ns_) {
    timeout_ns = busy_nap_ns;
  } else if (connections_.empty()) {
    timeout_ns = idle_nap_ns;
  }
  if (listener_ && !accepting_) timeout_ns = std::min(timeout_ns, accept_pause_ns);
  watch_.events.wait(timeout_ns, [&](Source source) {
    // The answer to a doorbell comes to the process by itself, mostly.
    if (source.connection == 0 || source.item != Connection::item_doorbell) busy_until_ns_ = vmci::monotonic_ns() + busy_ns;
    take_event(source);
  });
}

void Agent::take_event(Source source) {
  if (source.connection != 0) {
    const auto found = connections_.find(source.connection);
    if (found != connections_.end() && !found->second->take_event(source.item)) drop(*found->second, source.connection);
    return;
  }
  std::uint64_t interrupts;
  switch (source.item) {
    case item_stop:
      stopping_ = true;
      break;
    case item_listener:
      accept();
      break;
    case item_packets:
      watch_.packets.wait(0, [this](Source packet) { take_event(packet); });
      break;
    case item_interrupt: {
      [[maybe_unused]] const auto taken = ::read(session_.device().interrupt, &interrupts, sizeof(interrupts));
      break;
    }
    default:
      break;
  }
}

// Nothing else: the others' events come again.
void Agent::take_doorbells() {
  watch_.events.wait(0, [this](Source source) {
    if (source.connection != 0 && source.item == Connection::item_doorbell) take_event(source);
  });
}

void Agent::accept() {
  constexpr int at_once = 4;  // whoever knocks all the time does not keep the others waiting
  for (int left = at_once; left > 0; --left) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      // Out of descriptors or memory: those who wait get their turn when there is some again, whoever has let go of it.
      if (const int why = errno; std::exchange(not_accepted_, why) != why) say("cannot accept a process (%s): raise the limit of open files", std::strerror(why));
      watch_.events.remove(listener_.get());
      accepting_ = false;
      accept_again_ns_ = vmci::monotonic_ns() + accept_pause_ns;
      return;
    }
    not_accepted_ = 0;
    vmci::PacketSocket socket(std::move(fd));
    const auto peer = socket.peer();
    if (!peer) continue;
    User& user = users_[peer->uid];
    if (user.connections >= options_.connections_per_user_max || user.closer->pending() > Connection::closing_max) {  // nobody takes up everything
      user.closer->close(socket.release());
      continue;
    }
    const std::uint32_t number = next_connection_++;
    auto connection = Connection::open(number, std::move(socket), user.closer, session_, watch_);
    if (!connection) continue;
    ++user.connections;
    connections_.emplace(number, std::move(*connection));
  }
}

void Agent::drop(Connection& connection, std::uint32_t number) {
  count_out(connection);
  connection.leave();
  session_.link().send(Frame::close, number, {});
}

void Agent::count_out(const Connection& connection) {
  --users_[connection.uid()].connections;
  forget_users();
  accept_again_ns_ = 0;
}

void Agent::forget_users() {
  // Whoever else has the closer may close by it yet: a connection that is just leaving, and one that the service is not through with.
  std::erase_if(users_, [](const auto& known) { return known.second.connections == 0 && known.second.closer.use_count() == 1 && known.second.closer->pending() == 0; });
}

void Agent::look_at_listener(std::uint64_t now_ns) {
  if (!listener_ || accepting_ || now_ns < accept_again_ns_) return;
  accepting_ = watch_.events.add(listener_.get(), EPOLLIN, {0, item_listener}).has_value();
  accept_again_ns_ = now_ns + accept_pause_ns;
}

void Agent::listen() {
  std::error_code error;
  const auto folder = std::filesystem::path(options_.socket).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) throw std::runtime_error("cannot make the folder " + folder.string() + " of the socket (" + error.message() + "): make it, or give another --socket");
  auto listening = vmci::listen_packets(options_.socket, options_.socket_mode);
  if (!listening) {
    const int why = value(listening.error());
    throw std::runtime_error("cannot listen at " + options_.socket + " (" + std::strerror(why) + "): " +
                             (why == EADDRINUSE   ? "it is served already; a virtual machine needs vrdma-guestd only, stop its vrdmad"
                              : why == ENOTSOCK   ? "a file that is not a socket stands there; remove it, or give another --socket"
                              : why == ENAMETOOLONG ? "a socket's path has at most 107 characters; give a shorter --socket"
                                                  : "give another --socket"));
  }
  vmci::let_descriptors_in(listening->get(), false);
  listener_ = std::move(*listening);
  socket_file_ = vmci::SocketFile(options_.socket);
  accept_again_ns_ = 0;
  look_at_listener(vmci::monotonic_ns());
  say("%s serves %s as machine \"%s\"", VRDMA_VERSION, options_.socket.c_str(), session_.machine().c_str());
  readiness_.serves("serves " + options_.socket + " as machine " + session_.machine());
}

// Nobody is left waiting in the queue of a socket that is not served.
void Agent::stop_listening() {
  if (!listener_) return;
  socket_file_.remove();
  if (std::exchange(accepting_, false)) watch_.events.remove(listener_.get());
  backlog_closer_->close(std::move(listener_));
}

void Agent::lose() {
  stop_listening();
  for (auto& [number, connection] : connections_) {
    connection->leave();
    left_behind_.push_back(std::move(connection));
  }
  connections_.clear();
  for (auto& [uid, user] : users_) user.connections = 0;
  forget_users();
}

// Who leaves lets go of memory that the service writes to: first the service is brought to let go of it, by another session.
void Agent::leave_in_order() {
  session_.lose();
  lose();
  if (left_behind_.empty() && !session_.page_lent()) return;
  session_.begin(/*to_leave=*/true);
  for (const std::uint64_t until_ns = vmci::monotonic_ns() + goodbye_ns; session_.state() == Session::State::asked;) {
    const std::uint64_t now_ns = vmci::monotonic_ns();
    if (now_ns >= until_ns) {
      say("the host service does not answer: leaving without it");
      return;
    }
    if (session_.look(now_ns) == Session::News::accepted) break;
    watch_.events.wait(nap_ns, [](Source) {});
  }
  left_behind_.clear();
}

}  // namespace vrdma::agent
