#include "cli/host_talk.hpp"

#include <fmt/format.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/session.hpp"

namespace vrdma::cli {

namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using namespace hosts;
using Level = Finding::Level;

constexpr auto patience = std::chrono::seconds(20);

// Why a conversation did not come about.
struct Failed : std::runtime_error {
  enum class How {
    plainly,
    unanswered,  // at all: as a firewall does it
    no_route,    // from here
    no_host,     // says a router, the kernel, as nobody here has that address, or a firewall
    asked,       // the question is there, and what it wants may be done yet
  };
  explicit Failed(const std::string& what, How how_in = How::plainly) : runtime_error(what), how(how_in) {}
  How how;
};

Failed::How how_of(const boost::system::error_code& error) {
  if (error == asio::error::timed_out) return Failed::How::unanswered;
  if (error == asio::error::network_unreachable) return Failed::How::no_route;
  if (error == asio::error::host_unreachable) return Failed::How::no_host;
  return Failed::How::plainly;
}

// One question to the vrdmad at an address, one answer.
template <class Answer>
Answer converse(Tls& tls, const std::string& from, const std::string& address, std::uint16_t port, const Message& question,
                Hello* peer = nullptr) {
  asio::io_context io;
  tcp::socket socket(io);
  boost::system::error_code error = asio::error::timed_out;
  const tcp::endpoint endpoint(asio::ip::make_address(address), port);
  socket.open(endpoint.protocol());
  if (!from.empty()) {
    boost::system::error_code bound;
    socket.bind({asio::ip::make_address(from), 0}, bound);
    if (bound) throw Failed(fmt::format("{} is not an address of this host ({})", from, bound.message()));
  }
  socket.async_connect(endpoint, [&](const boost::system::error_code& result) { error = result; });
  io.run_for(patience);
  if (error)
    throw Failed(error == asio::error::timed_out ? fmt::format("no answer within {} s", patience.count()) : error.message(), how_of(error));

  Hello hello;
  hello.version = VRDMA_VERSION;
  hello.name = tls.us().name;
  hello.run = "tool";
  std::optional<Answer> answer;
  std::string why = "no answer";
  bool asked = false;
  Session::Events events{[&](const std::shared_ptr<Session>& session) {
                           asked = true;
                           if (peer != nullptr) *peer = session->peer();
                           session->send(question);
                         },
                         [&](const std::shared_ptr<Session>& session, const Message& message) {
                           if (const auto* given = std::get_if<Answer>(&message)) answer = *given;
                           session->retire();
                         },
                         [&](const std::shared_ptr<Session>&, const std::string& reason) { why = reason; }};
  const auto session = std::make_shared<Session>(tls, std::move(socket), true, SessionLimits{}, std::move(events));
  session->start(hello, "");
  io.restart();
  io.run_for(patience * 2);
  if (!answer) throw Failed(why, asked ? Failed::How::asked : Failed::How::plainly);
  return *answer;
}

std::string rule(const std::string& from, std::uint16_t port) {
  return fmt::format("nft add rule inet filter input ip{} saddr {} tcp dport {{ {}, {} }} accept", from.find(':') != std::string::npos ? "6" : "",
                     from, port, port + 1);
}

// `here` may be empty: not known.
std::string way_remedy(Failed::How how, const std::string& here, const std::string& there, std::uint16_t port) {
  const std::string let_in = fmt::format("on {}: {}", there, rule(here.empty() ? "ADDRESS OF THIS HOST" : here, port));
  switch (how) {
    case Failed::How::unanswered:
      return let_in;
    case Failed::How::no_route:
      return fmt::format("no route leads there: this host has none (\"ip route get {}\" says so), or a router on the way. Add it, or correct the address", there);
    case Failed::How::no_host:
      return fmt::format("is that host up, at that address, and the route to it right (\"ip route get {0}\", \"ip neigh show {0}\")? If so, a firewall refuses: {1}",
                         there, let_in);
    case Failed::How::plainly:
    case Failed::How::asked:
      break;
  }
  return "is vrdmad running there, with \"hosts\" in its configuration, and the certificates of one subnet on both hosts?";
}

}  // namespace

namespace {
enum class Question { looks, changes };

// From a member to the leader, which may change meanwhile. One that has died is named for some seconds, until another is elected or nobody
// leads: so the first one is asked again for a while.
template <class Reply>
Reply ask_leader(Tls& tls, const std::string& first_address, std::uint16_t first_port, const Message& question, Question kind, Hello* leader = nullptr) {
  constexpr std::chrono::milliseconds election{10'000}, pause{500};
  constexpr int hops_max = 3;
  std::optional<std::chrono::steady_clock::time_point> until;
  std::string address = first_address, why;
  std::uint16_t port = first_port;
  for (int hops = 0;;) {
    try {
      const Reply reply = converse<Reply>(tls, "", address, port, question, leader);
      if (reply.error.empty() && reply.leader.empty()) return reply;
      if (!reply.error.empty() && reply.error != no_leader) throw std::runtime_error(reply.error);
      if (reply.error.empty() && ++hops < hops_max) {
        address = reply.leader;
        port = reply.port;
        continue;
      }
      why = reply.error.empty() ? "each names another leader" : reply.error;
    } catch (const Failed& error) {
      why = fmt::format("{}: {}", with_port(address, port), error.what());
      // A leader who reaches no majority keeps the wish until it does, or leads no more.
      if (error.how == Failed::How::asked)
        throw std::runtime_error(why + (kind == Question::changes ? ": the change may come all the same, once a majority of the managers runs; look again before you repeat it" : ""));
      if (address == first_address && port == first_port)
        throw std::runtime_error(fmt::format("{} cannot be reached: {}: {}", with_port(address, port), error.what(), way_remedy(error.how, "", address, port)));
    }
    const auto now = std::chrono::steady_clock::now();
    if (!until) until = now + election;
    if (now >= *until) throw std::runtime_error(why + ": the subnet is about to elect a leader, or cannot: try again when \"vrdma show hosts\" says who leads");
    std::this_thread::sleep_for(pause);
    address = first_address;
    port = first_port;
    hops = 0;
  }
}
}  // namespace

bool ask_removal(Tls& tls, const std::string& address, std::uint16_t port, const std::string& name, const std::string& serial) {
  Hello leader;
  ask_leader<RemoveReply>(tls, address, port, Remove{name, serial}, Question::changes, &leader);
  return leader.name == name && leader.manages && leader.managers.size() <= 1;
}

Partitions ask_partitions(Tls& tls, const std::string& address, std::uint16_t port, const ChangePartition& change) {
  const Question kind = change.pkey != 0 ? Question::changes : Question::looks;
  return ask_leader<PartitionsReply>(tls, address, port, change, kind).partitions;
}

std::vector<Finding> examine_host(const std::string& folder, const std::string& target, const std::string& here, std::uint16_t port) {
  const auto there = address_and_port(target);
  if (!there) return {{Level::problem, "host", fmt::format("\"{}\" is neither another host that the service knows nor a numeric address", target),
                       "\"vrdma show hosts\" says who is known, or \"vrdma show routes\" where the configuration lists the hosts"}};
  const std::string at = with_port(there->first, there->second);
  std::shared_ptr<Tls> tls;
  try {
    tls = Tls::of_host(folder);
  } catch (const std::exception& error) {
    return {{Level::problem, "certificate", error.what(),
             "hosts that the configuration lists (\"remote\") have none, and are asked for by their names there; for others \"vrdma host init\" or "
             "\"join\" makes it (docs/subnet.md), and --folder says where"}};
  }
  std::vector<Finding> findings;
  Hello peer;
  try {
    const auto probed = converse<Probed>(*tls, here, there->first, there->second,
                                         Probe{here.empty() ? "127.0.0.1" : here, port == 0 ? default_port : port}, &peer);
    findings.push_back({Level::ok, "to", fmt::format("{} answers, with a certificate of this subnet: vrdmad {}", at, peer.version), ""});
    if (port == 0)
      findings.push_back({Level::note, "from", "the other direction was not tried: no vrdmad with \"hosts\" in its configuration runs here",
                          "start it, and try again"});
    else if (probed.error.empty())
      findings.push_back({Level::ok, "from", fmt::format("{} reaches this host at {}", at, with_port(here, port)), ""});
    else
      findings.push_back({Level::problem, "from", fmt::format("{} does not reach this host at {}: {}", at, with_port(here, port), probed.error),
                          "on this host: " + rule(there->first, port)});
  } catch (const Failed& error) {
    findings.push_back({Level::problem, "to", fmt::format("{} cannot be reached: {}", at, error.what()),
                        way_remedy(error.how, here, there->first, there->second)});
  }
  return findings;
}

}  // namespace vrdma::cli
