// Shared by the tests of the configuration: short names, all values as text, a file with every key.
#pragma once

#include <gtest/gtest.h>

#include "config/config.h"
#include "config/fields.h"
#include "leeway/error.h"

namespace leeway {

inline const Catalog catalog;

inline Config parse(const std::string& text, const std::vector<std::string>& sets = {}) {
  return parse_config(catalog, "run.toml", text, sets, ConfigScope::whole);
}

inline std::string error_of(const std::string& text, const std::vector<std::string>& sets = {}) {
  try {
    parse(text, sets);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_words(const std::string& message, const std::vector<std::string>& words) {
  EXPECT_FALSE(message.empty());
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << message << "\n  without: " << word;
  }
}

inline std::vector<Section> sections_of(Config& config) {
  std::vector<Section> sections = describe(config.run, config.renderer);
  for (size_t i = 0; i < config.run.environments.size(); ++i) {
    sections.push_back(describe(config.run.environments[i], i));
  }
  return sections;
}

// All values of all tables, whether they have an effect or not.
inline std::string values_of(Config config) {
  std::string out = config.run.sft.enabled ? "sft\n" : "";
  for (const Section& section : sections_of(config)) {
    for (const Field& field : section.fields) {
      out += section.prefix() + field.key + " = " + toml_text(field) + "\n";
    }
  }
  return out;
}

inline std::string effective_of(const Config& config) {
  std::string out;
  for (const EffectiveValue& value : config.effective)
    out += value.key + " = " + value.value + "\n";
  return out;
}

inline std::string origin_of(const Config& config, const std::string& key) {
  for (const EffectiveValue& value : config.effective) {
    if (value.key == key) return value.origin;
  }
  return "(not there)";
}

inline const std::string kSort = "[[environment]]\nname = \"sort\"\n";

// A file that gives every key of every table a value other than its default, as far as they are
// compatible.
inline const std::string kFull = R"(output_dir = "runs/\u00e9 \"x\" \\ \u007f"
seed = 9007199254740991
[model]
tokenizer = "byte"
model_type = "qwen3"
vocab_size = 300
hidden_size = 64
intermediate_size = 100
num_hidden_layers = 3
num_attention_heads = 6
num_key_value_heads = 3
head_dim = 16
max_position_embeddings = 1024
rms_norm_eps = 1e-5
rope_theta = 1e6
tie_word_embeddings = true
[sft]
max_steps = 7
batch_size = 3
data = "d.jsonl"
stop_at_reward = 0.25
check_every = 2
check_from = 0
check_prompts = 9
learning_rate = 0.1234567890123456
warmup_steps = 4
schedule = "cosine"
final_rate = 0.1
beta1 = 0
beta2 = 0.98
epsilon = 1e-300
weight_decay = 1e22
max_grad_norm = 0
[trainer]
max_steps = 2
epochs = 3
minibatches = 4
optimizer_steps = "minibatch"
max_tokens = 100
prox_forward = "never"
reference = "some/folder"
teacher = "teacher/folder"
entropy_bonus = 0.01
numerics = "fast"
precision = "float32"
recompute_activations = "layer"
gradient_slots = 8
threads = 3
learning_rate = 2
warmup_steps = 5
schedule = "linear"
final_rate = 1
beta1 = 0.8
beta2 = 0.9
epsilon = 1e-7
weight_decay = 0.5
max_grad_norm = 2.5
[trainer.loss]
preset = "grpo"
ref_kl = 0.1
teacher_tau = 0.5
[orchestrator]
prompts_per_batch = 3
group_size = 5
max_off_policy_steps = 0
schedule = "free"
max_inflight = 7
max_turns = 2
max_error_reschedule_attempts = "unlimited"
min_group_size = 2
max_prompt_failures = 4
zero_progress_batches = 2.5
retry_backoff = 0.5
rollout_timeout = 30
advantage = "leave_one_out"
length_penalty = 0.5
filter_zero_advantages = true
[orchestrator.renderer]
name = "qwen3"
thinking_retention = "all"
preserve_all_thinking = true
preserve_thinking_between_tool_calls = true
[rollout]
max_new_tokens = 5
temperature = 0.7
top_k = 5
top_p = 0.9
min_p = 0.1
precision = "int8"
kv_after_swap = "recompute"
stop = "\n"
kv_bytes = 1048576
max_sequences = 8
threads = 2
[eval]
every = 5
prompts = 6
samples = 2
greedy = false
[output]
tensorboard = true
rollouts_every = 3
rollouts_groups = 0
rollouts_keep = 7
batches_every = 7
weights_every = 9
log_bytes = 5000
[checkpoint]
every = 4
keep_last = 3
keep_every = 20
[[environment]]
name = "sort"
id = "letters"
weight = 2
min_length = 1
max_length = 26
[[environment]]
name = "calculator"
id = "c"
weight = 0.5
max_operand = 12
terms = 3
operators = "*"
format_weight = 0.2
[[environment]]
name = "jsonl"
id = "j"
weight = 3
data = "a.jsonl"
eval_data = "b.jsonl"
verifier = "regex"
prompt_key = "q"
answer_key = "a"
format_weight = 1
)";

}  // namespace leeway
