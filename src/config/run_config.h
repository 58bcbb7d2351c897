// The tables of a run's configuration as typed values, one struct per table. Field names are the
// TOML keys; the initial values here are the only defaults.
//
// The meaning, range and table of each key are in `describe` (run_config.cpp), which the reader,
// the effective dump and docs/configuration.md share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/settings.h"

namespace leeway {

// [model.lora]: a low-rank adapter over model.path is trained instead of all weights.
struct LoraTable {
  bool enabled = false;  // whether the file has the table
  std::string path;      // an adapter to start from; empty: a new one
  // Of a new one; an adapter of `path` has its own.
  int64_t rank = 16;
  double alpha = 32.0;  // the update is scaled by alpha / rank
  std::vector<std::string> targets = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                      "gate_proj", "up_proj", "down_proj"};
  double dropout = 0.0;  // 0 is the only value
};

// [model]: a Hugging Face folder, or the shape of a model initialized from scratch (never both).
struct ModelTable {
  std::string path;             // empty: from scratch
  std::string tokenizer;        // "byte" or a tokenizer.json; empty: the one in `path`, else "byte"
  Device device = Device::cpu;  // of trainer and sampler
  // Keys of config.json for a model from scratch. vocab_size 0: what the tokenizer needs.
  ModelType model_type = ModelType::llama;
  int64_t vocab_size = 0;
  int64_t hidden_size = 96;
  int64_t intermediate_size = 192;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 24;
  int64_t max_position_embeddings = 512;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  bool tie_word_embeddings = false;
  LoraTable lora;
};

// A number, or "auto", which the rest of the configuration determines. `value` is the effective
// number.
struct AutoNumber {
  double value = 0.0;
  bool automatic = false;

  AutoNumber() = default;
  AutoNumber(double number) : value(number) {}  // NOLINT: a number is one
  operator double() const { return value; }     // NOLINT
};
// "auto", not determined yet.
inline AutoNumber auto_number() {
  AutoNumber number;
  number.automatic = true;
  return number;
}

// Keys that [trainer] and [sft] share.
struct OptimizerTable {
  AutoNumber learning_rate = 1e-3;
  int64_t warmup_steps = 0;  // optimizer steps from 0 to the full learning rate
  RateSchedule schedule = RateSchedule::constant;  // from the end of the warm-up on
  double final_rate = 0.0;  // fraction of learning_rate at the end of linear and cosine
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;   // on matrices; not on norms and biases
  double max_grad_norm = 1.0;  // 0: no clipping
};

// [sft]: supervised warm start before RL, or the whole job of `leeway sft`.
struct SftTable {
  bool enabled = false;  // whether the file has the table
  int64_t max_steps = 100;
  int64_t batch_size = 128;     // demonstrations per step
  std::string data;             // JSONL; empty: the environments generate demonstrations
  double stop_at_reward = 0.0;  // stop once held-out prompts reach this mean reward; 0: off
  int64_t check_every = 5;      // steps between checks, with stop_at_reward
  int64_t check_from = 25;      // step of the first check
  int64_t check_prompts = 256;
  OptimizerTable optimizer;  // its keys are in [sft] itself
};

// [trainer]
struct TrainerTable {
  int64_t max_steps = 100;  // rollout batches to train on
  int64_t epochs = 1;       // passes over each batch
  int64_t minibatches = 1;  // per batch
  OptimizerSteps optimizer_steps = OptimizerSteps::batch;
  int64_t max_tokens = 16384;  // per forward and backward pass
  ProxForward prox_forward = ProxForward::automatic;
  // "initial": the policy at step 0; "base": model.path below an adapter; or a Hugging Face folder.
  std::string reference = "initial";
  std::string teacher;  // a Hugging Face folder; for teacher_tau
  double entropy_bonus = 0.0;
  Numerics numerics = Numerics::exact;
  TrainingPrecision precision = TrainingPrecision::automatic;
  Recompute recompute_activations = Recompute::off;
  OptimizerState optimizer_state = OptimizerState::float32;
  Sharding sharding = Sharding::optimizer;
  int64_t gradient_slots = 0;  // a power of two; 0: automatic
  int64_t threads = 0;         // 0: automatic
  // Its keys are in [trainer] itself. Too large steps destroy a capable policy long before it
  // learns anything, so the default learning rate is small and has a warm-up.
  OptimizerTable optimizer{.learning_rate = auto_number(), .warmup_steps = 10};
};

// The learning rate that "auto" stands for. It falls with the model's width, as Adam's step on a
// sum of that many terms must, and somewhat faster, down to what is used for billions of
// parameters.
double automatic_learning_rate(int64_t hidden_size);
// Of an adapter, times this: its matrices are small and begin at zero, and the rates that work best
// for them lie about this far above those of all weights.
inline constexpr double kAdapterRate = 10.0;

// [orchestrator]
struct OrchestratorTable {
  int64_t prompts_per_batch = 32;
  int64_t group_size = 8;            // rollouts per prompt
  int64_t max_off_policy_steps = 1;  // 0: strictly on-policy
  RolloutSchedule schedule = RolloutSchedule::lockstep;
  int64_t max_inflight = 0;  // rollouts; 0: as many as staleness allows
  int64_t max_turns = 8;     // per rollout
  std::optional<int64_t> max_error_reschedule_attempts = 3;  // empty: "unlimited"
  int64_t min_group_size = 0;  // finished rollouts with which a given-up group is trained; 0: all
  int64_t max_prompt_failures = 3;     // given-up groups of a prompt before it is excluded
  double zero_progress_batches = 4.0;  // batches' worth of consecutive failures that end the run
  double retry_backoff = 0.1;          // seconds before the first retry; doubles with every retry
  double rollout_timeout = 600.0;      // seconds; 0: no limit
  AdvantageKind advantage = AdvantageKind::group_mean;
  double length_penalty = 0.0;      // 0: off
  std::string advantage_command;    // a program that takes their place; empty: none
  double advantage_timeout = 60.0;  // seconds, of each of its answers
  bool filter_zero_advantages = false;
};

// [rollout]: how tokens are sampled.
struct RolloutTable {
  int64_t max_new_tokens = 64;  // per turn
  double temperature = 1.0;
  // Truncated sampling; refused by `leeway train`, whose trainer computes logprobs under the full
  // distribution.
  int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  RolloutPrecision precision = RolloutPrecision::automatic;
  KvAfterSwap kv_after_swap = KvAfterSwap::keep;
  std::string stop;  // its last token ends a completion; empty: by renderer and model
  int64_t kv_bytes = int64_t{1} << 30;
  int64_t max_sequences = 256;
  int64_t threads = 0;  // 0: automatic
};

// [inference]: which process samples.
struct InferenceTable {
  InferencePool pool = InferencePool::in_process;
  std::vector<std::string> base_url;        // static
  std::vector<std::string> admin_base_url;  // static; empty: as base_url
  std::string hostname;                     // elastic
  int64_t port = 8000;                      // elastic
  InferenceDialect dialect = InferenceDialect::automatic;
  std::string api_key_var;           // name of an environment variable; empty: no key
  std::vector<std::string> headers;  // "Name: value"
  int64_t dp_rank_count = 1;         // vLLM: data-parallel ranks behind each URL
  double sync_interval = 5.0;        // seconds between looks at the servers and their name
  double connect_timeout = 5.0;      // seconds, also of answers about health
  double request_timeout = 600.0;    // seconds
  int64_t request_attempts = 5;      // calls for a request before its rollouts fail
  double stall_timeout = 60.0;       // seconds between two pieces of an answer
  double update_timeout = 300.0;     // seconds in which a server loads weights
  int64_t update_attempts = 3;
  double ready_timeout = 120.0;   // seconds without any server before requests fail
  double outage_timeout = 900.0;  // seconds of failures alone before the run ends
};

// [eval]
struct EvalTable {
  int64_t every = 0;  // steps between evaluations; 0: only before the first and after the last
  int64_t prompts = 256;
  int64_t samples = 1;  // per prompt, at rollout.temperature
  bool greedy = true;   // one more at temperature 0
};

// [output]
struct OutputTable {
  bool tensorboard = false;
  int64_t rollouts_every = 10;   // steps; 0: never
  int64_t rollouts_groups = 4;   // groups per file; 0: all
  int64_t rollouts_keep = 1000;  // files to keep: the first and the newest; 0: all
  int64_t batches_every = 0;     // steps; 0: never
  int64_t weights_every = 0;     // steps; 0: only at the end
  int64_t log_bytes = 16 << 20;  // size at which log.txt is rotated to log.1.txt
};

// [checkpoint]
struct CheckpointTable {
  int64_t every = 50;      // steps; 0: only at the end
  int64_t keep_last = 2;   // checkpoints
  int64_t keep_every = 0;  // multiples of this step count are kept for good; 0: none
};

// [[environment]]: one or more; the keys depend on `name`.
struct EnvironmentTable {
  std::string name;     // sort | arithmetic | calculator | jsonl | process
  std::string id;       // in metric names; empty: the name, numbered if several share it
  double weight = 1.0;  // share of prompts
  int64_t min_length = 4, max_length = 8;       // sort: letters
  int64_t max_operand = 99;                     // arithmetic, calculator
  int64_t terms = 2;                            // arithmetic, calculator: numbers per task
  std::string operators = "+-";                 // arithmetic, calculator: of + - *
  std::string data, eval_data;                  // jsonl, process: files
  VerifierKind verifier = VerifierKind::exact;  // jsonl
  std::string prompt_key = "prompt", answer_key = "answer";  // jsonl
  double format_weight = 0.0;  // calculator, jsonl: reward for a well-formed answer; 0: off
  std::string command;         // process: run by /bin/sh
  int64_t processes = 2;       // process: how many run
  double turn_timeout = 60.0;  // process: seconds per answer
  int64_t max_output_bytes = int64_t{1} << 20;  // process: per answer
  // process: resource limits of the program; 0: none
  int64_t max_memory_bytes = 0, max_cpu_seconds = 0, max_processes = 0;
};

// The whole file except [trainer.loss] and [orchestrator.renderer], which Config holds.
struct RunConfig {
  std::string output_dir = "runs/leeway";
  int64_t seed = 1;
  ModelTable model;
  SftTable sft;
  TrainerTable trainer;
  OrchestratorTable orchestrator;
  RolloutTable rollout;
  InferenceTable inference;
  EvalTable eval;
  OutputTable output;
  CheckpointTable checkpoint;
  std::vector<EnvironmentTable> environments;
};

// What rollout.precision comes to: `auto` is the trainer's own, so that rollouts have the bits of
// training: bf16 on a GPU, unless it trains in float32.
Precision rollout_precision(const RunConfig& run);
// Whether sampled log-probabilities have the trainer's bits when the weights are the same.
bool rollouts_are_exact(const RunConfig& run);

}  // namespace leeway
