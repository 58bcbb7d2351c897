// The Qwen3 decoder as one would write it in plain libtorch: padded batches, full logits and
// autograd for training; a KV cache, softmax and multinomial for sampling. The baseline of
// policy_benchmark. This header does not include torch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/parameters.h"

namespace leeway {

// Sequences padded on the right to the longest, [rows, columns]. Position (b, t) predicts
// targets[b, t]; padding has mask 0.
struct PaddedBatch {
  int64_t rows = 0, columns = 0;
  std::vector<int64_t> tokens, targets;
  std::vector<float> rollout, advantages;
  std::vector<uint8_t> mask;
};

class PlainDecoder {
 public:
  explicit PlainDecoder(const Parameters& weights);
  ~PlainDecoder();

  static std::string libtorch_version();
  // Sets ATen's threads and those of its BLAS, which ATen does not control.
  static void set_threads(int aten, int blas);
  // Seconds for one float32 product of [n, n] matrices.
  static double product_seconds(int64_t n);

  // IcePop's loss, keeping ratios in [0.2, 5], and the gradients of all parameters. Micro-batches
  // add up under one denominator.
  double train(std::span<const PaddedBatch> micro_batches, double denominator);
  // Gradients of the last `train`.
  void copy_gradients_to(Parameters& to) const;

  // concatenated: the cache is a tensor that grows with each token, as in transformers.
  // preallocated: keys and values are written into preallocated memory.
  enum class Cache { concatenated, preallocated };
  struct Sampled {
    std::vector<int64_t> ids;  // [rows, new_tokens]
    std::vector<float> logprobs;
  };
  // Samples from prompts of equal length [rows, length] at temperature 1.
  Sampled sample(std::span<const int64_t> prompts, int64_t rows, int64_t new_tokens, Cache cache);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
