// Where a pool's servers come from: a list, a name that is resolved again and again, or processes
// that the run has started.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace leeway {

// A server by its URLs, "http://10.0.0.7:8000" without a path at the end.
struct ServerAddress {
  std::string url;    // of requests; also the server's name in messages
  std::string admin;  // of health, weights and pauses
  bool operator==(const ServerAddress&) const = default;
};

// Used by one thread.
class ServerSource {
 public:
  virtual ~ServerSource() = default;
  // The servers there are now. Returns at once; `now` is the pool's clock.
  virtual std::vector<ServerAddress> servers(double now) = 0;
  // Why a server that it listed is gone, in words that follow the server's name.
  virtual std::string why_gone(const std::string& /*url*/) const { return "is no longer listed"; }
  // What happened to the source itself since the last call, for the log.
  virtual std::vector<std::string> take_log() { return {}; }
  // Why there will be no server any more; empty: there may be.
  virtual std::string given_up() const { return ""; }
};

class StaticServers : public ServerSource {
 public:
  explicit StaticServers(std::vector<ServerAddress> servers) : servers_(std::move(servers)) {}
  std::vector<ServerAddress> servers(double) override { return servers_; }

 private:
  std::vector<ServerAddress> servers_;
};

}  // namespace leeway
