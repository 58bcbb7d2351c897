// The keys of a run's configuration: tables, bindings, allowed values and meanings.

#include "config/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/fields.h"
#include "config/given.h"

namespace leeway {
namespace {

// Limits far above any practical use that keep products of sizes, such as the rollouts of a whole
// run, within 63 bits.
constexpr double kMostSteps = 1e8;
constexpr double kMostPrompts = 1e6;
constexpr double kMostRollouts = 1e4;  // per prompt
constexpr double kMostTokens = 0x1p30;
constexpr double kMostThreads = 1024;
constexpr double kMostSeed = 0x1p53 - 1;  // exact in any JSON reader
constexpr double kMostBytes = 0x1p50;

const Range kNotNegative{.low = 0};
const Range kPositive{.low = 0, .open_low = true};
// Limit on weights and penalties that keeps sums of products with rewards and counts finite.
constexpr double kMostWeight = 1e9;
const Range kWeight{.low = 0, .high = kMostWeight, .open_low = true};
const Range kWeightOrNone{.low = 0, .high = kMostWeight};
const Range kShare{.low = 0, .high = 1};
const Range kShareBelowOne{.low = 0, .high = 1, .open_high = true};

Field integer(const char* key, int64_t& value, double low, double high, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .range = {.low = low, .high = high}};
}
Field number(const char* key, double& value, const Range& range, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .range = range};
}
Field flag(const char* key, bool& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
Field text(const char* key, std::string& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
Field texts(const char* key, std::vector<std::string>& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
// Text that must not be empty.
Field word(const char* key, std::string& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .may_be_empty = false};
}
template <NamedEnum E>
Field choice(const char* key, E& value, const char* meaning) {
  const EnumTarget target{
      .value = &value,
      .get = [](const void* at) { return static_cast<size_t>(*static_cast<const E*>(at)); },
      .set = [](void* at, size_t place) { *static_cast<E*>(at) = static_cast<E>(place); }};
  return {.key = key,
          .target = target,
          .meaning = meaning,
          .choices = {kNames<E>.begin(), kNames<E>.end()}};
}

// The same for a key that may also be `true`, for the value `if_true`, or `false`, for the first.
template <NamedEnum E>
Field choice_or_flag(const char* key, E& value, E if_true, const char* meaning) {
  Field field = choice(key, value, meaning);
  field.if_true = name_of(if_true);
  return field;
}

// A key that has no effect because of the value of key `by` if `condition` holds.
Field inert_if(bool condition, const std::string& by, const std::string& reason, Field field) {
  field.inert_by = by;
  if (condition) field.inert = reason;
  return field;
}
// A file or folder that is read; `words` are special values that are not paths.
Field input(Field field, std::vector<std::string> words = {}) {
  field.input_path = true;
  field.no_paths = std::move(words);
  return field;
}

std::vector<Field> model_fields(ModelTable& t) {
  std::vector<Field> fields = {
      input(text("path", t.path,
                 "A Hugging Face folder to start from; if empty, a model is initialized from "
                 "scratch.")),
      input(text("tokenizer", t.tokenizer,
                 "`byte`, or a tokenizer.json; if empty, the one in `path`, or `byte` for a "
                 "model from scratch."),
            {"byte"}),
      choice("device", t.device,
             "Device for training and sampling; cuda needs a GPU and a build with PyTorch for "
             "CUDA."),
  };
  const std::string reason = fmt::format(
      "sets the shape of a model made from scratch, but model.path = {} has its own shape; leave "
      "out one of the two",
      toml_string(t.path));
  for (Field& field : std::vector<Field>{
           choice("model_type", t.model_type,
                  "Decoder family; qwen2 has biases on queries, keys and values, qwen3 has "
                  "RMSNorm on queries and keys."),
           integer("vocab_size", t.vocab_size, 0, 0x1p30,
                   "Size of the vocabulary; 0 means what the tokenizer needs."),
           integer("hidden_size", t.hidden_size, 1, 0x1p20, "Width of the residual stream."),
           integer("intermediate_size", t.intermediate_size, 1, 0x1p22,
                   "Hidden width of the feed-forward (SwiGLU) block."),
           integer("num_hidden_layers", t.num_hidden_layers, 1, 4096, "Number of layers."),
           integer("num_attention_heads", t.num_attention_heads, 1, 4096,
                   "Query heads; a multiple of `num_key_value_heads`, and a divisor of "
                   "`hidden_size` for "
                   "llama."),
           integer("num_key_value_heads", t.num_key_value_heads, 1, 4096,
                   "Key and value heads, shared by groups of query heads."),
           integer("head_dim", t.head_dim, 2, 1024, "Width of a head; even."),
           integer("max_position_embeddings", t.max_position_embeddings, 1, kMostTokens,
                   "Maximum sequence length, prompt and completions together."),
           number("rms_norm_eps", t.rms_norm_eps, kPositive, "Epsilon of RMSNorm."),
           number("rope_theta", t.rope_theta, kPositive, "RoPE base frequency."),
           flag("tie_word_embeddings", t.tie_word_embeddings,
                "Whether the output head shares the embedding's weights."),
       }) {
    fields.push_back(inert_if(!t.path.empty(), "model.path", reason, std::move(field)));
  }
  return fields;
}

std::vector<Field> lora_fields(LoraTable& t) {
  const std::string reason =
      fmt::format("is that of the adapter model.lora.path = {}; leave it out", toml_string(t.path));
  const auto of_new = [&](Field field) {
    return inert_if(!t.path.empty(), "model.lora.path", reason, std::move(field));
  };
  return {
      input(text("path", t.path,
                 "An adapter to start from, as PEFT saves it; if empty, a new one: A random, B "
                 "zero.")),
      of_new(
          integer("rank", t.rank, 1, 65536,
                  "Rank of the update of each matrix; a multiple of 8 with `device` = \"cuda\".")),
      of_new(number("alpha", t.alpha, kPositive, "The update is scaled by `alpha` / `rank`.")),
      of_new(texts("targets", t.targets,
                   "Modules of each layer that get an update: any of `q_proj`, `k_proj`, `v_proj`, "
                   "`o_proj`, `gate_proj`, `up_proj`, `down_proj`.")),
      number("dropout", t.dropout, kShareBelowOne,
             "0 is the only value: with dropout the trainer would compute other log-probabilities "
             "than the sampler."),
  };
}

std::vector<Field> optimizer_fields(OptimizerTable& t, const std::string& path) {
  const char* rate = "AdamW learning rate after the warm-up; 0 leaves the weights unchanged.";
  const char* rate_or_auto =
      "AdamW learning rate after the warm-up; 0 leaves the weights unchanged, `auto` is 0.3 / "
      "`hidden_size`^1.5 of the model, ten times that for an adapter.";
  return {
      path == "sft" ? number("learning_rate", t.learning_rate.value, kNotNegative, rate)
                    : Field{.key = "learning_rate",
                            .target = &t.learning_rate,
                            .meaning = rate_or_auto,
                            .range = kNotNegative},
      integer("warmup_steps", t.warmup_steps, 0, kMostSteps,
              "Optimizer steps over which the learning rate rises from 0 to `learning_rate`."),
      choice("schedule", t.schedule,
             "Learning-rate schedule after the warm-up, down to `final_rate` at the last step."),
      inert_if(t.schedule == RateSchedule::constant, path + ".schedule",
               fmt::format("inert with {}.schedule = \"constant\"; set schedule to \"linear\" or "
                           "\"cosine\", or leave final_rate out",
                           path),
               number("final_rate", t.final_rate, kShare,
                      "Final learning rate as a fraction of `learning_rate`; for linear and "
                      "cosine.")),
      number("beta1", t.beta1, kShareBelowOne, "AdamW decay of the first moment."),
      number("beta2", t.beta2, kShareBelowOne, "AdamW decay of the second moment."),
      number("epsilon", t.epsilon, kPositive, "AdamW epsilon, added to the denominator."),
      number("weight_decay", t.weight_decay, kNotNegative,
             "AdamW weight decay; applies to matrices, not to norms and biases."),
      number("max_grad_norm", t.max_grad_norm, kNotNegative,
             "Gradient clipping: gradients with a larger norm are scaled down to it; 0 disables "
             "clipping."),
  };
}

std::vector<Field> sft_fields(SftTable& t) {
  std::vector<Field> fields = {
      integer("max_steps", t.max_steps, 1, kMostSteps, "Maximum number of optimizer steps."),
      integer("batch_size", t.batch_size, 1, kMostPrompts, "Demonstrations per step."),
      input(text("data", t.data,
                 "A JSONL file of demonstrations; if empty, the environments generate them.")),
      number("stop_at_reward", t.stop_at_reward, kNotNegative,
             "Stop early once sampled held-out prompts reach this mean reward; 0 disables early "
             "stopping."),
  };
  const std::string reason =
      "inert without sft.stop_at_reward; set a reward to stop at, or leave it out";
  for (Field& field : std::vector<Field>{
           integer("check_every", t.check_every, 1, kMostSteps,
                   "Steps between checks of the reward."),
           integer("check_from", t.check_from, 0, kMostSteps, "Step of the first check."),
           integer("check_prompts", t.check_prompts, 1, kMostPrompts,
                   "Held-out prompts sampled per check."),
       }) {
    fields.push_back(
        inert_if(t.stop_at_reward == 0, "sft.stop_at_reward", reason, std::move(field)));
  }
  for (Field& field : optimizer_fields(t.optimizer, "sft")) fields.push_back(std::move(field));
  return fields;
}

std::vector<Field> trainer_fields(TrainerTable& t, Device device) {
  const bool on_gpu = device == Device::cuda;
  const std::string of_cpu =
      "applies to the CPU only and is inert with model.device = \"cuda\"; leave it out";
  std::vector<Field> fields = {
      integer("max_steps", t.max_steps, 1, kMostSteps, "Number of rollout batches to train on."),
      integer("epochs", t.epochs, 1, 1000, "Passes over each batch."),
      integer("minibatches", t.minibatches, 1, kMostPrompts,
              "Number of minibatches that a batch "
              "is split into."),
      choice("optimizer_steps", t.optimizer_steps,
             "One optimizer step per pass over the batch, or one per minibatch."),
      integer("max_tokens", t.max_tokens, 1, kMostTokens,
              "Maximum tokens per forward and backward pass (micro-batch)."),
      choice("prox_forward", t.prox_forward,
             "Whether to compute logprobs of the policy before the update, for losses that read "
             "`prox`; auto does so if the batch takes more than one optimizer step."),
      input(word("reference", t.reference,
                 "Reference policy for losses that read `ref`: `initial` (the policy at step 0), "
                 "`base` (`model.path` without its adapter) or a Hugging Face folder."),
            {"initial", "base"}),
      input(text("teacher", t.teacher,
                 "A Hugging Face folder; required by losses with `teacher_tau`, refused for "
                 "others.")),
      number("entropy_bonus", t.entropy_bonus, kNotNegative,
             "Entropy coefficient: this times the mean entropy is subtracted from the loss."),
      choice("numerics", t.numerics,
             "exact reproduces the sampler's bits however tokens are batched: in float32 on the "
             "CPU, in bf16 on cuda. fast, on the CPU only, uses the BLAS."),
      choice("precision", t.precision,
             "Dtype of the trainer's forward and backward passes; weights and optimizer state "
             "are float32. auto is bf16 on cuda and float32 on cpu, which supports only float32."),
      choice_or_flag("recompute_activations", t.recompute_activations, Recompute::layer,
                     "What the backward pass computes again instead of storing it, with the same "
                     "result: selective the gate and up projections, layer everything but each "
                     "layer's input."),
      inert_if(!on_gpu, "model.device",
               "applies to cuda only and is inert with model.device = \"cpu\"; leave it out",
               choice("optimizer_state", t.optimizer_state,
                      "How AdamW's moments are stored on cuda: float32, 8 bytes per parameter, or "
                      "int8 in blocks of 256, 2 bytes. Checkpoints contain float32 either way.")),
      inert_if(
          on_gpu, "model.device", of_cpu,
          integer("gradient_slots", t.gradient_slots, 0, 1024,
                  "Parts of a step whose gradients are summed on their own and then joined, a "
                  "power of two: as many ranks can share the step, with the same bits. 0 is 4; "
                  "1 adds gradients up in place, with the least memory.")),
      inert_if(on_gpu, "model.device", of_cpu,
               integer("threads", t.threads, 0, kMostThreads,
                       "Number of trainer threads on the CPU; 0 chooses automatically.")),
  };
  for (Field& field : optimizer_fields(t.optimizer, "trainer")) fields.push_back(std::move(field));
  return fields;
}

std::vector<Field> orchestrator_fields(OrchestratorTable& t) {
  return {
      integer("prompts_per_batch", t.prompts_per_batch, 1, kMostPrompts, "Groups per batch."),
      integer("group_size", t.group_size, 1, kMostRollouts, "Rollouts per prompt."),
      integer("max_off_policy_steps", t.max_off_policy_steps, 0, kMostSteps,
              "Maximum staleness of a trained token, in policy updates; 0 is strictly on-policy."),
      choice("schedule", t.schedule,
             "lockstep makes runs repeatable bit for bit; free lets sampling run ahead as fast "
             "as it can."),
      integer("max_inflight", t.max_inflight, 0, kMostPrompts,
              "Maximum rollouts in flight; 0 means as many as staleness allows."),
      integer("max_turns", t.max_turns, 1, 10000, "Maximum turns per rollout."),
      {.key = "max_error_reschedule_attempts",
       .target = &t.max_error_reschedule_attempts,
       .meaning = "Rounds with a failure after which a group is given up.",
       .range = {.low = 1, .high = 1e6}},
      integer("min_group_size", t.min_group_size, 0, kMostRollouts,
              "A group that is given up is still trained if at least this many of its rollouts "
              "finished; 0 means all of them."),
      integer("max_prompt_failures", t.max_prompt_failures, 1, 1e6,
              "Groups of a prompt that may be given up before the prompt is excluded for good."),
      number("zero_progress_batches", t.zero_progress_batches, kPositive,
             "The run gives up after this many batches' worth of consecutive failed rollouts."),
      number("retry_backoff", t.retry_backoff, kNotNegative,
             "Seconds before a group's first retry; doubles with every retry, up to a minute."),
      number("rollout_timeout", t.rollout_timeout, kNotNegative,
             "Seconds that a rollout may take; 0 means no limit."),
      choice("advantage", t.advantage, "How advantages are computed from rewards."),
      number("length_penalty", t.length_penalty, kWeightOrNone,
             "Length penalty: subtracted from the longest of a group's best rollouts, less from "
             "shorter ones; 0 disables it."),
      text("advantage_command", t.advantage_command,
           "Program that computes the advantages of each group, or drops it, instead of "
           "`advantage` and `length_penalty`; run by /bin/sh. Empty: none."),
      number("advantage_timeout", t.advantage_timeout, kPositive,
             "Maximum seconds per answer of `advantage_command`."),
      flag("filter_zero_advantages", t.filter_zero_advantages,
           "Whether to drop groups whose advantages are all 0 from the batch."),
  };
}

std::vector<Field> renderer_fields(RendererConfig& t) {
  const std::string reason = "inert without orchestrator.renderer.name; set the renderer's name";
  const std::string by = "orchestrator.renderer.name";
  const bool nameless = t.name.empty();
  Field retention = choice(
      "thinking_retention", t.thinking_retention,
      "Which past thinking is kept in training: `last` is what the template keeps; "
      "`between_tool_calls` and `all` are the two flags below. Evaluation keeps what the template "
      "keeps.");
  retention.in_dump = false;
  const auto said_by_retention = [](Field field) {
    field.synonym = "orchestrator.renderer.thinking_retention";
    return field;
  };
  return {
      text("name", t.name,
           "The chat renderer, such as `qwen3`; `auto` takes that of the chat template in "
           "`model.path`; empty for plain text."),
      inert_if(nameless && t.thinking_retention != KeptThinking::last, by, reason, retention),
      inert_if(nameless && t.preserve_all_thinking, by, reason,
               said_by_retention(flag("preserve_all_thinking", t.preserve_all_thinking,
                                      "Whether to keep all past thinking."))),
      inert_if(nameless && t.preserve_thinking_between_tool_calls, by, reason,
               said_by_retention(flag("preserve_thinking_between_tool_calls",
                                      t.preserve_thinking_between_tool_calls,
                                      "Whether to keep thinking after the last user message if a "
                                      "tool message follows."))),
  };
}

std::vector<Field> rollout_fields(RolloutTable& t, InferencePool pool) {
  const auto of_engine = [&](Field field) {
    return inert_if(pool != InferencePool::in_process, "inference.pool",
                    "is decided by the servers of inference.pool; leave it out", std::move(field));
  };
  return {
      integer("max_new_tokens", t.max_new_tokens, 1, kMostTokens,
              "Maximum sampled tokens per turn."),
      number("temperature", t.temperature, kNotNegative,
             "Sampling temperature; 0 is greedy, otherwise at least 1e-4."),
      integer("top_k", t.top_k, 0, kMostTokens,
              "Sample from this many most likely tokens; 0 means all, which training requires."),
      number("top_p", t.top_p, {.low = 0, .high = 1, .open_low = true},
             "Sample from the most likely tokens with this total probability (nucleus); training "
             "requires 1."),
      number("min_p", t.min_p, kShare,
             "Sample from tokens with at least this fraction of the largest probability; "
             "training requires 0."),
      of_engine(choice("precision", t.precision,
                       "Dtype of the sampler's weights. auto is the trainer's: bf16 on cuda, "
                       "float32 on cpu.")),
      of_engine(
          choice("kv_after_swap", t.kv_after_swap,
                 "What happens to the KV cache of unfinished rollouts when the weights change.")),
      text("stop", t.stop,
           "Stop text: its last token ends a completion; if empty, the renderer and model decide."),
      integer("kv_bytes", t.kv_bytes, 1, kMostBytes, "Memory for the KV cache, in bytes."),
      integer("max_sequences", t.max_sequences, 1, 65536,
              "Maximum sequences sampled "
              "concurrently."),
      of_engine(integer("threads", t.threads, 0, kMostThreads,
                        "Number of sampler threads; 0 chooses automatically.")),
  };
}

std::vector<Field> inference_fields(InferenceTable& t) {
  const auto of = [&](bool condition, const char* reason, Field field) {
    const bool local = t.pool == InferencePool::in_process;
    return inert_if(local || !condition, "inference.pool",
                    local ? "inert with inference.pool = \"in_process\"; set pool to \"static\" or "
                            "\"elastic\", or leave it out"
                          : reason,
                    std::move(field));
  };
  const bool listed = t.pool == InferencePool::static_;
  const char* of_static = "is a key of inference.pool = \"static\"; leave it out";
  const char* of_elastic = "is a key of inference.pool = \"elastic\"; leave it out";
  return {
      choice("pool", t.pool,
             "What samples, for training and its evaluations: this process, the servers of a list, "
             "or those behind a "
             "host name, which may come and go."),
      of(listed, of_static,
         texts("base_url", t.base_url, "Static: the servers, as in `http://10.0.0.7:8000`.")),
      of(listed, of_static,
         texts("admin_base_url", t.admin_base_url,
               "Static: where the same servers take weights, pauses and questions of their health; "
               "empty: where they take requests.")),
      of(!listed, of_elastic,
         text("hostname", t.hostname, "Elastic: the name whose addresses are the servers.")),
      of(!listed, of_elastic, integer("port", t.port, 1, 65535, "Elastic: the servers' port.")),
      of(true, "",
         choice("dialect", t.dialect, "How the servers are spoken to; auto asks each of them.")),
      of(true, "",
         text("api_key_var", t.api_key_var,
              "Environment variable with the key that the servers want; empty: they want none.")),
      of(true, "", texts("headers", t.headers, "More headers of every call, as in `X-Team: rl`.")),
      of(t.dialect == InferenceDialect::automatic || t.dialect == InferenceDialect::vllm,
         "is vLLM's; leave it out",
         integer("dp_rank_count", t.dp_rank_count, 1, 1024,
                 "vLLM: data-parallel ranks behind each URL, which are chosen by a header.")),
      of(true, "",
         number("sync_interval", t.sync_interval, kPositive,
                "Seconds between two questions of a server's health, and between two resolutions "
                "of `hostname`.")),
      of(true, "",
         number("connect_timeout", t.connect_timeout, kPositive,
                "Maximum seconds for a connection, and for an answer about health.")),
      of(true, "",
         number("request_timeout", t.request_timeout, kPositive,
                "Maximum seconds for the answer to a request.")),
      of(true, "",
         integer("request_attempts", t.request_attempts, 1, 100,
                 "Calls for a request, each to another server if there is one, before its rollouts "
                 "fail.")),
      of(true, "",
         number("stall_timeout", t.stall_timeout, kPositive,
                "Maximum seconds between two pieces of an answer.")),
      of(true, "",
         number("update_timeout", t.update_timeout, kPositive,
                "Maximum seconds in which a server loads new weights.")),
      of(true, "",
         integer("update_attempts", t.update_attempts, 1, 100,
                 "Attempts to give a server new weights before it leaves the pool.")),
      of(true, "",
         number("ready_timeout", t.ready_timeout, kPositive,
                "Seconds without any server after which requests fail, and a run does not start.")),
      of(true, "",
         number("outage_timeout", t.outage_timeout, kPositive,
                "Seconds without one good answer, while there are requests and some have failed, "
                "after which the run ends; calls in flight are waited for.")),
  };
}

std::vector<Field> eval_fields(EvalTable& t) {
  return {
      integer("every", t.every, 0, kMostSteps,
              "Steps between evaluations; 0 evaluates only before the first and after the last."),
      integer("prompts", t.prompts, 1, kMostPrompts, "Held-out prompts per evaluation."),
      integer("samples", t.samples, 1, kMostRollouts,
              "Samples per prompt at `rollout.temperature`."),
      flag("greedy", t.greedy, "Whether to also take one greedy sample per prompt."),
  };
}

std::vector<Field> checkpoint_fields(CheckpointTable& t) {
  return {
      integer("every", t.every, 0, kMostSteps,
              "Steps between checkpoints; 0 writes only one, at the end."),
      integer("keep_last", t.keep_last, 1, 1e6,
              "Number of recent checkpoints to keep; older "
              "ones are removed."),
      integer("keep_every", t.keep_every, 0, kMostSteps,
              "Checkpoints at multiples of this step count are kept for good; 0 keeps none."),
  };
}

std::vector<Field> output_fields(OutputTable& t) {
  return {
      flag("tensorboard", t.tensorboard, "Whether to also write metrics for TensorBoard."),
      integer("rollouts_every", t.rollouts_every, 0, kMostSteps,
              "Steps between files of rollouts; 0 writes none."),
      inert_if(t.rollouts_every == 0, "output.rollouts_every",
               "inert with output.rollouts_every = 0; set rollouts_every, or leave it out",
               integer("rollouts_groups", t.rollouts_groups, 0, kMostPrompts,
                       "Groups per file of rollouts; 0 means all.")),
      inert_if(t.rollouts_every == 0, "output.rollouts_every",
               "inert with output.rollouts_every = 0; set rollouts_every, or leave it out",
               integer("rollouts_keep", t.rollouts_keep, 0, kMostSteps,
                       "Number of rollout files to keep: the first and the newest; 0 keeps all.")),
      integer("batches_every", t.batches_every, 0, kMostSteps,
              "Steps between files with a whole batch and everything the loss read, for `loss "
              "compare` and `loss eval`; 0 writes none."),
      integer("weights_every", t.weights_every, 0, kMostSteps,
              "Steps between saved weights; 0 writes only the final ones."),
      integer("log_bytes", t.log_bytes, 4096, 1e12,
              "Size at which `log.txt` is rotated to `log.1.txt`, replacing the previous one."),
  };
}

}  // namespace

double automatic_learning_rate(int64_t hidden_size) {
  return 0.3 / std::pow(static_cast<double>(hidden_size), 1.5);
}

std::vector<Section> describe(RunConfig& run, RendererConfig& renderer) {
  return {
      {.path = "",
       .about = "Keys before the first table.",
       .fields = {word("output_dir", run.output_dir, "The run's folder."),
                  integer("seed", run.seed, 0, kMostSeed,
                          "Random seed for prompts, initial weights and sampling.")}},
      {.path = "model",
       .about = "The policy at step 0: a folder, or the shape of a model initialized from "
                "scratch. With\n"
                "`path`, keys of the shape are refused.",
       .fields = model_fields(run.model)},
      {.path = "model.lora",
       .about = "A low-rank adapter over `model.path` is trained instead of all weights "
                "([LoRA](lora.md)). It is\n"
                "enabled by the presence of the table, even an empty one.",
       .fields = lora_fields(run.model.lora),
       .present = run.model.lora.enabled,
       .given = &run.model.lora.enabled},
      {.path = "sft",
       .about = "Supervised warm start before RL, and all that `leeway sft` does. It is enabled "
                "by the\n"
                "presence of the table, even an empty one.",
       .fields = sft_fields(run.sft),
       .present = run.sft.enabled,
       .given = &run.sft.enabled},
      {.path = "trainer",
       .about =
           "How a batch of rollouts is trained.\n\n"
           "The defaults assume a policy that already has some skill, which reinforcement "
           "learning\n"
           "needs: advantages are noise at first, and Adam's first steps move every weight by "
           "the full\n"
           "learning rate, whatever the gradient. At a learning rate of 1e-3 from the first step "
           "on, a\n"
           "small model's reward falls from 0.31 to 0.07 in two updates. So the learning rate "
           "warms up\n"
           "over ten steps, gradients are clipped to a norm of 1, and the default rate falls "
           "with the\n"
           "model's width: 3.2e-4 at 96, 9.2e-6 at 1024, 1.1e-6 at 4096. A rate tuned for one "
           "task may\n"
           "well be several times that.",
       .fields = trainer_fields(run.trainer, run.model.device)},
      {.path = "trainer.loss",
       .about = "`preset`, the keys of that preset, and `plugin`.",
       .open = true},
      {.path = "orchestrator",
       .about = "Which rollouts are sampled, when, and how their rewards become advantages.",
       .fields = orchestrator_fields(run.orchestrator)},
      {.path = "orchestrator.renderer",
       .about = "How conversations become tokens.",
       .fields = renderer_fields(renderer),
       .present = !renderer.name.empty()},
      {.path = "rollout",
       .about = "How tokens are sampled.",
       .fields = rollout_fields(run.rollout, run.inference.pool)},
      {.path = "inference",
       .about = "Which process samples for training ([pools](pools.md)).",
       .fields = inference_fields(run.inference),
       .present = run.inference.pool != InferencePool::in_process},
      {.path = "eval", .about = "Rewards on held-out prompts.", .fields = eval_fields(run.eval)},
      {.path = "output", .about = "What a run writes.", .fields = output_fields(run.output)},
      {.path = "checkpoint",
       .about = "What `--resume` continues from.",
       .fields = checkpoint_fields(run.checkpoint)},
  };
}

Section describe(EnvironmentTable& t, size_t index) {
  auto of = [&](std::vector<std::string> owners, Field field) {
    if (std::find(owners.begin(), owners.end(), t.name) == owners.end()) {
      field.inert =
          fmt::format("is a key of environment {}, but environment.{}.name is {}; leave it out",
                      fmt::join(owners, " and "), index, toml_string(t.name));
    }
    field.inert_by = fmt::format("environment.{}.name", index);
    field.owners = std::move(owners);
    return field;
  };
  const std::vector<std::string> sums = {"arithmetic", "calculator"};
  const std::vector<std::string> files = {"jsonl", "process"};
  Section section;
  section.path = fmt::format("environment.{}", index);
  section.about = "Where prompts and rewards come from: one table per environment.";
  section.fields = {
      {.key = "name",
       .target = &t.name,
       .meaning = "Kind of environment; required.",
       .choices = {"sort", "arithmetic", "calculator", "jsonl", "process"}},
      text("id", t.id,
           "Unique name in metrics; if empty, `name`, numbered from 1 if several environments "
           "share it."),
      number("weight", t.weight, kWeight,
             "Share of prompts, relative to the weights of the "
             "other environments."),
      of({"sort"}, integer("min_length", t.min_length, 1, 26, "Minimum number of letters.")),
      of({"sort"}, integer("max_length", t.max_length, 1, 26, "Maximum number of letters.")),
      of(sums, integer("max_operand", t.max_operand, 1, 1e9, "Largest number in a task.")),
      of(sums, integer("terms", t.terms, 2, 16, "How many numbers a task has.")),
      of(sums, word("operators", t.operators, "Any of `+`, `-` and `*`, each at most once.")),
      of(files,
         input(text("data", t.data,
                    "File of training prompts, one JSON object per line; required, except for a "
                    "process that speaks protocol 2."))),
      of(files, input(text("eval_data", t.eval_data,
                           "File of held-out prompts; if empty, some of `data` is held out from "
                           "training."))),
      of({"jsonl"},
         choice("verifier", t.verifier, "How an answer is compared with the expected one.")),
      of(files, word("prompt_key", t.prompt_key, "Key of the prompt in a line.")),
      of({"jsonl"}, word("answer_key", t.answer_key, "Key of the expected answer in a line.")),
      of({"calculator", "jsonl"},
         number("format_weight", t.format_weight, kWeightOrNone,
                "Reward for a well-formed answer, right or wrong; 0 is off.")),
      of({"process"},
         text("command", t.command, "Command that answers the turns, run by /bin/sh; required.")),
      of({"process"}, integer("processes", t.processes, 1, 1024,
                              "Number of processes that run "
                              "the command.")),
      of({"process"},
         number("turn_timeout", t.turn_timeout, kPositive, "Maximum seconds per answer.")),
      of({"process"},
         integer("max_output_bytes", t.max_output_bytes, 1024, 1e9, "Maximum bytes per answer.")),
      of({"process"}, integer("max_memory_bytes", t.max_memory_bytes, 0, kMostBytes,
                              "Address-space limit of each process; 0 means no limit.")),
      of({"process"}, integer("max_cpu_seconds", t.max_cpu_seconds, 0, 1e9,
                              "Total CPU seconds that a process may use before it is replaced; 0 "
                              "means no limit.")),
      of({"process"}, integer("max_processes", t.max_processes, 0, 1e6,
                              "Maximum simultaneous processes of one command, itself included; "
                              "all of them are killed when there are more. 0 means no limit.")),
  };
  return section;
}

Precision rollout_precision(const RunConfig& run) {
  switch (run.rollout.precision) {
    case RolloutPrecision::float32: return Precision::float32;
    case RolloutPrecision::bf16: return Precision::bf16;
    case RolloutPrecision::int8: return Precision::int8;
    case RolloutPrecision::automatic: break;
  }
  const bool half =
      run.model.device == Device::cuda && run.trainer.precision != TrainingPrecision::float32;
  return half ? Precision::bf16 : Precision::float32;
}

bool rollouts_are_exact(const RunConfig& run) {
  if (run.trainer.numerics != Numerics::exact) return false;
  if (run.model.device == Device::cpu) return rollout_precision(run) == Precision::float32;
  return run.trainer.precision != TrainingPrecision::float32 &&
         rollout_precision(run) == Precision::bf16;
}

}  // namespace leeway
