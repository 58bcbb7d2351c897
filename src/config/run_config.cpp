// The tables of a run's configuration, and what follows from its keys.

#include "config/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/field_makers.h"
#include "config/given.h"
#include "config/run_fields.h"

namespace leeway {
namespace {

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
      integer(
          "weights_every", t.weights_every, 0, kMostSteps,
          "Steps between saved weights; 0 writes only the final ones. Where a GPU has no room for "
          "a float32 copy beside training, all but the final ones are rounded to bf16."),
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
       .fields = inference_fields(run.inference)},
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
    case RolloutPrecision::fp8: return Precision::fp8;
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
