// Requests to a sampler and their results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/policy_version.h"

namespace leeway {

struct SamplingSettings {
  float temperature = 1.0f;  // 0: the most likely token, the first of equals
  int64_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  bool truncates() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  int64_t samples = 1;          // all from one prefill
  int64_t max_new_tokens = 16;
  SamplingSettings sampling;
  std::vector<int32_t> stop_ids;  // sampling one ends the sequence; it is part of it
  uint64_t seed = 0;
  int64_t top_logprobs = 0;  // most likely tokens to report at each place, 0 to kMostTopLogprobs
};

inline constexpr int64_t kMostTopLogprobs = 20;

// A token that could have been drawn, with its log-probability in the model's own distribution.
struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0.0f;
};

// How a sequence ended: with a stop id, at its token limit, by `cancel`, or by an error while it
// was sampled.
enum class Finish { stop, length, cancelled, failed };
const char* name_of(Finish finish);

// One sample of a request. The lists have one entry per sampled token.
struct SampledSequence {
  int64_t request = 0;  // what `submit` returned
  int64_t sample = 0;   // 0 .. samples-1
  Finish finish = Finish::stop;
  std::vector<int32_t> ids;
  std::vector<float> raw_logprobs;  // of the model's own distribution: what a trainer computes
  std::vector<float> processed_logprobs;  // of the distribution drawn from
  std::vector<PolicyVersion> versions;    // of the policy that sampled the token
  // For each token the same number of the most likely ones, largest first: as many as requested or
  // as the vocabulary has.
  std::vector<TokenLogprob> top;
  std::string failure;  // failed: the error's message
};

}  // namespace leeway
