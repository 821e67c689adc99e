// Fuzz target: what another host says of its multicast groups, while this one's own come and go. What is known of it must be what a
// plain model says, nothing that it claims may exceed what one host can have, and it is answered once a turn at most.
//
//     input   steps, each   step u8, then
//     step    0: a record   word u8, flags u8, count u8, cut u8, number u16, that many groups of two bytes each (0xfe00: no group)
//             1: a turn   2: with room, 3: without   4: a new session, features u8
//             5: a group of this host joins, 6: leaves: two bytes          (mod 7)
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

#include "vmkernel_svc/remote/far_groups.hpp"
#include "vmkernel_svc/remote/link_head.hpp"
#include "vrdma/limits.hpp"

using namespace vrdma;
using namespace vrdma::svc;

namespace {

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "far_groups_fuzz: %s\n", what);
  std::abort();
}

struct Input {
  const std::uint8_t* at;
  std::size_t left;
  std::uint8_t byte() { return left == 0 ? std::uint8_t{0} : (--left, *at++); }
  std::uint16_t pair() {
    const std::uint8_t low = byte();
    return static_cast<std::uint16_t>(low | byte() << 8);
  }
  Gid group() {
    const std::uint16_t number = pair();
    Gid gid{static_cast<std::uint8_t>(number >= 0xfe00 ? 0xfe : 0xff), 0x12};
    if (number >= 0xfc00 && number < 0xfe00) gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, static_cast<std::uint8_t>(number >= 0xfd00 ? 239 : 198)};  // RoCE v2's, and an address
    gid[14] = static_cast<std::uint8_t>(number >> 8), gid[15] = static_cast<std::uint8_t>(number);
    return gid;
  }
};

constexpr remote::HostId far = 7;

struct Post final : FarGroups::Post {
  bool room = true;
  std::size_t heards = 0, records = 0;
  std::uint64_t told = 0;
  std::set<Gid> theirs;  // what the far host knows of us, if it takes in all it is told

  bool may_tell(remote::HostId host) override {
    if (host != far) wrong("it asks for another host");
    return room;
  }
  bool is_connected(remote::HostId) override { return true; }
  bool meets_others() override { return false; }
  void tell(remote::HostId host, engine::FarFramePtr frame) override {
    const auto& record = frame->record();
    if (host != far || !room || record.kind != engine::FarKind::groups) wrong("it tells what it must not");
    const auto word = static_cast<GroupsWord>(record.opcode);
    if (word == GroupsWord::heard) return void(++heards);
    ++records;
    if (word == GroupsWord::all && (record.flags & groups_first) != 0) theirs.clear();
    for (std::size_t i = 0; i < record.payload_bytes / sizeof(Gid); ++i) {
      Gid gid;
      std::memcpy(gid.data(), frame->payload() + i * sizeof(Gid), sizeof(Gid));
      if (word == GroupsWord::leave) theirs.erase(gid);
      else theirs.insert(gid);
      if (theirs.size() > limits::mcast_groups_max) wrong("it tells of more groups than there are");
    }
    if (record.bytes != 0) told = record.bytes;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  Input input{data, bytes};
  Post post;
  FarGroups groups(post);
  bool knows = false, knows_ipv4 = false, complete = false;
  std::set<Gid> model, ours;
  groups.new_session(far, 0);
  while (input.left != 0) {
    switch (input.byte() % 7) {
      case 0: {
        const std::uint8_t word = input.byte(), flags = input.byte(), count = input.byte(), cut = input.byte();
        const std::uint64_t number = input.pair();
        auto frame = engine::FarFrame::make(static_cast<std::uint32_t>(count * sizeof(Gid)));
        auto& record = frame->record();
        record.opcode = word, record.flags = flags, record.bytes = number;
        record.payload_bytes = frame->capacity() - (cut % 2 != 0 && count != 0 ? 1 : 0);
        std::vector<Gid> said(count);
        for (auto& gid : said) gid = input.group();
        if (count != 0) std::memcpy(frame->payload(), said.data(), frame->capacity());
        const bool taken = groups.arrived(far, *frame);
        const bool torn = record.payload_bytes % sizeof(Gid) != 0;
        const auto known = static_cast<GroupsWord>(word);
        if (!knows) {
          if (taken) wrong("it takes records of a host that has none");
        } else if (known == GroupsWord::heard) {
          if (taken != (record.payload_bytes == 0 && number <= post.told)) wrong("what cannot have been heard is taken, or the other way round");
        } else if (torn || word < 1 || word > 4 || (known == GroupsWord::all && (flags & groups_first) == 0 && complete)) {
          if (taken) wrong("what makes no sense is taken");
        } else {
          if (known == GroupsWord::all && (flags & groups_first) != 0) model.clear(), complete = false;
          bool good = true;
          for (const Gid& gid : said) {
            if (known == GroupsWord::leave) model.erase(gid);
            else if (is_multicast(gid) && (model.contains(gid) || model.size() < limits::mcast_groups_max)) model.insert(gid);
            else good = false;
          }
          if (known == GroupsWord::all && (flags & groups_last) != 0) complete = true;
          if (taken != good) wrong("a good record is refused, or a bad one taken");
        }
        for (const Gid& gid : said) {
          const auto& to = groups.receivers(gid);
          const bool sends = std::find(to.begin(), to.end(), far) != to.end();
          if (sends != (!complete || model.contains(gid))) wrong("a datagram goes to a host that has no members, or not to one that has");
        }
        break;
      }
      case 1: {
        const std::size_t before = post.heards;
        groups.turn();
        if (post.heards > before + 1) wrong("it answers more than once a turn");
        break;
      }
      case 2: post.room = true; break;
      case 3: post.room = false; break;
      case 4: {
        const std::uint8_t features = input.byte();
        knows = (features & remote::link_knows_groups) != 0;
        knows_ipv4 = (features & remote::link_knows_ipv4_groups) != 0;
        groups.new_session(far, features);
        model.clear(), post.theirs.clear(), post.told = 0;
        complete = false;
        break;
      }
      default: {
        const bool join = (input.at[-1] % 7) == 5;
        const Gid gid = input.group();
        if (join && ours.size() < limits::mcast_groups_max && ours.insert(gid).second) groups.joined(gid);
        else if (!join && ours.erase(gid) != 0) groups.left(gid);
        break;
      }
    }
    if (groups.count(far) != (complete ? std::optional(model.size()) : std::nullopt)) wrong("it knows of other groups than it was told");
  }
  post.room = true;
  groups.turn();
  if (!knows_ipv4) std::erase_if(ours, is_ipv4_mapped);
  if (knows && post.theirs != ours) wrong("the far host was not told what is");
  if (!knows && post.records != 0 && post.theirs.size() != 0) wrong("a host that knows no such records was told");
  return 0;
}
