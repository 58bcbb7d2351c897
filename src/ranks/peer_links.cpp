#include "ranks/peer_links.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>

#include "ranks/ranks.h"

namespace leeway {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLongest = 1 << 20;   // bytes of a frame: beats, losses, departures
constexpr size_t kMostStrangers = 64;  // connections that have not said who they are
constexpr double kLeastTime = 20.0;    // seconds, at least, for all connections
constexpr int kAskedEvery = 50;        // milliseconds, whether all is lost

std::string greeting(const RanksOptions& options) {
  return FrameWriter().text(options.job).number(static_cast<uint64_t>(options.rank)).take();
}

}  // namespace

PeerLinks::PeerLinks(const RanksOptions& options, const RankMember& own)
    : options_(options), listener_(listen_at(own.address, 0)), port_(port_of(listener_)) {}

std::vector<FrameSocket> PeerLinks::connect(
    const std::vector<RankMember>& members, const std::vector<int>& ports,
    const std::function<std::string(double seconds)>& lost) {
  const double seconds = std::max(options_.link_timeout, kLeastTime);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  const auto unreached = [&](int r, const std::string& why) {
    return Error(fmt::format(
        "{} does not reach {} at {}: {}; LEEWAY_INTERFACE names the network interface to use",
        name_of(options_.rank, members[static_cast<size_t>(options_.rank)]),
        name_of(r, members[static_cast<size_t>(r)]), members[static_cast<size_t>(r)].address, why));
  };
  std::vector<FrameSocket> links(static_cast<size_t>(options_.size));
  for (int r = 1; r < options_.rank; ++r) {
    std::string problem = lost(0.0);
    if (!problem.empty()) throw Lost(problem);
    FrameSocket link(connect_to(members[static_cast<size_t>(r)].address,
                                ports[static_cast<size_t>(r)], seconds, problem),
                     kLongest);
    if (!link.open()) {
      // That a rank has ended is known to rank 0, now or soon.
      const std::string reason = lost(1.0);
      if (!reason.empty()) throw Lost(reason);
      throw unreached(r, problem);
    }
    link.queue({.kind = FrameKind::hello, .payload = greeting(options_)});
    link.flush();
    links[static_cast<size_t>(r)] = std::move(link);
  }
  std::vector<FrameSocket> strangers;
  int missing = options_.rank + 1;
  while (true) {
    while (missing < options_.size && links[static_cast<size_t>(missing)].open()) ++missing;
    if (missing >= options_.size) return links;
    const std::string reason = lost(0.0);
    if (!reason.empty()) throw Lost(reason);
    if (Clock::now() >= end)
      throw unreached(missing, fmt::format("nothing came for {:g} s", seconds));
    std::vector<pollfd> waiting = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const FrameSocket& stranger : strangers) {
      waiting.push_back({.fd = stranger.socket().get(), .events = POLLIN, .revents = 0});
    }
    ::poll(waiting.data(), waiting.size(), kAskedEvery);
    while (strangers.size() < kMostStrangers) {
      Descriptor socket = accept_from(listener_);
      if (!socket.open()) break;
      strangers.emplace_back(std::move(socket), kLongest);
    }
    for (FrameSocket& stranger : strangers) {
      const bool open = stranger.receive();
      if (const auto frame = stranger.next()) {
        FrameReader reader(frame->payload);
        const std::string job = reader.text();
        const uint64_t rank = reader.number();
        if (reader.complete() && frame->kind == FrameKind::hello && job == options_.job &&
            rank > static_cast<uint64_t>(options_.rank) &&
            rank < static_cast<uint64_t>(options_.size) && !links[rank].open()) {
          links[rank] = std::move(stranger);
        }
        stranger.close();
      }
      if (!open || stranger.garbage()) stranger.close();
    }
    std::erase_if(strangers, [](const FrameSocket& stranger) { return !stranger.open(); });
  }
}

}  // namespace leeway
