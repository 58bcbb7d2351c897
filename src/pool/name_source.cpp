#include "pool/name_source.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "leeway/error.h"

namespace leeway {

std::vector<std::string> resolve_by_system(const std::string& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(name.c_str(), nullptr, &hints, &found);
  if (problem != 0) throw Error(gai_strerror(problem));
  std::vector<std::string> addresses;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    char text[NI_MAXHOST] = "";
    if (getnameinfo(each->ai_addr, each->ai_addrlen, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    addresses.push_back(each->ai_family == AF_INET6 ? fmt::format("[{}]", text) : text);
  }
  freeaddrinfo(found);
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  return addresses;
}

// Shared with the thread that resolves.
struct NameServers::Lookup {
  std::mutex mutex;
  bool done = false;  // and the others, under the mutex
  std::vector<std::string> addresses;
  std::string failure;
};

NameServers::NameServers(std::string name, int64_t port, double interval, Resolve resolve)
    : name_(std::move(name)), port_(port), interval_(interval), resolve_(std::move(resolve)) {}

std::vector<ServerAddress> NameServers::servers(double now) {
  if (lookup_) take_answer();
  if (!lookup_ && now >= next_) {
    next_ = now + interval_;
    lookup_ = std::make_shared<Lookup>();
    std::thread([lookup = lookup_, resolve = resolve_, name = name_] {
      std::vector<std::string> addresses;
      std::string failure;
      try {
        addresses = resolve(name);
      } catch (const std::exception& error) {
        failure = error.what();
      }
      const std::lock_guard lock(lookup->mutex);
      lookup->addresses = std::move(addresses);
      lookup->failure = std::move(failure);
      lookup->done = true;
    }).detach();
  }
  return servers_;
}

void NameServers::take_answer() {
  const std::shared_ptr<Lookup> ended = lookup_;
  const std::lock_guard lock(ended->mutex);
  if (!ended->done) return;
  lookup_.reset();
  std::string failure = ended->failure;
  if (failure.empty() && ended->addresses.empty()) failure = "it has no address";
  if (!failure.empty()) {
    if (failure != last_failure_) {
      log_.push_back(
          fmt::format("inference.hostname = \"{}\" cannot be resolved: {}", name_, failure));
    }
    last_failure_ = failure;
    return;
  }
  last_failure_.clear();
  servers_.clear();
  for (const std::string& address : ended->addresses) {
    const std::string url = fmt::format("http://{}:{}", address, port_);
    servers_.push_back({url, url});
  }
}

}  // namespace leeway
