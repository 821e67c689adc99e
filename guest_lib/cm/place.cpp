#include "guest_lib/cm/place.hpp"

#include <endian.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "guest_lib/never_destroyed.hpp"

namespace vrdma::guest::cm {

using control::CmAddress;

namespace {

// struct sockaddr_ib of the kernel's <rdma/ib.h>.
struct IbAddress {
  std::uint16_t family;
  std::uint16_t pkey;
  std::uint32_t flow;
  std::array<std::uint8_t, 16> gid;
  std::uint64_t service, service_mask, scope;
};
static_assert(sizeof(IbAddress) == 48);

CmAddress from_ib(const IbAddress& in) {
  const std::uint64_t service = be64toh(in.service), space = service >> 16;
  CmAddress out{AF_IB, static_cast<std::uint16_t>(service), 0, in.gid};
  out.scope = CmAddress::ib_scope(be16toh(in.pkey), static_cast<std::uint16_t>(std::min<std::uint64_t>(space, CmAddress::other_space)));
  constexpr std::array<std::uint8_t, 16> loopback{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  if (out.ip == loopback) out.ip = {};
  return out;
}

IbAddress to_ib(const CmAddress& from) {
  const std::uint64_t service = std::uint64_t{from.port_space()} << 16 | from.port;
  return {AF_IB, htobe16(from.pkey()), 0, from.ip, htobe64(service), service != 0 ? ~std::uint64_t{0} : 0, 0};
}

// What the service was told last.
struct Place {
  std::uint64_t service = 0, network = 0;
  std::vector<CmAddress> addresses;
  bool operator==(const Place&) const = default;
};
struct LastTold {
  std::mutex mutex;
  Place place;
};
constinit NeverDestroyed<LastTold> last_told;  // exit handlers of others bind, too

}  // namespace

void forget_place() { std::construct_at(&last_told.it); }

Interfaces::Interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    CmAddress one = address_of(each->ifa_addr);
    one.port = 0;
    if (one.family != 0) addresses_.push_back(one);
  }
  ::freeifaddrs(list);
}

bool Interfaces::lead_to(const CmAddress& address) const {
  return address.is_loopback() ||
         std::any_of(addresses_.begin(), addresses_.end(), [&](const CmAddress& own) { return own.same_host(address); });
}

CmAddress address_of(const sockaddr* address, std::size_t room) {
  CmAddress out{};
  if (address == nullptr) return out;
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof(in));
    out.family = AF_INET;
    out.port = ntohs(in.sin_port);
    std::memcpy(out.ip.data(), &in.sin_addr, 4);
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, address, sizeof(in));
    out.family = AF_INET6;
    out.port = ntohs(in.sin6_port);
    out.scope = in.sin6_scope_id;
    std::memcpy(out.ip.data(), &in.sin6_addr, 16);
    // A socket of both families names IPv4 so.
    constexpr std::uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (std::equal(std::begin(mapped), std::end(mapped), out.ip.begin())) {
      out.family = AF_INET, out.scope = 0;
      std::copy_n(out.ip.begin() + 12, 4, out.ip.begin());
      std::fill(out.ip.begin() + 4, out.ip.end(), 0);
    }
  } else if (address->sa_family == AF_IB && room >= sizeof(IbAddress)) {
    IbAddress in;
    std::memcpy(&in, address, sizeof(in));
    out = from_ib(in);
  }
  return out;
}

CmAddress own_address_of(const sockaddr* address, std::size_t room) {
  if (address->sa_family != AF_IB || room < sizeof(IbAddress)) return address_of(address, room);
  IbAddress in;
  std::memcpy(&in, address, sizeof(in));
  in.service &= in.service_mask;
  return from_ib(in);
}

std::size_t put_address(sockaddr_storage& out, const CmAddress& address) {
  std::memset(&out, 0, sizeof(out));
  if (address.family == AF_INET) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(address.port);
    std::memcpy(&in.sin_addr, address.ip.data(), 4);
    std::memcpy(&out, &in, sizeof(in));
    return sizeof(in);
  }
  if (address.family == AF_INET6) {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_port = htons(address.port);
    in.sin6_scope_id = address.scope;
    std::memcpy(&in.sin6_addr, address.ip.data(), 16);
    std::memcpy(&out, &in, sizeof(in));
    return sizeof(in);
  }
  if (address.family == AF_IB) {
    const IbAddress in = to_ib(address);
    std::memcpy(&out, &in, sizeof(in));
    return sizeof(in);
  }
  return 0;
}

Status tell_place(Attachment& attachment, const Interfaces& interfaces) {
  Place place{attachment.ordinal(), 0, interfaces.addresses()};
  struct stat network;
  if (::stat("/proc/self/ns/net", &network) == 0) place.network = network.st_ino;
  // Where there are more than the service can be told of, those that lead to one link only are the least missed.
  std::stable_partition(place.addresses.begin(), place.addresses.end(), [](const CmAddress& one) { return one.scope == 0; });
  const std::size_t most = attachment.service_minor() >= control::minor_of_many_addresses ? control::cm_addresses_max : control::cm_addresses_at_once;
  place.addresses.resize(std::min(place.addresses.size(), most));
  auto& [mutex, told] = last_told.it;
  std::lock_guard lock(mutex);
  if (told == place) return ok();
  std::size_t done = 0;
  do {
    control::CmPlaceRequest request{place.network, 0, done != 0, {}};
    request.count = static_cast<std::uint32_t>(std::min<std::size_t>(place.addresses.size() - done, control::cm_addresses_at_once));
    std::copy_n(place.addresses.begin() + static_cast<std::ptrdiff_t>(done), request.count, request.addresses);
    if (const auto answer = attachment.call<control::Request::cm_place>(request); !answer) return told = {}, answer.error();
    done += request.count;
  } while (done < place.addresses.size());
  told = std::move(place);
  return ok();
}

CmAddress source_for(const CmAddress& destination) {
  if (destination.family == AF_IB) return {};
  CmAddress to = destination;
  if (to.port == 0) to.port = 9;  // nothing is sent there
  sockaddr_storage address;
  const std::size_t bytes = put_address(address, to);
  if (bytes == 0) return {};
  const vmci::UniqueFd probe(static_cast<int>(::syscall(SYS_socket, to.family, SOCK_DGRAM | SOCK_CLOEXEC, 0)));
  socklen_t length = sizeof(address);
  if (!probe || ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), static_cast<socklen_t>(bytes)) != 0 ||
      ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return {};
  CmAddress source = address_of(reinterpret_cast<const sockaddr*>(&address));
  source.port = 0;
  return source;
}

}  // namespace vrdma::guest::cm
