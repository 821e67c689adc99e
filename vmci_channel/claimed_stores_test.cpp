// Stores that a thread loses together with its claim: against a real process that is stopped anywhere, again and again.
#include "vmci_channel/claimed_stores.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <vector>

#include "doctest/doctest.h"

namespace vmci {
namespace {

constexpr std::uint64_t mine = 42, lost = 43;

ClaimedStores stores_under(const std::uint64_t& claim) {
  ClaimedStores stores(&claim, mine);
  stores.guard();
  return stores;
}

bool copies_exactly(const ClaimedStores& stores, std::size_t bytes, std::size_t to_misaligned, std::size_t from_misaligned) {
  constexpr std::size_t margin = 64;
  std::vector<std::byte> from(bytes + 64), to(bytes + 2 * margin + 64, std::byte{0xcd});
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 131 + (i >> 8) * 7 + 1);
  std::byte* const at = to.data() + margin + to_misaligned;
  if (!stores.copy(at, from.data() + from_misaligned, bytes)) return false;
  if (bytes != 0 && std::memcmp(at, from.data() + from_misaligned, bytes) != 0) return false;
  for (const std::byte* byte = to.data(); byte < to.data() + to.size(); ++byte)
    if ((byte < at || byte >= at + bytes) && *byte != std::byte{0xcd}) return false;
  return true;
}

TEST_CASE("Under the claim every copy is exact, and nothing around it is touched") {
  const std::uint64_t claim = mine;
  const ClaimedStores stores = stores_under(claim);
  for (std::size_t bytes = 0; bytes <= 300; ++bytes)
    for (std::size_t to = 0; to < 16; to += 1 + bytes % 3)
      REQUIRE_MESSAGE(copies_exactly(stores, bytes, to, (to * 5 + bytes) % 16), bytes << " bytes, to +" << to);
  for (std::size_t bytes = 250; bytes <= 700; bytes += 3)
    for (std::size_t to = 0; to < 64; to += 1 + bytes % 5)
      REQUIRE_MESSAGE(copies_exactly(stores, bytes, to, bytes % 64), bytes << " bytes, to +" << to);
  for (const std::size_t around : {std::size_t{512}, std::size_t{4096}, std::size_t{8192}, std::size_t{65536}})
    for (std::size_t bytes = around - 20; bytes <= around + 20; ++bytes)
      REQUIRE_MESSAGE(copies_exactly(stores, bytes, bytes % 16, bytes % 7), bytes << " bytes");
}

template <class Word>
void words_are_stored() {
  std::uint64_t claim = mine;
  const ClaimedStores stores = stores_under(claim);
  Word words[3] = {1, 2, 3};
  CHECK(stores.store(&words[1], static_cast<Word>(0xa5)));
  CHECK(words[0] == 1);
  CHECK(words[1] == 0xa5);
  CHECK(words[2] == 3);
  if (!stores.guarded()) return;
  claim = lost;
  CHECK_FALSE(stores.store(&words[1], Word{7}));
  CHECK(words[1] == 0xa5);
}

TEST_CASE("Words of every size are stored under the claim, and not without it") {
  words_are_stored<std::uint64_t>();
  words_are_stored<std::uint32_t>();
  words_are_stored<std::uint16_t>();
  words_are_stored<std::uint8_t>();
}

TEST_CASE("What reads and writes at once says what was there, and without the claim does nothing") {
  std::uint64_t claim = mine;
  const ClaimedStores stores = stores_under(claim);
  std::uint64_t word = 5, value = 3;
  CHECK(stores.fetch_add(&word, value));
  CHECK(value == 5);
  CHECK(word == 8);
  value = 7;
  CHECK(stores.compare_and_swap(&word, value, std::uint64_t{100}));
  CHECK(value == 8);
  CHECK(word == 8);
  CHECK(stores.compare_and_swap(&word, value, std::uint64_t{100}));
  CHECK(value == 8);
  CHECK(word == 100);
  std::uint32_t halves[3] = {1, 2, 3}, half = 7;
  CHECK(stores.compare_and_swap(&halves[1], half, 100u));
  CHECK(half == 2);
  CHECK(halves[1] == 2);
  CHECK(stores.compare_and_swap(&halves[1], half, 100u));
  CHECK(halves[0] == 1);
  CHECK(halves[1] == 100);
  CHECK(halves[2] == 3);
  CHECK(stores.held());
  CHECK(stores.set_bits(&word, 3));
  CHECK(word == 103);
  alignas(32) std::uint64_t four[4] = {};
  CHECK(stores.store4(four, 1, 2, 3, 4));
  for (std::uint64_t i = 0; i < 4; ++i) CHECK(four[i] == i + 1);
  if (!stores.guarded()) {
    MESSAGE("SKIP: threads have no restartable sequences here: a claim cannot be taken from them");
    return;
  }
  claim = lost;
  value = 1;
  half = 100;
  CHECK_FALSE(stores.held());
  CHECK_FALSE(stores.compare_and_swap(&halves[1], half, 1u));
  CHECK(halves[1] == 100);
  CHECK_FALSE(stores.fetch_add(&word, value));
  CHECK_FALSE(stores.compare_and_swap(&word, value, std::uint64_t{1}));
  CHECK_FALSE(stores.set_bits(&word, 8));
  CHECK_FALSE(stores.store4(four, 9, 9, 9, 9));
  std::byte bytes[20000] = {}, others[20000];
  std::memset(others, 1, sizeof(others));
  for (const std::size_t size : {1, 3, 9, 40, 500, 20000}) CHECK_FALSE(stores.copy(bytes, others, size));
  CHECK(word == 103);
  CHECK(four[3] == 4);
  for (const std::byte byte : bytes) CHECK(byte == std::byte{0});
}

TEST_CASE("A system call is made under the claim, and not without it") {
  std::uint64_t claim = mine;
  const ClaimedStores stores = stores_under(claim);
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  char text[] = "abc";
  long result = 0;
  CHECK(stores.system_call(SYS_write, {ends[1], reinterpret_cast<long>(text), 3, 0}, result));
  CHECK(result == 3);
  CHECK(stores.system_call(SYS_write, {-1, reinterpret_cast<long>(text), 3, 0}, result));
  CHECK(result == -EBADF);
  if (stores.guarded()) {
    claim = lost;
    CHECK_FALSE(stores.system_call(SYS_write, {ends[1], reinterpret_cast<long>(text), 3, 0}, result));
  }
  char read[8] = {};
  CHECK(::read(ends[0], read, sizeof(read)) == 3);
  CHECK(std::strcmp(read, text) == 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

// What both processes see.
struct Shared {
  std::uint64_t claim;
  std::uint32_t given_up;  // times that a store failed
  std::uint32_t rounds;    // that went well
  alignas(4096) std::byte memory[1 << 18];
};

// Writes numbers that go up by every way there is, for as long as it has the claim.
[[noreturn]] void write_for_ever(Shared& shared) {
  const ClaimedStores stores = stores_under(shared.claim);
  static std::byte from[sizeof(shared.memory)];
  const int itself = ::open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (itself < 0) ::_exit(1);
  for (std::uint32_t round = 1;; ++round) {
    std::memset(from, static_cast<int>(round), sizeof(from));
    std::byte* const to = shared.memory;
    auto* const words = reinterpret_cast<std::uint64_t*>(to);
    const std::size_t bytes[] = {1, 8, 13, 64, 4096, 8000, sizeof(shared.memory)};
    std::uint64_t one = 1;
    bool all = stores.copy(to, from, bytes[round % 7]);
    long moved = 0;
    const std::array<long, 4> reading{itself, reinterpret_cast<long>(to), static_cast<long>(bytes[round / 7 % 7]), reinterpret_cast<long>(from)};
    all = all && stores.system_call(SYS_pread64, reading, moved) && moved == reading[2];
    all = all && stores.store4(words, round, round, round, round) && stores.fetch_add(words + 4, one) && stores.set_bits(words + 5, round);
    if (all) {
      std::atomic_ref(shared.rounds).fetch_add(1);
      continue;
    }
    std::atomic_ref(shared.given_up).fetch_add(1);
    while (std::atomic_ref(shared.claim).load() != mine) ::usleep(100);
  }
}

TEST_CASE("A process that is stopped anywhere writes nothing any more once its claim is taken") {
  if (!ClaimedStores::available()) {
    MESSAGE("SKIP: threads have no restartable sequences here");
    return;
  }
  auto& shared = *static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  REQUIRE(static_cast<void*>(&shared) != MAP_FAILED);
  shared.claim = mine;
  const pid_t writer = ::fork();
  REQUIRE(writer >= 0);
  if (writer == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    write_for_ever(shared);
  }
  std::mt19937 random(11);
  std::vector<std::byte> seen(sizeof(shared.memory));
  std::size_t changed = 0;
  for (std::uint32_t round = 1; round <= 150; ++round) {
    const std::uint32_t rounds = std::atomic_ref(shared.rounds).load();
    while (std::atomic_ref(shared.rounds).load() == rounds) cpu_relax();  // it writes
    for (auto spins = random() % 200'000; spins > 0; --spins) cpu_relax();
    ::kill(writer, SIGSTOP);
    int status = 0;
    REQUIRE(::waitpid(writer, &status, WUNTRACED) == writer);
    REQUIRE(WIFSTOPPED(status));
    std::atomic_ref(shared.claim).store(lost);
    const std::uint32_t given_up = shared.given_up;
    std::memcpy(seen.data(), shared.memory, seen.size());
    ::kill(writer, SIGCONT);
    while (std::atomic_ref(shared.given_up).load() == given_up) ::usleep(50);
    changed += std::memcmp(seen.data(), shared.memory, seen.size()) != 0;
    std::atomic_ref(shared.claim).store(mine);
  }
  CHECK(changed == 0);
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
  ::munmap(&shared, sizeof(Shared));
}

}  // namespace
}  // namespace vmci
