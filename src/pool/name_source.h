// The servers behind a host name: it is resolved again each sync_interval, on a thread of its own,
// so that the polling thread does not wait for a name server that does not answer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pool/server_source.h"

namespace leeway {

// The addresses of a name as text, "10.0.0.7" or "[fd00::7]", sorted, each once. Throws Error.
using Resolve = std::function<std::vector<std::string>(const std::string& name)>;
std::vector<std::string> resolve_by_system(const std::string& name);

class NameServers : public ServerSource {
 public:
  // `resolve` is called on another thread, which may outlive this object.
  NameServers(std::string name, int64_t port, double interval, Resolve resolve = resolve_by_system);

  // Those of the last answer. A name that cannot be resolved changes nothing: the servers that are
  // known are asked for their health anyway.
  std::vector<ServerAddress> servers(double now) override;
  std::vector<std::string> take_log() override { return std::exchange(log_, {}); }

 private:
  struct Lookup;
  void take_answer();

  std::string name_;
  int64_t port_;
  double interval_;
  Resolve resolve_;
  double next_ = 0.0;
  std::shared_ptr<Lookup> lookup_;  // null: none is going on
  std::vector<ServerAddress> servers_;
  std::string last_failure_;
  std::vector<std::string> log_;
};

}  // namespace leeway
