// Requests for which nobody listens yet, each kept for as long as the others. A caller has so many and no more: nobody else is turned away
// because of it. Used by the shard's thread only.
#pragma once

#include <algorithm>
#include <array>
#include <boost/multi_index/mem_fun.hpp>
#include <boost/multi_index/member.hpp>
#include <boost/multi_index/ordered_index.hpp>
#include <boost/multi_index/ranked_index.hpp>
#include <boost/multi_index/sequenced_index.hpp>
#include <boost/multi_index_container.hpp>
#include <compare>
#include <cstdint>
#include <vector>

#include "vmkernel_svc/cm/identifier.hpp"

namespace vrdma::svc {

class CmKept {
 public:
  // A tenant of this host, by its uid; a port of another one, by its GUID.
  struct Caller {
    std::uint32_t host;
    std::uint64_t number;
    auto operator<=>(const Caller&) const = default;
  };
  struct Address {
    std::uint32_t port_space;
    std::uint16_t port;
    std::uint16_t family;
    std::array<std::uint8_t, 16> ip;
    auto operator<=>(const Address&) const = default;
  };
  struct Kept {
    std::uint64_t until_ns;
    std::uint32_t host;
    Caller caller;
    CmMessage request;
    CmPeer sender() const { return {host, request.from}; }
    Address called() const { return {request.port_space, request.destination.port, request.destination.family, request.destination.ip}; }
  };
  static constexpr std::size_t of_caller_max = 4096;

  bool empty() const { return kept_.empty(); }
  const Kept& oldest() const { return kept_.front(); }
  Kept take_oldest() {
    const Kept oldest = kept_.front();
    kept_.pop_front();
    return oldest;
  }
  // False: its caller has too many, or that one already. The youngest is kept longest.
  bool keep(const Kept& one) { return kept_.get<Caller>().count(one.caller) < of_caller_max && kept_.push_back(one).second; }
  void forget(const CmPeer& sender) { kept_.get<CmPeer>().erase(sender); }
  void forget_host(std::uint32_t host) {
    auto& senders = kept_.get<CmPeer>();
    senders.erase(senders.lower_bound(CmPeer{host, 0}), senders.upper_bound(CmPeer{host, ~0u}));
  }
  // Of those whose address may be one that is held so, the ones that it is said of.
  template <class F>
  std::vector<Kept> take(std::uint32_t port_space, const CmHolding& held, F&& is_said) {
    std::vector<Kept> taken;
    auto& called = kept_.get<Address>();
    const auto look_at = [&](std::uint16_t family, const std::array<std::uint8_t, 16>& from) {
      auto to = from;
      if (std::ranges::all_of(from, [](auto byte) { return byte == 0; })) to.fill(0xff);  // any
      const auto end = called.upper_bound(Address{port_space, held.at.port, family, to});
      for (auto at = called.lower_bound(Address{port_space, held.at.port, family, from}); at != end;) {
        if (is_said(*at)) taken.push_back(*at), at = called.erase(at);
        else ++at;
      }
    };
    look_at(held.at.family, held.at.ip);
    if (held.also_ipv4) look_at(AF_INET, {});
    return taken;
  }

 private:
  template <class Key, Key (Kept::*of)() const>
  using key = boost::multi_index::const_mem_fun<Kept, Key, of>;
  boost::multi_index_container<
      Kept, boost::multi_index::indexed_by<
                boost::multi_index::sequenced<>,
                boost::multi_index::ordered_unique<boost::multi_index::tag<CmPeer>, key<CmPeer, &Kept::sender>>,
                boost::multi_index::ordered_non_unique<boost::multi_index::tag<Address>, key<Address, &Kept::called>>,
                boost::multi_index::ranked_non_unique<boost::multi_index::tag<Caller>, boost::multi_index::member<Kept, Caller, &Kept::caller>>>>
      kept_;
};

}  // namespace vrdma::svc
