#include "vmkernel_svc/remote/hca_registrar.hpp"

#include <system_error>
#include <utility>

namespace vrdma::remote {

HcaRegistrar::~HcaRegistrar() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HcaRegistrar::register_now(HcaRegistration& r) const {
  r.mr_ = (library_.ibv_reg_mr_iova)(r.pd, r.memory, r.bytes, r.iova, r.access);
  if (r.mr_ == nullptr) r.error_ = library_.error();
  r.be(r.mr_ != nullptr ? HcaRegistration::State::registered : HcaRegistration::State::refused);
}

void HcaRegistrar::take_back_now(HcaRegistration& r) const {
  const bool gone = r.mr_ == nullptr || library_.ibv_dereg_mr(r.mr_) == 0;
  if (gone) r.mr_ = nullptr;
  r.be(gone ? HcaRegistration::State::gone : HcaRegistration::State::kept);
}

void HcaRegistrar::carry_out(const Task& task) const {
  task.take_back ? take_back_now(*task.registration) : register_now(*task.registration);
  news_();
}

void HcaRegistrar::give(Task task) {
  try {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    tasks_.push_back(std::move(task));
  } catch (const std::system_error&) {  // there are too many threads; no task was ever left to one
    return carry_out(task);
  }
  changed_.notify_all();
}

void HcaRegistrar::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty(); });
}

void HcaRegistrar::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return leaving_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());  // its place is kept until it is done
    lock.unlock();
    carry_out(task);
    task = {};  // may unmap its memory
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace vrdma::remote
