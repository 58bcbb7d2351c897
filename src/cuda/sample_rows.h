// Draws tokens from rows of logits on a CUDA device, with their logprobs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"

namespace leeway::cuda {

// The result of one draw. `failed` is not 0 if the row is not a distribution (NaN, plus infinity,
// no finite logit, or a largest logit that overflows at the draw's temperature); the rest is then
// 0.
struct SampledRow {
  int32_t id = 0;
  float raw_logprob = 0.0f;        // of softmax(logits)
  float processed_logprob = 0.0f;  // under the distribution drawn from; 0 if the draw was certain
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

// For each draw, the first id in id order at which the cumulative weight exp((z - largest) /
// temperature) exceeds uniform times the total. Weights are float32; they are summed within
// segments of ids in float32, and over segments in float64, always in the same order. One thread
// block per draw.
void sample_rows(Dtype dtype, const SampleRows& batch, cudaStream_t stream);

}  // namespace leeway::cuda
