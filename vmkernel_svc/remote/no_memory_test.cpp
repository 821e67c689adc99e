// A connection for which OpenSSL has no memory ends, alone.
#include <doctest/doctest.h>
#include <openssl/crypto.h>
#include <sys/socket.h>

#include <cstdlib>
#include <memory>

#include "vmkernel_svc/remote/tcp_connection.hpp"

using namespace vrdma;
using namespace vrdma::remote;

namespace {

bool nothing_left = false;

void* memory_of(std::size_t bytes, const char*, int) { return nothing_left ? nullptr : std::malloc(bytes); }
void* more_memory_of(void* before, std::size_t bytes, const char*, int) { return nothing_left ? nullptr : std::realloc(before, bytes); }
void give_back_memory(void* memory, const char*, int) { std::free(memory); }

// Before anything of this program uses OpenSSL.
const bool is_ours = CRYPTO_set_mem_functions(memory_of, more_memory_of, give_back_memory) == 1;

struct NoMemory {
  NoMemory() { nothing_left = true; }
  ~NoMemory() { nothing_left = false; }
};

std::shared_ptr<const PeerHost> host(const char* name) { return std::make_shared<const PeerHost>(PeerHost{0, name, "127.0.0.1", 1, {}, true}); }

struct Ends {
  Handshake::Context context{"one", true, [](std::string_view) { return host("one"); }};
  vmci::UniqueFd sockets[2];
  std::unique_ptr<TcpConnection> dialed, accepted;

  Ends() {
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
    sockets[0].reset(both[0]), sockets[1].reset(both[1]);
  }
  void begin() {
    dialed = std::make_unique<TcpConnection>(context, std::move(sockets[0]), host("other"), 0);
    accepted = std::make_unique<TcpConnection>(context, std::move(sockets[1]), nullptr, 0);
  }
  bool over() const { return dialed->state() == TcpConnection::State::broken || accepted->state() == TcpConnection::State::broken; }
  bool open() const { return dialed->state() == TcpConnection::State::open && accepted->state() == TcpConnection::State::open; }
};

}  // namespace

// Whichever of its steps finds none: none of them throws, which would end the service.
TEST_CASE("AConnectionForWhichThereIsNoMemoryEndsAndDoesNotThrow") {
  REQUIRE(is_ours);
  SUBCASE("From its beginning") {
    Ends ends;
    const NoMemory none;
    CHECK_NOTHROW(ends.begin());
    CHECK(ends.dialed->state() == TcpConnection::State::broken);
    CHECK(ends.accepted->why() == TcpConnection::Why::failed);
    CHECK_NOTHROW(ends.dialed->go_on());
    CHECK_NOTHROW(ends.dialed->send({}, engine::FarFrame::make(0)));
  }
  SUBCASE("In a step of the handshake") {
    for (int good_steps = 0;; ++good_steps) {
      CAPTURE(good_steps);
      Ends ends;
      ends.begin();
      for (int i = 0; i < good_steps && !ends.open(); ++i) (i % 2 == 0 ? ends.dialed : ends.accepted)->go_on();
      if (ends.open()) break;
      {
        const NoMemory none;
        CHECK_NOTHROW((good_steps % 2 == 0 ? ends.dialed : ends.accepted)->go_on());
      }
      REQUIRE(good_steps < 100);
    }
  }
  Ends later;
  later.begin();
  for (int i = 0; i < 100 && !later.open() && !later.over(); ++i) later.dialed->go_on(), later.accepted->go_on();
  CHECK(later.open());
}
