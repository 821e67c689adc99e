#include "vmkernel_svc/remote/peer_filter.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace vrdma::remote {

namespace {

// A program of the kernel's for some addresses. It makes one word of the sender's address (IPv4: that is it; IPv6: a digest, which another
// address has with a chance of one in 2^32 for each host, and nobody can know which, as `factor` is random), and looks for that among the
// hosts' words: one instruction for each host, and a few for a packet.
class Program {
 public:
  // Of each address its first `bits` count.
  Program(std::span<const std::array<std::uint32_t, 4>> addresses, bool v6, unsigned bits, std::uint32_t factor) : v6_(v6), bits_(bits), factor_(factor) {
    std::vector<std::uint32_t> words;
    words.reserve(addresses.size());
    for (const auto& address : addresses) words.push_back(word_of(address));
    std::ranges::sort(words);
    words.erase(std::unique(words.begin(), words.end()), words.end());
    make_word();
    look_for(words);
  }

  bool attach(int socket) {
    if (instructions_.size() > BPF_MAXINSNS) return errno = E2BIG, false;
    const sock_fprog filter{static_cast<unsigned short>(instructions_.size()), instructions_.data()};
    return ::setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) == 0;
  }

 private:
  static constexpr std::uint32_t mixing_shift = 15;
  static constexpr std::size_t in_a_row = 64;  // compared one after the other: within reach of a jump

  unsigned word_count() const { return v6_ ? 4 : 1; }
  std::uint32_t mask(unsigned word) const {
    const unsigned before = 32 * word;
    return bits_ <= before ? 0 : bits_ - before >= 32 ? ~0u : ~0u << (32 - (bits_ - before));
  }
  std::uint32_t word_of(const std::array<std::uint32_t, 4>& address) const {
    if (!v6_) return address[0] & mask(0);
    std::uint32_t digest = 0;
    for (unsigned i = 0; i < word_count(); ++i) {
      digest = ((address[i] & mask(i)) + digest) * factor_;
      digest ^= digest >> mixing_shift;
    }
    return digest;
  }

  void add(std::uint16_t code, std::uint32_t k, std::uint8_t if_so = 0, std::uint8_t if_not = 0) { instructions_.push_back({code, if_so, if_not, k}); }

  // As word_of() does it. The digest so far is in X.
  void make_word() {
    constexpr std::uint32_t v4_source = 12, v6_source = 8;
    add(BPF_LDX | BPF_IMM, 0);
    for (unsigned i = 0; i < word_count(); ++i) {
      add(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(SKF_NET_OFF) + (v6_ ? v6_source + 4 * i : v4_source));
      if (mask(i) != ~0u) add(BPF_ALU | BPF_AND | BPF_K, mask(i));
      if (!v6_) continue;
      add(BPF_ALU | BPF_ADD | BPF_X, 0);
      add(BPF_ALU | BPF_MUL | BPF_K, factor_);
      add(BPF_MISC | BPF_TAX, 0);
      add(BPF_ALU | BPF_RSH | BPF_K, mixing_shift);
      add(BPF_ALU | BPF_XOR | BPF_X, 0);
      add(BPF_MISC | BPF_TAX, 0);
    }
  }

  // Each way through it ends in it.
  void look_for(std::span<const std::uint32_t> sorted) {
    constexpr std::uint32_t all = 0xffffffff;
    if (sorted.size() <= in_a_row) {
      for (std::size_t i = 0; i < sorted.size(); ++i) add(BPF_JMP | BPF_JEQ | BPF_K, sorted[i], static_cast<std::uint8_t>(sorted.size() - i));
      add(BPF_RET | BPF_K, 0);
      return add(BPF_RET | BPF_K, all);
    }
    const std::size_t middle = sorted.size() / 2;
    add(BPF_JMP | BPF_JGE | BPF_K, sorted[middle], 0, 1);
    const std::size_t jump = instructions_.size();
    add(BPF_JMP | BPF_JA, 0);
    look_for(sorted.first(middle));
    instructions_[jump].k = static_cast<std::uint32_t>(instructions_.size() - jump - 1);
    look_for(sorted.subspan(middle));
  }

  bool v6_;
  unsigned bits_;
  std::uint32_t factor_;
  std::vector<sock_filter> instructions_;
};

void detach(int socket) {
  const int unused = 0;
  ::setsockopt(socket, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof(unused));
}

}  // namespace

unsigned accept_only(int socket, const std::vector<std::string>& texts) {
  int family = 0;
  socklen_t bytes = sizeof(family);
  if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &bytes) != 0) return 0;
  const bool v6 = family == AF_INET6;
  std::vector<std::array<std::uint32_t, 4>> addresses;
  for (const auto& text : texts) {
    std::array<std::uint32_t, 4> words{};
    if (::inet_pton(family, text.c_str(), words.data()) != 1) continue;
    for (auto& word : words) word = ntohl(word);
    addresses.push_back(words);
  }
  std::uint32_t factor = 0x9e3779b1;
  [[maybe_unused]] const auto got = ::getrandom(&factor, sizeof(factor), 0);  // without, it is a worse filter
  factor |= 1;
  const unsigned step = v6 ? 8 : 2;
  bool has_all_room = false;
  for (unsigned bits = address_bits(v6); bits != 0;) {
    if (Program(addresses, v6, bits, factor).attach(socket)) return bits;
    if (errno != ENOMEM && errno != E2BIG) break;
    // The filter that is there takes up some of the room until the next one is. Without one the port is open for that moment.
    if (errno == ENOMEM && !std::exchange(has_all_room, true)) detach(socket);
    else bits -= step;
  }
  const int why = errno;
  detach(socket);  // one that is there would keep out who has joined since
  errno = why;
  return 0;
}

}  // namespace vrdma::remote
