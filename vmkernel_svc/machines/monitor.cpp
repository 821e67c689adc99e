#include "vmkernel_svc/machines/monitor.hpp"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {
using nlohmann::json;
using Kind = MonitorNews::Kind;

constexpr std::size_t line_bytes_max = 64 * 1024;
constexpr std::string_view ask_run_state = "vrdma-run-state";  // the ids of our questions
constexpr std::string_view asked = "vrdma-asked-";              // and a number

// A member of that name and type; null where there is none.
const json* member(const json& object, const char* name, json::value_t type) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found != object.end() && found->type() == type ? &*found : nullptr;
}
std::string text_of(const json& object, const char* name) {
  const json* const found = member(object, name, json::value_t::string);
  return found != nullptr ? found->get<std::string>() : std::string();
}
std::uint64_t microseconds(const json& event) {
  const json* const stamp = member(event, "timestamp", json::value_t::object);
  if (stamp == nullptr) return 0;
  const json* const seconds = member(*stamp, "seconds", json::value_t::number_unsigned);
  const json* const rest = member(*stamp, "microseconds", json::value_t::number_unsigned);
  return seconds != nullptr && rest != nullptr ? seconds->get<std::uint64_t>() * 1'000'000 + rest->get<std::uint64_t>() : 0;
}

void understand_event(const std::string& name, const json& event, const Monitor::Handler& handler) {
  const std::uint64_t at_us = microseconds(event);
  if (name == "RESET") return handler({Kind::reset, "", at_us});
  if (name == "STOP") return handler({Kind::stopped, "", at_us});
  if (name == "RESUME") return handler({Kind::resumed, "", at_us});
  if (name == "SUSPEND") return handler({Kind::suspended, "", at_us});
  if (name == "WAKEUP") return handler({Kind::woken, "", at_us});
  if (name != "MIGRATION") return;
  if (const json* const data = member(event, "data", json::value_t::object)) handler({Kind::migration, text_of(*data, "status"), at_us});
}

}  // namespace

Monitor::Monitor(boost::asio::io_context& io, std::string machine, Handler handler)
    : machine_(std::move(machine)), handler_(std::move(handler)), socket_(io) {}

Monitor::~Monitor() {
  *alive_ = false;
  close();
}

void Monitor::close() {
  vmci::GivenFd(unwatched(socket_), closer_).reset();
}

void Monitor::talk_to(vmci::GivenFd qemu) {
  hang_up();
  boost::system::error_code refused;
  if (socket_.assign(qemu.get(), refused)) return;
  closer_ = qemu.closer();
  qemu.release();
  // Without the first there are no events, and of migrations none without the second.
  say(R"({"execute":"qmp_capabilities"})");
  say(R"({"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"events","state":true}]}})");
  say(R"({"execute":"query-status","id":")" + std::string(ask_run_state) + R"("})");
  await();
}

// A monitor that takes none of these few words is none; what it then does not tell is as if it were not there.
void Monitor::say(std::string_view command) {
  const std::string line = std::string(command) + "\n";
  [[maybe_unused]] const auto sent = ::send(socket_.native_handle(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Monitor::await() {
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive || !socket_.is_open()) return;
    read();
    if (*alive && socket_.is_open()) await();
  });
}

void Monitor::hang_up() {
  close();
  line_.clear();
}

void Monitor::ask(std::uint64_t number) {
  if (socket_.is_open()) say(R"({"execute":"query-status","id":")" + std::string(asked) + std::to_string(number) + R"("})");
}

int Monitor::descriptor() { return socket_.is_open() ? socket_.native_handle() : -1; }

void Monitor::drain() {
  constexpr int parts = 16;  // who talks without end is not listened to for ever
  for (int part = 0; part < parts && socket_.is_open() && read(); ++part) {
  }
}

bool Monitor::read() {
  std::array<char, 4096> text;
  const auto got = vmci::receive_given(socket_.native_handle(), std::as_writable_bytes(std::span(text)), closer_);
  if (!got && value(got.error()) == EAGAIN) return false;
  const auto alive = alive_;
  const bool sound = got && got->bytes != 0 && !got->descriptors_missing && take({text.data(), got->bytes});
  if (!*alive) return false;
  if (!sound) close();
  return sound;
}

bool Monitor::take(std::string_view text) {
  for (const char c : text) {
    if (c != '\n') {
      line_ += c;
      continue;
    }
    const auto alive = alive_;
    understand(std::exchange(line_, {}), handler_);
    if (!*alive) return false;
  }
  return line_.size() <= line_bytes_max;
}

void Monitor::understand(std::string_view line, const Handler& handler) {
  const json said = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (const std::string event = text_of(said, "event"); !event.empty()) return understand_event(event, said, handler);
  const std::string id = text_of(said, "id");
  if (id.starts_with(asked)) return handler({Kind::answer, id.substr(asked.size()), 0});
  if (id != ask_run_state) return;
  if (const json* const answer = member(said, "return", json::value_t::object)) handler({Kind::run_state, text_of(*answer, "status"), 0});
}

}  // namespace vrdma::svc
