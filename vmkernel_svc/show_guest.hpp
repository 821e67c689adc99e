// One guest as `vrdma show` tells of it, in JSON, some objects at a time: others' messages do not wait until all of very many are written
// down. Runs on the first shard's thread, alone; the guest may be another's between two calls, or have lost what was to come.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

// Whether a physical HCA takes part, for connections to other hosts.
bool has_hca(const Fabric& fabric);

class ShownGuest {
 public:
  void begin(const Guest& guest, Shard& shard, std::string& text);
  // One object, or as many steps as one takes. False: there is nothing more.
  bool go_on(Guest& guest, Shard& shard, std::string& text);
  // After that, or where the guest has gone meanwhile.
  void end(std::string& text);

 private:
  enum class Part { contexts, pds, qps, cqs, srqs, cm_ids, mrs };
  void open(Part part, const Guest& guest, std::string& text);
  bool write_identifiers(const Guest& guest, Shard& shard, std::string& text);
  void write_object(Guest& guest, Shard& shard, std::uint32_t handle, std::string& text);
  void separate(std::string& text) {
    if (!first_) text += ',';
    first_ = false;
  }

  Part part_ = Part::contexts;
  bool first_ = true;  // of its part's objects
  bool open_ = true;   // the part's list is
  std::vector<std::uint32_t> handles_;  // of the part, as they were when it began
  std::size_t next_ = 0;                // of these; of the identifiers of rdma_cm: its number
  engine::QpCounters totals_{};
};

}  // namespace vrdma::svc
