// The engine on a thread of its own: others give it requests and commands, and get tokens back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "text/tokenizer.h"

namespace leeway {

// One request to the engine.
struct EngineJob {
  int64_t id = 0;  // chosen by the caller, never used twice
  Request request;
  bool streams = false;                 // tokens are reported while they are sampled
  std::vector<std::string> stop_texts;  // end a sample as `stop`, with the token that completes one
};

// What happened to one sample of a job.
struct EngineUpdate {
  int64_t job = 0;
  // Of a sample that runs: the tokens since the last update, as far as the job streams. Of one that
  // has ended: all of it. `sample` is its number in the job.
  SampledSequence sequence;
  bool ended = false;
};

// What there is to see of the engine, after a step or a command.
struct EngineStatus {
  int64_t running = 0,
          queued = 0;  // samples; queued: those that wait for memory, a place or a resume
  int64_t blocks = 0, free_blocks = 0;
  uint64_t prompt_tokens = 0, sampled_tokens = 0;  // since the start
  uint64_t steps = 0;
  double step_seconds = 0;  // in all
  PolicyVersion version = 0;
  bool paused = false;  // also while `wait` lets the last ones finish
  std::string failure;  // why the engine is dead; empty: it lives
};

// How running samples and those to come are treated until `resume`. keep: they stay as they are;
// recompute: they stay, and their keys and values are computed again with the weights there are
// then; abort: they end with what they have; wait: they are finished first. New ones wait in each
// case.
enum class PauseMode { keep, recompute, abort, wait };

class EngineThread {
 public:
  // Called on the engine's thread, once per step with all that happened in it.
  using Report = std::function<void(std::vector<EngineUpdate> updates, const EngineStatus& status)>;
  using Done = std::function<void(const std::string& failure)>;  // empty: done; on that thread too

  // `tokenizer` is for stop texts and may be null without them; it must outlive the thread. Throws
  // Error as the engine does.
  EngineThread(std::shared_ptr<const PolicySnapshot> weights, const EngineOptions& options,
               const Tokenizer* tokenizer, Report report);
  // Ends after the step that runs; what is unfinished is forgotten.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // All of these from any thread.

  // Throws Error for a request that the engine would refuse, and takes nothing then.
  void submit(EngineJob job);
  void cancel(int64_t job);  // its samples end as cancelled with what they have; unknown: nothing
  void cancel_all();
  // `done` when no step runs any more: for `wait`, when the last sample has ended.
  void pause(PauseMode mode, Done done);
  void resume(Done done);
  // Between two steps. `done` gets a message if they are of another network; the old ones stay.
  void update_weights(std::shared_ptr<const PolicySnapshot> weights, Done done);
  void post(std::function<void()> function);  // on the engine's thread, in order

  const Engine& engine() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
