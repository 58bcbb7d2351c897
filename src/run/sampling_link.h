// Rank 0's end of Channel::sampling: orders to the sampling workers of the other ranks, and what
// they report (sampling_messages.h). It knows nothing of who should sample what.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "data/sampling.h"
#include "ranks/ranks.h"

namespace leeway {

// Used by one thread; a thread for each other rank receives. What a worker or a thread of the link
// meets is thrown by every call that follows: Lost, or Error with the rank's number.
class SamplingLink {
 public:
  // Workers make their engines with `begin`, an order's message; all other ranks must have a
  // worker. `ranks` must outlive this.
  SamplingLink(Ranks& ranks, const std::string& begin);
  // Ends the engines and waits for their last words, so that the next link finds nothing of this
  // one.
  ~SamplingLink();
  SamplingLink(const SamplingLink&) = delete;
  SamplingLink& operator=(const SamplingLink&) = delete;

  // Where orders for a rank (> 0) are put; `flush` sends them, those of a rank in one message.
  ByteWriter& orders(int rank) { return peers_[static_cast<size_t>(rank)].orders; }
  void flush();
  // The same message to all, after what was put before.
  void send_all(const std::string& message);

  struct Results {
    int rank;
    std::vector<SampledSequence> sequences;
  };
  // Reports since the last call; waits for one until `deadline` if there is none.
  std::vector<Results> take(std::chrono::steady_clock::time_point deadline);
  void check() const;

 private:
  struct Peer {
    ByteWriter orders;
    std::thread receiver;
  };
  void receive(int rank);
  bool read(int rank, const std::string& message);
  void fail(std::exception_ptr failure);
  void close();

  Ranks& ranks_;
  std::vector<Peer> peers_;  // by rank; the first is not used
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Under the mutex.
  std::vector<Results> results_;
  std::exception_ptr failure_;  // the first
};

}  // namespace leeway
