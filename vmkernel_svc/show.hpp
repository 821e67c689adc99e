// What `vrdma show` and the metrics see: the service's objects as JSON, written to a memfd that travels with the reply. A tool sees
// the objects of its own user; root and the service's user see all. Runs on the first shard's thread, alone, but not for long at a time: an
// answer is a picture of each object, not of one moment.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "vmkernel_svc/shard.hpp"
#include "vmkernel_svc/show_guest.hpp"

namespace vrdma::svc {

// Who asks: root and the service's own user see all, others what is theirs; a machine's root what is the machine's, its users theirs. Who may be
// one of several users (users.hpp) sees what is its process's.
struct Viewer {
  uid_t uid = static_cast<uid_t>(-1);
  bool all = false;
  std::string machine;  // empty: on this host
  bool is_visible = true;  // the process that asks is in this service's pid namespace, or one below
  pid_t one_of_several = -1;  // of those with its uid: the process, 0 if that cannot be seen; -1: it is one user's

  static Viewer at(const vmci::PacketSocket& socket);
  static Viewer in(const std::string& machine, uid_t uid) { return {uid, uid == 0, machine, true}; }
  bool sees(const Guest& guest) const;
  bool is_known() const { return one_of_several < 0; }
};

class ShowDesk {
 public:
  explicit ShowDesk(Shard& shard) : shard_(shard) {}
  // Answered later. EBUSY: this user has many that were not answered yet, or that were and nobody has read.
  // connection: whose socket it is, gone when that is closed; closer: of a copy of it.
  void ask(const vmci::PacketSocket& socket, const control::Head& head, const Viewer& viewer, std::weak_ptr<const void> connection, std::shared_ptr<vmci::Closer> closer);

 private:
  // What was answered and nobody has read: memory of this service's.
  struct Unread {
    uid_t uid = 0;
    int socket = -1;  // while the connection is there
    std::weak_ptr<const void> connection;
    bool waits() const;
  };
  struct Job {
    Viewer viewer;
    control::Head head;
    vmci::GivenFd socket;       // of its own: the connection may be closed meanwhile
    Unread unread;              // once it is answered
    vmci::UniqueFd file;
    std::vector<std::uint32_t> guests;
    std::string text, routes;
    ShownGuest guest;
    std::size_t next = 0;  // of the guests
    bool inside = false;   // of that one
  };
  void step_soon();
  void step();
  bool write_some(Job& job);
  static void reply(int socket, const control::Head& head, int status, int file = -1);

  Shard& shard_;
  std::deque<std::unique_ptr<Job>> jobs_;
  std::vector<Unread> unread_;
  std::uint64_t stepped_in_turn_ = 0;
};

}  // namespace vrdma::svc
