#include "run/memory_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

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

// What a run has on its device one after the other. Its supervised phase is over before there are
// servers, reference and teacher, and has the batches and the engine of `leeway sft`.
std::vector<MemoryOfJob> phases_of(const RunConfig& run, const MemoryOfJob& job) {
  if (job.job == Job::sft || !run.sft.enabled || job.sft_is_over) return {job};
  return {{.job = Job::sft, .ranks = job.ranks}, job};
}

// Rollouts and evaluations have an engine each; servers that the run starts have theirs on the same
// device and evaluate too. Supervised training has one to measure its reward.
int64_t engines_of(const RunConfig& run, const MemoryOfJob& job) {
  if (job.job == Job::sft) return run.sft.stop_at_reward > 0.0 ? 1 : 0;
  if (job.spawn_servers > 0) return job.spawn_servers;
  return run.inference.pool == InferencePool::in_process ? 2 : 0;
}

// Policies beside the one that is trained, by the key that names each; those that are the shared
// model with or without an adapter are not among them.
struct OtherPolicy {
  const char* key;
  ModelConfig model;
};
std::vector<OtherPolicy> other_policies(const Config& config, const ModelConfig& model,
                                        const MemoryOfJob& job) {
  std::vector<OtherPolicy> out;
  if (job.job != Job::train) return out;
  const RunConfig& run = config.run;
  if (config.loss_spec.reads(Stream::ref)) {
    const std::string& folder = run.trainer.reference;
    const bool initial = folder == "initial",
               shared = run.model.lora.enabled && (initial || folder == "base");
    if (!shared) out.push_back({"trainer.reference", initial ? model : load_model_config(folder)});
  }
  if (config.loss_spec.reads(Stream::teacher)) {
    out.push_back({"trainer.teacher", load_model_config(run.trainer.teacher)});
  }
  return out;
}

// Why the kernels do not compute what is trained, with a remedy; empty: they do.
std::string why_it_cannot_train(const Config& config, const ModelConfig& model,
                                const MemoryOfJob& job) {
  const RunConfig& run = config.run;
  const LoraTable& lora = run.model.lora;
  std::string why =
      why_gpu_cannot_train(model, run.trainer.precision != TrainingPrecision::float32);
  if (!why.empty()) return why;
  if (lora.enabled) {
    why = why_gpu_has_no_training_kernels(model);
    if (!why.empty()) {
      return why +
             ", which an adapter needs; leave [model.lora] out, or set model.device = \"cpu\"";
    }
    if (!lora.path.empty()) why = why_gpu_takes_no_rank(load_lora_settings(lora.path).rank);
    if (!why.empty()) {
      return fmt::format("model.lora.path = \"{}\": {}; set model.device = \"cpu\"", lora.path,
                         why);
    }
  }
  if (job.ranks == 1 || run.trainer.sharding != Sharding::weights) return "";
  // Reference and teacher are in parts too.
  std::vector<OtherPolicy> all = other_policies(config, model, job);
  all.insert(all.begin(), {"model", model});
  for (const OtherPolicy& each : all) {
    why = why_gpu_has_no_training_kernels(each.model);
    if (!why.empty()) {
      return fmt::format("{}: {}; set trainer.sharding = \"optimizer\"", each.key, why);
    }
  }
  return "";
}

// Why the job's engines cannot sample the model, with a remedy; empty: they can, or there are none.
std::string why_it_cannot_sample(const RunConfig& run, const ModelConfig& model,
                                 const MemoryOfJob& job) {
  std::string why = engines_of(run, job) > 0 ? why_gpu_cannot_sample(model) : "";
  if (why.empty()) return why;
  if (job.job == Job::sft) {
    return why + "; leave sft.stop_at_reward out, or set model.device = \"cpu\"";
  }
  const bool measures = run.sft.enabled && !job.sft_is_over && run.sft.stop_at_reward > 0.0;
  return fmt::format(
      "{}; set model.device = \"cpu\", or {}inference.pool = \"static\" with servers that sample "
      "on CPUs{}",
      why, job.spawn_servers > 0 ? "leave --spawn-servers out and set " : "",
      measures ? ", without sft.stop_at_reward" : "");
}

Error refused(const std::string& why) {
  return Error(fmt::format("model.device = \"{}\": {}", name_of(Device::cuda), why));
}

// Of a phase of the job, which is named where it is not the job's own.
Error refused_in(const MemoryOfJob& phase, const MemoryOfJob& job, const std::string& why) {
  return refused(phase.job == job.job ? why : "[sft]: " + why);
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
  for (OtherPolicy& other : other_policies(config, model, job)) {
    use.other_policies.push_back(std::move(other.model));
  }
  use.sampler = {.engines = engines_of(run, job),
                 .fp8_engines = fp8_engines_of(run, job),
                 .kv_bytes = run.rollout.kv_bytes,
                 .max_sequences = run.rollout.max_sequences,
                 .max_rows = rows_per_step(run.model.device),
                 .in_process = job.spawn_servers == 0,
                 .measures_reward = job.job == Job::sft};
  return use;
}

int64_t evaluation_engine_memory(const Config& config, const ModelConfig& model) {
  // Without reference and teacher, whose folders are read for their shapes.
  DeviceMemoryUse use = memory_use_of(config, model, {.job = Job::sft});
  use.sampler.engines = 1, use.sampler.fp8_engines = 0;
  return device_memory(use).sampler;
}

int64_t device_memory_of(const Config& config, const ModelConfig& model, const MemoryOfJob& job) {
  int64_t most = 0;
  for (const MemoryOfJob& phase : phases_of(config.run, job)) {
    most = std::max(most, device_memory(memory_use_of(config, model, phase)).total());
  }
  return most;
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

void check_sizes_for_gpu(const Config& config, const ModelConfig& model, const MemoryOfJob& job) {
  std::string why = why_it_cannot_train(config, model, job);
  // Before the phases: where neither can sample, its message has the remedies of both.
  if (why.empty()) why = why_it_cannot_sample(config.run, model, job);
  if (!why.empty()) throw refused(why);
  for (const MemoryOfJob& phase : phases_of(config.run, job)) {
    why = why_it_cannot_sample(config.run, model, phase);
    if (!why.empty()) throw refused_in(phase, job, why);
  }
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
    check_sizes_for_gpu(config, model, job);
    check_ranks(static_cast<int>(job.ranks), config.run);
    const int64_t free = free_device_memory();
    for (const MemoryOfJob& phase : phases_of(config.run, job)) {
      const std::string why = why_it_does_not_fit(memory_use_of(config, model, phase), free);
      if (!why.empty()) throw refused_in(phase, job, why);
    }
  };
}

}  // namespace leeway
