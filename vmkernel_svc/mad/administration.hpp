// Subnet administration (IBA 15): records of nodes, ports, links, paths and multicast groups, by whatever of them a request gives.
#pragma once

#include "vmkernel_svc/mad/datagram.hpp"
#include "vmkernel_svc/mad/groups.hpp"
#include "vmkernel_svc/mad/subnet.hpp"

namespace vrdma::svc::mad {

class Administration {
 public:
  explicit Administration(Subnet& subnet) : subnet_(subnet) {}
  // Turns a request into the answer; that to GetTable has all records, however long. False: nobody answers.
  bool answer(Guest& viewer, Mad& mad);
  void leave(const Guest& guest);  // nobody else has its port

  const Groups& groups() const { return groups_; }

 private:
  struct Records;
  struct Kind;
  static const Kind kinds[];
  static const Kind* kind_of(std::uint16_t attribute);

  void nodes(Guest& viewer, const View& view, Records& out);
  void ports(Guest& viewer, const View& view, Records& out);
  void links(Guest& viewer, const View& view, Records& out);
  void switches(Guest& viewer, const View& view, Records& out);
  void managers(Guest& viewer, const View& view, Records& out);
  void pkeys(Guest& viewer, const View& view, Records& out);
  void paths(Guest& viewer, const View& view, Records& out);
  void members(Guest& viewer, const View& view, Records& out);
  struct End {
    Gid gid;
    std::uint16_t lid;
    const Tenant* tenant;  // nullptr: the switch, a group, a guest of another host
    std::uint16_t pkey;    // of a group
  };
  class Reach;
  void put_path(const End& from, const End& to, std::uint16_t pkey, Records& out);

  void put_member(const Gid& gid, const Group& group, const Gid& port, std::uint8_t state, Records& out);
  void put_group(std::span<std::uint8_t> record, const Gid& gid, const Group& group) const;

  std::uint16_t join(Guest& viewer, Mad& mad);
  std::uint16_t leave(Guest& viewer, Mad& mad);
  void class_port_info(Mad& mad);

  Subnet& subnet_;
  Groups groups_;
};

}  // namespace vrdma::svc::mad
