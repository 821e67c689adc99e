#include "guest_lib/cm/files.hpp"

#include <signal.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <chrono>

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
void Account::abandon() { current() = new Account; }

File::File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in)
    : CharacterFile(std::move(attachment_in), channel_in, fd_in, makedev(10, connection_manager_minor)) {}

long File::write(const void* command, std::size_t bytes) {
  return write_command(std::static_pointer_cast<File>(shared_from_this()), command, bytes);
}

void File::asks() {
  {
    std::lock_guard lock(mutex_);
    taker_ = 0;
  }
  asked_.notify_all();
}

void File::has_taken() {
  std::lock_guard lock(mutex_);
  taker_ = ::gettid();
}

// rping of rdma-core before 59 closes its channel when its thread has acknowledged the last event, and that thread, if it then asks for
// another one, ends a good test with EBADF. Such a thread is let in first: there it waits for ever, as in the kernel.
void File::closing() {
  constexpr std::chrono::milliseconds patience{100};
  std::unique_lock lock(mutex_);
  if (taker_ == 0 || taker_ == ::gettid() || ::tgkill(::getpid(), taker_, 0) != 0) return;
  asked_.wait_for(lock, patience, [this] { return taker_ == 0; });
}

void File::forgotten() {
  {
    Account& account = Account::instance();
    std::lock_guard lock(account.mutex);
    std::erase_if(account.told, [&](const auto& one) { return one.second.channel == key(); });
  }
  if (!attachment->liveness().gone()) (void)attachment->call<control::Request::cm_close>({channel, 0});
}

std::shared_ptr<File> find_file(int fd) { return std::dynamic_pointer_cast<File>(CharacterFiles::instance().find(fd)); }

}  // namespace vrdma::guest::cm

namespace vrdma {
int open_connection_manager(int flags) {
  using namespace guest;
  return as_count([&] {
    return CharacterFiles::instance().open<control::Request::cm_open>(flags, control::minor_of_cm, [](auto attachment, std::uint32_t channel, int fd) {
      return std::make_shared<cm::File>(std::move(attachment), channel, fd);
    });
  });
}
}  // namespace vrdma
