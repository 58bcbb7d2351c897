// Draws tokens from rows of logits on a CUDA device, with their logprobs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"

namespace leeway::cuda {

// The result of one draw. `failed` is not 0 if the row is not a distribution (NaN, plus infinity,
// no finite logit, or a largest logit that overflows at the draw's temperature); the rest is then
// 0.
struct alignas(16) SampledRow {
  int32_t id = 0;
  float raw_logprob = 0.0f;        // of softmax(logits)
  float processed_logprob = 0.0f;  // under the distribution drawn from; 0 if the draw was certain
  int32_t failed = 0;
};

struct SampleRows {
  const float* logits = nullptr;  // [any, vocabulary], rows `stride` apart
  int64_t vocabulary = 0, stride = 0;
  int64_t draws = 0;
  const int32_t* rows = nullptr;  // [draws], into logits and hidden; may repeat
  // [draws]; 0: the largest logit, the first of equals.
  const float* inverse_temperatures = nullptr;
  const double* uniforms = nullptr;  // [draws], in [0, 1)
  // What the logits are the product of, in bf16: [any, hidden_size], [vocabulary, hidden_size].
  // Null: logprobs are those of the float32 logits. Else they are, bit for bit, those that
  // head_logprobs gives a row with this hidden state, target and temperature, provided that the
  // logits are the sums which that product rounds to bf16.
  const void *hidden = nullptr, *weight = nullptr;
  int64_t hidden_size = 0;
  void* workspace = nullptr;
  // [draws]; in device memory, or in the host's where the device maps it. Each is written once.
  SampledRow* sampled = nullptr;
};

// Bytes of `workspace`; it is aligned to 16.
int64_t sample_workspace_bytes(int64_t vocabulary, int64_t draws);

// For each draw, the first id in id order at which the cumulative weight exp((z - largest) /
// temperature) exceeds uniform times the total. Weights are float32; they are summed within
// segments of ids in float32, and over segments in float64, always in the same order. Each logit is
// read once, and a few of them a second time.
void sample_rows(const SampleRows& batch, cudaStream_t stream);

}  // namespace leeway::cuda
