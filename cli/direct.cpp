#include "cli/direct.hpp"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

#include "cli/output.hpp"
#include "cli/query.hpp"

namespace vrdma::cli {

int direct(const DirectOptions& options) {
  const auto service = find_service_to_show(options.socket);
  if (!service) throw unreachable(options.socket);
  const bool mediated = options.mode == "mediated";
  const auto reply = set_direct(*service, {options.guest, mediated ? 1u : 0u});
  if (!reply) {
    const int error = value(reply.error());
    if (error == EOPNOTSUPP)
      throw std::runtime_error(fmt::format("the service at {} offers no direct mode, or is of an older version: start it with \"direct\": \"auto\" in its "
                                           "configuration, or with --direct auto", service->path));
    if (error == EPERM)
      throw std::runtime_error(fmt::format("the service at {} cannot tell this user from others, as its user namespace maps neither: it would be said of all of them; "
                                           "map this user there, or start programs by \"vrdma run --mediated\"", service->path));
    if (error == ENOENT) throw std::runtime_error(fmt::format("no guest {}, or none of yours: vrdma show guests lists them", options.guest));
    throw std::runtime_error(fmt::format("the service at {} refused: {}", service->path, std::strerror(error)));
  }
  const auto guests = [](std::uint32_t count) { return fmt::format("{} guest{}", count, count == 1 ? "" : "s"); };
  if (mediated)
    print_all(fmt::format("{}: through the service, from the next message on\n", guests(reply->guests)));
  else if (reply->still_mediated == 0)
    print_all(fmt::format("{}: direct where possible, from the next message on\n", guests(reply->guests)));
  else
    print_all(fmt::format("{}: still through the service, as \"vrdma direct mediated\" was said of {}\n", guests(reply->still_mediated),
                          options.guest != 0 ? "all guests" : "all guests of the service by its administrator"));
  return 0;
}

}  // namespace vrdma::cli
