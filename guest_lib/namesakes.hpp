// What is called alike in the attributes of <infiniband/verbs.h>, of the kernel's ABI (<rdma/ib_user_verbs.h>) and on the channel; only
// the types differ, by enums.
#pragma once

#include <cstring>
#include <type_traits>

#include "vrdma/attributes.hpp"

namespace vrdma::guest {

// The channel's names for what others have in a `grh`.
template <class Attributes>
void copy_address(const AddressVector& from, Attributes& to) {
  static_assert(sizeof(to.grh.dgid) == sizeof(from.dgid));
  std::memcpy(&to.grh.dgid, from.dgid, sizeof(from.dgid));
  to.grh.flow_label = from.flow_label;
  to.grh.sgid_index = from.sgid_index;
  to.grh.hop_limit = from.hop_limit;
  to.grh.traffic_class = from.traffic_class;
  to.dlid = from.dlid;
  to.sl = from.sl;
  to.src_path_bits = from.src_path_bits;
  to.static_rate = from.static_rate;
  to.is_global = from.is_global;
  to.port_num = from.port_num;
}

// Of a queue pair; its rate_limit is not in the kernel's ABI.
template <class From, class To>
void copy_namesakes(const From& from, To& to) {
  const auto copy = [](auto value, auto& place) { place = static_cast<std::remove_reference_t<decltype(place)>>(value); };
  copy(from.path_mtu, to.path_mtu);
  copy(from.path_mig_state, to.path_mig_state);
  copy(from.qkey, to.qkey);
  copy(from.rq_psn, to.rq_psn);
  copy(from.sq_psn, to.sq_psn);
  copy(from.dest_qp_num, to.dest_qp_num);
  copy(from.pkey_index, to.pkey_index);
  copy(from.alt_pkey_index, to.alt_pkey_index);
  copy(from.en_sqd_async_notify, to.en_sqd_async_notify);
  copy(from.max_rd_atomic, to.max_rd_atomic);
  copy(from.max_dest_rd_atomic, to.max_dest_rd_atomic);
  copy(from.min_rnr_timer, to.min_rnr_timer);
  copy(from.port_num, to.port_num);
  copy(from.timeout, to.timeout);
  copy(from.retry_cnt, to.retry_cnt);
  copy(from.rnr_retry, to.rnr_retry);
  copy(from.alt_port_num, to.alt_port_num);
  copy(from.alt_timeout, to.alt_timeout);
}

}  // namespace vrdma::guest
