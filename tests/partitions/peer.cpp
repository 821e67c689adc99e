// A program that does with one queue pair after the other what it is told on its standard input, a line each, and answers with a line:
//   keys                          the P_Key table, and where ibv_get_pkey_index finds each
//   qp rc|uc|ud INDEX             a queue pair in INIT: its number among ours, QPN, LID
//   connect QP QPN LID            to RTS, with receives posted
//   serve QP                      a datagram queue pair to RTS, with receives posted
//   send QP TEXT [QPN LID [GROUP]]  posts; the status of its completion. A group's QPN is 0xffffff, and LID 0
//   receive QP                    waits for a message: its text
//   whence QP                     of the last message: the sender's QPN and LID, and the group in its GRH
//   join QP [GROUP], leave QP [GROUP]  a multicast group, by its number; 0x77 without. From 0x100 on: an IPv4 group
//   flood QP COUNT GROUP          messages 0, 1, 2, … to a group, one after the other
//   event                         waits for an asynchronous event: its number
// Anything that fails ends it with a message.
#include <arpa/inet.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t slot_bytes = 256, slots = 16, pairs_max = 64;
constexpr std::uint32_t qkey = 0x11111111, multicast = 0xffffff;
constexpr unsigned usual_group = 0x77, ipv4_groups = 0x100;

void need(bool good, const char* what) {
  if (good) return;
  std::printf("error %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}
void need_zero(int error, const char* what) {
  if (error != 0) errno = error;
  need(error == 0, what);
}

struct Pair {
  ibv_qp* qp;
  ibv_cq *sends, *receives;
  ibv_qp_type type;
  char* memory;  // its slots; the first one is for what it sends
  std::string whence;  // of what it received last
};

struct World {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_mr* mr = nullptr;
  ibv_port_attr port{};
  std::vector<Pair> pairs;
  alignas(4096) char memory[pairs_max * slots * slot_bytes] = {};

  void open() {
    int count = 0;
    ibv_device** const list = ibv_get_device_list(&count);
    need(list != nullptr && count > 0, "ibv_get_device_list");
    context = ibv_open_device(list[0]);
    need(context != nullptr, "ibv_open_device");
    ibv_free_device_list(list);
    need_zero(ibv_query_port(context, 1, &port), "ibv_query_port");
    pd = ibv_alloc_pd(context);
    need(pd != nullptr, "ibv_alloc_pd");
    constexpr int access = IBV_ACCESS_LOCAL_WRITE;  // the macro mixes enumerations otherwise
    mr = ibv_reg_mr(pd, memory, sizeof(memory), access);
    need(mr != nullptr, "ibv_reg_mr");
  }

  std::string keys() {
    std::ostringstream out;
    for (int i = 0; i < port.pkey_tbl_len; ++i) {
      __be16 key = 0;
      need(ibv_query_pkey(context, 1, i, &key) == 0, "ibv_query_pkey");
      if (key == 0) continue;
      need(ibv_get_pkey_index(context, 1, key) == i, "ibv_get_pkey_index finds it elsewhere");
      char text[32];
      std::snprintf(text, sizeof(text), "%d:0x%04x ", i, ntohs(key));
      out << text;
    }
    return out.str();
  }

  std::size_t make(ibv_qp_type type, std::uint16_t index) {
    Pair pair{nullptr, ibv_create_cq(context, 64, nullptr, nullptr, 0), ibv_create_cq(context, 64, nullptr, nullptr, 0), type,
              memory + pairs.size() * slots * slot_bytes, ""};
    need(pairs.size() < pairs_max, "more queue pairs than there is room for");
    need(pair.sends != nullptr && pair.receives != nullptr, "ibv_create_cq");
    ibv_qp_init_attr wanted{};
    wanted.qp_type = type;
    wanted.send_cq = pair.sends;
    wanted.recv_cq = pair.receives;
    wanted.cap = {16, slots, 1, 1, 0};
    wanted.sq_sig_all = 1;
    pair.qp = ibv_create_qp(pd, &wanted);
    need(pair.qp != nullptr, "ibv_create_qp");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.pkey_index = index;
    a.port_num = 1;
    a.qkey = qkey;
    need_zero(ibv_modify_qp(pair.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)),
              "ibv_modify_qp to INIT");
    pairs.push_back(pair);
    return pairs.size() - 1;
  }

  void receive_into(Pair& pair, std::uint64_t slot) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(pair.memory) + slot * slot_bytes, slot_bytes, mr->lkey};
    ibv_recv_wr wr{slot, nullptr, &sge, 1}, *bad = nullptr;
    need_zero(ibv_post_recv(pair.qp, &wr, &bad), "ibv_post_recv");
  }

  void start(Pair& pair, std::uint32_t qpn, std::uint16_t lid) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    int mask = IBV_QP_STATE;
    if (pair.type != IBV_QPT_UD) {
      a.path_mtu = IBV_MTU_1024;
      a.dest_qp_num = qpn;
      a.ah_attr.dlid = lid;
      a.ah_attr.port_num = 1;
      mask |= IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_AV;
    }
    if (pair.type == IBV_QPT_RC) a.max_dest_rd_atomic = 1, a.min_rnr_timer = 12, mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    need_zero(ibv_modify_qp(pair.qp, &a, mask), "ibv_modify_qp to RTR");
    a = {};
    a.qp_state = IBV_QPS_RTS;
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (pair.type == IBV_QPT_RC) {
      a.timeout = 16;  // 268 ms, eight of them
      a.retry_cnt = a.rnr_retry = 7;
      a.max_rd_atomic = 1;
      mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    need_zero(ibv_modify_qp(pair.qp, &a, mask), "ibv_modify_qp to RTS");
    for (std::uint64_t slot = 1; slot < slots; ++slot) receive_into(pair, slot);
  }

  static ibv_wc next(ibv_cq* cq) {
    ibv_wc wc{};
    for (int got = 0; got == 0;) {
      got = ibv_poll_cq(cq, 1, &wc);
      need(got >= 0, "ibv_poll_cq");
    }
    return wc;
  }

  std::string send(Pair& pair, const std::string& text, std::uint32_t qpn, std::uint16_t lid, unsigned to_group = usual_group) {
    std::memcpy(pair.memory, text.c_str(), text.size() + 1);
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(pair.memory), static_cast<std::uint32_t>(text.size() + 1), mr->lkey};
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    if (pair.type == IBV_QPT_UD) {
      ibv_ah_attr to{};
      to.port_num = 1;
      to.dlid = lid;
      if (qpn == multicast) to.is_global = 1, to.dlid = 0xc001, to.grh.dgid = group(to_group);
      wr.wr.ud = {ibv_create_ah(pd, &to), qpn, qkey};
      need(wr.wr.ud.ah != nullptr, "ibv_create_ah");
    }
    need_zero(ibv_post_send(pair.qp, &wr, &bad), "ibv_post_send");
    const std::string status = ibv_wc_status_str(next(pair.sends).status);
    if (wr.wr.ud.ah != nullptr && pair.type == IBV_QPT_UD) need_zero(ibv_destroy_ah(wr.wr.ud.ah), "ibv_destroy_ah");
    return status;
  }

  std::string receive(Pair& pair) {
    const ibv_wc wc = next(pair.receives);
    if (wc.status != IBV_WC_SUCCESS) return ibv_wc_status_str(wc.status);
    const char* const slot = pair.memory + wc.wr_id * slot_bytes;
    const std::string text = slot + (pair.type == IBV_QPT_UD ? 40 : 0);
    const bool has_grh = (wc.wc_flags & IBV_WC_GRH) != 0;
    pair.whence = std::to_string(wc.src_qp) + " " + std::to_string(wc.slid) + " " + (has_grh ? std::to_string(static_cast<unsigned char>(slot[39])) : "none");
    receive_into(pair, wc.wr_id);
    return text;
  }

  static ibv_gid group(unsigned number) {
    ibv_gid gid{};
    if (number >= ipv4_groups) gid.raw[10] = gid.raw[11] = 0xff, gid.raw[12] = 239;
    else gid.raw[0] = 0xff, gid.raw[1] = 0x12;
    gid.raw[15] = static_cast<std::uint8_t>(number);
    return gid;
  }
};

World world;

std::string obey(std::istringstream& line) {
  std::string verb, text;
  std::size_t number = 0;
  std::uint32_t qpn = 0;
  std::uint16_t lid = 0;
  line >> verb;
  if (verb == "keys") return world.keys();
  if (verb == "event") {
    ibv_async_event event{};
    need(ibv_get_async_event(world.context, &event) == 0, "ibv_get_async_event");
    ibv_ack_async_event(&event);
    return std::to_string(event.event_type);
  }
  if (verb == "qp") {
    line >> text >> number;
    number = world.make(text == "rc" ? IBV_QPT_RC : text == "uc" ? IBV_QPT_UC : IBV_QPT_UD, static_cast<std::uint16_t>(number));
    return std::to_string(number) + " " + std::to_string(world.pairs[number].qp->qp_num) + " " + std::to_string(world.port.lid);
  }
  line >> number;
  need(number < world.pairs.size(), "there is no such queue pair");
  Pair& pair = world.pairs[number];
  if (verb == "connect") return line >> qpn >> lid, world.start(pair, qpn, lid), "ok";
  if (verb == "serve") return world.start(pair, 0, 0), "ok";
  if (verb == "send") {
    unsigned group = 0;
    line >> text >> qpn >> lid;
    return world.send(pair, text, qpn, lid, line >> group ? group : usual_group);
  }
  if (verb == "receive") return world.receive(pair);
  if (verb == "whence") return pair.whence;
  if (verb == "join" || verb == "leave") {
    unsigned group = 0;
    const ibv_gid gid = World::group(line >> group ? group : usual_group);
    if (verb == "join") need_zero(ibv_attach_mcast(pair.qp, &gid, 0xc001), "ibv_attach_mcast");
    else need_zero(ibv_detach_mcast(pair.qp, &gid, 0xc001), "ibv_detach_mcast");
    return "ok";
  }
  if (verb == "flood") {
    unsigned count = 0, group = 0;
    line >> count >> group;
    for (unsigned i = 0; i < count; ++i)
      if (const std::string status = world.send(pair, std::to_string(i), multicast, 0, group); status != "success") return "error: " + status;
    return "ok";
  }
  return "error: no such verb";
}

}  // namespace

int main() {
  world.open();
  std::string text;
  while (std::getline(std::cin, text)) {
    std::istringstream line(text);
    std::printf("%s\n", obey(line).c_str());
    std::fflush(stdout);
  }
  return 0;
}
