#include "run/training_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "base/json.h"
#include "run/text_check.h"

namespace leeway {
namespace {

// Of the policy's device: on a GPU all that is counted before a run, on the CPU what every run has.
double memory_bytes(const RunSetup& setup, const MemoryOfJob& job) {
  const Parameters& weights = setup.weights;
  if (setup.config.run.model.device == Device::cuda) {
    return static_cast<double>(device_memory_of(setup.config, weights.config(), job));
  }
  const auto base = static_cast<double>(weights.base() ? weights.base()->count() : 0);
  return sizeof(float) * (base + 4.0 * static_cast<double>(weights.count()));
}

std::string source_of(const RunConfig& run) {
  if (run.model.path.empty()) return "random weights";
  if (run.model.lora.path.empty()) return run.model.path;
  return fmt::format("{} with the adapter {}", run.model.path, run.model.lora.path);
}

std::string prompts_text(const Environment& environment) {
  const std::optional<uint64_t> train = environment.size(Split::train);
  const std::optional<uint64_t> held_out = environment.size(Split::held_out);
  if (!train || !held_out) return "prompts are generated";
  return fmt::format("{} prompts, {} held out", *train, *held_out);
}

std::string bytes_text(double bytes) {
  constexpr double kGib = 1 << 30;
  return bytes < kGib ? fmt::format("{:.1f} MiB", bytes / (1 << 20))
                      : fmt::format("{:.1f} GiB", bytes / kGib);
}

int64_t parameters_of(const Parameters& weights) {
  return weights.base() ? weights.base()->count() : weights.count();
}

}  // namespace

std::string training_plan_text(const RunSetup& setup, const MemoryOfJob& job) {
  const RunConfig& run = setup.config.run;
  const Parameters& weights = setup.weights;
  std::string out = fmt::format("model        {}: {}, {} parameters", source_of(run),
                                name_of(weights.config().family), parameters_of(weights));
  if (weights.base()) {
    out += fmt::format(", and an adapter of {}, which is trained", weights.count());
  }
  out += fmt::format("\ndevice       {}\n", name_of(run.model.device));
  out += fmt::format("text         {}\n", text_line(setup));
  for (size_t i = 0; i < setup.environments->members().size(); ++i) {
    const EnvironmentMix::Member& member = setup.environments->members()[i];
    out += fmt::format("environment  {} ({}): {}\n", member.id, run.environments[i].name,
                       prompts_text(*member.environment));
  }
  out += fmt::format("loss         {}\n", setup.config.preset);
  out += fmt::format(
      "steps        {}{} of {} prompts x {} rollouts, up to {} new tokens each\n",
      run.sft.enabled ? fmt::format("{} supervised, then ", run.sft.max_steps) : "",
      run.trainer.max_steps, run.orchestrator.prompts_per_batch, run.orchestrator.group_size,
      std::min(run.rollout.max_new_tokens, weights.config().max_position_embeddings));
  out += fmt::format("memory       {}{}\n", run.model.device == Device::cuda ? "" : "at least ",
                     bytes_text(memory_bytes(setup, job)));
  return out + fmt::format("run folder   {}{}, not written\n", run.output_dir,
                           is_present(run.output_dir) ? " is there; the next free name" : "");
}

std::string training_plan_json(const RunSetup& setup, const MemoryOfJob& job) {
  const RunConfig& run = setup.config.run;
  JsonWriter json;
  const auto number = [&](const char* key, auto value) {
    json.key(key).value(static_cast<double>(value));
  };
  json.begin_object().key("model").value(run.model.path);
  json.key("family").value(name_of(setup.weights.config().family));
  number("parameters", parameters_of(setup.weights));
  number("trained_parameters", setup.weights.count());
  json.key("device")
      .value(name_of(run.model.device))
      .key("renderer")
      .value(setup.config.renderer.name);
  json.key("stops").begin_array();
  for (const std::string& stop : stop_texts(setup)) json.value(stop);
  json.end_array();
  json.key("environments").begin_array();
  for (size_t i = 0; i < setup.environments->members().size(); ++i) {
    const EnvironmentMix::Member& member = setup.environments->members()[i];
    json.begin_object().key("id").value(member.id).key("name").value(run.environments[i].name);
    for (const auto& [key, split] :
         {std::pair{"prompts", Split::train}, std::pair{"held_out", Split::held_out}}) {
      const std::optional<uint64_t> size = member.environment->size(split);
      json.key(key);
      size ? json.value(static_cast<double>(*size)) : json.null();
    }
    json.end_object();
  }
  json.end_array().key("loss").value(setup.config.preset);
  number("sft_steps", run.sft.enabled ? run.sft.max_steps : 0);
  number("steps", run.trainer.max_steps);
  number("rollouts_per_step", run.orchestrator.prompts_per_batch * run.orchestrator.group_size);
  number("memory_bytes", memory_bytes(setup, job));
  return json.key("run").value(run.output_dir).end_object().text() + "\n";
}

}  // namespace leeway
