// The host's connection manager (IBA 12; the kernel's rdma_cm, whose states and events these are): identifiers that guests have, who
// listens where, and what the two ends of a connection say to each other before their queue pairs are connected. It touches no queue
// pair: librdmacm moves those by ibv_modify_qp, with the attributes that it asks for here.
//
// Addresses are those of the interfaces in a guest's network namespace, as the guest says; two guests of one namespace share them, and
// a port leads to one of them. Besides, each guest has the address that is mapped into its GIDs (addresses.hpp), which no interface has, and
// on InfiniBand its GID, by which it is called where programs use addresses of AF_IB (gids.cpp).
// Who is looked for, in this order: the guest with that address of ours; a listener in the namespace, where the address is one of it; a
// listener in another namespace of this host or of its machines; another host, of which each is asked.
//
// Members that take a guest are answers to its requests (vrdma/cm.hpp); errors as the kernel's. Used by the shard's thread only.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

#include "vmkernel_svc/cm/identifier.hpp"
#include "vmkernel_svc/cm/kept.hpp"
#include "vmkernel_svc/cm/ports.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Fabric;

class ConnectionManager {
 public:
  // Other hosts.
  class Post {
   public:
    virtual void tell(std::uint32_t host, const CmMessage& message) = 0;
    // Those that understand that address and may have it: who is connected, or was so a moment ago, or is to be met yet. What those are told
    // that are not connected comes when they are, or they begin anew (lost()).
    virtual std::vector<std::uint32_t> who_may_have(const control::CmAddress& address) = 0;
    // For how long nothing has been heard of that host.
    virtual std::uint64_t silent_ns(std::uint32_t host) = 0;

   protected:
    ~Post() = default;
  };

  explicit ConnectionManager(Fabric& fabric, std::uint32_t last_number = 0);
  ~ConnectionManager();
  void use(Post* post) { post_ = post; }
  // `at` is called when expire() is to be called earlier than was known.
  void set_alarm(std::function<void(std::uint64_t at_ns)> at) { alarm_ = std::move(at); }
  void expire(std::uint64_t now_ns);
  bool waits() const { return !deadlines_.empty() || !kept_.empty(); }  // for some time to come

  Result<control::CmOpenReply> open(Guest& guest, vmci::UniqueFd pipe);
  Status close(Guest& guest, std::uint32_t channel);
  Status place(Guest& guest, const control::CmPlaceRequest& request);
  Result<control::CmId> create(Guest& guest, const control::CmCreateRequest& request);
  Result<control::CmGone> destroy(Guest& guest, const control::CmId& id);
  Status bind(Guest& guest, const control::CmBindRequest& request);
  Status resolve_address(Guest& guest, const control::CmResolveAddressRequest& request);
  Status resolve_route(Guest& guest, const control::CmId& id);
  Status listen(Guest& guest, const control::CmListenRequest& request);
  Status connect(Guest& guest, const control::CmConnectRequest& request);
  Status accept(Guest& guest, const control::CmAcceptRequest& request);
  Status reject(Guest& guest, const control::CmRejectRequest& request);
  Status disconnect(Guest& guest, const control::CmId& id);
  Status established(Guest& guest, const control::CmId& id);  // data has come before the rtu
  Status write_event(Guest& guest, const control::CmWriteEventRequest& request);
  Status set_option(Guest& guest, const control::CmOptionRequest& request);
  Result<control::CmQueryReply> query(Guest& guest, const control::CmId& id);
  Result<control::CmAttributesReply> attributes(Guest& guest, const control::CmAttributesRequest& request);
  Result<control::CmGone> migrate(Guest& guest, const control::CmMigrateRequest& request);
  Result<control::CmId> join(Guest& guest, const control::CmJoinRequest& request);
  Result<control::CmGone> leave_group(Guest& guest, const control::CmId& id);
  Result<control::CmTakeReply> take_event(Guest& guest, std::uint32_t channel);

  void leave(Guest& guest);  // all that it has
  // Of another host, which is trusted as far as its own guests go.
  void arrived(std::uint32_t host, const CmMessage& message) { deliver(host, message); }
  void lost(std::uint32_t host);  // what it knew: it begins anew, or is met for the first time

  // For those who ask: vrdma show, and tests.
  const std::map<std::uint32_t, std::unique_ptr<CmIdentifier>>& identifiers() const { return identifiers_; }
  const std::map<std::uint32_t, std::unique_ptr<CmChannel>>& channels() const { return channels_; }
  const std::map<std::uint32_t, std::uint32_t>& memberships() const { return memberships_; }
  const std::set<std::pair<std::uint64_t, std::uint32_t>>& deadlines() const { return deadlines_; }

 private:
  // How long a connection that has ended is remembered by its ends: packets of its own may come until then (IBA 12.9.8.4).
  static constexpr std::uint64_t timewait_ns = 500'000'000;
  // How long whoever waits for an answer waits for a host of which nothing is heard.
  static constexpr std::uint64_t unheard_patience_ns = 69'000'000'000;

  struct Place {
    CmNetwork network;
    std::vector<control::CmAddress> addresses;  // in their order
    static bool before(const control::CmAddress& one, const control::CmAddress& other) { return std::tie(one.family, one.ip) < std::tie(other.family, other.ip); }
    bool has(const control::CmAddress& address) const { return std::binary_search(addresses.begin(), addresses.end(), address, before); }
  };

  Result<CmIdentifier*> find(Guest& guest, const control::CmId& id);  // ENOENT, or EINVAL where it is another channel's
  CmChannel* channel_of(Guest& guest, std::uint32_t handle);
  std::uint32_t new_number();
  Result<CmIdentifier*> add(Guest& guest, CmChannel& channel, std::uint32_t port_space, engine::QpType type);
  void remove(CmIdentifier& one);   // and what its peer is told of it
  // It, its memberships, and who waits to be accepted by nobody else, for the request has not been read: what goes where it goes.
  std::set<std::uint32_t> with_its_own(const CmIdentifier& one) const;
  static std::uint32_t drop_events(CmChannel& channel, const std::set<std::uint32_t>& counted_at);  // 1: the last ones went
  // What an application is given of what the other one has said, in a message of so much private data.
  static control::CmParameters as_received(control::CmParameters parameters, std::uint32_t private_bytes);
  void raise(CmIdentifier& one, std::uint32_t event, std::int32_t status = 0, const CmMessage* with = nullptr, std::uint32_t private_bytes = 0);
  void raise_on(CmChannel& channel, std::uint32_t counted_at, const control::CmEvent& event);
  void set_deadline(CmIdentifier& one, std::uint64_t after_ns);
  void clear_deadline(CmIdentifier& one);
  void await_answer(CmIdentifier& one, std::uint64_t patience_ns);
  bool may_still_answer(CmIdentifier& one, std::uint64_t now_ns);  // and is waited for
  void end(CmIdentifier& one, std::uint32_t event, std::int32_t status, const CmMessage* with = nullptr, std::uint32_t private_bytes = 0);

  static control::CmAddress mapped_address(const Guest& guest);  // into its GIDs
  static bool is_address_of(const Guest& guest, const control::CmAddress& address);  // by its GIDs
  bool is_own(const Guest& guest, const control::CmAddress& address) const;
  Status take_address(Guest& guest, CmIdentifier& one, control::CmAddress address);
  static Status take_gid(const Guest& guest, const CmIdentifier& one, control::CmAddress& address);
  static Status call_from_gid(const Guest& guest, CmIdentifier& one, const control::CmAddress& destination);
  CmPort port_at(const control::CmAddress& address, const Guest& caller) const;
  // Whom a request of that host's is for, by CmPorts::listener or CmPorts::holder.
  using Lookup = CmIdentifier* (CmPorts::*)(const CmNetwork&, std::uint32_t, const control::CmAddress&) const;
  CmIdentifier* look_for(std::uint32_t host, const CmMessage& request, Lookup who) const;
  Guest* guest_at(const control::CmAddress& address) const;  // whose GIDs that address is of
  bool is_known_here(const CmNetwork& except, const control::CmAddress& address) const;
  void address_resolved(CmIdentifier& one);
  void address_unknown(CmIdentifier& one, int error);
  bool may_have(std::uint32_t host, const control::CmAddress& address) const;
  void stop_asking(CmIdentifier& one, std::uint32_t host);

  CmMessage message(CmKind kind, const CmIdentifier& from) const;
  void send(const CmPeer& to, const CmMessage& message);
  void refuse(std::uint32_t host, const CmMessage& request, std::int32_t reason);
  void deliver(std::uint32_t host, const CmMessage& message);
  void deliver_request(std::uint32_t host, const CmMessage& message);
  bool keep_for_listener(std::uint32_t host, const CmMessage& request);
  void deliver_kept(const CmIdentifier& listener);
  void deliver_who_has(std::uint32_t host, const CmMessage& message);
  void deliver_has(std::uint32_t host, const CmMessage& message);
  void deliver_rep(CmIdentifier& one, std::uint32_t host, const CmMessage& message);
  void deliver_sidr_rep(CmIdentifier& one, std::uint32_t host, const CmMessage& message);
  void deliver_rtu(CmIdentifier& one);
  void deliver_rej(CmIdentifier& one, const CmMessage& message);
  void deliver_dreq(CmIdentifier& one);
  bool was_called(const CmIdentifier& one) const;  // it was made for a request
  CmIdentifier* addressee(std::uint32_t host, const CmMessage& message);
  void learn_peer(CmIdentifier& one, std::uint32_t host, const CmMessage& message);
  CmPort port_of(const Guest& guest) const;
  AddressVector address_vector(const CmIdentifier& one) const;
  std::uint16_t pkey_index(const CmIdentifier& one) const;
  static std::uint16_t pkey_of(const Guest& guest, std::uint16_t wanted);  // its own in that partition; 0: it is in none

  Fabric& fabric_;
  Post* post_ = nullptr;
  std::function<void(std::uint64_t)> alarm_;
  std::uint32_t last_number_;  // of channels, identifiers, memberships
  std::uint64_t last_event_ = 0;
  std::map<std::uint32_t, std::unique_ptr<CmChannel>> channels_;
  std::map<std::uint32_t, std::unique_ptr<CmIdentifier>> identifiers_;
  std::map<CmPeer, std::uint32_t> by_peer_;              // identifiers that were made for requests
  std::map<std::uint32_t, std::uint32_t> memberships_;   // whose identifier's
  std::unordered_map<std::uint32_t, Place> places_;      // of guests
  std::set<std::pair<std::uint64_t, std::uint32_t>> deadlines_;
  CmKept kept_;
  CmPorts ports_;
};

}  // namespace vrdma::svc
