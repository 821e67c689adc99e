// This host in its subnet: listens and dials, keeps a session with every other host, runs the node, keeps its file, and says what
// is so. A thread of its own; what is public may be called from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "vmkernel_svc/hosts/boot_clock.hpp"
#include "vmkernel_svc/hosts/settings.hpp"
#include "vmkernel_svc/hosts/subnet_file.hpp"

namespace vrdma::hosts {

class EtcdAgreement;
class EtcdClient;
class Session;
class Tls;

class Service final : public remote::Directory {
 public:
  struct Other {
    Host host;
    bool reachable = false;
    bool manages = false;
    bool expired = false;  // its certificate
    std::array<std::byte, 32> key{};
    std::string version, problem;  // why it is not reachable, as far as known
  };
  struct Snapshot {
    Host us;
    LidRange lids = no_lids;
    BootClock::time_point lease_until;
    std::shared_ptr<const Partitions> partitions = std::make_shared<Partitions>();
    std::string leader, problem;
    bool manages = false;
    std::string manager_problem;  // of this host as a manager, whether it has a lease or not; empty: none
    std::uint64_t term = 0, version = 0;  // of the managers; of what is known of the subnet
    std::map<std::string, Other> others;
    std::map<std::uint16_t, std::pair<std::uint16_t, std::uint32_t>> blocks;  // first → last, host id
    std::map<std::uint32_t, std::shared_ptr<const remote::PeerHost>> peers;
    std::uint64_t strangers = 0;  // connections that showed no good certificate
    std::string last_stranger;

    bool may_give() const { return lids != no_lids && BootClock::now() < lease_until; }
    bool refused() const { return !leader.empty() && !problem.empty(); }  // who leads leases this host nothing, and `problem` is why
  };

  // Reads the folder and listens. Throws std::runtime_error with a message for a person.
  explicit Service(Settings settings);
  ~Service() override;
  void start();
  void stop();  // nobody is called any more when it returns

  std::shared_ptr<const Snapshot> snapshot() const;

  remote::LidRange ours() const override { return snapshot()->lids; }
  std::optional<remote::HostId> host_of(std::uint16_t lid) const override;
  std::vector<remote::LidHolder> holders() const override;
  std::shared_ptr<const remote::PeerHost> host(remote::HostId id) const override;
  std::shared_ptr<const remote::PeerHost> host_named(std::string_view name) const override;
  // Of what this class tells, and when a lease begins, lapses or is refused.
  void when_changed(std::function<void()> call) override;

 private:
  struct Network;  // what is Asio's: its headers and those of TLS take 3 s of each compilation, and few files need them (network.hpp)
  using SessionPtr = std::shared_ptr<Session>;
  struct Dial {
    std::string address;
    std::uint16_t port = 0;
    bool under_way = false;
    std::function<void()> call_off;  // of a connect that is under way
    std::uint64_t next_ms = 0, pause_ms = 0;
    std::string problem;
  };

  std::uint64_t now_ms() const;
  void accept_next();
  void tick();
  void heard_of_etcd();
  void perform(Outbox out);
  void save();
  void deliver(const Outbox::Letter& letter);
  Hello hello() const;
  std::string objection(const Session& session);  // why it is not let in, who has said hello; empty: it is
  void on_up(const SessionPtr& session);
  void on_message(const SessionPtr& session, const Message& message);
  void on_down(const SessionPtr& session, const std::string& why);
  static void say_it_is_there(const Session& session);
  void adopt_managers(const Hello& hello);
  void dial_those_missing();
  void dial(const std::string& key, const std::string& expected, Dial& target);
  void dialed(const std::string& key, const std::string& problem);
  void note_who_lasts();
  void probe(const SessionPtr& asker, const Probe& probe);
  // What only the leader can do, for an administrator: it answers, or who leads is named.
  template <class Reply>
  void wish(const SessionPtr& asker, const Message& message, const std::string& what);
  SessionPtr session_with(const std::string& name) const;
  bool is_right(const Session& session) const;  // the subnet knows its host by that address, or not at all
  void drop_those_out();
  bool have_expired() const;  // we
  std::string problem() const;  // for a person; empty: none
  std::string manager_problem() const;
  void publish();

  Settings settings_;
  std::shared_ptr<Tls> tls_;
  SubnetFile file_;
  std::unique_ptr<Network> network_;
  BootClock::time_point began_ = BootClock::now();
  std::string run_;
  std::vector<Endpoint> managers_;
  std::unique_ptr<EtcdClient> etcd_client_;  // nullptr: the managers agree among themselves
  std::unique_ptr<EtcdAgreement> etcd_;
  std::unique_ptr<Node> node_;
  std::map<std::string, remote::HostId> ids_;  // by name and certificate: this process's numbers of hosts
  std::uint64_t next_route_ = 1;
  std::map<std::uint64_t, SessionPtr> sessions_;  // up, by route
  std::map<std::string, std::int64_t> valid_until_s_;  // of certificates that others have shown, by serial
  std::set<std::string> expired_;                 // of these, and ours
  std::deque<std::weak_ptr<Session>> opening_;    // accepted, and not up yet; oldest first
  std::map<std::string, Dial> dials_;             // by name; the seed's by "seed"
  std::string seed_name_;
  std::map<std::string, bool> fleeting_;          // whose last session has not lasted, so far; it was not logged
  bool unsaved_ = false, may_give_ = false;
  std::uint64_t strangers_ = 0;
  std::string last_stranger_;
  std::uint64_t warned_ms_ = 0, warn_pause_ms_ = 0;
  std::string warned_why_;
  std::set<std::string> said_;                    // what was logged of whom, once

  mutable std::mutex mutex_;
  std::shared_ptr<const Snapshot> snapshot_ = std::make_shared<Snapshot>();
  std::vector<std::function<void()>> listeners_;
  std::thread thread_;
};

}  // namespace vrdma::hosts
