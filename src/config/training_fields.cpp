// The keys of what is trained and how.

#include <fmt/format.h>

#include "config/field_makers.h"
#include "config/given.h"
#include "config/run_fields.h"

namespace leeway {
namespace {

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

}  // namespace

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
      inert_if(!on_gpu, "model.device",
               "applies to cuda only and is inert with model.device = \"cpu\"; leave it out",
               choice("sharding", t.sharding,
                      "What several GPUs have a part of each: optimizer its moments and half of "
                      "the float32 weights (ZeRO-1), weights all weights and gradients too, which "
                      "passes gather layer by layer (ZeRO-3).")),
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

}  // namespace leeway
