// The policy head and its loss on tensors of either device: on the CPU by core/cpu/policy_head.h on
// a thread pool, on CUDA by ops/cuda_head.h, queued without waiting for the device.
//
// N tokens, H hidden, V vocabulary.
#pragma once

#include <torch/types.h>

#include <optional>
#include <span>

#include "base/thread_pool.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"
#include "trainer/micro_batch.h"

namespace leeway {

namespace cuda {
class Products;
}

// A micro-batch on a device. The batch must outlive this.
struct BatchOnDevice {
  // `with_loss`: what the loss reads is copied too.
  BatchOnDevice(const MicroBatch& host, torch::Device device, bool with_loss);

  const MicroBatch& batch;
  torch::Tensor tokens;  // int64 [N]
  // Undefined on the CPU, where the batch itself is read, and where the batch has none.
  torch::Tensor targets, rows, temperature;
  torch::Tensor cu_seqlens, mask, advantages, weights, rollout, prox, ref, teacher, versions;
  torch::Tensor rollout_ids;
};

// hidden [N, H] and weight [V, H], detached, of one type: float32 or bf16.
struct HeadOnDevice {
  const BatchOnDevice& on;
  torch::Tensor hidden, weight;
  cuda::Products* products = nullptr;  // makes the logits of bf16 on CUDA; null: cuBLAS chooses
};

// float32 [N], on the device.
struct HeadValues {
  torch::Tensor logprobs, entropy;
};
HeadValues head_logprobs(ThreadPool& pool, const HeadOnDevice& head);

// From g (and g_entropy, or empty) [N]: returns d_hidden [N, H] of hidden's type and adds to
// d_weight, float32 [V, H], or writes it with `is_new`; undefined: the weight is frozen.
torch::Tensor head_backward(ThreadPool& pool, const HeadOnDevice& head, std::span<const float> g,
                            std::span<const float> g_entropy, const torch::Tensor& d_weight,
                            bool is_new = false);

struct HeadLoss {
  torch::Tensor loss;     // one number
  torch::Tensor metrics;  // float64 [MetricSums::kFlatSize]
  HeadValues values;
  torch::Tensor kept;      // uint8 [N]: 1 where a token's policy term carries gradient
  torch::Tensor d_hidden;  // [N, H] of hidden's type
};
// Loss, logprobs and gradients in one call; d_weight as above. `prox_is_pi`: uses the pass's own
// logprobs as prox. A number that is not finite gives an Error or a loss that is not finite.
HeadLoss head_loss(ThreadPool& pool, const HeadOnDevice& head, const LossSpec& spec,
                   bool prox_is_pi, std::optional<double> denominator,
                   const torch::Tensor& d_weight, bool is_new = false);

}  // namespace leeway
