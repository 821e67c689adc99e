// What is there from the library's load on, and has no end: other libraries' exit handlers use it, and threads that go on while the process ends.
// constinit and of no function, so that there is no guard of a first use either (g++ gives a function's static one for its end), which stays
// locked in a fork's child if a thread was at that at the fork.
#pragma once

namespace vrdma {

template <class T>
union NeverDestroyed {
  constexpr NeverDestroyed() : it{} {}
  ~NeverDestroyed() {}
  T it;
};

}  // namespace vrdma
