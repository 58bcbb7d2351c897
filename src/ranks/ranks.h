// Processes that train one policy together.
//
// Rank 0 leads: it has the run, its folder, the scheduler and the environments, and tells the
// others what to compute by messages. Large numbers, gradients and weights, move by collectives.
// Both have one fixed order, so that what they give has the same bits whatever the library, the
// network and the time.
//
// A rank that is lost ends the group: every call that waits throws Lost on all other ranks, within
// seconds for a process that ended and within `RanksOptions::link_timeout` for a link that was cut.
//
// Threads: collectives are called by one thread at a time, in the same order on all ranks; for each
// peer and channel one thread sends and one receives; all of these may run at once.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "leeway/error.h"

namespace leeway {

// A rank is gone or does not answer; the message names it, its host and the reason.
class Lost : public Error {
 public:
  using Error::Error;
};

// Messages of different channels do not wait for each other.
enum class Channel { training, sampling, saving, devices };
inline constexpr int kChannels = 4;

class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collectives. `bounds` [size + 1] cuts `whole` into a part per rank: rank r has
  // whole[bounds[r] .. bounds[r + 1]); the same on all ranks.
  virtual void broadcast(std::span<std::byte> data, int from) = 0;
  // What each rank brings, by rank; the lengths may differ.
  virtual std::vector<std::string> all_gather(const std::string& own) = 0;
  // Fills the parts of the other ranks in.
  virtual void all_gather(std::span<float> whole, std::span<const size_t> bounds) = 0;
  // `part` becomes the sum of this rank's part over all ranks, added in a binary tree in the order
  // of ranks: (0 + 1) + (2 + 3). A rank with nothing to add passes an empty `whole`: it is left out
  // of the tree. False if no rank has anything, `part` is unchanged then.
  virtual bool reduce_scatter(std::span<const float> whole, std::span<const size_t> bounds,
                              std::span<float> part) = 0;
  virtual void barrier() = 0;

  // Messages, in order per peer and channel. `send` may return before it has arrived.
  virtual void send(int to, Channel channel, const std::string& message) = 0;
  virtual std::string receive(int from, Channel channel) = 0;

  // Ends the group: all calls that wait, here and on other ranks, throw Lost with this reason.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace leeway
