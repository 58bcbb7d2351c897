// What samples for a run on ranks other than 0: an engine that rank 0 drives by messages
// (sampling_messages.h).
//
// Two threads. One receives, so that messages never wait for the engine; the other runs the engine,
// looks at what came between two passes, and sleeps while there is neither a message nor work.
// Sequences are sent as they end, those of a pass in one message.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "model/parameters.h"
#include "model/policy_snapshot.h"
#include "ranks/ranks.h"
#include "run/numbered_engine.h"
#include "run/sampling_messages.h"

namespace leeway {

struct SamplingWorkerOptions {
  EngineOptions engine;
  // Weights of a version that this rank has made itself, for orders that have the version alone.
  // May wait for them, which rank 0 may have a little earlier; null if they will not come, also
  // because a rank is lost. Called by the engine's thread. Empty: this rank makes none.
  std::function<std::shared_ptr<const PolicySnapshot>(PolicyVersion)> snapshot;
};

// An engine is there from rank 0's `begin` to its `end`, once or several times. Whatever fails, a
// message that cannot be read included, is told to rank 0, whose sampler throws it.
class SamplingWorker {
 public:
  // `like` has the shape of the weights that are sent, and the base of an adapter. Both must
  // outlive this. Throws Error if no thread can be started.
  SamplingWorker(Ranks& ranks, const Parameters& like, SamplingWorkerOptions options);
  // Waits until rank 0 has said that workers leave (end_sampling in ranks_sampler.h), or until a
  // rank is lost: `Ranks::abort` ends the wait as well.
  ~SamplingWorker();
  SamplingWorker(const SamplingWorker&) = delete;
  SamplingWorker& operator=(const SamplingWorker&) = delete;

 private:
  void receive();
  void serve();
  bool wait(std::vector<std::string>& messages);
  void obey(const std::string& message);
  void obey(SamplingOrder order, ByteReader& from);
  std::shared_ptr<const PolicySnapshot> weights(ByteReader& from) const;
  void work();
  void attempt(const std::function<void()>& work);
  void send(const std::string& message);

  Ranks& ranks_;
  const Parameters& like_;
  const SamplingWorkerOptions options_;

  // Of the engine's thread.
  std::unique_ptr<NumberedEngine> engine_;
  bool failed_ = false;  // orders have no effect until `end`

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> messages_;  // under the mutex
  bool over_ = false;                  // under the mutex: told to leave, or lost
  std::thread receiver_, worker_;
};

}  // namespace leeway
