#include "vmkernel_svc/engine/qp_state.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>

namespace vrdma::engine {
namespace {

constexpr PortLimits limits{16, 16, 5, 16, false, 0b1011};

// Second source for the table: the rows of the specification as text, read by a small parser of the test's own.
// "from>to: required / optional" with the abbreviations of the kernel's documentation.
constexpr std::string_view rows[5] = {
    // UD
    "0>1:PK PT QK/ 1>1:/PK PT QK 1>2:/PK QK 2>3:SP/CS QK 3>3:/CS QK 3>4:/EN 4>3:/CS QK 4>4:/PK QK 5>3:/CS QK ",
    // UC
    "0>1:PK PT AF/ 1>1:/PK PT AF 1>2:AV MTU DQ RP/AP AF PK 2>3:SP/CS AP AF PM 3>3:/CS AF AP PM 3>4:/EN "
    "4>3:/CS AP AF PM 4>4:/AV AP AF PK PM 5>3:/CS AF ",
    // RC
    "0>1:PK PT AF/ 1>1:/PK PT AF 1>2:AV MTU DQ RP DRA RNT/AP AF PK 2>3:TO RC RR SP QRA/CS AP AF RNT PM "
    "3>3:/CS AF AP PM RNT 3>4:/EN 4>3:/CS AP AF RNT PM 4>4:/PT AV TO RC RR QRA DRA AP AF PK RNT PM ",
    // XRC_SEND
    "0>1:PK PT AF/ 1>1:/PK PT AF 1>2:AV MTU DQ RP/AP AF PK 2>3:TO RC RR SP QRA/CS AP AF PM "
    "3>3:/CS AF AP PM 3>4:/EN 4>3:/CS AP AF PM 4>4:/PT AV TO RC RR QRA AP AF PK PM ",
    // XRC_RECV
    "0>1:PK PT AF/ 1>1:/PK PT AF 1>2:AV MTU DQ RP DRA RNT/AP AF PK 2>3:TO SP/CS AP AF RNT PM "
    "3>3:/CS AF AP PM RNT 3>4:/EN 4>3:/CS AP AF RNT PM 4>4:/PT AV TO DRA AP AF PK RNT PM "};

constexpr struct {
  std::string_view name;
  std::uint32_t bit;
} names[] = {{"CS", 1u << 1},  {"EN", 1u << 2},   {"AF", 1u << 3},  {"PK", 1u << 4},   {"PT", 1u << 5},  {"QK", 1u << 6},
             {"AV", 1u << 7},  {"MTU", 1u << 8},  {"TO", 1u << 9},  {"RC", 1u << 10},  {"RR", 1u << 11}, {"RP", 1u << 12},
             {"QRA", 1u << 13}, {"AP", 1u << 14}, {"RNT", 1u << 15}, {"SP", 1u << 16}, {"DRA", 1u << 17}, {"PM", 1u << 18},
             {"CAP", 1u << 19}, {"DQ", 1u << 20}, {"RATE", 1u << 25}};

struct Expected {
  bool legal = false;
  std::uint32_t required = 0, optional = 0;
};

std::uint32_t parse_masks(std::string_view text) {
  std::uint32_t mask = 0;
  while (!text.empty()) {
    const auto end = text.find(' ');
    const std::string_view word = text.substr(0, end);
    for (const auto& name : names)
      if (name.name == word) mask |= name.bit;
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return mask;
}

Expected expected(QpType type, int from, int to) {
  if (to == 0 || to == 6) return {true, 0, 0};
  const std::string_view row = rows[type == QpType::ud ? 0 : type == QpType::uc ? 1 : type == QpType::rc ? 2 : type == QpType::xrc_send ? 3 : 4];
  const std::string key = std::to_string(from) + ">" + std::to_string(to) + ":";
  const auto at = row.find(key);
  if (at == std::string_view::npos) return {};
  std::string_view rest = row.substr(at + key.size());
  if (const auto next = rest.find('>'); next != std::string_view::npos) rest = rest.substr(0, next - 1);
  const auto slash = rest.find('/');
  return {true, parse_masks(rest.substr(0, slash)), parse_masks(rest.substr(slash + 1))};
}

QpAttributes good_values() {
  QpAttributes a{};
  a.path_mtu = 3;
  a.qkey = 0x11;
  a.rq_psn = 0x123;
  a.sq_psn = 0x456;
  a.dest_qp_num = 0x99;
  a.access_flags = 7;
  a.path.port_num = a.alt_path.port_num = a.port_num = a.alt_port_num = 1;
  a.max_rd_atomic = a.max_dest_rd_atomic = 4;
  a.min_rnr_timer = 12;
  a.timeout = 14;
  a.retry_cnt = a.rnr_retry = 7;
  return a;
}

bool applied(QpType type, QpAttributes& attributes, const QpAttributes& wanted, std::uint32_t mask, const PortLimits& port) {
  const Status status = modify(type, attributes, wanted, mask, port);
  return status.has_value();
}

constexpr QpType types[] = {QpType::ud, QpType::uc, QpType::rc, QpType::xrc_send, QpType::xrc_recv};

TEST_CASE("Every pair of states accepts exactly the subsets of attributes that the table allows, and refusals change nothing") {
  std::uint64_t accepted = 0;
  for (const QpType type : types) {
    // uverbs drops what is of the half that an XRC queue pair does not have.
    const std::uint32_t dropped = parse_masks(type == QpType::xrc_send ? "DRA RNT" : type == QpType::xrc_recv ? "RC RR QRA" : "");
    for (int from = 0; from <= 6; ++from) {
      for (int to = 0; to <= 6; ++to) {
        const Expected row = expected(type, from, to);
        QpAttributes before{};
        before.state = static_cast<std::uint32_t>(from);
        before.max_send_wr = 77;
        QpAttributes wanted = good_values();
        wanted.state = static_cast<std::uint32_t>(to);
        wanted.cur_state = static_cast<std::uint32_t>(from);
        std::uint64_t wrong = 0, changed = 0;
        for (std::uint32_t subset = 0; subset < 1u << 21; ++subset) {
          const std::uint32_t mask = (subset & 0xfffff) << 1 | (subset >> 20) << 25 | qp_attr_state;  // bits 1..20 and 25
          // CUR_STATE names a state that a queue pair can leave by itself, where it may be given at all.
          const bool cs_ok = (mask & 2) == 0 || (from >= 2 && from <= 5);
          const bool should = row.legal && cs_ok && (mask & row.required) == row.required &&
                              (mask & ~(row.required | row.optional | qp_attr_state | dropped)) == 0;
          QpAttributes attributes = before;
          const bool did = applied(type, attributes, wanted, mask, limits);
          accepted += did;
          wrong += did != should;
          if (!did) changed += std::memcmp(&attributes, &before, sizeof(before)) != 0;
          if (did && attributes.state != static_cast<std::uint32_t>(to)) ++changed;
        }
        INFO("type ", static_cast<int>(type), " from ", from, " to ", to);
        CHECK(wrong == 0);
        CHECK(changed == 0);
      }
    }
  }
  CHECK(accepted > 1000);  // RC SQD→SQD alone has 2^12
}

TEST_CASE("Without a state in the mask the queue pair stays where it is and takes what that state lets it take") {
  QpAttributes a{};
  a.state = 3;
  QpAttributes wanted = good_values();
  wanted.state = 0;  // not named by the mask
  CHECK(applied(QpType::rc, a, wanted, qp_attr_access_flags | qp_attr_min_rnr_timer, limits));
  CHECK(a.state == 3);
  CHECK(a.min_rnr_timer == 12);
  CHECK_FALSE(applied(QpType::rc, a, wanted, qp_attr_timeout, limits));
  a.state = 2;
  CHECK_FALSE(applied(QpType::rc, a, wanted, qp_attr_access_flags, limits));
  CHECK_FALSE(applied(QpType::rc, a, wanted, 0, limits));
}

TEST_CASE("CUR_STATE must name the state that the queue pair is in") {
  QpAttributes a{};
  a.state = 3;
  QpAttributes wanted = good_values();
  for (std::uint32_t believed = 0; believed < 9; ++believed) {
    wanted.cur_state = believed;
    CHECK(applied(QpType::rc, a, wanted, qp_attr_cur_state, limits) == (believed == 3));
  }
}

TEST_CASE("Counts and timers that do not fit their fields lose their upper bits, as with mlx5") {
  QpAttributes wanted = good_values();
  wanted.retry_cnt = 10, wanted.rnr_retry = 15, wanted.min_rnr_timer = 33;
  QpAttributes a{};
  for (const std::uint32_t to : {1u, 2u, 3u}) {
    const auto masks = transition_masks(QpType::rc, static_cast<QpState>(a.state), static_cast<QpState>(to));
    wanted.state = to;
    REQUIRE(applied(QpType::rc, a, wanted, qp_attr_state | masks.required, limits));
  }
  CHECK(a.retry_cnt == 2);
  CHECK(a.rnr_retry == 7);
  CHECK(a.min_rnr_timer == 1);
}

struct Value {
  const char* what;
  std::uint32_t mask;
  void (*spoil)(QpAttributes&);
};

TEST_CASE("Values outside their range are refused on every transition that takes them, and nothing changes") {
  const Value values[] = {
      {"port 0", qp_attr_port, [](QpAttributes& a) { a.port_num = 0; }},
      {"port 2", qp_attr_port, [](QpAttributes& a) { a.port_num = 2; }},
      {"pkey index", qp_attr_pkey_index, [](QpAttributes& a) { a.pkey_index = 16; }},
      {"mtu 0", qp_attr_path_mtu, [](QpAttributes& a) { a.path_mtu = 0; }},
      {"mtu 6", qp_attr_path_mtu, [](QpAttributes& a) { a.path_mtu = 6; }},
      {"timeout", qp_attr_timeout, [](QpAttributes& a) { a.timeout = 32; }},
      {"max_rd_atomic", qp_attr_max_qp_rd_atomic, [](QpAttributes& a) { a.max_rd_atomic = 17; }},
      {"max_dest_rd_atomic", qp_attr_max_dest_rd_atomic, [](QpAttributes& a) { a.max_dest_rd_atomic = 17; }},
      {"path port", qp_attr_av, [](QpAttributes& a) { a.path.port_num = 0; }},
      {"empty sgid", qp_attr_av, [](QpAttributes& a) { a.path.is_global = 1, a.path.sgid_index = 2; }},
      {"sgid beyond table", qp_attr_av, [](QpAttributes& a) { a.path.is_global = 1, a.path.sgid_index = 200; }},
      {"alternate port", qp_attr_alt_path, [](QpAttributes& a) { a.alt_port_num = 3; }},
      {"alternate pkey", qp_attr_alt_path, [](QpAttributes& a) { a.alt_pkey_index = 16; }},
      {"migration state", qp_attr_path_mig_state, [](QpAttributes& a) { a.path_mig_state = 3; }},
  };
  for (const Value& value : values) {
    int tried = 0;
    for (const QpType type : types)
      for (int from = 0; from <= 6; ++from)
        for (int to = 1; to <= 5; ++to) {
          const auto masks = transition_masks(type, static_cast<QpState>(from), static_cast<QpState>(to));
          if (!masks.legal || ((masks.required | masks.optional) & value.mask) == 0) continue;
          ++tried;
          QpAttributes before{}, wanted = good_values();
          before.state = static_cast<std::uint32_t>(from);
          wanted.state = static_cast<std::uint32_t>(to);
          const std::uint32_t mask = qp_attr_state | masks.required | value.mask;
          QpAttributes a = before;
          CHECK(applied(type, a, wanted, mask, limits));
          value.spoil(wanted);
          a = before;
          INFO(value.what, ", type ", static_cast<int>(type), " from ", from, " to ", to);
          CHECK_FALSE(applied(type, a, wanted, mask, limits));
          CHECK(std::memcmp(&a, &before, sizeof(a)) == 0);
        }
    CHECK(tried > 0);
  }
}

TEST_CASE("On Ethernet there is no alternate path") {
  for (const bool is_ethernet : {false, true}) {
    PortLimits port = limits;
    port.ethernet = is_ethernet;
    QpAttributes a{}, wanted = good_values();
    a.state = 1;
    wanted.state = 2;
    wanted.path.is_global = wanted.alt_path.is_global = 1;
    const std::uint32_t mask = qp_attr_state | transition_masks(QpType::uc, QpState::init, QpState::rtr).required;
    CHECK(applied(QpType::uc, a, wanted, mask | qp_attr_alt_path, port) == !is_ethernet);
  }
}

TEST_CASE("On Ethernet an address vector must be global") {
  PortLimits ethernet = limits;
  ethernet.ethernet = true;
  QpAttributes a{}, wanted = good_values();
  a.state = 1;
  wanted.state = 2;
  const std::uint32_t mask = qp_attr_state | transition_masks(QpType::uc, QpState::init, QpState::rtr).required;
  CHECK_FALSE(applied(QpType::uc, a, wanted, mask, ethernet));
  wanted.path.is_global = 1;
  CHECK(applied(QpType::uc, a, wanted, mask, ethernet));
}

TEST_CASE("RESET wipes everything but what the queue pair was created with") {
  QpAttributes a = good_values(), wanted{};
  a.state = 3;
  a.max_send_wr = 5, a.max_recv_wr = 6, a.max_send_sge = 7, a.max_recv_sge = 8, a.max_inline_data = 9;
  CHECK(applied(QpType::rc, a, wanted, qp_attr_state, limits));
  QpAttributes expect{};
  expect.max_send_wr = 5, expect.max_recv_wr = 6, expect.max_send_sge = 7, expect.max_recv_sge = 8, expect.max_inline_data = 9;
  CHECK(std::memcmp(&a, &expect, sizeof(a)) == 0);
}

TEST_CASE("PSNs and the destination QPN are 24 bits wide") {
  QpAttributes a{}, wanted = good_values();
  a.state = 1;
  wanted.state = 2;
  wanted.rq_psn = 0xab000001, wanted.dest_qp_num = 0xcd000002;
  CHECK(applied(QpType::uc, a, wanted, qp_attr_state | qp_attr_av | qp_attr_path_mtu | qp_attr_dest_qpn | qp_attr_rq_psn, limits));
  CHECK(a.rq_psn == 1);
  CHECK(a.dest_qp_num == 2);
}

TEST_CASE("The drained notification is asked for anew each time SQD is entered") {
  QpAttributes a{}, wanted{};
  a.state = 3;
  wanted.state = 4;
  wanted.en_sqd_async_notify = 1;
  CHECK(applied(QpType::rc, a, wanted, qp_attr_state | qp_attr_en_sqd_async_notify, limits));
  CHECK(a.en_sqd_async_notify == 1);
  a.state = 3;
  CHECK(applied(QpType::rc, a, wanted, qp_attr_state, limits));
  CHECK(a.en_sqd_async_notify == 0);
}

TEST_CASE("States that do not exist are refused") {
  for (const std::uint32_t state : {7u, 8u, 0xffffffffu}) {
    QpAttributes a{}, wanted{};
    wanted.state = state;
    CHECK_FALSE(applied(QpType::rc, a, wanted, qp_attr_state, limits));
  }
}

}  // namespace
}  // namespace vrdma::engine
