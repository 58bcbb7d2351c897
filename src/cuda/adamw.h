// AdamW over flat arrays, and their norm, on a CUDA device. dtype.h says what holds for all such
// functions; arrays are 16-byte aligned.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/moment_codes.h"

namespace leeway::cuda {

// g <- scale * gradient;   m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
// p <- p * keep - step_size * m / (sqrt(v) * root + epsilon)
// `keep` is one for numbers from `decaying` on, a multiple of 8. All arrays are [count].
struct AdamWStep {
  int64_t count = 0, decaying = 0;
  // float32, or null: then they are split (split_float.h) into `copy` and `low`.
  float* parameters = nullptr;
  int16_t* low = nullptr;
  const float* gradients = nullptr;
  float *first_moment = nullptr, *second_moment = nullptr;
  void* copy = nullptr;  // bf16, receives the new parameters; may be null beside float32 ones
  float scale = 1.0f, keep = 1.0f, beta1 = 0.0f, beta2 = 0.0f;
  float step_size = 0.0f, root = 1.0f, epsilon = 0.0f;
};
void adamw_step(const AdamWStep& step, cudaStream_t stream);

// The same with moments as codes (moment_codes.h): the step itself is made with moments in float32,
// before they are stored. Arrays of codes are [count], of scales [moment_blocks(count)].
struct CodedMoments {
  int8_t* first_codes = nullptr;
  uint8_t* second_codes = nullptr;
  float *first_scales = nullptr, *second_scales = nullptr;
};
// step.first_moment and step.second_moment are not used.
void adamw_step(const AdamWStep& step, const CodedMoments& moments, cudaStream_t stream);
// Between codes and float32 [count], whole blocks from the first on.
void encode_moments(const float* first, const float* second, int64_t count,
                    const CodedMoments& moments, cudaStream_t stream);
void decode_moments(const CodedMoments& moments, int64_t count, float* first, float* second,
                    cudaStream_t stream);

// sums [square_sums(count)]: sums of squares of parts of x [count], in double.
int64_t square_sums(int64_t count);
void sum_squares(const float* x, int64_t count, double* sums, cudaStream_t stream);

}  // namespace leeway::cuda
