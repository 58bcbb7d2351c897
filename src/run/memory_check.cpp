#include "run/memory_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"
#include "run/devices.h"

namespace leeway {
namespace {

// A micro-batch is not larger than the batch.
int64_t largest_micro_batch(const RunSetup& setup, Job job) {
  const RunConfig& run = setup.config.run;
  const double samples = job == Job::sft ? static_cast<double>(run.sft.batch_size)
                                         : static_cast<double>(run.orchestrator.prompts_per_batch) *
                                               static_cast<double>(run.orchestrator.group_size);
  const auto positions = static_cast<double>(setup.weights.config().max_position_embeddings);
  return static_cast<int64_t>(
      std::min(static_cast<double>(run.trainer.max_tokens), samples * positions));
}

// Rollouts and evaluations have an engine each; servers that the run starts have theirs on the same
// device and evaluate too.
int64_t engines_of(const RunSetup& setup, Job job) {
  if (job == Job::sft) return setup.config.run.sft.stop_at_reward > 0.0 ? 1 : 0;
  if (setup.spawn_servers > 0) return setup.spawn_servers;
  return setup.config.run.inference.pool == InferencePool::in_process ? 2 : 0;
}

}  // namespace

DeviceMemoryUse memory_use_of(const RunSetup& setup, Job job) {
  const RunConfig& run = setup.config.run;
  DeviceMemoryUse use;
  use.model = setup.weights.config();
  use.half = run.trainer.precision != TrainingPrecision::float32;
  use.max_tokens = largest_micro_batch(setup, job);
  use.recompute = run.trainer.recompute_activations;
  use.optimizer_state = run.trainer.optimizer_state;
  const LossSpec& loss = setup.config.loss_spec;
  if (job == Job::train && loss.reads(Stream::ref)) {
    use.other_policies.push_back(
        run.trainer.reference == "initial" ? use.model : load_model_config(run.trainer.reference));
  }
  if (job == Job::train && loss.reads(Stream::teacher)) {
    use.other_policies.push_back(load_model_config(run.trainer.teacher));
  }
  use.sampler = {engines_of(setup, job), run.rollout.kv_bytes, run.rollout.max_sequences,
                 rows_per_step(run.model.device)};
  return use;
}

void check_device_memory(const RunSetup& setup, Job job) {
  const Device device = setup.config.run.model.device;
  if (device != Device::cuda) return;
  const std::string problem = why_it_does_not_fit(memory_use_of(setup, job), free_device_memory());
  if (problem.empty()) return;
  throw Error(fmt::format("model.device = \"{}\": {}", name_of(device), problem));
}

}  // namespace leeway
