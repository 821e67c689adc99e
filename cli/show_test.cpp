// What `vrdma show` and `vrdma metrics` make of an answer, also of one of a service of another version, which says less.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cli/show.hpp"

using namespace vrdma::cli;
using nlohmann::json;

namespace {

// All that a service may say: of a guest that has one of each, and as a host of a managed subnet with an HCA.
const char* const whole = R"({
  "service": {"version": "9.9", "channel_version": "1.2", "pid": 10, "uid": 0, "socket": "/run/s.sock", "vm_folder": "/run/vm", "link_layer": "InfiniBand", "direct": "auto",
              "active_mtu": 4096, "physical_hca": true, "all": true, "sees_caller": true},
  "guests": [{"guest": 3, "machine": "vm1", "name": "prog", "uid": 1000, "pid": 77, "lid": 5, "shard": 0, "node_guid": "0x020000fffe000001", "link_layer": "InfiniBand",
    "requests": 12, "protocol_errors": 1, "bad_pkeys": 2,
    "device": {"adapter": "vrdma virtual HCA", "physical_hca_available": true, "fw_version": "1.0", "node_guid": "0x020000fffe000001", "sys_image_guid": "0x020000fffe000002",
      "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "lid": 5, "sm_lid": 1, "active_mtu": 4096, "max_mtu": 4096, "srq_supported": true, "roce_versions": ["v2"],
      "qp_types": ["RC", "UD"], "limits": {"qps": 1, "cqs": 2, "srqs": 3, "mrs": 4, "pds": 5, "qp_wr": 6, "cqe": 7, "sge": 8},
      "gids": [{"index": 0, "gid": "fe80::1", "type": "IB"}], "pkeys": ["0xffff"]},
    "contexts": [{"ctx": 1}], "pds": [{"pd": 1}],
    "qps": [{"qpn": 9, "type": "RC", "state": "RTS", "mode": "direct", "mediated_because": "far", "carrier": {"via": "hca", "why": "both hosts have an HCA"}, "pkey": "0xffff",
      "dest_qpn": 10, "dlid": 6, "dgid": "fe80::2", "path_mtu": 1024, "pd": 1, "send_cq": 2, "recv_cq": 3, "srq": 4, "max_send_wr": 5, "max_recv_wr": 6, "counters": {"sends": 1}}],
    "cqs": [{"cq": 2, "cqe": 16, "completions": 1, "channel": 1, "overrun": true}],
    "srqs": [{"srqn": 4, "type": "BASIC", "max_wr": 5, "taken": 1, "limit": 2, "qps": 1, "srq": 4}],
    "cm_ids": [{"cm_id": 1, "type": "RC", "state": "LISTEN", "port_space": "TCP", "src_addr": "10.0.0.1:5", "dst_addr": "10.0.0.2:6"}],
    "mrs": [{"mr": 1, "bytes": 4096, "address": "0x1000", "access": 7, "path": "mapped", "unmapped_by": "none", "mapped_bytes": 4096, "pieces": 1}],
    "counters": {"sends": 1}}],
  "routes": [{"guest": 3, "name": "prog", "lid": 5, "gids": ["fe80::1"], "via": "local"}],
  "carriers": [{"host": "b", "address": "10.0.0.2:28251", "lids": "100-199", "via": "hca", "why": "both hosts have an HCA", "records_via": "tcp", "records_why": "none yet",
    "fallen_back": "it broke", "encrypted": true, "disagreement": "of LIDs", "unauthenticated": 2, "small_packets": true, "other_protocol": true, "problem": "refused", "state": "silent", "silent_ms": 3000, "connections_here": 1,
    "groups": 1, "multicast_datagrams": 4, "counters": {"sent_records": 1}}],
  "groups": [{"mgid": "ff12::1", "members": 1, "hosts": ["b"]}],
  "hca": {"state": "ACTIVE", "why": "", "device": "rxe0", "port": 1, "link_layer": "Ethernet", "gid": "fe80::3", "gid_index": 1, "mtu": 1024, "pfc": "off", "connections": 1,
    "registrations": 2, "being_registered": 1, "counters": {"sent_messages": 1}},
  "subnet": {"name": "a", "folder": "/f", "address": "10.0.0.1", "port": 28250, "lids": [1, 99], "lease_s": 20, "may_give": true, "leader": "a", "problem": "a problem",
    "manages": true, "manager_problem": "no state", "strangers": 1, "last_stranger": "10.0.0.9",
    "others": [{"name": "b", "address": "10.0.0.2", "port": 28250, "lids": [100, 199], "reachable": false, "manages": true, "leads": false, "version": "9.9", "problem": "away"}]},
  "tenants": [{"uid": 1000, "guests": 1, "objects": 5, "registered_bytes": 4096, "queue_bytes": 1, "moved_bytes": 2}],
  "cache": {"routes": {"hits": 1, "misses": 2, "invalidations": 3}},
  "shards": [{"shard": 0, "guests": 1, "turns": 1, "sleeps": 2, "doorbells": 3}],
  "counters": {"turns": 1}})";

std::string all_of(json state) {
  sort_answer(state);
  std::string text = show_text(state, "") + metrics_text(state);
  for (const char* object : show_objects) text += show_text(state, object) + show_json(state, object).dump();
  return text;
}

// Every key of every object once: `use` is called while it is missing.
template <class Use>
void without_each(json& whole_state, json& part, const std::string& path, Use use) {
  if (part.is_array())
    for (json& item : part) without_each(whole_state, item, path + "[]", use);
  if (!part.is_object()) return;
  std::vector<std::string> keys;
  for (const auto& entry : part.items()) keys.push_back(entry.key());
  for (const auto& key : keys) {
    const json value = part.at(key);
    part.erase(key);
    use(path + "/" + key);
    part[key] = value;
    without_each(whole_state, part[key], path + "/" + key, use);
  }
}

}  // namespace

TEST_CASE("AnAnswerThatLacksAnyKeyIsShownAsFarAsItGoes") {
  json state = json::parse(whole);
  const std::string lines = show_text(state, "");
  CHECK(lines.find("service /run/s.sock version 9.9 channel 1.2 pid 10 uid 0 link_layer InfiniBand active_mtu 4096 physical_hca yes guests 1\n") == 0);
  CHECK(lines.find("link vrdma0/1 guest 3 name prog lid 5 state ACTIVE vm vm1 link_layer InfiniBand uid 1000 pid 77 pd 1 cq 1 qp 1 srq 1 mr 1 ctx 1 requests 12 "
                   "protocol_errors 1 bad_pkeys 2\n") != std::string::npos);
  int dropped = 0;
  without_each(state, state, "", [&](const std::string& path) {
    CAPTURE(path);
    CHECK_NOTHROW(all_of(state));
    ++dropped;
  });
  CHECK(dropped > 150);
  CHECK(state == json::parse(whole));
  CHECK_NOTHROW(all_of(json::object()));
}

TEST_CASE("WhatStrangersSayMovesNoCursor") {
  json state = json::parse(whole);
  state["subnet"]["last_stranger"] = "10.0.0.9:1: the certificate of \"\x1b[2J\r\nsubnet z\" \xc2\x9b""31m, h\xc3\xb6st";
  state["subnet"]["others"][0]["version"] = "9\x07";
  const std::string text = show_text(state, "hosts");
  CHECK(text.find("?[2J??subnet z") != std::string::npos);
  CHECK(text.find("??31m, h\xc3\xb6st") != std::string::npos);
  CHECK(text.find("9?") != std::string::npos);
  CHECK(text.find_first_of("\x1b\r\x07") == std::string::npos);
}

TEST_CASE("WhatAnOlderServiceDoesNotSayIsLeftOut") {
  json state = json::parse(whole);
  state["guests"][0].erase("bad_pkeys");
  state["guests"][0]["qps"][0].erase("pkey");
  state["carriers"][0].erase("fallen_back");
  state.erase("shards");
  CHECK(show_text(state, "guests").find("protocol_errors 1\n") != std::string::npos);
  CHECK(show_text(state, "qps").find("mode direct dlid 6") != std::string::npos);
  CHECK(show_text(state, "routes").find("records_via_tcp \"none yet\" silent_ms 3000") != std::string::npos);
  CHECK(metrics_text(state).find("vrdma_shard_turns_total{") == std::string::npos);
}

TEST_CASE("WhereThereIsNoSubnetAndNoHcaTheirViewsSayNone") {
  json state = json::parse(whole);
  state["subnet"] = state["hca"] = nullptr;
  for (const char* const object : {"hosts", "hca"}) {
    CHECK(show_json(state, object) == json::object());
    CHECK(show_text(state, object).find(" state none why \"vrdmad was ") != std::string::npos);
  }
  CHECK(show_text(state, "hosts").find("see routes") != std::string::npos);
  state.erase("carriers");
  CHECK(show_text(state, "hosts") == "host state none why \"vrdmad was not told of any\"\n");
}
