// Requests to an etcd, by the JSON gateway of its API v3, over HTTP or HTTPS. One connection a request: there are a few a second.
//
// Used by the thread of the io_context.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ssl/context.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/settings.hpp"

namespace vrdma::hosts {

// nullptr: no answer, `why` says. Called later than post(), and exactly once while the client is there.
using EtcdAnswer = std::function<void(const nlohmann::json* reply, const std::string& why)>;

class EtcdCalls {
 public:
  virtual ~EtcdCalls() = default;
  virtual void post(const std::string& path, const nlohmann::json& body, EtcdAnswer answer) = 0;
};

class EtcdClient final : public EtcdCalls {
 public:
  // Throws std::runtime_error with a message for a person where a file is no good.
  EtcdClient(boost::asio::io_context& io, const EtcdSettings& settings, std::uint64_t patience_ms);
  void post(const std::string& path, const nlohmann::json& body, EtcdAnswer answer) override;

 private:
  boost::asio::io_context& io_;
  boost::asio::ssl::context tls_{boost::asio::ssl::context::tls_client};
  std::vector<EtcdEndpoint> endpoints_;
  std::size_t next_ = 0;  // the one that answered last
  const std::uint64_t patience_ms_;
};

}  // namespace vrdma::hosts
