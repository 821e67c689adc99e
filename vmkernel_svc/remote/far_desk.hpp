// The shard's side of other hosts: which destinations lie there, the records that go and come, and whom they are for: requesters of this
// host, or the stand-ins of other hosts' (engine/far_responder.hpp), which far_stand_ins.cpp keeps.
//
// Used by the shard's thread only.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "vmkernel_svc/engine/far_responder.hpp"
#include "vmkernel_svc/objects.hpp"
#include "vmkernel_svc/remote/carrier.hpp"
#include "vmkernel_svc/remote/far_cm.hpp"
#include "vmkernel_svc/remote/far_groups.hpp"
#include "vmkernel_svc/remote/far_management.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"

namespace vrdma::svc {

class Fabric;
class Shard;

struct StandIn : engine::StandIn<MediatedPorts> {
  std::uint64_t guid = 0;  // of the requester's port
  std::uint32_t link_layer = 0;
  std::uint16_t lid = 0;
  std::uint16_t claimed_pkey = 0;  // what its host says; core.port.pkey is that, or 0 where the host cannot have it
  bool is_of_its_host = true;      // the port, by what is known here of LIDs; else it finds nobody, as a packet from elsewhere would not get there
  std::array<control::GidEntry, 16> gids{};
  bool runnable = false;
  bool waits_for_mark = false;
  std::uint64_t wake_ns = 0;
};

static_assert(engine::StandInPortsFor<MediatedPorts>);

class FarDesk final : private FarGroups::Post {
 public:
  using Qp = MediatedPorts::Qp;

  FarDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine,
          std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier);
  ~FarDesk();

  bool turn();  // false: there was nothing to do
  bool anything_waiting() const { return carrier_->anything_waiting() || held_ || !runnable_.empty() || (hca_ && hca_->anything_waiting()); }
  // At the end of a turn, after the queue pairs: what was said in it leaves.
  void flush();
  void prepare_to_sleep() {
    if (hca_) hca_->prepare_to_sleep();
  }
  std::uint64_t next_wake_ns() const {
    constexpr std::uint64_t never = ~std::uint64_t{0};
    return std::min({carrier_->next_wake_ns(), timers_.empty() ? never : timers_.begin()->first, hca_ ? hca_->next_wake_ns() : never});
  }

  // Whether the connection that `qp` is set up for leads to another host. Then it has its half of it (Qp::far) from now on.
  bool route(Qp& qp);

  // For the ports.
  void send(Qp& qp, engine::FarFramePtr frame);
  bool has_room(std::uint32_t host);
  bool has_room_for_answers(std::uint32_t host);
  std::uint64_t session(std::uint32_t host) { return at(host).session; }
  std::uint64_t silent_ns(std::uint32_t host);
  std::uint32_t new_epoch() { return ++last_epoch_; }
  void connected_again(Qp& qp);
  void send_datagram(Qp& qp, const engine::Request& request, const UdOperand& ud, std::uint32_t qkey);
  void answer(StandIn& stand_in, WcStatus status) { responder_.answer(stand_in, status); }
  void say(StandIn& stand_in, engine::FarFramePtr frame, bool may_wait);
  void speaks_for(StandIn& stand_in, const engine::FarDatagram& head);
  bool waits_for_mark(StandIn& stand_in);
  void make_runnable(StandIn& stand_in);
  void set_timer(StandIn& stand_in, std::uint64_t at_ns);

  // Connections by HCAs; nullptr: none is configured.
  HcaDesk* hca() { return hca_.get(); }
  void send_to(remote::HostId host, engine::FarFramePtr frame);
  bool has_stand_in(remote::HostId host, std::uint32_t requester, std::uint32_t target) const;
  bool is_of(remote::HostId host, std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer) const;
  std::uint16_t judged(remote::HostId host, std::uint16_t pkey);
  void count_malformed() { ++malformed_; }

  // What a host wants of those who act alone; while much of that waits, nothing more is taken from any host.
  void later(std::function<void(Shard&)> task);

  bool is_connected(remote::HostId host) override;
  bool meets_others() override;

  // Multicast groups, and which hosts have members of them.
  FarGroups& groups() { return groups_; }
  std::uint64_t multicast_datagrams(remote::HostId host) { return at(host).multicast_datagrams; }  // sent there

  // The P_Key of `qp` is another: its stand-in hears of it.
  void tell_pkey(Qp& qp);
  // Who is in which partition has changed: what other hosts claim is judged anew.
  void look_at_partitions();
  // The directory says something else than before.
  void look_at_directory();
  const std::vector<remote::LidHolder>& ranges() const { return ranges_; }  // who has which LIDs
  std::size_t stand_in_count(remote::HostId host) const;

  const remote::Directory& directory() const { return *directory_; }
  remote::Carrier& carrier() { return *carrier_; }
  std::uint64_t dropped_datagrams() const { return dropped_datagrams_; }
  std::uint64_t malformed() const { return malformed_; }
  std::uint64_t refused_pkeys() const { return refused_pkeys_; }

 private:
  struct Host {
    std::uint64_t session = 0;
    bool knows_flow_labels = false;
    engine::FarMarks marks;  // that are sent there
    std::uint64_t owed_mark = 0;  // one of its own that is to be sent back
    std::shared_ptr<remote::Gauge> gauge;
    std::uint32_t stand_ins = 0;
    std::map<std::uint16_t, bool> claims;  // P_Keys that it has claimed: whether some guest of it may have them
    std::uint64_t multicast_datagrams = 0;
    // For its UD queue pairs, by the receiver's QPN: order is kept for each, and who is slow holds up few others. The last one is for
    // multicast, which waits for nobody.
    std::array<std::unique_ptr<StandIn>, 17> datagrams;
  };
  using StandInKey = std::pair<remote::HostId, std::uint32_t>;  // and the requester's QPN

  Host& at(std::uint32_t host);
  void arrived(engine::FarFramePtr frame);
  void to_requester(engine::FarFramePtr frame);
  void to_stand_in(engine::FarFramePtr frame);
  void to_datagrams(engine::FarFramePtr frame);
  void open(engine::FarFramePtr frame);
  void send_mark(remote::HostId host);
  void mark(remote::HostId host, const engine::FarRecord& record);
  void pay_mark(remote::HostId host);
  void end_waits();
  bool may_tell(remote::HostId host) override;
  void tell(remote::HostId host, engine::FarFramePtr frame) override { send_to(host, std::move(frame)); }
  void new_session(remote::HostId host, std::uint64_t session);
  void drop(StandIn& stand_in);
  bool run(StandIn& stand_in);
  engine::FarFramePtr address(remote::HostId host, engine::FarFramePtr frame);
  void give(engine::FarFramePtr frame);
  void hold(engine::FarFramePtr answer);
  void release();
  std::optional<std::uint32_t> host_of(const Qp& qp, std::uint16_t dlid, bool global, const std::uint8_t* dgid) const;

  Fabric& fabric_;
  Shard& shard_;
  MediatedPorts& ports_;
  engine::Engine<MediatedPorts>& engine_;
  engine::FarResponder<MediatedPorts> responder_;
  std::shared_ptr<remote::Directory> directory_;
  std::unique_ptr<remote::Carrier> carrier_;
  std::map<remote::HostId, Host> hosts_;
  std::vector<remote::LidHolder> ranges_;
  std::map<StandInKey, std::unique_ptr<StandIn>> stand_ins_;
  FarGroups groups_{*this};
  FarCm cm_{*this, shard_};
  FarManagement management_{*this, shard_};
  std::vector<StandIn*> runnable_;
  std::vector<StandIn*> waiting_;  // for marks
  bool marks_owed_ = false;        // to some host: a turn looks at all of them only then
  std::vector<Qp*> answered_;  // since the turn began
  std::set<std::pair<std::uint64_t, StandIn*>> timers_;
  std::uint32_t last_epoch_ = 0;
  int tasks_ = 0;  // given to later() and not run yet
  std::uint64_t dropped_datagrams_ = 0, malformed_ = 0, refused_pkeys_ = 0;
  engine::FarFramePtr held_;      // the only thing said in its turn; leaves with what the next one says, or at that one's end
  bool held_for_a_turn_ = false;
  bool said_something_ = false;   // in this turn
  std::unique_ptr<HcaDesk> hca_;
};

}  // namespace vrdma::svc
