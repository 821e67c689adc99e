// Registers memory with an HCA and takes it back in a thread of its own: the kernel looks every page of it up and pins it, at some 100 ms a
// GiB, in which the shard serves others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/remote/hca_library.hpp"

namespace vrdma::remote {

struct HcaRegistration {
  // kept: the HCA does not let go of it.
  enum class State : std::uint8_t { asked, registered, refused, gone, kept };

  ibv_pd* pd = nullptr;
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0, iova = 0;
  int access = 0;
  vmci::Mapping own;  // where the memory lies, if it was mapped for this alone

  // Whoever sees it registered, refused, gone or kept has all that the registrar has to do with it behind him.
  State state() const { return state_.load(std::memory_order_acquire); }  // HR1
  ibv_mr* mr() const { return state() == State::registered ? mr_ : nullptr; }
  int error() const { return error_; }  // errno, where it was refused

 private:
  friend class HcaRegistrar;
  void be(State state) { state_.store(state, std::memory_order_release); }  // pairs with HR1

  ibv_mr* mr_ = nullptr;
  int error_ = 0;
  std::atomic<State> state_{State::asked};
};

class HcaRegistrar {
 public:
  // news: called in the thread after each change of state there.
  HcaRegistrar(const HcaLibrary& library, std::function<void()> news) : library_(library), news_(std::move(news)) {}
  // After all that it was given.
  ~HcaRegistrar();

  // At once, by the caller.
  void register_now(HcaRegistration& registration) const;
  void take_back_now(HcaRegistration& registration) const;
  // By the thread, in this order.
  void register_soon(std::shared_ptr<HcaRegistration> registration) { give({std::move(registration), false}); }
  void take_back_soon(std::shared_ptr<HcaRegistration> registration) { give({std::move(registration), true}); }
  // Waits until nothing is left to do.
  void finish();

  HcaRegistrar(const HcaRegistrar&) = delete;
  HcaRegistrar& operator=(const HcaRegistrar&) = delete;

 private:
  struct Task {
    std::shared_ptr<HcaRegistration> registration;
    bool take_back;
  };
  void give(Task task);
  void carry_out(const Task& task) const;
  void run();

  const HcaLibrary& library_;
  const std::function<void()> news_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Task> tasks_;  // the first one is under way, or next
  bool leaving_ = false;
  std::thread thread_;  // there is one from the first task on
};

}  // namespace vrdma::remote
