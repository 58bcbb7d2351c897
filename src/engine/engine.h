// The sampling engine: requests in, tokens out, many at a time.
//
// Invariants:
// - Every submitted sample ends in exactly one SampledSequence: stop, length or cancelled.
// - A request is admitted when blocks for all its samples at full length are free; it then never
//   waits for memory again, so that nothing is evicted and nothing deadlocks. Admission is in order
//   of submission.
// - A token's draw depends on the request's seed, its sample number, its place in the sample and
//   the logits; with the native decoder's bitwise guarantees this means: same seed, same tokens,
//   whatever else is in the batch. (A GPU's logits depend in their last bits on the batch.)
// - Each token carries the policy version whose weights gave its logits.
//
// Threads: one thread calls `step`, `take_pending`, `recompute`, `sampled`, `running` and
// `cancel_sample`; everything else may be called from any thread at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "config/settings.h"
#include "engine/backend.h"
#include "engine/request.h"
#include "kernels/matmul.h"
#include "model/frozen_weights.h"
#include "model/policy_snapshot.h"

namespace leeway {

struct EngineOptions {
  Precision precision = Precision::float32;
  int threads = 0;                      // 0: one per core
  int64_t kv_bytes = int64_t{1} << 30;  // memory for the KV cache
  int64_t max_rows_per_step = 512;      // prompt and decode rows of one pass
  int64_t max_sequences = 256;          // samples running at a time
  KvAfterSwap kv_after_swap = KvAfterSwap::keep;
  FrozenWeights frozen = FrozenWeights::packed;  // other devices: own memory, or the base's
  MakeSamplingBackend backend;  // empty: the CPU's, which alone follows `precision`
};

// What one step did.
struct StepReport {
  int64_t prompt_rows = 0;  // prefilled
  int64_t decode_rows = 0;
  int64_t sampled = 0;  // tokens
  int64_t running = 0;  // samples after the step
  int64_t queued = 0;   // samples waiting for memory or a place
  int64_t free_blocks = 0;
  PolicyVersion version = 0;
  double load_seconds = 0.0;  // that new weights have taken since the step before
};

class Engine {
 public:
  // Throws Error for options out of range. At most as many blocks are made as max_sequences of the
  // model's greatest length can use.
  Engine(const PolicySnapshot& weights, const EngineOptions& options);
  Engine(const Parameters& weights, PolicyVersion version, const EngineOptions& options);
  ~Engine();

  // Returns the request's number. Throws Error for a prompt that is empty or does not fit the model
  // with its new tokens (max_position_embeddings), for ids outside the vocabulary, for more samples
  // than max_sequences, for settings out of range, and for a request that would not fit the memory
  // even alone.
  int64_t submit(Request request);
  // Throws as `submit` does for a request that it would refuse.
  void check(const Request& request) const;
  // Its unfinished samples end as cancelled with the tokens they have. Unknown or finished: false.
  bool cancel(int64_t request);
  // The next step samples with these weights. Weights of another config are refused (Error). A
  // second call before that step replaces the first.
  void update_weights(std::shared_ptr<const PolicySnapshot> weights);

  // Takes pending cancellations and weights, admits, runs one pass, samples. Does nothing when
  // idle. Throws Error naming a request whose logits are no distribution (weights that are or lead
  // to NaN or infinity): its unfinished samples end as cancelled, without a token of this step; all
  // others have their token, and the next step goes on with them.
  StepReport step();
  // Takes pending submissions, cancellations and weights as a step does, and runs no pass. By the
  // thread that steps.
  void take_pending();
  // Forgets the keys and values of all running samples, as weights do with KvAfterSwap::recompute:
  // the next passes compute them again, the tokens stay. By the thread that steps.
  void recompute();
  // The tokens that a running sample has so far; empty if it waits, has ended or is unknown. By the
  // thread that steps; valid until its next call.
  std::span<const int32_t> sampled(int64_t request, int64_t sample) const;
  // The same with the log-probabilities and versions, and with `finish` not yet decided; null where
  // that is empty.
  const SampledSequence* running(int64_t request, int64_t sample) const;
  // Ends one running sample as cancelled and leaves the request's others; false if it does not run.
  // By the thread that steps.
  bool cancel_sample(int64_t request, int64_t sample);
  // Samples that ended since the last call, in the order they ended.
  std::vector<SampledSequence> take_finished();
  bool idle() const;       // nothing running, queued or pending
  int64_t blocks() const;  // of the key/value store, each of kBlockKeys positions

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
