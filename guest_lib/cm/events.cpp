// What has happened to a channel's identifiers, as librdmacm reads it.
#include <rdma/rdma_user_cm.h>

#include <cerrno>

#include "guest_lib/cancellation.hpp"
#include "guest_lib/cm/command.hpp"
#include "guest_lib/interruption.hpp"
#include "guest_lib/namesakes.hpp"

namespace vrdma::guest::cm {

namespace {

rdma_ucm_event_resp event_of(const control::CmEvent& from) {
  rdma_ucm_event_resp to{};
  to.uid = from.uid;
  to.id = from.id;
  to.event = from.event;
  to.status = static_cast<std::uint32_t>(from.status);
  const control::CmParameters& parameters = from.parameters;
  if (from.event == control::cm_user || from.event == control::cm_internal) {
    std::memcpy(&to.param, parameters.private_data.data(), sizeof(std::uint64_t));
    return to;
  }
  if (from.is_datagram != 0) {
    rdma_ucm_ud_param& ud = to.param.ud;
    ud.qp_num = parameters.qpn;
    ud.qkey = parameters.qkey;
    copy_address(from.address, ud.ah_attr);
    ud.private_data_len = parameters.private_bytes;
    std::copy_n(parameters.private_data.begin(), parameters.private_bytes, ud.private_data);
  } else {
    rdma_ucm_conn_param& connection = to.param.conn;
    connection.qp_num = parameters.qpn;
    copy_parameters(parameters, connection);
    connection.private_data_len = parameters.private_bytes;
    std::copy_n(parameters.private_data.begin(), parameters.private_bytes, connection.private_data);
  }
  return to;
}

// The service is gone, and the devices with it. A connection's end is said before: rsockets, for one, look at nothing else, and would wait for
// ever. nullopt: every identifier of the channel has been told.
std::optional<control::CmEvent> next_of_the_end(Account& account, File& file) {
  std::optional<control::CmEvent> event;
  for (auto& [key, told] : account.told) {
    if (told.channel != file.key() || told.member != 0 || told.removal || told.uid == 0) continue;
    if (event) return event;
    event.emplace();
    event->uid = told.uid;
    event->id = static_cast<std::uint32_t>(key);
    event->event = told.connected ? control::cm_disconnected : control::cm_device_removal;
    ++told.events;
    if (told.connected) {
      told.connected = false;
      return event;
    }
    told.removal = true;
  }
  file.readers.close(false);
  return event;
}

// A thread inside get_event.
class Reader {
 public:
  explicit Reader(File& file) : file_(file) { file_.readers.enter(); }
  Reader(const Reader&) = delete;
  ~Reader() {
    const int error = errno;
    if (file_.readers.leave()) file_.fall_silent();
    errno = error;
  }

 private:
  File& file_;
};

// Takes and counts it. nullopt: none is there. last: it was the channel's last one.
Result<std::optional<control::CmEvent>> take_counted(File& file, bool& last) {
  Attachment& attachment = *file.attachment;
  Account& account = Account::instance();
  std::lock_guard lock(account.mutex);
  const auto taken = attachment.call<control::Request::cm_take_event>({file.channel, 0});
  if (!taken) {
    if (!attachment.liveness().gone()) return taken.error();
    const auto event = next_of_the_end(account, file);
    if (!event) return Errno{EIO};
    return event;
  }
  last = taken->last != 0;
  if (taken->found == 0) return std::optional<control::CmEvent>{};
  Told& told = account.told[file.key(taken->counted_at)];
  ++told.events;
  switch (taken->event.event) {
    case control::cm_connect_response:  // which librdmacm takes for it, and is told nothing further
    case control::cm_established: told.connected = taken->event.is_datagram == 0; break;
    case control::cm_disconnected:
    case control::cm_rejected:
    case control::cm_unreachable: told.connected = false; break;
    default: break;
  }
  if (told.member != 0) ++account.told[told.member].events;
  if (taken->event.event == control::cm_connect_request) account.told[file.key(taken->event.id)] = {file.key(), 0};
  return std::optional(taken->event);
}

Result<std::optional<control::CmEvent>> take_event(File& file) {
  const CancellationOff cancellation_off;
  if (file.attachment->liveness().inherited()) return Errno{EIO};
  bool last = false;
  auto taken = take_counted(file, last);
  if (last) file.take_record();  // which waits, and keeps the descriptor from being closed: not while the account is locked
  return taken;
}

}  // namespace

long get_event(const std::shared_ptr<File>& file, const std::byte* body, std::size_t bytes, std::size_t answer_bytes, std::size_t whole) {
  const Command command(file, body, bytes, answer_bytes);
  const auto request = command.body<rdma_ucm_get_event>();
  if (!request || answer_bytes < event_bytes_least) {
    errno = request ? ENOSPC : EINVAL;
    return -1;
  }
  const int errno_before = errno;
  const Reader reader(*file);
  const bool blocks = file->blocks();
  for (;;) {
    if (file->readers.closed()) {
      errno = EIO;
      return -1;
    }
    const int readable = file->wait_until_readable(blocks);
    if (file->closed.load(std::memory_order_relaxed)) return wait_for_ever(blocks);
    if (readable < 0) return -1;
    std::optional<control::CmEvent> event;
    const int error = as_int([&]() -> Status {
      auto taken = take_event(*file);
      if (!taken) return taken.error();
      event = *taken;
      return event ? command.answer(request->response, event_of(*event), event_bytes_least) : ok();
    });
    if (file->closed.load(std::memory_order_relaxed)) return wait_for_ever(blocks);
    if (error != 0) return -1;
    if (event) {
      remember_reader(file);
      errno = errno_before;
      return static_cast<long>(whole);
    }
  }
}

}  // namespace vrdma::guest::cm
