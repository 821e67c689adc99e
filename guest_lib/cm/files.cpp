#include "guest_lib/cm/files.hpp"

#include <rdma/rdma_user_cm.h>
#include <sys/sysmacros.h>

#include <cstring>
#include <memory>

#include "guest_lib/cm/commands.hpp"
#include "guest_lib/open_device.hpp"
#include "guest_lib/synthetic_tree.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest::cm {

namespace {
Account*& current() {
  static Account* account = new Account;  // never destroyed: exit handlers of others close channels
  return account;
}
}  // namespace

Account& Account::instance() { return *current(); }
void Account::abandon() {
  std::construct_at(&mutex);
  auto* const own = new Account;
  own->parents = current();
  current() = own;
}

File::File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in)
    : CharacterFile(std::move(attachment_in), channel_in, fd_in, makedev(10, connection_manager_minor)) {}

long File::write(const void* command, std::size_t bytes) {
  return write_command(std::static_pointer_cast<File>(shared_from_this()), command, bytes);
}

void File::forgotten() {
  if (attachment->liveness().inherited()) return;  // its parent's; whose account may be locked for ever
  {
    Account& account = Account::instance();
    std::lock_guard lock(account.mutex);
    std::erase_if(account.told, [&](const auto& one) { return one.second.channel == key(); });
  }
  if (!attachment->liveness().gone()) (void)attachment->call<control::Request::cm_close>({channel, 0});
}

namespace {
// A channel that the thread has events of, which blocks, and its number (-1: none); closed when it has expired.
thread_local std::weak_ptr<File> read_last;
thread_local int read_fd = -1;
}  // namespace

void remember_reader(const std::shared_ptr<File>& file) {
  read_fd = file->blocks() ? file->fd : -1;
  read_last = file;
}

// Anything else that a program writes to a descriptor that it has closed is its own affair.
bool asks_for_more_of_closed(int fd, const void* command, std::size_t bytes) {
  if (fd != read_fd || fd < 0 || bytes != sizeof(rdma_ucm_cmd_hdr) + sizeof(rdma_ucm_get_event)) return false;
  rdma_ucm_cmd_hdr head;
  std::memcpy(&head, command, sizeof(head));
  if (head.cmd != RDMA_USER_CM_CMD_GET_EVENT || head.in != sizeof(rdma_ucm_get_event) || head.out < event_bytes_least || head.out > sizeof(rdma_ucm_event_resp))
    return false;
  const auto file = read_last.lock();
  return !file || file->closed.load(std::memory_order_relaxed);
}

std::shared_ptr<File> find_file(int fd) { return std::dynamic_pointer_cast<File>(CharacterFiles::instance().find(fd)); }

}  // namespace vrdma::guest::cm

namespace vrdma {
int open_connection_manager(int flags) {
  using namespace guest;
  return as_count([&] {
    return CharacterFiles::instance().open<control::Request::cm_open, control::Request::cm_close>(flags, control::minor_of_cm, [](auto attachment, std::uint32_t channel, int fd) {
      return std::make_shared<cm::File>(std::move(attachment), channel, fd);
    });
  });
}
}  // namespace vrdma
