#include "run/memory_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/memory.h"
#include "base/out_of_memory.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "model/gpu_sizes.h"
#include "run/devices.h"
#include "trainer/ranks_backend.h"

namespace leeway {
namespace {

// A micro-batch is not larger than the batch.
int64_t largest_micro_batch(const RunConfig& run, const ModelConfig& model, Job job) {
  const double samples = job == Job::sft ? static_cast<double>(run.sft.batch_size)
                                         : static_cast<double>(run.orchestrator.prompts_per_batch) *
                                               static_cast<double>(run.orchestrator.group_size);
  return static_cast<int64_t>(
      std::min(static_cast<double>(run.trainer.max_tokens),
               samples * static_cast<double>(model.max_position_embeddings)));
}

// Rollouts and evaluations have an engine each; servers that the run starts have theirs on the same
// device and evaluate too.
int64_t engines_of(const RunConfig& run, const MemoryOfJob& job) {
  // The supervised phase measures its reward itself, before there are servers.
  const bool sft = job.job == Job::sft || run.sft.enabled;
  const int64_t of_sft = sft && run.sft.stop_at_reward > 0.0 ? 1 : 0;
  if (job.job == Job::sft) return of_sft;
  if (job.spawn_servers > 0) return job.spawn_servers;
  return run.inference.pool == InferencePool::in_process ? 2 : of_sft;
}

// In this process evaluations are in the precision of training; servers have one.
int64_t fp8_engines_of(const RunConfig& run, const MemoryOfJob& job) {
  const int64_t engines = engines_of(run, job);
  if (rollout_precision(run) != Precision::fp8 || job.job == Job::sft) return 0;
  return job.spawn_servers > 0 ? engines : engines / 2;
}

}  // namespace

DeviceMemoryUse memory_use_of(const Config& config, const ModelConfig& model,
                              const MemoryOfJob& job) {
  const RunConfig& run = config.run;
  DeviceMemoryUse use;
  use.model = model;
  use.half = run.trainer.precision != TrainingPrecision::float32;
  use.max_tokens = largest_micro_batch(run, model, job.job);
  use.recompute = run.trainer.recompute_activations;
  use.optimizer_state = run.trainer.optimizer_state;
  use.ranks = job.ranks, use.sharding = run.trainer.sharding;
  const LoraTable& lora = run.model.lora;
  if (lora.enabled && lora.path.empty()) {
    use.lora = {lora.rank, lora.alpha, ordered_targets(lora.targets), {}};
  } else if (lora.enabled) {
    use.lora = load_lora_settings(lora.path);
  }
  if (job.job == Job::train && config.loss_spec.reads(Stream::ref)) {
    const std::string& folder = run.trainer.reference;
    const bool initial = folder == "initial",
               shared = lora.enabled && (initial || folder == "base");
    if (!shared) use.other_policies.push_back(initial ? model : load_model_config(folder));
  }
  if (job.job == Job::train && config.loss_spec.reads(Stream::teacher)) {
    use.other_policies.push_back(load_model_config(run.trainer.teacher));
  }
  use.sampler = {.engines = engines_of(run, job),
                 .fp8_engines = fp8_engines_of(run, job),
                 .kv_bytes = run.rollout.kv_bytes,
                 .max_sequences = run.rollout.max_sequences,
                 .max_rows = rows_per_step(run.model.device),
                 .in_process = job.spawn_servers == 0};
  return use;
}

std::string why_it_does_not_fit_cpu(const Config& config, const ModelConfig& model,
                                    uint64_t available) {
  double weights = 0.0;
  for (const ParameterInfo& info : parameter_table(model))
    weights += static_cast<double>(info.size());
  const bool lora = config.run.model.lora.enabled;
  // With an adapter there are no gradients and moments but its own, which are small.
  const double bytes = weights * sizeof(float) * (lora ? 1.0 : 4.0);
  if (bytes <= static_cast<double>(available)) return "";
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  return fmt::format(
      "no memory for training {:.0f} weights: at least {:.1f} GiB are needed ({}), {:.1f} GiB are "
      "available; use a smaller model{} or a machine with more memory",
      weights, bytes / kGib,
      lora ? "the weights in float32" : "weights, gradient and two moments in float32",
      static_cast<double>(available) / kGib, lora ? "" : ", an adapter ([model.lora])");
}

void check_sizes_for_gpu(const RunConfig& run, const ModelConfig& model, const MemoryOfJob& job) {
  std::string problem =
      why_gpu_cannot_train(model, run.trainer.precision != TrainingPrecision::float32);
  if (problem.empty() && engines_of(run, job) > 0) problem = why_gpu_cannot_sample(model);
  const bool in_parts = job.ranks > 1 && run.trainer.sharding == Sharding::weights;
  if (problem.empty() && (in_parts || run.model.lora.enabled)) {
    problem = why_gpu_has_no_training_kernels(model);
    if (!problem.empty()) {
      problem += in_parts ? "; set trainer.sharding = \"optimizer\""
                          : ", which an adapter needs; leave [model.lora] out, or use the CPU";
    }
  }
  if (problem.empty()) return;
  throw Error(fmt::format("model.device = \"{}\": {}", name_of(Device::cuda), problem));
}

ModelCheck fits_memory(const MemoryOfJob& job) {
  return [job](const Config& config, const ModelConfig& model) {
    if (config.run.model.device != Device::cuda) {
      const std::optional<uint64_t> available = available_memory();
      const std::string problem =
          available ? why_it_does_not_fit_cpu(config, model, *available) : "";
      if (!problem.empty()) throw OutOfMemory(problem);
      return;
    }
    check_sizes_for_gpu(config.run, model, job);
    check_ranks(static_cast<int>(job.ranks), config.run);
    const std::string problem =
        why_it_does_not_fit(memory_use_of(config, model, job), free_device_memory());
    if (problem.empty()) return;
    throw Error(fmt::format("model.device = \"{}\": {}", name_of(Device::cuda), problem));
  };
}

}  // namespace leeway
