// What is asked of the engine, what it gives back, and which requests it can take.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sampler.h"

namespace leeway {

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  int64_t samples = 1;          // all from one prefill
  int64_t max_new_tokens = 16;
  SamplingSettings sampling;
  std::vector<int32_t> stop_ids;  // sampling one ends the sample; it is part of it
  uint64_t seed = 0;
};

enum class Finish { stop, length, cancelled };
const char* name_of(Finish finish);

struct FinishedSample {
  int64_t request = 0;  // what `submit` returned
  int64_t sample = 0;   // 0 .. samples-1
  Finish finish = Finish::stop;
  std::vector<int32_t> ids;
  std::vector<float> raw_logprobs;  // of the model's own distribution: what a trainer computes
  std::vector<float> processed_logprobs;  // of the distribution drawn from
  std::vector<int64_t> versions;          // policy version of each token
};

// Blocks that a request holds from its admission on. The last token of a sample is never fed back
// and needs no place.
struct BlockNeed {
  int64_t shared = 0;  // by all samples: those that the prompt fills
  int64_t own = 0;     // of each sample
  int64_t of(int64_t samples) const { return shared + samples * own; }
};
BlockNeed block_need(const Request& request);

struct RequestLimits {
  int64_t vocabulary = 0;
  int64_t positions = 0;  // max_position_embeddings
  int64_t sequences = 0;  // max_sequences
  int64_t blocks = 0;     // in all
  int64_t block_bytes = 0;
};
// Throws Error naming the member, its value and the limit.
void check_request(const Request& request, const RequestLimits& limits);

}  // namespace leeway
