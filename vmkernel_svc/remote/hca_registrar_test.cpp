#include "vmkernel_svc/remote/hca_registrar.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <future>
#include <latch>
#include <optional>
#include <string>
#include <vector>

using namespace vrdma::remote;
using State = HcaRegistration::State;

namespace {

// An HCA that takes as long as the test wants: no real one does.
struct SlowHca {
  std::mutex mutex;
  std::condition_variable changed;
  int allowed = 0;  // calls that may end
  int begun = 0;
  bool refuses = false, keeps = false;
  std::vector<std::string> done;
  std::vector<ibv_mr> mrs = std::vector<ibv_mr>(8);

  void call(const char* what) {
    std::unique_lock lock(mutex);
    ++begun;
    changed.notify_all();
    changed.wait(lock, [this] { return allowed > 0; });
    --allowed;
    done.push_back(what);
    changed.notify_all();
  }
  void allow(int calls) {
    const std::lock_guard lock(mutex);
    allowed += calls;
    changed.notify_all();
  }
  void await_begun(int calls) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return begun >= calls; });
  }
};
SlowHca* hca;

ibv_mr* register_slowly(ibv_pd*, void* memory, size_t bytes, uint64_t, int) {
  hca->call("register");
  if (hca->refuses) return errno = ENOMEM, nullptr;
  ibv_mr& mr = hca->mrs[hca->done.size()];
  mr.addr = memory;
  mr.length = bytes;
  return &mr;
}
int take_back_slowly(ibv_mr*) {
  hca->call("take back");
  return hca->keeps ? EBUSY : 0;
}

struct World {
  SlowHca slow;
  HcaLibrary library;
  std::mutex mutex;
  std::condition_variable told;
  int news = 0;
  std::optional<HcaRegistrar> registrar;
  std::byte memory[64]{};

  World() {
    hca = &slow;
    library.ibv_reg_mr_iova = register_slowly;
    library.ibv_dereg_mr = take_back_slowly;
    library.errno_location = __errno_location;
    registrar.emplace(library, [this] {
      const std::lock_guard lock(mutex);
      ++news;
      told.notify_all();
    });
  }
  ~World() { registrar.reset(); }
  std::shared_ptr<HcaRegistration> wish() {
    auto made = std::make_shared<HcaRegistration>();
    made->memory = memory;
    made->bytes = sizeof(memory);
    return made;
  }
  void await_news(int count) {
    std::unique_lock lock(mutex);
    told.wait(lock, [&] { return news >= count; });
  }
};

}  // namespace

TEST_CASE("whoever asks for a registration goes on, and hears of it") {
  World world;
  const auto registration = world.wish();
  world.registrar->register_soon(registration);
  world.slow.await_begun(1);
  CHECK(registration->state() == State::asked);
  CHECK(registration->mr() == nullptr);
  world.slow.allow(1);
  world.await_news(1);
  REQUIRE(registration->state() == State::registered);
  CHECK(registration->mr()->addr == world.memory);
  world.registrar->take_back_soon(registration);
  world.slow.await_begun(2);
  CHECK(registration->state() == State::registered);  // the HCA has it yet
  world.slow.allow(1);
  world.await_news(2);
  CHECK(registration->state() == State::gone);
  CHECK(registration->mr() == nullptr);
}

TEST_CASE("what is taken back before it is registered is so afterwards, in this order") {
  World world;
  const auto first = world.wish(), second = world.wish();
  world.registrar->register_soon(first);
  world.registrar->take_back_soon(first);
  world.registrar->register_soon(second);
  world.slow.allow(3);
  world.registrar->finish();
  CHECK(world.slow.done == std::vector<std::string>{"register", "take back", "register"});
  CHECK(first->state() == State::gone);
  CHECK(second->state() == State::registered);
}

TEST_CASE("what the HCA refuses is said to be, and need not be taken back from it; what it keeps is said to be kept") {
  World world;
  world.slow.refuses = true;
  world.slow.allow(1);
  const auto refused = world.wish();
  world.registrar->register_soon(refused);
  world.registrar->finish();
  CHECK(refused->state() == State::refused);
  CHECK(refused->error() == ENOMEM);
  world.registrar->take_back_soon(refused);
  world.registrar->finish();
  CHECK(refused->state() == State::gone);
  CHECK(world.slow.done == std::vector<std::string>{"register"});

  world.slow.refuses = false;
  world.slow.keeps = true;
  world.slow.allow(2);
  const auto kept = world.wish();
  world.registrar->register_soon(kept);
  world.registrar->take_back_soon(kept);
  world.registrar->finish();
  CHECK(kept->state() == State::kept);
}

TEST_CASE("it ends after what it was given") {
  World world;
  const auto registration = world.wish();
  world.registrar->register_soon(registration);
  world.slow.await_begun(1);
  auto end = std::async(std::launch::async, [&] { world.registrar.reset(); });
  world.slow.allow(1);
  end.get();
  CHECK(registration->state() == State::registered);
}
