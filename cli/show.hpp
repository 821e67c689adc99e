// `vrdma show` and `vrdma metrics`: what the service has, for people, for programs and for Prometheus.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>

namespace vrdma::cli {

struct ShowOptions {
  std::string object;  // one of show_objects; empty: the overview
  std::string socket;  // empty: where find_service() looks
  bool json = false;
};

constexpr const char* show_objects[] = {"devices", "guests", "qps", "cqs", "mrs", "srqs", "cm_ids", "routes", "hosts", "hca", "cache", "counters"};

// Exit code. Throw std::runtime_error with a message for a person where no service answers.
int show(const ShowOptions& options);
int metrics(const std::string& socket);

// The texts behind them, of a reply of the service, which may be of another version: what it does not say is left out. Here for the tests.
void sort_answer(nlohmann::json& state);  // the service answers in the order of its tables
std::string show_text(const nlohmann::json& state, const std::string& object);
nlohmann::json show_json(const nlohmann::json& state, const std::string& object);
std::string metrics_text(const nlohmann::json& state);

}  // namespace vrdma::cli
