// Workloads of policy_benchmark: models, and packed or padded sequences.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "core/cpu/policy_head.h"
#include "model/cpu_decoder.h"
#include "model/parameters.h"
#include "plain_decoder.h"

namespace leeway {

struct Model {
  std::string name;
  Parameters parameters;
  double body = 0, head = 0, norms = 0;  // parameter counts; the embedding is only a lookup

  // For one token that sees `keys` keys, counting a multiply-add as two.
  double body_flops(double keys) const;
  double head_flops() const { return 2.0 * head; }
  double weight_bytes(double bytes_per_weight) const;
};

// Qwen3 models with about one and ten million parameters and untied heads.
std::vector<Model> benchmark_models();

std::vector<int32_t> random_ids(const Model& model, int64_t count, Rng& rng);

struct PackedWorkload {
  std::vector<int32_t> tokens;
  std::vector<int64_t> cu_seqlens{0};
  std::vector<int64_t> targets;  // the token after each; 0 after the last
  // For training:
  std::vector<int64_t> rows;  // trained positions
  std::vector<float> rollout, advantages;
  std::vector<uint8_t> mask;

  PackedTokens packed() const { return {tokens, cu_seqlens}; }
  int64_t count() const { return cu_seqlens.back(); }
  int64_t sequences() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  int64_t length(int64_t s) const {
    const auto at = static_cast<size_t>(s);
    return cu_seqlens[at + 1] - cu_seqlens[at];
  }
  double mean_keys() const;  // seen by a token
};

PackedWorkload pack(const std::vector<std::vector<int32_t>>& sequences);

// Random tokens. The second half of each sequence is trained; rollouts come from a slightly
// different policy.
PackedWorkload training_batch(ThreadPool& pool, const Model& model,
                              const std::vector<int64_t>& lengths);

// Skewed like real completions: the median is about 120, and a few reach the limit of 512.
std::vector<int64_t> mixed_lengths(int64_t sequences);

// In the given order, or shortest first to reduce padding, `at_once` sequences at a time.
std::vector<PaddedBatch> padded_batches(const PackedWorkload& batch, bool sorted, int64_t at_once);

HeadProblem head_problem(const Model& model, const PackedWorkload& batch, const float* hidden);

// The policy's logprob of each target, by Leeway's training path.
std::vector<float> logprobs_of(ThreadPool& pool, const Model& model, const PackedWorkload& batch);

}  // namespace leeway
