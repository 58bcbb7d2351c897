// Kernels over rows of logits, and the rows of hidden states that go with them. One launch handles
// the rows of a chunk.
//
// N tokens, R rows (tokens that are computed), H hidden, V vocabulary.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/loss.h"

namespace leeway::cuda {

// Rows first .. first + count of the list of rows. Row k of the list is token rows[k] (k itself
// without a list). Values per token are [N].
struct RowChunk {
  int64_t first = 0, count = 0;
  const int64_t* rows = nullptr;
  const int64_t* targets = nullptr;
  const float* temperature = nullptr;  // [1] or [N]; null: 1
  bool temperature_per_token = false;
  // Exact logits of the targets, which replace the rounded ones; null if logits are float32. The
  // rounding of a target's logit affects its logprob, and so g, in full; errors of the other logits
  // average out.
  float* target_logits = nullptr;
  float* logprobs = nullptr;    // may be null with a given gradient
  float* entropy = nullptr;     // may be null
  float* log_sums = nullptr;    // log2 of the sum of exponentials; may be null
  bool log_sums_known = false;  // log sums and entropies are available from a forward pass
};

struct LogitRows {
  void* data = nullptr;  // [count, stride]
  int64_t stride = 0;    // elements; a multiple of 64
  int64_t vocabulary = 0;
  Dtype type = Dtype::bf16;
};

// The longest row that fits in the shared memory of a cluster.
int64_t most_vocabulary(Dtype type);

// Logprobs of the targets, entropies, log sums. Reads each logit once.
void forward_rows(const LogitRows& logits, const RowChunk& chunk, cudaStream_t stream);

// The same, and replaces the logits by their gradient, g (onehot - softmax) / temperature, with g
// of the plan (token level) from the row's own logprob. The gradient's type is `gradient`; its rows
// start where those of the logits did. `g` [N] receives g. Each logit is read once.
void loss_rows(const LogitRows& logits, const RowChunk& chunk, Dtype gradient, const LossPlan& plan,
               const LossBatch& batch, const LossWorkspace& work, float* g, cudaStream_t stream);

// The gradient from given g [N] and g_entropy [N] (may be null).
void gradient_rows(const LogitRows& logits, const RowChunk& chunk, Dtype gradient, const float* g,
                   const float* g_entropy, cudaStream_t stream);

// Gathers the hidden states of a chunk's rows: to [padded, H], zeros beyond `count`.
void gather_rows(const void* hidden, int64_t hidden_stride, int64_t hidden_size, Dtype type,
                 const RowChunk& chunk, int64_t padded, void* to, cudaStream_t stream);
// target_logits, in float32, from a chunk's gathered hidden states and the weight [V, H]; NaN for a
// target outside the vocabulary.
void find_target_logits(const void* gathered, const void* weight, int64_t hidden_size,
                        int64_t vocabulary, Dtype type, const RowChunk& chunk, cudaStream_t stream);
// Zeroes the rows whose g and g_entropy are both zero, so that their contents have no effect.
void clear_rows(void* gathered, int64_t hidden_size, Dtype type, const RowChunk& chunk,
                const float* g, const float* g_entropy, cudaStream_t stream);
// Scatters rows back to their tokens: to [N, H].
void scatter_rows(const void* from, int64_t hidden_size, Dtype type, const RowChunk& chunk,
                  void* to, cudaStream_t stream);

// Marks logprobs as not computed (NaN), and later replaces remaining marks by zero. A marked token
// that takes part in a loss makes it NaN.
void mark_not_computed(float* logprobs, int64_t tokens, cudaStream_t stream);
void clear_not_computed(float* logprobs, int64_t tokens, cudaStream_t stream);

// Multiplies numbers [count] by factor [1], unless that is one.
void scale_in_place(void* numbers, int64_t count, Dtype type, const float* factor,
                    cudaStream_t stream);

}  // namespace leeway::cuda
