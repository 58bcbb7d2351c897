// The policy head on a CUDA device: hidden states to loss and gradients without a
// [tokens, vocabulary] tensor. Torch-free: pointers are to device memory, matrix products go
// through the caller's cuBLAS handle, everything is queued on one stream and nothing waits for it.
//
//   for each chunk of rows:  Z = h W^T;  log p, entropy;  g from the plan;
//                            Z <- g (onehot - softmax(Z)) in place;  dh = Z W;  dW += Z^T h
//
// N tokens, R rows (tokens that are computed), H hidden, V vocabulary.
// Rows not listed are not touched: log-probability 0, entropy 0, gradient 0. Rows whose g is zero
// give exactly zero gradient, whatever their hidden states hold.
//
// The same call gives the same bits on the same device. With `invariant` a row's log-probability
// also does not depend on which other rows are computed with it: products have one shape, padded.
#pragma once

#include <cublas_v2.h>

#include <cstdint>

#include "cuda/head_rows.h"
#include "cuda/loss.h"

namespace leeway::cuda {

class Products;

struct HeadOptions {
  // Workspace for a chunk: logits, its hidden states and their gradient. 0: 1 GiB. A chunk always
  // has at least one row.
  int64_t chunk_bytes = 0;
  bool invariant = false;
  // Keeps the logits of bf16 products in float32, at twice the memory traffic. Without it a
  // target's own logit is still exact (head_rows.h), and the others are rounded to 8 bits.
  bool float32_logits = false;
  // Makes the logits of bf16, where it is not null: their rows have the bits that it gives them
  // among any other rows, as in sampling. Belongs to the calling thread and the stream.
  Products* products = nullptr;
};

struct HeadProblem {
  int64_t tokens = 0, row_count = 0, hidden_size = 0, vocabulary = 0;
  Dtype type = Dtype::bf16;      // of hidden and weight
  const void* hidden = nullptr;  // [N, H], rows `hidden_stride` elements apart
  int64_t hidden_stride = 0;
  const void* weight = nullptr;  // [V, H], contiguous
  // [N]; a target outside the vocabulary (such as -100 for masked tokens) has logprob NaN.
  const int64_t* targets = nullptr;
  const int64_t* rows = nullptr;       // [R] rising positions; null: all, row_count = tokens
  const float* temperature = nullptr;  // [1] or [N], positive; null: 1
  bool temperature_per_token = false;
};

// Null if not wanted. d_hidden [N, H], contiguous, of the problem's type, is written; d_weight [V,
// H] is added to, or written with `d_weight_is_new`.
struct HeadGradients {
  void* d_hidden = nullptr;
  void* d_weight = nullptr;
  Dtype d_weight_type = Dtype::bf16;
  bool d_weight_is_new = false;
};

// Throws Error for a vocabulary whose row does not fit the shared memory of a cluster.
void check_head(const HeadProblem& problem, const HeadOptions& options);

// Bytes of `workspace` for each of the calls below; `plan` null: no loss.
int64_t head_workspace_bytes(const HeadProblem& problem, const HeadOptions& options,
                             const LossPlan* plan, int64_t sequences);

// logprobs [N] and entropy [N] (may be null) are written.
void head_logprobs(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                   const HeadOptions& options, void* workspace, float* logprobs, float* entropy);

// From g [N] and g_entropy [N] (may be null).
void head_backward(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                   const HeadOptions& options, void* workspace, const float* g,
                   const float* g_entropy, const HeadGradients& gradients);

// All in one call: loss [1], logprobs [N], entropy [N], the row of metrics. `batch` contains the
// streams of all N tokens; its pi is ignored. `denominator` negative: the batch's own. Token-level
// plans need one pass; others compute logprobs first, and recompute the logits of all chunks but
// the last. A token that takes part and is not among the rows makes the loss NaN.
void policy_head(cublasHandle_t blas, cudaStream_t stream, const HeadProblem& problem,
                 const HeadOptions& options, void* workspace, const LossPlan& plan,
                 const LossBatch& batch, double denominator, float* loss, float* logprobs,
                 float* entropy, double* metrics, const HeadGradients& gradients);

}  // namespace leeway::cuda
