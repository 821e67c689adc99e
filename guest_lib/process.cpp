#include "guest_lib/process.hpp"

#include <pthread.h>

#include <cstddef>
#include <new>

#include "guest_lib/cm/files.hpp"
#include "guest_lib/cm/place.hpp"
#include "guest_lib/interruption.hpp"

namespace vrdma::guest {

Process& Process::instance() {
  alignas(Process) static constinit std::byte place[sizeof(Process)]{};  // not of the heap, for the same reason as `mutex`
  static Process* const process = new (place) Process;
  return *process;
}

void Process::remember(const std::shared_ptr<Attachment>& made) {
  std::erase_if(attachments, [](const auto& old) { return old.expired(); });
  attachments.push_back(made);
}

void Process::watch_forks() {
  if (watching_forks_) return;
  watching_forks_ = true;
  cm::Account::instance();  // or its guard may be locked where the child asks for it
  pthread_atfork(
      [] {
        Process::instance().mutex.lock();
        CharacterFiles::lock_for_fork();
      },
      [] {
        CharacterFiles::unlock_after_fork();
        Process::instance().mutex.unlock();
      },
      [] {
        Process& process = Process::instance();
        for (const auto& weak : process.attachments)
          if (auto inherited = weak.lock()) inherited->become_inherited();
        for (OwnFd* fd : process.private_descriptors) fd->reset();
        process.attachments.clear();
        process.attachment.reset();
        CharacterFiles::unlock_after_fork();
        cm::Account::abandon();
        cm::forget_place();
        forget_sleepers();
        process.mutex.unlock();
      });
}

}  // namespace vrdma::guest
