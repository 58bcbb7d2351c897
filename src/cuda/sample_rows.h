// Tokens drawn from rows of logits on a CUDA device, with their log-probabilities.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/number.h"

namespace leeway::cuda {

// One draw's result. `failed` is not 0 where the row is no distribution (NaN, plus infinity, no
// finite logit, or a largest logit that overflows at the draw's temperature); the rest is 0 then.
struct SampledRow {
  int32_t id = 0;
  float raw_logprob = 0.0f;        // of softmax(logits)
  float processed_logprob = 0.0f;  // of the distribution drawn from; 0 where the draw was certain
  int32_t failed = 0;
};

struct SampleRows {
  const void* logits = nullptr;  // [any, vocabulary]
  int64_t vocabulary = 0;
  int64_t draws = 0;
  const int32_t* rows = nullptr;  // [draws], into logits; may repeat
  // [draws]; 0: the largest logit, the first of equals.
  const float* inverse_temperatures = nullptr;
  const double* uniforms = nullptr;  // [draws], in [0, 1)
  SampledRow* sampled = nullptr;     // [draws]
};

// For each draw the first id, in order of ids, up to which the weights exp((z - largest) /
// temperature) exceed uniform times their total. Weights are float32; they are summed by segments
// of ids in float32, segments and running sums in float64, always in the same order. One block of
// threads for a draw.
void sample_rows(Number number, const SampleRows& batch, cudaStream_t stream);

}  // namespace leeway::cuda
