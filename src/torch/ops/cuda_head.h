// The head and its loss on tensors of one CUDA device: what the operators are built from, for C++
// callers that have a LossSpec. Work is queued on the current stream without waiting for the
// device. Tensors that are not given or not wanted are undefined.
//
// N tokens, R rows, H hidden, V vocabulary, S sequences.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "cuda/policy_head.h"
#include "leeway/loss.h"
#include "torch/compat.h"

namespace leeway::cuda {

struct HeadTensors {
  Tensor hidden;       // [N, H], float32 or bf16
  Tensor weight;       // [V, H], of hidden's type
  Tensor targets;      // int64 [N]
  Tensor rows;         // int64 [R], rising; undefined: every token
  Tensor temperature;  // float32 [1] or [N]; undefined: 1
};

// On the head's device.
struct LossTensors {
  Tensor cu_seqlens;  // int64 [S + 1]
  Tensor mask;        // bool or uint8 [N]
  Tensor advantages;  // float32 [N], as the streams
  Tensor rollout, prox, ref, teacher, weights;
  Tensor versions;            // int32 [N]
  Tensor rollout_ids;         // int32 [S], equal numbers = samples of one rollout
  Tensor correction_weights;  // float32 [N] } of corrections that the caller computes: the plan
  Tensor correction_mask;     // uint8 [N]   } must not be `token_level` then
  bool prox_is_pi = false;    // use the logprobs computed here as prox
  Tensor kept;                // uint8 [N], written: 1 where a token's policy term carries gradient
};

// A spec in the form the device computes. Throws Error for a spec without a complete plan
// (core/float32/plan.h).
struct PlannedSpec {
  PlannedSpec(const LossSpec& spec) : preset(spec.preset), plan(make_complete_plan(spec)) {}
  std::string preset;
  LossPlan plan;
};

// logprobs, entropy: float32 [N].
std::pair<Tensor, Tensor> head_logprobs(const HeadTensors& head, const HeadOptions& options);

// From g (and g_entropy) float32 [N]: d_hidden [N, H] of hidden's type is written, d_weight [V, H],
// float32 or of weight's type, is added to, or written with `d_weight_is_new`.
void head_backward(const HeadTensors& head, const Tensor& g, const Tensor& g_entropy,
                   const Tensor& d_hidden, const Tensor& d_weight, const HeadOptions& options,
                   bool d_weight_is_new = false);

struct HeadLoss {
  Tensor loss;               // float32 []; NaN if a number that takes part is not finite
  Tensor logprobs, entropy;  // float32 [N]
  Tensor metrics;            // float64 [MetricSums::kFlatSize]
};

// All in one call; see leeway::policy_head (core/cpu/policy_head.h).
HeadLoss head_loss(const HeadTensors& head, const PlannedSpec& spec, const LossTensors& batch,
                   std::optional<double> denominator, const Tensor& d_hidden,
                   const Tensor& d_weight, const HeadOptions& options,
                   bool d_weight_is_new = false);

// The loss of log-probabilities float32 [N]: loss, g [N], metrics.
struct TokenLoss {
  Tensor loss, g, metrics;
};
TokenLoss token_loss(const Tensor& logprobs, const PlannedSpec& spec, const LossTensors& batch,
                     std::optional<double> denominator);

// gradient times factor [], in place; a factor of one is detected on the device and costs nothing.
Tensor scaled(const Tensor& gradient, const Tensor& factor);

}  // namespace leeway::cuda
