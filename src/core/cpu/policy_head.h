// The policy head on the CPU: hidden states to loss and gradients without a [tokens, vocabulary]
// tensor. Torch-free; src/torch/ops binds it to tensors.
//
//   for each chunk of rows:  Z = h W^T;  log p, entropy;  g from the spec;
//                            Z <- g (onehot - softmax(Z)) in place;  dh = Z W;  dW += Z^T h
//
// N tokens, R rows (tokens that are computed), H hidden, V vocabulary.
// Rows not listed are not touched: no logits, log-probability 0, entropy 0, gradient 0, whatever
// their hidden states hold. A row's log-probability does not depend on chunk, batch or threads, bit
// for bit. One call at a time per pool.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/matmul.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"

namespace leeway {

struct HeadProblem {
  int64_t tokens = 0, hidden_size = 0, vocabulary = 0;
  Operand hidden;                    // [N, H], float32 or bf16
  Operand weight;                    // [V, H], float32 or bf16
  std::span<const int64_t> targets;  // [N]: row t predicts targets[t]; looked at for rows only
  std::span<const int64_t> rows;     // [R] rising positions; empty with `all_rows`
  bool all_rows = true;
  std::span<const float> temperature;  // [N], or [1] for all, or empty: 1
  // Workspace for logits; a chunk always has at least one row.
  int64_t chunk_bytes = int64_t{64} << 20;
};

// Throws Error naming the position and the value for a target outside the vocabulary, a row out of
// range or out of order, and a temperature that is not positive and finite.
void check_head(const HeadProblem& problem);

// The maximum workspace of a call in bytes, besides its inputs and outputs: a chunk and its
// packing, within `chunk_bytes` if that fits a row, and less than a hundred bytes per token.
int64_t head_workspace_bytes(const HeadProblem& problem);

// logprobs [N], entropy [N] (empty if not wanted).
void head_logprobs(ThreadPool& pool, const HeadProblem& problem, std::span<float> logprobs,
                   std::span<float> entropy);

// From g [N] = d loss / d logprobs (and g_entropy [N], or empty): writes d_hidden [N, H] and adds
// to d_weight [V, H]. Rows with both gradients zero are skipped. Either output may be empty.
void head_backward(ThreadPool& pool, const HeadProblem& problem, std::span<const float> g,
                   std::span<const float> g_entropy, std::span<float> d_hidden,
                   std::span<float> d_weight);

// True if g of a token depends only on that token's own streams and a denominator known before the
// pass, so that `policy_head` needs one pass; otherwise it computes logprobs first, unless all rows
// fit one chunk.
bool one_pass(const LossSpec& spec);

struct HeadResult {
  double loss = 0.0;
  MetricSums metrics;
};

// Everything at once. `batch` holds the streams of all N tokens; its `pi` is not looked at: the
// log-probabilities computed here take its place (and go to `logprobs` [N], `entropy` [N] or
// empty). `denominator` is the global one; without it the batch's own is used. `d_hidden` is
// written, `d_weight` added to; both empty: no gradient work at all.
// `kept` [N] or empty: 1 where a token's policy term carries gradient.
// A token that takes part (mask) and is not among the rows is the caller's mistake: Error.
HeadResult policy_head(ThreadPool& pool, const HeadProblem& problem, const LossSpec& spec,
                       const BatchView<float>& batch, std::optional<double> denominator,
                       std::span<float> logprobs, std::span<float> entropy,
                       std::span<float> d_hidden, std::span<float> d_weight,
                       std::span<uint8_t> kept = {});

}  // namespace leeway
