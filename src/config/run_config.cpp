// What the keys of a run's configuration are: tables, bindings, allowed values and meanings.

#include "config/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/fields.h"
#include "config/given.h"

namespace leeway {
namespace {

// Limits are far above any use and keep products of sizes, such as rollouts of a whole run, within
// 63 bits.
constexpr double kMostSteps = 1e8;
constexpr double kMostPrompts = 1e6;
constexpr double kMostRollouts = 1e4;  // of a prompt
constexpr double kMostTokens = 0x1p30;
constexpr double kMostThreads = 1024;
constexpr double kMostSeed = 0x1p53 - 1;  // exact wherever JSON is read
constexpr double kMostBytes = 0x1p50;

const Range kNotNegative{.low = 0};
const Range kPositive{.low = 0, .open_low = true};
// Of weights and penalties: sums of products with rewards and counts stay finite.
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
// Text that says something.
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

// A key that the value of the key `by` leaves without effect if `condition` holds.
Field inert_if(bool condition, const std::string& by, const std::string& reason, Field field) {
  field.inert_by = by;
  if (condition) field.inert = reason;
  return field;
}
// A file or folder to be read; `word` is a value that is none.
Field input(Field field, const char* word = "") {
  field.input_path = true;
  field.no_path = word;
  return field;
}

std::vector<Field> model_fields(ModelTable& t) {
  std::vector<Field> fields = {
      input(text("path", t.path,
                 "A Hugging Face folder to start from; empty makes a model from scratch.")),
      input(text("tokenizer", t.tokenizer,
                 "`byte`, or a tokenizer.json; empty takes that of `path`, and `byte` from "
                 "scratch."),
            "byte"),
      choice("device", t.device,
             "What trains and samples; cuda needs a GPU and a build with PyTorch for CUDA."),
  };
  const std::string reason = fmt::format(
      "shapes a model made from scratch, and model.path = {} brings its own shape; leave out one "
      "of the two",
      toml_string(t.path));
  for (Field& field : std::vector<Field>{
           choice("model_type", t.model_type,
                  "Family of the decoder; qwen2 has biases on queries, keys and values, qwen3 "
                  "norms on queries and keys."),
           integer("vocab_size", t.vocab_size, 0, 0x1p30,
                   "Number of token ids; 0 takes what the tokenizer needs."),
           integer("hidden_size", t.hidden_size, 1, 0x1p20, "Width of the residual stream."),
           integer("intermediate_size", t.intermediate_size, 1, 0x1p22,
                   "Width inside the feed-forward part."),
           integer("num_hidden_layers", t.num_hidden_layers, 1, 4096, "Number of layers."),
           integer("num_attention_heads", t.num_attention_heads, 1, 4096,
                   "Query heads; a multiple of `num_key_value_heads`, and a divisor of "
                   "`hidden_size` for "
                   "llama."),
           integer("num_key_value_heads", t.num_key_value_heads, 1, 4096,
                   "Key and value heads, shared by groups of query heads."),
           integer("head_dim", t.head_dim, 2, 1024, "Width of a head; even."),
           integer("max_position_embeddings", t.max_position_embeddings, 1, kMostTokens,
                   "Longest sequence, prompt and completions together."),
           number("rms_norm_eps", t.rms_norm_eps, kPositive,
                  "Added to the mean square inside each norm."),
           number("rope_theta", t.rope_theta, kPositive, "Base of the rotary frequencies."),
           flag("tie_word_embeddings", t.tie_word_embeddings,
                "Whether the output head is the embedding."),
       }) {
    fields.push_back(inert_if(!t.path.empty(), "model.path", reason, std::move(field)));
  }
  return fields;
}

std::vector<Field> optimizer_fields(OptimizerTable& t, const std::string& path) {
  const char* rate = "AdamW's rate after the warm-up; 0 leaves the weights as they are.";
  const char* rate_or_auto =
      "AdamW's rate after the warm-up; 0 leaves the weights as they are, `auto` is 0.3 / "
      "`hidden_size`^1.5 of the model.";
  return {
      path == "sft" ? number("learning_rate", t.learning_rate.value, kNotNegative, rate)
                    : Field{.key = "learning_rate",
                            .target = &t.learning_rate,
                            .meaning = rate_or_auto,
                            .range = kNotNegative},
      integer("warmup_steps", t.warmup_steps, 0, kMostSteps,
              "Optimizer steps over which the rate rises from 0 to `learning_rate`."),
      choice("schedule", t.schedule,
             "How the rate goes on after the warm-up, down to `final_rate` at the last step."),
      inert_if(t.schedule == RateSchedule::constant, path + ".schedule",
               fmt::format("inert with {}.schedule = \"constant\"; set schedule to \"linear\" or "
                           "\"cosine\", or leave final_rate out",
                           path),
               number("final_rate", t.final_rate, kShare,
                      "Share of `learning_rate` left at the end; for linear and cosine.")),
      number("beta1", t.beta1, kShareBelowOne, "AdamW's decay of the first moment."),
      number("beta2", t.beta2, kShareBelowOne, "AdamW's decay of the second moment."),
      number("epsilon", t.epsilon, kPositive, "AdamW's addition to the denominator."),
      number("weight_decay", t.weight_decay, kNotNegative,
             "AdamW's decay of matrices; norms and biases have none."),
      number("max_grad_norm", t.max_grad_norm, kNotNegative,
             "Gradients of a larger norm are scaled down to it; 0 leaves them."),
  };
}

std::vector<Field> sft_fields(SftTable& t) {
  std::vector<Field> fields = {
      integer("max_steps", t.max_steps, 1, kMostSteps, "Optimizer steps at most."),
      integer("batch_size", t.batch_size, 1, kMostPrompts, "Demonstrations of a step."),
      input(text("data", t.data,
                 "A JSONL file of demonstrations; empty takes those that the environments make.")),
      number("stop_at_reward", t.stop_at_reward, kNotNegative,
             "Stops when sampled held-out prompts reach this mean reward; 0 goes on to the end."),
  };
  const std::string reason =
      "inert without sft.stop_at_reward; give a reward to stop at, or leave it out";
  for (Field& field : std::vector<Field>{
           integer("check_every", t.check_every, 1, kMostSteps,
                   "Steps between two looks at the reward."),
           integer("check_from", t.check_from, 0, kMostSteps, "Step of the first look."),
           integer("check_prompts", t.check_prompts, 1, kMostPrompts,
                   "Held-out prompts sampled for a look."),
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
      "is of the CPU alone and inert with model.device = \"cuda\"; leave it out";
  std::vector<Field> fields = {
      integer("max_steps", t.max_steps, 1, kMostSteps, "Batches of rollouts to train on."),
      integer("epochs", t.epochs, 1, 1000, "Passes over each batch."),
      integer("minibatches", t.minibatches, 1, kMostPrompts, "Parts that a batch is cut into."),
      choice("optimizer_steps", t.optimizer_steps,
             "One optimizer step after all parts of a pass, or one after each part."),
      integer("max_tokens", t.max_tokens, 1, kMostTokens,
              "Tokens of one forward and backward pass at most."),
      choice("prox_forward", t.prox_forward,
             "Whether the policy before the update is evaluated for losses that read `prox`; auto "
             "does so when more than one optimizer step follows."),
      input(word("reference", t.reference,
                 "The policy that a penalty compares with: `initial`, the one at step 0, or a "
                 "Hugging Face folder; for losses that read `ref`."),
            "initial"),
      input(text("teacher", t.teacher,
                 "A Hugging Face folder; needed by losses with `teacher_tau`, refused for "
                 "others.")),
      number("entropy_bonus", t.entropy_bonus, kNotNegative,
             "Times the mean entropy, taken off the loss."),
      inert_if(on_gpu, "model.device", of_cpu,
               choice("numerics", t.numerics,
                      "Exact gives the sampler's bits whatever is computed side by side; fast uses "
                      "the BLAS; on the CPU.")),
      choice("precision", t.precision,
             "Of the trainer's passes, whose weights and optimizer are float32; auto is bf16 on "
             "cuda and float32 on cpu, which has no other."),
      flag("recompute_activations", t.recompute_activations,
           "Whether layers are computed again in the backward pass instead of kept."),
      inert_if(on_gpu, "model.device", of_cpu,
               integer("threads", t.threads, 0, kMostThreads,
                       "Threads of the trainer on the CPU; 0 leaves it to the plan.")),
  };
  for (Field& field : optimizer_fields(t.optimizer, "trainer")) fields.push_back(std::move(field));
  return fields;
}

std::vector<Field> orchestrator_fields(OrchestratorTable& t) {
  return {
      integer("prompts_per_batch", t.prompts_per_batch, 1, kMostPrompts, "Groups of a batch."),
      integer("group_size", t.group_size, 1, kMostRollouts, "Rollouts of a prompt."),
      integer("max_off_policy_steps", t.max_off_policy_steps, 0, kMostSteps,
              "How many updates a trained token may be behind; 0 is strictly on-policy."),
      choice("schedule", t.schedule,
             "Lockstep repeats a run bit for bit; free lets sampling run ahead as it can."),
      integer("max_inflight", t.max_inflight, 0, kMostPrompts,
              "Rollouts under way at most; 0 for as many as staleness allows."),
      integer("max_turns", t.max_turns, 1, 10000, "Turns of a rollout at most."),
      {.key = "max_error_reschedule_attempts",
       .target = &t.max_error_reschedule_attempts,
       .meaning = "Rounds with a failure after which a group is given up.",
       .range = {.low = 1, .high = 1e6}},
      integer(
          "min_group_size", t.min_group_size, 0, kMostRollouts,
          "Finished rollouts with which a group that is given up is trained all the same; 0 for "
          "the whole group."),
      integer("max_prompt_failures", t.max_prompt_failures, 1, 1e6,
              "Groups of a prompt given up before the prompt is left out for good."),
      number("zero_progress_batches", t.zero_progress_batches, kPositive,
             "Batches' worth of failed rollouts, without one that completes, after which the run "
             "gives up."),
      number("retry_backoff", t.retry_backoff, kNotNegative,
             "Seconds before a group's first retry; doubles every round, up to a minute."),
      number("rollout_timeout", t.rollout_timeout, kNotNegative,
             "Seconds from a rollout's start to its end; 0 waits for ever."),
      choice("advantage", t.advantage, "How the rewards of a group become advantages."),
      number("length_penalty", t.length_penalty, kWeightOrNone,
             "Taken off the longest of a group's best rollouts, less off shorter ones; 0 is off."),
      flag("filter_zero_advantages", t.filter_zero_advantages,
           "Whether groups whose advantages are all 0 are left out of the batch."),
  };
}

std::vector<Field> renderer_fields(RendererConfig& t) {
  const std::string reason = "inert without orchestrator.renderer.name; give the renderer's name";
  const std::string by = "orchestrator.renderer.name";
  const bool nameless = t.name.empty();
  return {
      text("name", t.name, "The chat renderer, such as `qwen3`; empty for plain text."),
      inert_if(nameless && t.preserve_all_thinking, by, reason,
               flag("preserve_all_thinking", t.preserve_all_thinking,
                    "Whether past thinking is always kept.")),
      inert_if(nameless && t.preserve_thinking_between_tool_calls, by, reason,
               flag("preserve_thinking_between_tool_calls", t.preserve_thinking_between_tool_calls,
                    "Whether thinking after the last user message is kept if a tool message "
                    "follows.")),
  };
}

std::vector<Field> rollout_fields(RolloutTable& t) {
  return {
      integer("max_new_tokens", t.max_new_tokens, 1, kMostTokens,
              "Sampled tokens of a turn at most."),
      number("temperature", t.temperature, kNotNegative,
             "Divides the logits; 0 is greedy, else at least 1e-4."),
      integer("top_k", t.top_k, 0, kMostTokens,
              "Samples among this many likeliest tokens; 0 among all, which training needs."),
      number("top_p", t.top_p, {.low = 0, .high = 1, .open_low = true},
             "Samples among the likeliest tokens of this total probability; training needs 1."),
      number("min_p", t.min_p, kShare,
             "Samples among tokens of at least this share of the likeliest one's probability; "
             "training needs 0."),
      choice("precision", t.precision, "Of the sampler's weights."),
      choice("kv_after_swap", t.kv_after_swap,
             "What becomes of the keys and values of unfinished rollouts when weights change."),
      text("stop", t.stop,
           "Text whose last token ends a completion; empty leaves it to renderer and model."),
      integer("kv_bytes", t.kv_bytes, 1, kMostBytes, "Memory for keys and values."),
      integer("max_sequences", t.max_sequences, 1, 65536, "Sequences sampled at a time at most."),
      integer("threads", t.threads, 0, kMostThreads,
              "Threads of the sampler; 0 leaves it to the plan."),
  };
}

std::vector<Field> eval_fields(EvalTable& t) {
  return {
      integer("every", t.every, 0, kMostSteps,
              "Steps between evaluations; 0 evaluates before the first and after the last only."),
      integer("prompts", t.prompts, 1, kMostPrompts, "Held-out prompts of an evaluation."),
      integer("samples", t.samples, 1, kMostRollouts,
              "Samples of each prompt at `rollout.temperature`."),
      flag("greedy", t.greedy, "Whether one more sample is taken at temperature 0."),
  };
}

std::vector<Field> checkpoint_fields(CheckpointTable& t) {
  return {
      integer("every", t.every, 0, kMostSteps,
              "Steps between two checkpoints; 0 makes one at the end only."),
      integer("keep_last", t.keep_last, 1, 1e6, "Checkpoints kept; older ones are removed."),
      integer("keep_every", t.keep_every, 0, kMostSteps,
              "Checkpoints of steps that this divides are kept for good; 0 keeps none."),
  };
}

std::vector<Field> output_fields(OutputTable& t) {
  return {
      flag("tensorboard", t.tensorboard, "Whether metrics are written for TensorBoard too."),
      integer("rollouts_every", t.rollouts_every, 0, kMostSteps,
              "Steps between two files of rollouts; 0 writes none."),
      inert_if(t.rollouts_every == 0, "output.rollouts_every",
               "inert with output.rollouts_every = 0; let rollouts be written, or leave it out",
               integer("rollouts_groups", t.rollouts_groups, 0, kMostPrompts,
                       "Groups in such a file; 0 for all.")),
      inert_if(t.rollouts_every == 0, "output.rollouts_every",
               "inert with output.rollouts_every = 0; let rollouts be written, or leave it out",
               integer("rollouts_keep", t.rollouts_keep, 0, kMostSteps,
                       "Such files that stay: the first and the newest; 0 keeps all.")),
      integer("batches_every", t.batches_every, 0, kMostSteps,
              "Steps between two files with a whole batch and every stream that the loss read, for "
              "`loss compare` and `loss eval`; 0 writes none."),
      integer("weights_every", t.weights_every, 0, kMostSteps,
              "Steps between two folders of weights; 0 writes those of the end only."),
      integer("log_bytes", t.log_bytes, 4096, 1e12,
              "Length of `log.txt` at which it becomes `log.1.txt`, in place of the one before."),
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
                          "Decides prompts, weights made from scratch and samples.")}},
      {.path = "model",
       .about = "The policy at step 0: a folder, or the shape of a model made from scratch. With\n"
                "`path`, keys of the shape are refused.",
       .fields = model_fields(run.model)},
      {.path = "sft",
       .about = "A supervised start before RL, and the whole job of `leeway sft`. It takes place\n"
                "if the table is there, even an empty one.",
       .fields = sft_fields(run.sft),
       .present = run.sft.enabled,
       .given = &run.sft.enabled},
      {.path = "trainer",
       .about =
           "What is done with a batch of rollouts.\n\n"
           "The defaults are made for a policy that can do something already, which reinforcement\n"
           "learning needs: its advantages are noise at first, and Adam's first steps move every\n"
           "weight by the whole rate, whatever the gradient. At a rate of 1e-3 from the first "
           "step\n"
           "on, a small model falls from 0.31 to 0.07 in two updates. So the rate rises over ten\n"
           "steps, gradients are cut to a norm of 1, and the rate itself falls with the model's\n"
           "width: 3.2e-4 at 96, 9.2e-6 at 1024, 1.1e-6 at 4096. A rate that is tuned for one task "
           "may\n"
           "well be several times that.",
       .fields = trainer_fields(run.trainer, run.model.device)},
      {.path = "trainer.loss", .about = "`preset`, and the keys of that preset.", .open = true},
      {.path = "orchestrator",
       .about = "Which rollouts are made, when, and what becomes of their rewards.",
       .fields = orchestrator_fields(run.orchestrator)},
      {.path = "orchestrator.renderer",
       .about = "How conversations become tokens.",
       .fields = renderer_fields(renderer),
       .present = !renderer.name.empty()},
      {.path = "rollout",
       .about = "How tokens are sampled.",
       .fields = rollout_fields(run.rollout)},
      {.path = "eval", .about = "Rewards on held-out prompts.", .fields = eval_fields(run.eval)},
      {.path = "output", .about = "What a run writes.", .fields = output_fields(run.output)},
      {.path = "checkpoint",
       .about = "What `--resume` goes on from.",
       .fields = checkpoint_fields(run.checkpoint)},
  };
}

Section describe(EnvironmentTable& t, size_t index) {
  auto of = [&](std::vector<std::string> owners, Field field) {
    if (std::find(owners.begin(), owners.end(), t.name) == owners.end()) {
      field.inert = fmt::format(
          "belongs to environment {}, and environment.{}.name is {}; leave "
          "it out",
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
  section.about = "Where prompts and rewards come from: one table for each environment.";
  section.fields = {
      {.key = "name",
       .target = &t.name,
       .meaning = "The kind of environment; must be given.",
       .choices = {"sort", "arithmetic", "calculator", "jsonl", "process"}},
      text("id", t.id,
           "Its name in metrics, unlike all others; empty takes `name`, numbered from 1 if that "
           "comes twice."),
      number("weight", t.weight, kWeight, "Share of prompts, relative to the other weights."),
      of({"sort"}, integer("min_length", t.min_length, 1, 26, "Letters at least.")),
      of({"sort"}, integer("max_length", t.max_length, 1, 26, "Letters at most.")),
      of(sums, integer("max_operand", t.max_operand, 1, 1e9, "Largest number in a task.")),
      of(sums, integer("terms", t.terms, 2, 16, "Numbers in a task.")),
      of(sums, word("operators", t.operators, "Some of `+`, `-` and `*`, each once.")),
      of(files, input(text("data", t.data,
                           "File of training prompts, one JSON object a line; must "
                           "be given."))),
      of(files,
         input(text("eval_data", t.eval_data,
                    "File of held-out prompts; empty keeps some of `data` out of training."))),
      of({"jsonl"},
         choice("verifier", t.verifier, "How an answer is compared with the expected one.")),
      of(files, word("prompt_key", t.prompt_key, "Key of the prompt in a line.")),
      of({"jsonl"}, word("answer_key", t.answer_key, "Key of the expected answer in a line.")),
      of({"calculator", "jsonl"},
         number("format_weight", t.format_weight, kWeightOrNone,
                "Reward for a well-formed answer, right or wrong; 0 is off.")),
      of({"process"},
         text("command", t.command, "What answers turns, run by /bin/sh; must be given.")),
      of({"process"}, integer("processes", t.processes, 1, 1024, "How many of it run.")),
      of({"process"},
         number("turn_timeout", t.turn_timeout, kPositive, "Seconds that an answer may take.")),
      of({"process"}, integer("max_output_bytes", t.max_output_bytes, 1024, 1e9,
                              "Bytes that an answer may have.")),
      of({"process"}, integer("max_memory_bytes", t.max_memory_bytes, 0, kMostBytes,
                              "Address space of each of its processes; 0 for no limit.")),
      of({"process"}, integer("max_cpu_seconds", t.max_cpu_seconds, 0, 1e9,
                              "CPU seconds of each of its processes, over its life; then it is "
                              "replaced. 0 for no limit.")),
      of({"process"}, integer("max_processes", t.max_processes, 0, 1e6,
                              "Processes that one of it may have at a time, itself among them; "
                              "with more all of them are killed. 0 for no limit.")),
  };
  return section;
}

}  // namespace leeway
