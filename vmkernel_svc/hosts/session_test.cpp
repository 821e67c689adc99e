// Certificates, and two sessions that meet over a real connection: who is let in, and what is said to whom is not.
#include "vmkernel_svc/hosts/session.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>

using namespace vrdma::hosts;
namespace asio = boost::asio;
using asio::ip::tcp;

namespace {

const std::int64_t now = std::time(nullptr);
const Identity& subnet() {
  static const Identity authority = make_authority(10);
  return authority;
}
X509Ptr authority_of(const Identity& identity) { return certificate_from_pem(to_pem(identity.certificate.get()), "test"); }
Identity member(const std::string& name, const Identity& authority = subnet(), std::int64_t from_s = now - 100, std::int64_t until_s = now + 86400) {
  return issue(authority, name, Role::host, from_s, until_s);
}

Hello hello_of(const std::string& name) {
  Hello hello;
  hello.version = "1";
  hello.name = name;
  hello.run = "r";
  hello.address = "127.0.0.1";
  hello.port = 1;
  return hello;
}

// What each of the two has seen when both connections have ended, or are up.
struct Meeting {
  bool server_up = false, client_up = false;
  std::string server_why, client_why;
  std::array<std::byte, 32> server_key{}, client_key{};
};

Meeting meet(Tls& server, Tls& client, const Hello& client_hello, const std::string& expected = "") {
  Meeting result;
  asio::io_context io;
  tcp::acceptor acceptor(io, {asio::ip::make_address("127.0.0.1"), 0});
  tcp::socket dialing(io);
  dialing.connect(acceptor.local_endpoint());
  tcp::socket accepted = acceptor.accept();
  int over = 0;
  const auto events = [&](bool& up, std::string& why, std::array<std::byte, 32>& key) {
    return Session::Events{[&](const std::shared_ptr<Session>& session) { up = true, key = session->key(); },
                           [](const std::shared_ptr<Session>&, const Message&) {}, [&](const std::shared_ptr<Session>&, const std::string& reason) { why = reason, ++over; }};
  };
  const SessionLimits limits{60'000, 60'000};
  const auto at_server = std::make_shared<Session>(server, std::move(accepted), false, limits, events(result.server_up, result.server_why, result.server_key));
  const auto at_client = std::make_shared<Session>(client, std::move(dialing), true, limits, events(result.client_up, result.client_why, result.client_key));
  at_server->start(hello_of(server.us().name), "");
  at_client->start(client_hello, expected);
  while (over < 2 && !(result.server_up && result.client_up))
    if (io.run_one_for(std::chrono::seconds(60)) == 0) break;
  return result;
}

}  // namespace

TEST_CASE("TwoHostsOfOneSubnetMeetAndShareAKeyThatNobodyElseHas") {
  Tls a(member("a"), authority_of(subnet())), b(member("b"), authority_of(subnet()));
  const Meeting first = meet(a, b, hello_of("b")), second = meet(a, b, hello_of("b"));
  CHECK(first.server_up);
  CHECK(first.client_up);
  CHECK(first.server_key == first.client_key);
  CHECK(first.server_key != second.server_key);
}

TEST_CASE("ACertificateThatIsNotGoodIsRefusedAndBothSidesSayWhy") {
  Tls a(member("a"), authority_of(subnet()));
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  SUBCASE("of another subnet") {
    const Identity foreign = make_authority(10);
    Tls b(member("b", foreign), authority_of(subnet()));  // it believes us
    const Meeting result = meet(a, b, hello_of("b"));
    CHECK_FALSE(result.server_up);
    CHECK_FALSE(result.client_up);
    INFO(result.server_why << " / " << result.client_why);
    CHECK(contains(result.server_why, "the certificate of \"b\" is of another authority"));
    CHECK(contains(result.client_why, "refuses our certificate"));
  }
  SUBCASE("expired") {
    Tls b(member("b", subnet(), now - 100, now - 50), authority_of(subnet()));
    const Meeting result = meet(a, b, hello_of("b"));
    CHECK_FALSE(result.server_up);
    INFO(result.server_why << " / " << result.client_why);
    CHECK(contains(result.server_why, "the certificate of \"b\" has expired"));
    CHECK(contains(result.client_why, "expired"));
  }
  SUBCASE("not valid yet") {
    Tls b(member("b", subnet(), now + 5000, now + 9000), authority_of(subnet()));
    CHECK(contains(meet(a, b, hello_of("b")).server_why, "is not valid before"));
  }
  SUBCASE("another's name in the hello") {
    Tls b(member("b"), authority_of(subnet()));
    const Meeting result = meet(a, b, hello_of("c"));
    CHECK(contains(result.server_why, "it calls itself \"c\", its certificate \"b\""));
    CHECK(contains(result.client_why, "it calls itself \"c\""));
  }
  SUBCASE("not whom we dialed") {
    Tls b(member("b"), authority_of(subnet()));
    CHECK(contains(meet(a, b, hello_of("b"), "z").client_why, "the host there is \"a\", not \"z\""));
  }
  SUBCASE("another version of the protocol") {
    Tls b(member("b"), authority_of(subnet()));
    Hello hello = hello_of("b");
    hello.major = 7;
    const Meeting result = meet(a, b, hello);
    CHECK(contains(result.server_why, "speaks version 7 of the hosts' protocol"));
    CHECK(contains(result.client_why, "speaks version 7"));
  }
}

TEST_CASE("ANameInACertificateOfAnybodysIsPrintable") {
  const Identity foreign = make_authority(10);
  const Identity stranger = member("a", foreign);
  const unsigned char raw[] = "a\x1b[2J\nhosts: \"b\" is here\xc2\x9b";
  X509_NAME* const name = X509_NAME_new();
  REQUIRE(X509_NAME_add_entry_by_txt(name, "CN", V_ASN1_UTF8STRING, raw, sizeof(raw) - 1, -1, 0) == 1);
  REQUIRE(X509_set_subject_name(stranger.certificate.get(), name) == 1);
  X509_NAME_free(name);
  CHECK(describe(stranger.certificate.get()).name == "a?[2J?hosts: \"b\" is here??");
  const std::string why = refusal(stranger.certificate.get(), subnet().certificate.get(), now);
  CAPTURE(why);
  CHECK(std::all_of(why.begin(), why.end(), [](unsigned char c) { return c >= ' ' && c <= '~'; }));
}

TEST_CASE("WhatIsNoCertificateOrNoKeyIsRefusedByName") {
  CHECK_THROWS_WITH_AS(issue(subnet(), "Bad_Name", Role::host, now, now + 1), doctest::Contains("Bad_Name"), std::runtime_error);
  CHECK_THROWS_WITH_AS(certificate_from_pem("nothing", "x.pem"), doctest::Contains("x.pem: there is no certificate in it"), std::runtime_error);
  const Identity a = member("a");
  const auto info = describe(a.certificate.get());
  CHECK(info.name == "a");
  CHECK(info.role == Role::host);
  CHECK(describe(subnet().certificate.get()).role == Role::authority);
  CHECK(describe(issue(subnet(), "x", Role::admin, now, now + 60).certificate.get()).role == Role::admin);
  CHECK(refusal(a.certificate.get(), subnet().certificate.get(), now) == "");
  CHECK(refusal(a.certificate.get(), subnet().certificate.get(), now + 90'000).find("has expired") != std::string::npos);

  std::string name = (std::filesystem::temp_directory_path() / "vrdma-key-XXXXXX").string();
  const std::filesystem::path folder = ::mkdtemp(name.data());
  save_new(folder / "host.key", to_pem(a.key.get()), For::owner);
  CHECK_NOTHROW(load_key(folder / "host.key"));
  CHECK_THROWS_WITH_AS(save_new(folder / "host.key", "", For::owner), doctest::Contains("is there already"), std::runtime_error);
  std::filesystem::permissions(folder / "host.key", std::filesystem::perms::group_read, std::filesystem::perm_options::add);
  CHECK_THROWS_WITH_AS(load_key(folder / "host.key"), doctest::Contains("others may read this key"), std::runtime_error);
  std::filesystem::remove_all(folder);

  const Invitation again = read_invitation(write_invitation({member("b"), authority_of(subnet()), "10.0.0.1:28250"}), "b.invitation");
  CHECK(again.seed == "10.0.0.1:28250");
  CHECK(describe(again.host.certificate.get()).name == "b");
  CHECK(describe(again.authority.get()).role == Role::authority);
  CHECK(X509_check_private_key(again.host.certificate.get(), again.host.key.get()) == 1);
}
