#include "cli/show.hpp"

#include "cli/output.hpp"
#include "cli/query.hpp"

namespace vrdma::cli {

namespace {

using nlohmann::json;

json state_of(const std::string& socket) {
  auto service = find_service_to_show(socket);
  if (!service) throw unreachable(socket);
  json state = query(*service);
  sort_answer(state);
  return state;
}

}  // namespace

int show(const ShowOptions& options) {
  const json state = state_of(options.socket);
  const std::string text = options.json ? json_text(show_json(state, options.object)) : show_text(state, options.object);
  print_all(text);
  if (!knows_user(state)) tell("vrdma: the service cannot tell this user from others, as its user namespace maps neither: guests and what is theirs are not shown\n");
  return 0;
}

int metrics(const std::string& socket) {
  print_all(metrics_text(state_of(socket)));
  return 0;
}

}  // namespace vrdma::cli
