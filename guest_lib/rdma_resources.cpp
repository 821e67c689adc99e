#include "guest_lib/rdma_resources.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/rdma_netlink.h>
#include <rdma/rdma_user_cm.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "guest_lib/attachment.hpp"
#include "guest_lib/control.hpp"
#include "guest_lib/memory/raw_file.hpp"

namespace vrdma::guest {

namespace {

using nlohmann::json;

// What the service shows this user, who need not be a guest for that.
Result<std::string> ask_service() {
  const auto socket = connect_to_service();
  if (!socket) return socket.error();
  const auto files = exchange_packet(*socket, {.kind = control::Request::show}, {});
  if (!files) return files.error();
  if (files->size() != 1) return vmci::not_brought(*files);
  std::string text;
  char part[65536];
  for (ssize_t got; (got = memory::raw_pread(files->front().get(), part, sizeof(part), static_cast<off_t>(text.size()))) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  return text;
}

// --- one object's attributes

struct Named {
  const char* name;
  std::uint32_t number;
};
template <std::size_t N>
std::uint32_t number_of(const Named (&names)[N], const std::string& name) {
  for (const Named& one : names)
    if (name == one.name) return one.number;
  return 0;
}
// As the kernel numbers them: enum ib_qp_type, ib_qp_state, rdma_cm_state, which user space has no header for.
constexpr Named qp_types[] = {{"RC", 2}, {"UC", 3}, {"UD", 4}, {"XRC_INI", 9}, {"XRC_TGT", 10}};
constexpr Named qp_states[] = {{"RESET", 0}, {"INIT", 1}, {"RTR", 2}, {"RTS", 3}, {"SQD", 4}, {"SQE", 5}, {"ERR", 6}};
constexpr Named cm_states[] = {{"IDLE", 0},    {"ADDR_QUERY", 1}, {"ADDR_RESOLVED", 2}, {"ROUTE_RESOLVED", 4}, {"CONNECT", 5},    {"REQUESTED", 5},
                               {"ACCEPTED", 5}, {"ESTABLISHED", 5}, {"DISCONNECT", 6},    {"ENDED", 6},          {"ADDR_BOUND", 7}, {"LISTEN", 8}};
constexpr Named port_spaces[] = {{"TCP", RDMA_PS_TCP}, {"UDP", RDMA_PS_UDP}, {"IPoIB", RDMA_PS_IPOIB}, {"IB", RDMA_PS_IB}};

std::uint32_t number(const json& object, const char* name) { return object.at(name).get<std::uint32_t>(); }

// What `vrdma show` says of an identifier's address, "1.2.3.4:5" or "[::1]:5"; anything else is left out.
void put_address(NetlinkAnswer& answer, std::uint16_t attribute, const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == text.npos) return;
  sockaddr_storage address{};
  const auto port = htons(static_cast<std::uint16_t>(std::strtoul(text.c_str() + colon + 1, nullptr, 10)));
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (::inet_pton(AF_INET, text.substr(0, colon).c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = port;
  } else if (colon > 2 && text[0] == '[' && ::inet_pton(AF_INET6, text.substr(1, colon - 2).c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = port;
  } else {
    return;
  }
  answer.put(attribute, &address, sizeof(address));
}

void put_queue_pair(NetlinkAnswer& to, const json&, const json& qp) {
  const std::string type = qp.at("type"), state = qp.at("state");
  if (state != "RESET") to.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  if (type == "RC" || type == "UC" || type.starts_with("XRC")) {
    to.put(RDMA_NLDEV_ATTR_RES_RQPN, number(qp, "dest_qpn"));
    to.put(RDMA_NLDEV_ATTR_RES_RQ_PSN, number(qp, "rq_psn"));
    to.put<std::uint8_t>(RDMA_NLDEV_ATTR_RES_PATH_MIG_STATE, 0);  // MIGRATED
  }
  to.put(RDMA_NLDEV_ATTR_RES_SQ_PSN, number(qp, "sq_psn"));
  to.put(RDMA_NLDEV_ATTR_RES_TYPE, static_cast<std::uint8_t>(number_of(qp_types, type)));
  to.put(RDMA_NLDEV_ATTR_RES_STATE, static_cast<std::uint8_t>(number_of(qp_states, state)));
  to.put(RDMA_NLDEV_ATTR_RES_PDN, number(qp, "pd"));
}

void put_identifier(NetlinkAnswer& to, const json&, const json& id) {
  const std::string state = id.at("state");
  if (state != "IDLE") to.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  to.put(RDMA_NLDEV_ATTR_RES_TYPE, static_cast<std::uint8_t>(number_of(qp_types, id.at("type"))));
  to.put(RDMA_NLDEV_ATTR_RES_STATE, static_cast<std::uint8_t>(number_of(cm_states, state)));
  to.put(RDMA_NLDEV_ATTR_RES_PS, number_of(port_spaces, id.at("port_space")));
  put_address(to, RDMA_NLDEV_ATTR_RES_SRC_ADDR, id.at("src_addr"));
  put_address(to, RDMA_NLDEV_ATTR_RES_DST_ADDR, id.at("dst_addr"));
}

void put_completion_queue(NetlinkAnswer& to, const json&, const json& cq) {
  to.put(RDMA_NLDEV_ATTR_RES_CQE, number(cq, "cqe"));
  to.put<std::uint64_t>(RDMA_NLDEV_ATTR_RES_USECNT, number(cq, "users"));
  to.put(RDMA_NLDEV_ATTR_RES_CTXN, number(cq, "ctx"));
}

void put_memory_region(NetlinkAnswer& to, const json&, const json& mr) {
  to.put(RDMA_NLDEV_ATTR_RES_RKEY, number(mr, "key"));
  to.put(RDMA_NLDEV_ATTR_RES_LKEY, number(mr, "key"));
  to.put<std::uint64_t>(RDMA_NLDEV_ATTR_RES_IOVA, std::strtoull(mr.at("address").get_ref<const std::string&>().c_str(), nullptr, 16));
  to.put(RDMA_NLDEV_ATTR_RES_MRLEN, mr.at("bytes").get<std::uint64_t>());
  to.put(RDMA_NLDEV_ATTR_RES_PDN, number(mr, "pd"));
}

void put_protection_domain(NetlinkAnswer& to, const json&, const json& pd) {
  to.put<std::uint64_t>(RDMA_NLDEV_ATTR_RES_USECNT, number(pd, "users"));
  to.put(RDMA_NLDEV_ATTR_RES_CTXN, number(pd, "ctx"));
}

void put_nothing_more(NetlinkAnswer&, const json&, const json&) {}

void put_shared_receive_queue(NetlinkAnswer& to, const json& guest, const json& srq) {
  to.put<std::uint8_t>(RDMA_NLDEV_ATTR_RES_TYPE, srq.at("type") == "XRC" ? 1 : 0);
  to.put(RDMA_NLDEV_ATTR_RES_PDN, number(srq, "pd"));
  to.nest(RDMA_NLDEV_ATTR_RES_QP, [&] {
    for (const json& qp : guest.at("qps"))
      if (qp.at("srq") == srq.at("srq") && to.room() > 64)
        to.nest(RDMA_NLDEV_ATTR_RES_QP_ENTRY, [&] { to.put(RDMA_NLDEV_ATTR_RES_LQPN, number(qp, "qpn")); });
  });
}

using Counts = std::map<std::string, std::uint64_t>;

void put_counts(NetlinkAnswer& to, const Counts& counts) {
  to.nest(RDMA_NLDEV_ATTR_STAT_HWCOUNTERS, [&] {
    for (const auto& one : counts)
      to.nest(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY, [&] {
        to.put(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME, one.first.c_str());
        to.put(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE, one.second);
      });
  });
}

// A counter of a queue pair's own.
void put_counter(NetlinkAnswer& to, const json&, const json& qp) {
  to.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  to.nest(RDMA_NLDEV_ATTR_RES_QP,
          [&] { to.nest(RDMA_NLDEV_ATTR_RES_QP_ENTRY, [&] { to.put(RDMA_NLDEV_ATTR_RES_LQPN, number(qp, "qpn")); }); });
  put_counts(to, qp.at("counters").get<Counts>());
}

// --- all objects of a kind

struct Kind {
  const char* name;         // in the summary
  const char *list, *key;   // where `vrdma show --json` has them, and what it calls their numbers
  std::uint16_t command, table, entry, number;
  void (*put)(NetlinkAnswer& to, const json& guest, const json& object);
};
constexpr Kind kinds[] = {
  {"pd", "pds", "pd", RDMA_NLDEV_CMD_RES_PD_GET, RDMA_NLDEV_ATTR_RES_PD, RDMA_NLDEV_ATTR_RES_PD_ENTRY, RDMA_NLDEV_ATTR_RES_PDN, put_protection_domain},
  {"cq", "cqs", "cq", RDMA_NLDEV_CMD_RES_CQ_GET, RDMA_NLDEV_ATTR_RES_CQ, RDMA_NLDEV_ATTR_RES_CQ_ENTRY, RDMA_NLDEV_ATTR_RES_CQN, put_completion_queue},
  {"qp", "qps", "qpn", RDMA_NLDEV_CMD_RES_QP_GET, RDMA_NLDEV_ATTR_RES_QP, RDMA_NLDEV_ATTR_RES_QP_ENTRY, RDMA_NLDEV_ATTR_RES_LQPN, put_queue_pair},
  {"cm_id", "cm_ids", "cm_id", RDMA_NLDEV_CMD_RES_CM_ID_GET, RDMA_NLDEV_ATTR_RES_CM_ID, RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY, RDMA_NLDEV_ATTR_RES_CM_IDN,
   put_identifier},
  {"mr", "mrs", "mr", RDMA_NLDEV_CMD_RES_MR_GET, RDMA_NLDEV_ATTR_RES_MR, RDMA_NLDEV_ATTR_RES_MR_ENTRY, RDMA_NLDEV_ATTR_RES_MRN, put_memory_region},
  {"ctx", "contexts", "ctx", RDMA_NLDEV_CMD_RES_CTX_GET, RDMA_NLDEV_ATTR_RES_CTX, RDMA_NLDEV_ATTR_RES_CTX_ENTRY, RDMA_NLDEV_ATTR_RES_CTXN,
   put_nothing_more},
  {"srq", "srqs", "srqn", RDMA_NLDEV_CMD_RES_SRQ_GET, RDMA_NLDEV_ATTR_RES_SRQ, RDMA_NLDEV_ATTR_RES_SRQ_ENTRY, RDMA_NLDEV_ATTR_RES_SRQN,
   put_shared_receive_queue},
};
constexpr Kind counters{"counter", "qps", "qpn", RDMA_NLDEV_CMD_STAT_GET, RDMA_NLDEV_ATTR_STAT_COUNTER, RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY,
                        RDMA_NLDEV_ATTR_STAT_COUNTER_ID, put_counter};

struct Object {
  std::uint32_t number;
  const json *guest, *object;
};

void put(NetlinkAnswer& to, const Kind& kind, const Object& one) {
  to.put(kind.number, one.number);
  to.put(RDMA_NLDEV_ATTR_RES_PID, number(*one.guest, "pid"));
  kind.put(to, *one.guest, *one.object);
}

int answer_of_kind(const Kind& kind, const json& shown, const ResourceQuestion& question, const ResourceReply& reply) {
  constexpr std::size_t object_bytes_max = 1536;
  std::vector<Object> all;
  for (const json& guest : shown.at("guests"))
    for (const json& object : guest.at(kind.list)) all.push_back({number(object, kind.key), &guest, &object});
  std::stable_sort(all.begin(), all.end(), [](const Object& a, const Object& b) { return a.number < b.number; });
  if (!question.dump) {
    const std::uint32_t wanted = question.wanted(kind.number);
    for (const Object& one : all) {
      if (one.number != wanted) continue;
      NetlinkAnswer about = reply.begin();
      put(about, kind, one);
      return reply.send(about), 0;
    }
    return wanted == ResourceQuestion::absent ? EINVAL : ENOENT;
  }
  for (std::size_t at = 0; at < all.size();) {
    NetlinkAnswer some = reply.begin();
    some.nest(kind.table, [&] {
      for (; at < all.size() && some.room() > object_bytes_max; ++at) some.nest(kind.entry, [&] { put(some, kind, all[at]); });
    });
    reply.send(some);
  }
  return 0;
}

int answer_summary(const json& shown, const ResourceReply& reply) {
  NetlinkAnswer about = reply.begin();
  about.nest(RDMA_NLDEV_ATTR_RES_SUMMARY, [&] {
    for (const Kind& kind : kinds) {
      std::uint64_t count = 0;
      for (const json& guest : shown.at("guests")) count += guest.at(kind.list).size();
      about.nest(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY, [&] {
        about.put(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME, kind.name);
        about.put(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR, count);
      });
    }
  });
  return reply.send(about), 0;
}

// What the port has counted, of programs that are there now; of STAT_GET_STATUS only their names are read.
int answer_port_counters(const json& shown, const ResourceReply& reply) {
  Counts sum;
  for (const json& guest : shown.at("guests"))
    for (const auto& [name, count] : guest.at("counters").items()) sum[name] += count.get<std::uint64_t>();
  NetlinkAnswer about = reply.begin();
  about.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  put_counts(about, sum);
  return reply.send(about), 0;
}

int answer_statistics(const json& shown, const ResourceQuestion& question, const ResourceReply& reply) {
  const std::uint32_t of = question.wanted(RDMA_NLDEV_ATTR_STAT_RES);
  if (of == ResourceQuestion::absent) return question.dump ? EOPNOTSUPP : answer_port_counters(shown, reply);
  if (of != RDMA_NLDEV_ATTR_RES_QP) return of == RDMA_NLDEV_ATTR_RES_MR && question.dump ? 0 : EOPNOTSUPP;
  if (question.wanted(RDMA_NLDEV_ATTR_STAT_MODE) == ResourceQuestion::absent) return answer_of_kind(counters, shown, question, reply);
  NetlinkAnswer about = reply.begin();
  about.put<std::uint32_t>(RDMA_NLDEV_ATTR_PORT_INDEX, 1);
  about.put<std::uint32_t>(RDMA_NLDEV_ATTR_STAT_MODE, RDMA_COUNTER_MODE_NONE);  // each has one, whatever is bound
  return reply.send(about), 0;
}

// A json value that goes wants memory for a list of what is in it, and ends the program where there is none: some is kept for that, and freed when
// there is no more for the first time. One at a time for a thread.
class KeptForUnwinding {
 public:
  explicit KeptForUnwinding(std::size_t bytes) : before_(std::set_new_handler([] {
    std::free(std::exchange(kept_, nullptr));
    throw std::bad_alloc();
  })) {
    kept_ = std::malloc(bytes);
  }
  ~KeptForUnwinding() {
    std::set_new_handler(before_);
    std::free(std::exchange(kept_, nullptr));
  }
  KeptForUnwinding(const KeptForUnwinding&) = delete;
  KeptForUnwinding& operator=(const KeptForUnwinding&) = delete;
  explicit operator bool() const { return kept_ != nullptr; }

 private:
  static thread_local void* kept_;
  const std::new_handler before_;
};
constinit thread_local void* KeptForUnwinding::kept_ = nullptr;

int answer(const ResourceQuestion& question, const ResourceReply& reply) try {
  const auto text = ask_service();
  if (!text) return value(text.error());
  const KeptForUnwinding kept(text->size() / 2);
  if (!kept) return ENOMEM;
  const json shown = json::parse(*text);
  switch (question.command) {
    case RDMA_NLDEV_CMD_RES_GET: return answer_summary(shown, reply);
    case RDMA_NLDEV_CMD_STAT_GET: return answer_statistics(shown, question, reply);
    case RDMA_NLDEV_CMD_STAT_GET_STATUS: return answer_port_counters(shown, reply);
    default: break;
  }
  for (const Kind& kind : kinds)
    if (question.command == kind.command) return answer_of_kind(kind, shown, question, reply);
  return EOPNOTSUPP;
} catch (const std::bad_alloc&) {
  return ENOMEM;
} catch (const std::exception&) {
  return EIO;  // a service of another version
}

__attribute__((constructor)) void offer_resources() { set_resource_source(answer); }

}  // namespace

}  // namespace vrdma::guest
