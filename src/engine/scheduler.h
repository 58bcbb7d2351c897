// Who runs next: the queue, the admitted requests, their blocks and how far each sample has come.
// Knows no model: it lays out the rows of a pass and takes the tokens drawn from it.
//
// A prompt is computed once, in the blocks of one sample, the leader. The blocks it fills belong to
// all samples of the request; of the block it fills in part each sample has its own, copied from
// the leader's when the prompt is done.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/block_pool.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "kernels/attention.h"

namespace leeway {

struct ScheduledSample {
  Rng rng{0};
  SampledSequence result;  // the tokens so far
  std::vector<int32_t> blocks;
  int64_t stored = 0;  // positions whose keys and values are there
  bool live = true;
};

struct ScheduledRequest {
  int64_t id = 0;
  Request request;
  std::vector<ScheduledSample> samples;
  int64_t live = 0;  // samples
  size_t leader = 0;
  bool prompt_done = false;
  bool failed = false;
};

// A token to draw.
struct Draw {
  ScheduledRequest* request = nullptr;
  ScheduledSample* sample = nullptr;
  int64_t logits = 0;  // index into StepRows::logit_rows
};
// What came of it; `failure` says why there is no token.
struct Drawn {
  SampledToken token;
  std::string failure;
  std::vector<TokenLogprob> top;  // as the request asks for
};

// The rows of one pass through the decoder.
struct StepRows {
  std::vector<int32_t> tokens;
  std::vector<SequenceRows> sequences;
  std::vector<int32_t> logit_rows;
  std::vector<Draw> draws;  // the first tokens of a request's samples share their logits
  int64_t prompt_rows = 0;
  int64_t decode_rows = 0;
};

struct BlockCopy {
  int32_t from, to;
};

class Scheduler {
 public:
  Scheduler(int64_t blocks, int64_t max_sequences, int64_t max_rows);

  // The request must be one that fits (check_request).
  void enqueue(int64_t id, Request request);
  // Ends what is left of a request; unknown: nothing. Samples that ended are appended to `ended`,
  // here and below.
  void cancel(int64_t id, std::vector<SampledSequence>& ended);
  // Ends one sample alone. False if it is not running: unknown, waiting or ended.
  bool cancel_sample(int64_t id, int64_t sample, std::vector<SampledSequence>& ended);
  // The running sample, or null.
  const ScheduledSample* find_running(int64_t id, int64_t sample) const;
  // Forgets all keys and values: every running sample is computed again, its tokens stay.
  void restart();
  // Takes requests from the queue, in order, as long as the next one finds a place for each sample
  // and every block it can ever need.
  void admit();

  // Decode rows first, then prompts (and tokens computed again), in order of admission, up to the
  // limit of rows. Valid until the next call; empty when nothing runs.
  const StepRows& plan();
  // The planned pass has run. `drawn` belongs to its draws. A request with a failure is ended whole
  // as cancelled, without the tokens of this pass. Returns copies to be made before the next pass.
  std::span<const BlockCopy> commit(std::span<const Drawn> drawn, PolicyVersion version,
                                    std::vector<SampledSequence>& ended);

  int64_t running() const { return running_; }  // samples
  int64_t queued() const { return queued_; }    // samples
  const BlockPool& pool() const { return pool_; }

 private:
  struct Waiting {
    int64_t id;
    Request request;
  };
  // One sequence of the pass.
  struct Advance {
    ScheduledRequest* request;
    ScheduledSample* sample;
    int64_t rows;
  };

  void add_rows(ScheduledRequest& request, ScheduledSample& sample, int64_t rows);
  void accept(const Draw& draw, const Drawn& drawn, PolicyVersion version,
              std::vector<SampledSequence>& ended);
  void fork(ScheduledRequest& request);
  static void choose_leader(ScheduledRequest& request);
  void end_sample(ScheduledRequest& request, ScheduledSample& sample, Finish finish,
                  std::vector<SampledSequence>& ended);
  void end_request(ScheduledRequest& request, std::vector<SampledSequence>& ended);
  void sweep();

  BlockPool pool_;
  int64_t max_sequences_, max_rows_;
  std::deque<Waiting> queue_;
  std::vector<std::unique_ptr<ScheduledRequest>> requests_;  // in order of admission
  int64_t running_ = 0, queued_ = 0;
  bool to_sweep_ = false;

  StepRows pass_;
  std::vector<Advance> advances_;  // [pass_.sequences]
  std::vector<BlockCopy> copies_;
};

}  // namespace leeway
