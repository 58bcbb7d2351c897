#include "run/run_setup.h"

#include <fmt/format.h>

#include <filesystem>
#include <initializer_list>
#include <optional>
#include <utility>

#include "base/files.h"
#include "base/folders.h"
#include "engine/checks.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "orchestrator/demonstrations.h"
#include "run/configured_renderer.h"
#include "run/devices.h"
#include "run/input_paths.h"
#include "run/memory_check.h"
#include "run/run_ranks.h"

namespace leeway {
namespace {

Family family_of(ModelType type) {
  switch (type) {
    case ModelType::llama: return Family::llama;
    case ModelType::qwen2: return Family::qwen2;
    case ModelType::qwen3: return Family::qwen3;
  }
  return Family::llama;
}

ModelConfig scratch_config(const ModelTable& table, int64_t tokenizer_size) {
  ModelConfig config;
  config.family = family_of(table.model_type);
  config.vocab_size = table.vocab_size > 0 ? table.vocab_size : tokenizer_size;
  config.hidden_size = table.hidden_size;
  config.intermediate_size = table.intermediate_size;
  config.num_hidden_layers = table.num_hidden_layers;
  config.num_attention_heads = table.num_attention_heads;
  config.num_key_value_heads = table.num_key_value_heads;
  config.head_dim = table.head_dim;
  config.max_position_embeddings = table.max_position_embeddings;
  config.rms_norm_eps = table.rms_norm_eps;
  config.rope_theta = table.rope_theta;
  config.tie_word_embeddings = table.tie_word_embeddings;
  config.qk_norm = config.family == Family::qwen3;
  config.qkv_bias = config.family == Family::qwen2;
  check_model_config("[model]", config);
  return config;
}

// Checked before anything is read of them, and before the weights, which take long.
Config with_its_device(Config config) {
  check_device(config);
  check_input_paths(config);
  return config;
}

// An adapter over the model's folder: one that is there, or a new one.
Parameters make_adapter(const RunConfig& run) {
  const LoraTable& table = run.model.lora;
  auto base = std::make_shared<const Parameters>(load_parameters(run.model.path));
  const std::string where = std::filesystem::absolute(run.model.path).string();
  if (!table.path.empty()) {
    Parameters adapter = load_adapter(table.path, std::move(base), run.model.path);
    adapter.set_base_path(where);
    return adapter;
  }
  Parameters adapter(std::move(base), {.rank = table.rank,
                                       .alpha = table.alpha,
                                       .targets = ordered_targets(table.targets),
                                       .base_path = where});
  initialise(adapter, static_cast<uint64_t>(run.seed));
  return adapter;
}

// Such ids have no embedding: text would reach them in the middle of a run, or never.
void refuse_ids_beyond(const std::string& tokenizer_file, const std::string& folder,
                       int64_t vocab_size, int32_t ids) {
  if (ids <= vocab_size) return;
  throw Error(
      fmt::format("{}: has ids up to {}, but the weights in {} have vocab_size = {}: the "
                  "tokenizer belongs to another model",
                  tokenizer_file, ids - 1, folder, vocab_size));
}

Parameters make_weights(const Config& config, const Tokenizer& tokenizer,
                        const std::string& tokenizer_file, const ModelCheck& check) {
  const RunConfig& run = config.run;
  if (is_adapter_folder(run.model.path)) {
    throw Error(
        fmt::format("model.path = \"{}\": is an adapter; set model.path to the model below it and "
                    "model.lora.path to the adapter, or merge them: leeway merge",
                    run.model.path));
  }
  const ModelConfig model = run.model.path.empty()
                                ? scratch_config(run.model, tokenizer.vocab_size())
                                : load_model_config(run.model.path);
  if (!run.model.path.empty() && !tokenizer_file.empty()) {
    refuse_ids_beyond(tokenizer_file, run.model.path, model.vocab_size, tokenizer.vocab_size());
  }
  if (rollout_precision(run) == Precision::fp8) check_sizes_for_fp8(model);
  if (check) check(config, model);
  if (run.model.lora.enabled) return make_adapter(run);
  if (!run.model.path.empty()) return load_parameters(run.model.path);
  Parameters weights(model);
  initialise(weights, static_cast<uint64_t>(run.seed));
  return weights;
}

// What "auto" stands for. The dump keeps the word, so that the file it came from can resume the
// run, and says what was found beside it.
Config with_found_renderer(Config config) {
  if (config.renderer.name != "auto") return config;
  config.renderer = with_found_name(config.renderer, config.run.model.path);
  for (EffectiveValue& value : config.effective) {
    if (value.key != "orchestrator.renderer.name") continue;
    value.origin += ", found " + config.renderer.name;
  }
  return config;
}

// A folder of weights knows the chat format it was trained with; a configuration that names none
// uses it.
Config with_renderer_of_model(Config config) {
  if (config.run.model.path.empty() || !config.renderer.name.empty()) return config;
  const std::optional<PolicyCard> card = read_policy_card(config.run.model.path);
  if (!card || card->renderer.name.empty()) return config;
  config.renderer = card->renderer;
  const std::string origin = config.run.model.path + "/leeway.json";
  const auto flag = [](bool value) { return std::string(value ? "true" : "false"); };
  const std::string table = "orchestrator.renderer.";
  std::erase_if(config.effective,
                [&](const EffectiveValue& value) { return value.key.starts_with(table); });
  const RendererConfig& renderer = config.renderer;
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"name", "\"" + renderer.name + "\""},
           {"preserve_all_thinking", flag(renderer.preserve_all_thinking)},
           {"preserve_thinking_between_tool_calls",
            flag(renderer.preserve_thinking_between_tool_calls)}}) {
    config.effective.push_back({table + key, value, origin});
  }
  return config;
}

// How text becomes tokens: the card for the policy's folders.
PolicyCard make_card(const Config& config) {
  const ModelTable& model = config.run.model;
  PolicyCard card{.renderer = config.renderer};
  const std::optional<PolicyCard> known =
      model.path.empty() ? std::nullopt : read_policy_card(model.path);
  const bool named = !model.tokenizer.empty();
  card.byte = named ? model.tokenizer == "byte" : known ? known->byte : model.path.empty();
  if (!card.byte) return card;
  // A model that was trained before keeps its ids; a new byte-level model gets the control tokens
  // of its chat format.
  if (known && known->byte) {
    card.control_tokens = known->control_tokens;
  } else if (!config.renderer.name.empty()) {
    card.control_tokens = control_tokens_of(config.renderer.name);
  }
  return card;
}

std::string tokenizer_file_of(const RunConfig& run, const PolicyCard& card) {
  if (card.byte) return "";
  const std::string& named = run.model.tokenizer;
  if (!named.empty()) return is_folder(named) ? named + "/tokenizer.json" : named;
  const std::string file = run.model.path + "/tokenizer.json";
  if (!is_present(file)) {
    throw Error(
        fmt::format("{}: there is no such file, which turns text into tokens; name another "
                    "folder's with model.tokenizer",
                    file));
  }
  return file;
}

}  // namespace

RunSetup::RunSetup(Config configuration, bool needs_environments, const ModelCheck& check)
    : config(
          with_renderer_of_model(with_found_renderer(with_its_device(std::move(configuration))))),
      card(make_card(config)),
      tokenizer_file(tokenizer_file_of(config.run, card)),
      tokenizer(card.byte ? make_byte_tokenizer(card.control_tokens)
                          : load_tokenizer(tokenizer_file)),
      weights(make_weights(config, *tokenizer, tokenizer_file, check)) {
  const RunConfig& run = config.run;
  if (!config.renderer.name.empty()) {
    renderer = make_configured_renderer(config.renderer, tokenizer.get());
    evaluation_renderer = make_configured_renderer(without_flags(config.renderer), tokenizer.get());
  }
  const auto talk = [&](const Renderer* with) {
    return std::make_unique<Conversation>(*tokenizer, with, run.rollout.stop,
                                          weights.config().eos_token_id);
  };
  conversation = talk(renderer.get());
  evaluation_conversation = talk(evaluation_renderer.get());
  for (int32_t id : conversation->stop_ids()) {
    if (id < weights.config().vocab_size) continue;
    throw Error(fmt::format("model.vocab_size = {}: the tokenizer's stop token has the id {}",
                            weights.config().vocab_size, id));
  }
  if (run.sft.enabled && !run.sft.data.empty()) read_demonstrations();
  if (run.environments.empty()) {
    if (!needs_environments) return;
    throw Error(
        "the configuration has no [[environment]]; give one with name = \"sort\", \"arithmetic\", "
        "\"calculator\", \"jsonl\" or \"process\"");
  }
  environments = std::make_unique<EnvironmentMix>(
      make_environments(run.environments, static_cast<uint64_t>(run.seed)));
  for (const EnvironmentMix::Member& member : environments->members()) {
    environment_ids.push_back(member.id);
    if (member.environment->needs_renderer() && renderer == nullptr) {
      throw Error(
          fmt::format("environment {}: has several turns and needs a chat format; give "
                      "orchestrator.renderer.name, one of {}",
                      member.id, fmt::join(renderer_names(), ", ")));
    }
    if (run.sft.enabled && run.sft.data.empty() &&
        member.environment->example(Split::train, 0).demonstration.empty()) {
      throw Error(fmt::format(
          "[sft]: the environment {} has no demonstrations; give sft.data, a JSONL file of them",
          member.id));
    }
  }
}

void RunSetup::read_demonstrations() {
  const std::string& file = config.run.sft.data;
  const int64_t positions = weights.config().max_position_embeddings;
  for (const Example& example : load_demonstrations(file)) {
    demonstrations.push_back(conversation->demonstration(example));
    const auto size = static_cast<int64_t>(demonstrations.back().ids.size());
    if (size <= positions) continue;
    throw Error(fmt::format("{}: demonstration {} has {} tokens, the model {} positions", file,
                            example.index + 1, size, positions));
  }
}

ThreadPlan plan_threads(const RunConfig& run, int cores) {
  const bool overlap = run.orchestrator.max_off_policy_steps > 0;
  return {overlap ? std::max(1, cores / 2) : cores,
          run.trainer.threads > 0 ? static_cast<int>(run.trainer.threads) : cores};
}

int RunSetup::cores() const { return ranks != nullptr ? ranks->cores() : cores_of_rank(1); }

MakeTrainingBackend RunSetup::training_backend() const {
  if (own_backend) {
    LEEWAY_CHECK(ranks == nullptr, "ranks wait for passes of their own backend");
    return own_backend;
  }
  if (ranks != nullptr) return ranks->training_backend();
  SnapshotUse snapshots = {.is_shared = !samples_in_process()};
  if (samples_in_process() && !keeps_evaluation_engine()) {
    snapshots.keep_free = evaluation_engine_memory(config, weights.config());
  }
  return leeway::training_backend(config.run, snapshots);
}

// Another one is made in a fraction of a second where the GPU has the weights; the first and the
// last evaluation of a run take them from the host. Below this size an engine's memory is a small
// part of a GPU's, and it stays.
bool RunSetup::keeps_evaluation_engine() const {
  constexpr int64_t kMostWeights = int64_t{1} << 31;
  return config.run.model.device != Device::cuda || weights.count() < kMostWeights;
}

EngineOptions engine_options(const RunConfig& run, int threads) {
  const RolloutTable& table = run.rollout;
  EngineOptions options;
  options.precision = rollout_precision(run);
  options.threads = table.threads > 0 ? static_cast<int>(table.threads) : threads;
  options.kv_bytes = table.kv_bytes;
  options.max_sequences = table.max_sequences;
  options.max_rows_per_step = rows_per_step(run.model.device);
  options.kv_after_swap = table.kv_after_swap;
  options.backend = sampling_backend(run);
  // The trainer has the base too: no copy of it.
  if (run.model.lora.enabled) options.frozen = FrozenWeights::in_place;
  return options;
}

RolloutSettings RunSetup::rollout_settings(float temperature) const {
  RolloutSettings settings;
  settings.sampling.temperature = temperature;
  settings.sampling.top_k = config.run.rollout.top_k;
  settings.sampling.top_p = static_cast<float>(config.run.rollout.top_p);
  settings.sampling.min_p = static_cast<float>(config.run.rollout.min_p);
  settings.max_new_tokens = config.run.rollout.max_new_tokens;
  settings.max_turns = config.run.orchestrator.max_turns;
  settings.timeout = config.run.orchestrator.rollout_timeout;
  settings.max_length = weights.config().max_position_embeddings;
  return settings;
}

}  // namespace leeway
