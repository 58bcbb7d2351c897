#include "trainer/device_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "model/parameters.h"

namespace leeway {
namespace {

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;
constexpr int64_t kMebi = int64_t{1} << 20;
// Workspaces of cuBLAS and cuDNN, and kernels, which are loaded when they are first used.
constexpr int64_t kLibraries = 384 * kMebi;
constexpr int64_t kHeadBytes = int64_t{1} << 30;  // at most, of a chunk of logits
constexpr int64_t kLeastTokens = 512;             // that a suggestion goes down to

std::string gib(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / kGibi); }

int64_t parameters_of(const ModelConfig& model) {
  int64_t count = 0;
  for (const ParameterInfo& info : parameter_table(model)) count += info.size();
  return count;
}

int64_t adapter_of(const DeviceMemoryUse& use) {
  int64_t count = 0;
  for (const ParameterInfo& info : lora_table(use.model, *use.lora)) count += info.size();
  return count;
}

// Parameters that sharded_weights.h has in one place at a time: two layers, and the embedding or
// the head.
int64_t gathered_of(const ModelConfig& model) {
  const int64_t queries = model.num_attention_heads * model.head_dim;
  const int64_t keys = model.num_key_value_heads * model.head_dim;
  const int64_t layer = model.hidden_size * (2 * queries + 2 * keys + 3 * model.intermediate_size);
  return 2 * layer + model.vocab_size * model.hidden_size;
}

bool is_sharded(const DeviceMemoryUse& use) {
  return use.ranks > 1 && use.sharding == Sharding::weights;
}

// Widths of a token's rows.
struct Widths {
  explicit Widths(const ModelConfig& model)
      : hidden(model.hidden_size),
        queries(model.num_attention_heads * model.head_dim),
        keys(model.num_key_value_heads * model.head_dim),
        inner(model.intermediate_size),
        vocabulary((model.vocab_size + 63) / 64 * 64) {}
  int64_t qkv() const { return queries + 2 * keys; }
  int64_t hidden, queries, keys, inner, vocabulary;
};

// Bytes of a token, of one layer.
struct LayerBytes {
  int64_t kept, forward, backward;
};

LayerBytes layer_bytes(const DeviceMemoryUse& use) {
  const Widths w(use.model);
  const int64_t number = use.half ? 2 : 4;
  const bool off = use.recompute == Recompute::off, layer = use.recompute == Recompute::layer;
  // Queries, keys and values, attention's result and its sums, and the stream after it.
  const int64_t of_attention =
      number * (w.qkv() + w.queries + w.hidden) + 4 * use.model.num_attention_heads;
  const int64_t gate_up = number * 2 * w.inner;
  LayerBytes bytes{};
  bytes.kept = number * w.hidden + (layer ? 0 : of_attention) + (off ? gate_up : 0);
  const int64_t again = (layer ? of_attention : 0) + (off ? 0 : gate_up);
  // Beside that: the norm's result, what the two blocks add, turned queries and keys, and the input
  // of the last product.
  bytes.forward = again + number * (3 * w.hidden + w.queries + w.keys + w.inner);
  // The gradient of gate_up takes the place of gate_up, which is gone when attention's turn comes.
  // That has three float32 sums of a query's width.
  const int64_t by_mlp = number * (3 * w.hidden + w.inner);
  const int64_t by_attention =
      number * (2 * w.hidden + w.queries + (w.queries + w.keys) + 2 * w.qkv()) + 12 * w.queries -
      gate_up;
  bytes.backward = again + std::max(by_mlp, by_attention);
  return bytes;
}

int64_t head_bytes(const DeviceMemoryUse& use) {
  const Widths w(use.model);
  const int64_t number = use.half ? 2 : 4;
  const int64_t row = number * (w.vocabulary + 2 * w.hidden);
  return std::min(kHeadBytes, use.max_tokens * row) + 16 * use.max_tokens;
}

// The matrices of the layers, which are codes in fp8.
struct CodedBytes {
  int64_t numbers = 0, rows = 0;
};
CodedBytes coded_bytes(const ModelConfig& model) {
  const Widths w(model);
  const int64_t layers = model.num_hidden_layers;
  return {layers * (w.qkv() * w.hidden + w.hidden * w.queries + 3 * w.inner * w.hidden),
          layers * (w.qkv() + 2 * w.hidden + 2 * w.inner)};
}

int64_t sampler_bytes(const DeviceMemoryUse& use) {
  const SamplerMemoryUse& sampler = use.sampler;
  const Widths w(use.model);
  const int64_t number = use.half ? 2 : 4;
  const int64_t row = number * (3 * w.hidden + w.qkv() + 2 * w.queries + 3 * w.inner);
  const int64_t draw = number * w.hidden + 4 * w.vocabulary;
  int64_t own = use.lora ? adapter_of(use) : 0;
  if (!use.lora || !sampler.in_process) own += parameters_of(use.model);
  const int64_t engine =
      number * own + sampler.kv_bytes + sampler.max_rows * row + sampler.max_sequences * draw;
  // In fp8 a byte for each number of the layers' matrices, in the place of the matrices or, where
  // these are the shared base of an adapter, beside it. A pass has codes of its widest row.
  const CodedBytes coded = coded_bytes(use.model);
  const int64_t widest = std::max({w.hidden, w.queries, w.inner});
  const int64_t kept = use.lora ? 0 : number * coded.numbers;
  const int64_t more = coded.numbers + 4 * coded.rows - kept + sampler.max_rows * (widest + 4);
  return sampler.engines * engine + sampler.fp8_engines * more;
}

struct Choice {
  DeviceMemoryUse use;
  std::string text;  // the keys that differ
};

// `use` with other settings, those first that cost the least time.
std::vector<Choice> choices(const DeviceMemoryUse& use) {
  std::vector<Choice> list;
  const auto add = [&](Recompute recompute, Sharding sharding, OptimizerState state) {
    Choice choice{use, {}};
    choice.use.recompute = recompute, choice.use.optimizer_state = state;
    choice.use.sharding = sharding;
    std::vector<std::string> keys;
    if (state != use.optimizer_state) {
      keys.push_back(fmt::format("trainer.optimizer_state = \"{}\"", name_of(state)));
    }
    if (sharding != use.sharding) {
      keys.push_back(fmt::format("trainer.sharding = \"{}\"", name_of(sharding)));
    }
    if (recompute != use.recompute) {
      keys.push_back(fmt::format("trainer.recompute_activations = \"{}\"", name_of(recompute)));
    }
    choice.text = fmt::format("{}", fmt::join(keys, " and "));
    list.push_back(std::move(choice));
  };
  const bool can_shard = use.ranks > 1 && use.half && !use.lora;
  for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
    for (const Sharding sharding : {Sharding::optimizer, Sharding::weights}) {
      if (sharding != use.sharding && !(can_shard && sharding == Sharding::weights)) continue;
      for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
        if (recompute < use.recompute || state < use.optimizer_state) continue;
        add(recompute, sharding, state);
      }
    }
  }
  return list;
}

// With the most tokens of a micro-batch that fit, in powers of two below what is set.
std::optional<Choice> with_fewer_tokens(Choice choice, int64_t free) {
  int64_t tokens = 1;
  while (2 * tokens < choice.use.max_tokens) tokens *= 2;
  for (; tokens >= kLeastTokens; tokens /= 2) {
    choice.use.max_tokens = tokens;
    if (device_memory(choice.use).total() > free) continue;
    choice.text +=
        fmt::format("{}trainer.max_tokens = {}", choice.text.empty() ? "" : " and ", tokens);
    return choice;
  }
  return std::nullopt;
}

// What fits, in lines; empty: nothing does.
std::string fitting_lines(const DeviceMemoryUse& use, int64_t free) {
  constexpr size_t kMost = 4;
  std::vector<Choice> fit;
  for (const Choice& choice : choices(use)) {
    if (device_memory(choice.use).total() <= free) {
      fit.push_back(choice);
    } else if (const auto fewer = with_fewer_tokens(choice, free)) {
      fit.push_back(*fewer);
    }
  }
  std::string lines;
  for (size_t i = 0; i < std::min(kMost, fit.size()); ++i) {
    lines += fmt::format("\n  {}: {} GiB", fit[i].text, gib(device_memory(fit[i].use).total()));
  }
  return lines;
}

}  // namespace

DeviceMemory device_memory(const DeviceMemoryUse& use) {
  const int64_t all = parameters_of(use.model), tokens = use.max_tokens;
  const int64_t count = use.lora ? adapter_of(use) : all;  // that is trained
  const int64_t number = use.half ? 2 : 4, row = number * use.model.hidden_size;
  const LayerBytes layer = layer_bytes(use);
  DeviceMemory memory;
  // An adapter has a copy that passes read beside its float32 numbers; else passes read a half of
  // them, which is whole on every rank.
  if (use.lora) {
    memory.weights = number * all + (4 + number) * count;
  } else {
    memory.weights = use.half ? 2 * count + 2 * count / use.ranks : 4 * count;
  }
  memory.gradients = 4 * count;
  if (is_sharded(use)) {
    memory.weights = 4 * count / use.ranks, memory.gradients /= use.ranks;
    memory.gathered = (number + 4) * gathered_of(use.model);
  }
  memory.moments =
      (use.optimizer_state == OptimizerState::int8 ? 2 * count + count / 32 : 8 * count) /
      use.ranks;
  for (const ModelConfig& other : use.other_policies) {
    memory.other_policies +=
        number * (is_sharded(use) ? parameters_of(other) / use.ranks + gathered_of(other)
                                  : parameters_of(other));
  }
  // The input of the last norm, too.
  memory.activations = tokens * (use.model.num_hidden_layers * layer.kept + row);
  // The head and the layers' gradients work beside hidden states and their gradient.
  memory.workspace = std::max({tokens * layer.forward, 2 * tokens * row + head_bytes(use),
                               tokens * (2 * row + layer.backward)});
  memory.sampler = sampler_bytes(use);
  memory.libraries = kLibraries;
  return memory;
}

std::string why_it_does_not_fit(const DeviceMemoryUse& use, int64_t free) {
  const DeviceMemory need = device_memory(use);
  if (need.total() <= free) return "";
  std::string text = fmt::format("the run needs {} GiB of the GPU's memory, of which {} are free:",
                                 gib(need.total()), gib(free));
  const auto add = [&](const std::string& name, int64_t bytes) {
    if (bytes > 0) text += fmt::format("\n  {:>6}  {}", gib(bytes), name);
  };
  add("weights", need.weights);
  add("gradients", need.gradients);
  add(fmt::format("optimizer's moments in {}", name_of(use.optimizer_state)), need.moments);
  add("layers that passes gather, and their gradients", need.gathered);
  add("reference and teacher", need.other_policies);
  add(fmt::format("activations of {} tokens, trainer.recompute_activations = \"{}\"",
                  use.max_tokens, name_of(use.recompute)),
      need.activations);
  add("head and gradients of a layer", need.workspace);
  add("sampling: weights, KV cache and a pass of each engine", need.sampler);
  add("CUDA's libraries", need.libraries);
  const std::string fit = fitting_lines(use, free);
  if (!fit.empty()) return text + "\nThese settings fit:" + fit;
  DeviceMemoryUse alone = use;
  alone.sampler = {};
  if (use.sampler.engines > 0) {
    const std::string elsewhere = use.sampler.measures_reward
                                      ? "\nIt fits without sft.stop_at_reward"
                                      : "\nIt fits where servers sample on another device "
                                        "(inference.pool)";
    const std::string without = fitting_lines(alone, free);
    if (device_memory(alone).total() <= free) return text + elsewhere + ".";
    if (!without.empty()) return text + elsewhere + ", with" + without;
  }
  DeviceMemoryUse least = choices(alone).back().use;
  least.max_tokens = std::min(kLeastTokens, use.max_tokens);
  return text + fmt::format(
                    "\nNo settings make it fit: the least, without sampling, is {} GiB. "
                    "Train a smaller model{}",
                    gib(device_memory(least).total()),
                    use.lora ? ""
                             : ", or an adapter ([model.lora]), or share this one between more "
                               "GPUs (--ranks, trainer.sharding = \"weights\")");
}

}  // namespace leeway
