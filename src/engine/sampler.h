// Turns a row of logits into a token.
//
// The order of the filters is that of transformers: temperature, then top-k, then top-p, then
// min-p. (vLLM applies min-p first, so its top-p refers to the mass that min-p leaves.) In detail:
// - top-k keeps the k largest logits; ties at the k-th place are all kept.
// - top-p keeps the most likely tokens, one by one, until their share of what top-k has left
// reaches
//   top_p; reaching it exactly is enough. Among equal logits the lower id comes first.
// - min-p keeps tokens that are at least min_p times as likely as the most likely one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "data/sampling.h"

namespace leeway {

// Throws Error naming the setting and its value.
void check_sampling(const SamplingSettings& settings);

// The random stream of one sample of a request: the n-th number is for its n-th token. It depends
// on nothing else, so sample i of a request is the same however many samples were requested.
Rng sample_stream(uint64_t seed, int64_t sample);

// One sampled token. The two log-probabilities belong to two distributions:
// - `raw_logprob`: softmax of the logits as the model gives them (temperature 1, no filter). This
//   is what a trainer computes.
// - `processed_logprob`: the distribution the token was really drawn from, after temperature and
//   filters. At temperature 0 it is 0: the draw was certain.
struct SampledToken {
  int32_t id = 0;
  float raw_logprob = 0.0f;
  float processed_logprob = 0.0f;
};

// The `count` largest logits, or all of them, in falling order, the lower id first among equals,
// with their log-probabilities before temperature and filters: those of a token that is drawn have
// the bits of its raw_logprob. The logits must be a distribution.
void most_likely(std::span<const float> logits, int64_t count, std::vector<TokenLogprob>& top);

// Reusable buffers; one per thread.
class TokenSampler {
 public:
  // `logits` [V]. Draws one uniform number from `rng` per call, whatever the settings, so that the
  // n-th token of a request uses the n-th number. Without filters, processed_logprob has the bits
  // of kernels' row_softmax at this temperature. A logit of minus infinity is never drawn. Throws
  // Error for NaN, plus infinity, and a row without a finite logit.
  SampledToken sample(std::span<const float> logits, const SamplingSettings& settings, Rng& rng);

 private:
  // Kept tokens are a prefix of the order "larger logits first, lower ids first among equals", up
  // to and including this position.
  struct Cut {
    float logit;
    int64_t id;
  };
  float kth_largest(std::span<const float> logits, int64_t k);
  Cut nucleus(std::span<const float> logits, float least, float inverse, float shift, float top_p);
  void filter(std::span<const float> logits, const SamplingSettings& settings, int64_t largest);
  int64_t draw(double uniform);

  std::vector<float> weights_;  // [V], relative to the most likely token; 0: filtered out
  std::vector<float> sums_;     // of runs of weights_
  double total_ = 0.0;          // of sums_
  std::vector<float> largest_;
  std::vector<double> bins_;
  std::vector<int32_t> order_;
};

}  // namespace leeway
