// The keys of one guest as its direct peers read them (direct::KeyTable): what can be reached by mapping one of its files.
// A region in several pieces is there with its largest. Used by the shard's thread only.
#pragma once

#include <memory>

#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/memory/region.hpp"
#include "vrdma/direct.hpp"

namespace vrdma::svc {

class KeyBook {
 public:
  // With all that the guest has registered so far.
  static Result<std::unique_ptr<KeyBook>> create(Guest& guest, RegionTable& regions);

  // At any time: nobody knows the key yet. Where there is no place for it, its operations stay the service's.
  void add(Guest& guest, const Region& region);
  // While no direction that could read the guest's keys is handed out.
  void remove(Key key);
  // No key names that backing any more. Likewise.
  void let_go(std::uint32_t backing);

  int fd() const { return segment_.fd(); }  // can be mapped for reading only

 private:
  direct::KeyTable& table() const { return *segment_.at<direct::KeyTable>(0); }
  vmci::Segment segment_;
};

}  // namespace vrdma::svc
