// How those who may lead a subnet agree on its State, and on who leads: among themselves (consensus.hpp), or by an etcd that all of
// them reach (etcd_agreement.hpp). The manager needs no more of either.
#pragma once

#include <cstdint>
#include <string>

#include "vmkernel_svc/hosts/outbox.hpp"

namespace vrdma::hosts {

class Agreement {
 public:
  virtual ~Agreement() = default;
  virtual void tick(std::uint64_t now_ms, Outbox& out) = 0;
  // Leads, knows all that was committed, and nobody else can lead now.
  virtual bool leads(std::uint64_t now_ms) const = 0;
  virtual const std::string& leader() const = 0;  // as far as known; empty: none
  virtual const State& committed() const = 0;     // while leads()
  virtual std::uint64_t term() const = 0;
  // One change at a time. `changed` is made of committed(), with State::begin(term()).
  virtual bool can_propose(std::uint64_t now_ms) const = 0;
  virtual void propose(std::uint64_t now_ms, State changed, Outbox& out) = 0;
};

}  // namespace vrdma::hosts
