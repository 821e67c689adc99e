// Who takes turns, one after the other, while members come and go: between two turns of one, each other that was there all the time has
// one. Programs count on it that what they post to many queue pairs completes evenly (guest_lib/poll.cpp says which). One thread.
#pragma once

#include <cstddef>
#include <vector>

namespace vrdma::svc {

template <class Member>
class TurnOrder {
 public:
  bool empty() const { return members_.empty(); }
  std::size_t size() const { return members_.size(); }
  Member& at(std::size_t index) const { return *members_[index]; }

  // Whose turn it is, until it passes or is removed. There must be one.
  Member& current() {
    if (next_ >= members_.size()) next_ = 0;
    return *members_[next_];
  }
  void pass() { ++next_; }

  void add(Member& member) { members_.push_back(&member); }
  bool remove(const Member& member) {  // false: it is not here
    return remove_if([&](const Member& other) { return &other == &member; }) != 0;
  }
  template <class Leaves>
  std::size_t remove_if(Leaves&& leaves) {
    std::size_t kept = 0, next = next_;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if (!leaves(*members_[i])) members_[kept++] = members_[i];
      else next -= i < next_;
    }
    const std::size_t removed = members_.size() - kept;
    members_.resize(kept);
    next_ = next;
    return removed;
  }

 private:
  std::vector<Member*> members_;
  std::size_t next_ = 0;
};

}  // namespace vrdma::svc
