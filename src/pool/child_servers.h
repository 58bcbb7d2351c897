// `leeway serve` processes on this machine as servers. They listen on free ports, want a key that
// only this process has, and die with it. One that ends is started again, a bounded number of
// times.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pool/server_source.h"

namespace leeway {

struct ChildServersOptions {
  int64_t count = 1;
  std::string model;         // a folder; what they start with
  std::string weights_root;  // below which they take weights
  std::string log_folder;    // their stderr: server_1.log, ..
  std::vector<std::string> options;
  std::string program = "/proc/self/exe";
  int64_t most_restarts = 3;  // of each
};

// Used by one thread, which must outlive the children: they die when it ends.
class ChildServers : public ServerSource {
 public:
  // Starts them. Throws Error if a process or its log cannot be made.
  explicit ChildServers(ChildServersOptions options);
  // Ends them: SIGTERM, and SIGKILL for those that have not ended after a moment.
  ~ChildServers() override;

  const std::string& key() const { return key_; }
  // Those that listen.
  std::vector<ServerAddress> servers(double now) override;
  std::string why_gone(const std::string& url) const override;
  std::vector<std::string> take_log() override { return std::exchange(log_, {}); }
  std::string given_up() const override;
  std::vector<pid_t> processes() const;  // that run

 private:
  struct Child {
    int64_t number = 0;
    pid_t pid = -1;   // -1: none runs
    std::string url;  // empty: does not listen yet
    size_t read = 0;  // bytes of its log
    int64_t starts = 0;
    double restart_at = 0.0;
    double started = 0.0;
    std::string end;  // how the last process ended
  };
  std::string log_of(const Child& child) const;
  void start(Child& child, double now);
  void look(Child& child, double now);

  ChildServersOptions options_;
  std::string key_;
  std::vector<Child> children_;
  std::map<std::string, std::string> ends_;  // of processes that listened, by URL
  std::vector<std::string> log_;
};

}  // namespace leeway
