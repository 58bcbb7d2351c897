// Settings with a fixed set of values. The tables of names are what TOML, the dump and
// docs/configuration.md write.
#pragma once

#include "base/enum_names.h"
#include "kernels/numerics.h"

namespace leeway {

// model.device: where trainer and sampler compute.
enum class Device { cpu, cuda };
template <>
inline constexpr std::array kNames<Device>{"cpu", "cuda"};

// model.model_type: architecture of a model made from scratch.
enum class ModelType { llama, qwen2, qwen3 };
template <>
inline constexpr std::array kNames<ModelType>{"llama", "qwen2", "qwen3"};

// trainer.schedule, sft.schedule: the learning rate after the warm-up.
enum class RateSchedule { constant, linear, cosine };
template <>
inline constexpr std::array kNames<RateSchedule>{"constant", "linear", "cosine"};

// trainer.optimizer_steps: one step after all minibatches of an epoch, or one after each.
enum class OptimizerSteps { batch, minibatch };
template <>
inline constexpr std::array kNames<OptimizerSteps>{"batch", "minibatch"};

// trainer.prox_forward: whether the policy before the update is evaluated for losses that read
// `prox`.
enum class ProxForward { automatic, always, never };
template <>
inline constexpr std::array kNames<ProxForward>{"auto", "always", "never"};

// trainer.precision: of the forward and backward passes; weights and optimizer are float32.
enum class TrainingPrecision { automatic, float32, bf16 };
template <>
inline constexpr std::array kNames<TrainingPrecision>{"auto", "float32", "bf16"};

// trainer.recompute_activations: what the backward pass computes again instead of finding it kept:
// nothing; the wide half of the feed-forward block and what is cheap; or each layer from its input.
enum class Recompute { off, selective, layer };
template <>
inline constexpr std::array kNames<Recompute>{"off", "selective", "layer"};

// trainer.optimizer_state: how AdamW's moments of matrices are stored between steps.
enum class OptimizerState { float32, int8 };
template <>
inline constexpr std::array kNames<OptimizerState>{"float32", "int8"};

// trainer.sharding: of what several GPUs have a part each: moments and what float32 weights have
// beyond those that passes read; or weights and gradients too.
enum class Sharding { optimizer, weights };
template <>
inline constexpr std::array kNames<Sharding>{"optimizer", "weights"};

// rollout.precision: of the sampler's weights, and of its passes on a GPU.
enum class RolloutPrecision { automatic, float32, bf16, int8, fp8 };
template <>
inline constexpr std::array kNames<RolloutPrecision>{"auto", "float32", "bf16", "int8", "fp8"};

// orchestrator.schedule: whether sampling waits for the trainer, so that runs repeat bit for bit,
// or runs ahead of it.
enum class RolloutSchedule { lockstep, free };
template <>
inline constexpr std::array kNames<RolloutSchedule>{"lockstep", "free"};

// orchestrator.advantage: formulas are in orchestrator/advantages.h.
enum class AdvantageKind {
  group_mean,
  group_deviation,
  leave_one_out,
  max_rl,
  reinforce_pp,
  batch_mean,
  none,
};
template <>
inline constexpr std::array kNames<AdvantageKind>{"group_mean", "group_deviation", "leave_one_out",
                                                  "max_rl",     "reinforce_pp",    "batch_mean",
                                                  "none"};

// rollout.kv_after_swap: what becomes of the KV cache of running requests when weights are swapped:
// kept (the field does this; the next tokens are sampled from a mixture of both policies' states),
// or computed again with the new weights (the next tokens are exactly the new policy's).
enum class KvAfterSwap { keep, recompute };
template <>
inline constexpr std::array kNames<KvAfterSwap>{"keep", "recompute"};

// orchestrator.renderer.thinking_retention: which past thinking a renderer keeps.
enum class KeptThinking { last, between_tool_calls, all };
template <>
inline constexpr std::array kNames<KeptThinking>{"last", "between_tool_calls", "all"};

// inference.pool: what samples for training: this process, servers of a list, or the servers behind
// a name.
enum class InferencePool { in_process, static_, elastic };
template <>
inline constexpr std::array kNames<InferencePool>{"in_process", "static", "elastic"};

// inference.dialect: how servers are spoken to; automatic asks each of them.
enum class InferenceDialect { automatic, leeway, vllm, sglang };
template <>
inline constexpr std::array kNames<InferenceDialect>{"auto", "leeway", "vllm", "sglang"};

// environment.verifier: how an answer is compared with the expected one.
enum class VerifierKind { exact, numeric, regex, choice };
template <>
inline constexpr std::array kNames<VerifierKind>{"exact", "numeric", "regex", "choice"};

}  // namespace leeway
