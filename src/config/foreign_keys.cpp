#include "config/foreign_keys.h"

#include <fmt/format.h>

#include <algorithm>

namespace leeway {
namespace {

// What several code bases have and we do not.
constexpr const char* kNoKlInReward =
    "rewards carry no KL term; trainer.loss.ref_kl adds the k3 penalty against ref to the loss";
constexpr const char* kNoCritic =
    "there is no critic: advantages come from groups (orchestrator.advantage)";
constexpr const char* kNoGpuLayout = "a run uses one device, model.device";
constexpr const char* kNoTracker =
    "a run writes metrics.jsonl and report.html; output.tensorboard adds TensorBoard files";
constexpr const char* kMicroBatch =
    "passes are cut by tokens, not by sequences, and the cut does not change the result";

// Presets are named where a key only exists there.
constexpr const char* kEpsilon =
    "a distance from one; of ppo, grpo, dapo, gspo, cispo, cispo_mask and m2po";
constexpr const char* kDualClip = "of ppo, grpo, dapo and m2po";
constexpr const char* kRefKl =
    "of grpo, the k3 estimator; the penalty is on where it is above 0, without a switch";
constexpr const char* kTis = "an absolute bound of prox/rollout; of the correction +tis";

const std::vector<ForeignKey>& table() {
  static const std::vector<ForeignKey> keys = {
      // prime-rl
      {"prime-rl", "loss.type", {"trainer.loss.preset"}, "`leeway loss list` prints the names"},
      {"prime-rl",
       "loss.ratio_type",
       {"trainer.loss.preset"},
       "icepop weighs tokens, gspo and geo_mask whole sequences"},
      {"prime-rl",
       "loss.token_mask_low",
       {"trainer.loss.icepop_ratio_low"},
       "an absolute bound of pi/rollout; of icepop"},
      {"prime-rl",
       "loss.token_mask_high",
       {"trainer.loss.icepop_ratio_high"},
       "an absolute bound of pi/rollout; of icepop"},
      {"prime-rl",
       "loss.geo_mask_low",
       {"trainer.loss.geo_ratio_low"},
       "of geo_mask, which drops whole sequences by their geometric mean"},
      {"prime-rl",
       "loss.geo_mask_high",
       {"trainer.loss.geo_ratio_high"},
       "of geo_mask, which drops whole sequences by their geometric mean"},
      {"prime-rl",
       "loss.sequence_mask_low",
       {"trainer.loss.icepop_rollout_min_ratio"},
       "of icepop: a sequence with one token below it is dropped"},
      {"prime-rl",
       "loss.sequence_mask_high",
       {"trainer.loss.seq_ratio_high"},
       "of seq_mis, which bounds the product over the sequence, not its largest token"},
      {"prime-rl",
       "loss.dppo_mask_low",
       {"trainer.loss.dppo_diff_low", "trainer.loss.ipo_ratio_low"},
       "a probability difference in the dppo loss (dppo_tv, dppo_kl), a ratio bound since IPO+KL "
       "(ipo_kl)"},
      {"prime-rl",
       "loss.dppo_mask_high",
       {"trainer.loss.dppo_diff_high", "trainer.loss.ipo_ratio_high"},
       "a probability difference in the dppo loss (dppo_tv, dppo_kl), a ratio bound since IPO+KL "
       "(ipo_kl)"},
      {"prime-rl",
       "loss.ipo_threshold",
       {"trainer.loss.dppo_diff_low", "trainer.loss.dppo_diff_high"},
       "of dppo_tv; both bounds are the threshold"},
      {"prime-rl",
       "loss.kl_tau",
       {"trainer.loss.kl_tau"},
       "of ipo_kl, paid on kept tokens, and dppo_kl, paid on every trained token; icepop and "
       "dppo_tv have no KL term"},
      {"prime-rl", "loss.adv_tau", {"trainer.loss.adv_tau"}, ""},
      {"prime-rl", "loss.teacher_tau", {"trainer.loss.teacher_tau"}, "trainer.teacher names it"},
      {"prime-rl",
       "max_async_level",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      {"prime-rl",
       "strict_async_level",
       {"orchestrator.schedule"},
       "\"lockstep\" repeats a run bit for bit, \"free\" lets sampling run ahead as it can"},
      {"prime-rl", "rollouts_per_example", {"orchestrator.group_size"}, "rollouts of a prompt"},
      {"prime-rl",
       "orchestrator.batch_size",
       {"orchestrator.prompts_per_batch", "orchestrator.group_size"},
       "counts rollouts: prompts_per_batch times group_size"},
      {"prime-rl", "orchestrator.sampling.max_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"prime-rl",
       "online_difficulty_filtering",
       {"orchestrator.filter_zero_advantages"},
       "leaves out groups whose rewards are all equal, whatever they are"},
      {"prime-rl", "max_completion_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"prime-rl",
       "seq_len",
       {"model.max_position_embeddings", "trainer.max_tokens"},
       "the longest sequence is the model's; a pass is cut by max_tokens"},
      {"prime-rl", "optim.lr", {"trainer.learning_rate"}, ""},
      {"prime-rl", "optim.max_norm", {"trainer.max_grad_norm"}, ""},
      {"prime-rl", "ckpt.interval", {"checkpoint.every"}, ""},
      {"prime-rl", "ckpt.keep_last", {"checkpoint.keep_last"}, ""},
      {"prime-rl", "wandb", {}, kNoTracker},
      // slime
      {"slime",
       "advantage_estimator",
       {"orchestrator.advantage", "trainer.loss.preset"},
       "one word there chooses both: grpo is group_deviation with preset grpo, gspo and cispo are "
       "presets"},
      {"slime",
       "disable_grpo_std_normalization",
       {"orchestrator.advantage"},
       "group_mean instead of group_deviation"},
      {"slime", "eps_clip", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"slime", "eps_clip_high", {"trainer.loss.eps_high"}, kEpsilon},
      {"slime", "eps_clip_c", {"trainer.loss.dual_clip"}, kDualClip},
      {"slime", "use_kl_loss", {"trainer.loss.ref_kl"}, kRefKl},
      {"slime", "kl_loss_coef", {"trainer.loss.ref_kl"}, kRefKl},
      {"slime", "kl_loss_type", {}, "trainer.loss.ref_kl uses the k3 estimator"},
      {"slime", "kl_coef", {}, kNoKlInReward},
      {"slime", "entropy_coef", {"trainer.entropy_bonus"}, ""},
      {"slime",
       "use_tis",
       {"trainer.loss.preset"},
       "a correction is part of the preset's name, as in \"grpo+tis\""},
      {"slime", "tis_clip", {"trainer.loss.tis_cap"}, kTis},
      {"slime",
       "tis_clip_low",
       {"trainer.loss.tis_ratio_low"},
       "of +icepop_tis, which drops what is below"},
      {"slime",
       "use_rollout_logprobs",
       {"trainer.loss.anchor"},
       "anchor = \"rollout\" clips pi/rollout and needs no pass for prox"},
      {"slime",
       "calculate_per_token_loss",
       {"trainer.loss.reduction"},
       "token_mean, which is the default here; off there is seq_mean_token_mean"},
      {"slime", "opd_kl_coef", {"trainer.loss.teacher_tau"}, "with trainer.teacher"},
      {"slime", "n_samples_per_prompt", {"orchestrator.group_size"}, ""},
      {"slime", "rollout_batch_size", {"orchestrator.prompts_per_batch"}, "counts prompts"},
      {"slime",
       "global_batch_size",
       {"trainer.minibatches"},
       "counts samples of an optimizer step: prompts_per_batch * group_size / minibatches here, "
       "with trainer.optimizer_steps = \"minibatch\""},
      {"slime",
       "num_steps_per_rollout",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "with optimizer_steps = \"minibatch\" each part of a batch is a step"},
      {"slime", "num_rollout", {"trainer.max_steps"}, "batches of rollouts"},
      {"slime", "rollout_max_response_len", {"rollout.max_new_tokens"}, "of a turn"},
      {"slime", "rollout_temperature", {"rollout.temperature"}, ""},
      {"slime",
       "dynamic_sampling_filter_path",
       {"orchestrator.filter_zero_advantages"},
       "the one filter there is"},
      {"slime", "lr_decay_style", {"trainer.schedule"}, ""},
      {"slime", "adam_beta1", {"trainer.beta1"}, ""},
      {"slime", "adam_beta2", {"trainer.beta2"}, ""},
      {"slime", "max_tokens_per_gpu", {"trainer.max_tokens"}, kMicroBatch},
      {"slime", "hf_checkpoint", {"model.path"}, ""},
      {"slime", "ref_load", {"trainer.reference"}, ""},
      {"slime", "prompt_data", {"environment.data"}, "of environment jsonl"},
      {"slime", "input_key", {"environment.prompt_key"}, "of environment jsonl"},
      {"slime", "label_key", {"environment.answer_key"}, "of environment jsonl"},
      {"slime",
       "rm_type",
       {"environment.verifier"},
       "of environment jsonl; rewards of your own are environment process"},
      {"slime", "eval_interval", {"eval.every"}, ""},
      {"slime", "n_samples_per_eval_prompt", {"eval.samples"}, ""},
      {"slime", "save_interval", {"checkpoint.every"}, ""},
      {"slime",
       "partial_rollout",
       {"rollout.kv_after_swap"},
       "unfinished rollouts always go on with new weights; this says what becomes of their KV "
       "cache"},
      {"slime", "colocate", {}, kNoGpuLayout},
      // cookbook
      {"cookbook",
       "ppo_n_minibatches",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "optimizer_steps = \"minibatch\" takes a step after each part, \"batch\" one after all"},
      {"cookbook",
       "policy_loss",
       {"trainer.loss.preset"},
       "`leeway loss list` prints the names; cookbook/NAME computes its formulas as they are"},
      {"cookbook", "eps_clip", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"cookbook", "eps_clip_high", {"trainer.loss.eps_high"}, kEpsilon},
      {"cookbook", "eps_clip_c", {"trainer.loss.dual_clip"}, kDualClip},
      {"cookbook", "kl_beta", {"trainer.loss.ref_kl"}, kRefKl},
      {"cookbook", "tis_cap", {"trainer.loss.tis_cap"}, kTis},
      {"cookbook", "tis_level", {"trainer.loss.tis_level"}, "sequence there is geometric here"},
      {"cookbook",
       "icepop_threshold",
       {"trainer.loss.tis_ratio_low", "trainer.loss.tis_ratio_high"},
       "the band [1/x, x] of +icepop_tis"},
      {"cookbook",
       "anchor_logp",
       {"trainer.loss.anchor"},
       "what the clipped ratio is taken against"},
      {"cookbook", "ratio_log_cap", {"trainer.loss.log_clamp"}, "of is; others clamp nothing"},
      {"cookbook", "seq_ratio_log_cap", {"trainer.loss.log_cap"}, "of gspo"},
      {"cookbook", "prompt_groups_per_step", {"orchestrator.prompts_per_batch"}, ""},
      {"cookbook", "completions_per_prompt", {"orchestrator.group_size"}, ""},
      {"cookbook",
       "max_head_offpolicy_versions",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      // tinker-cookbook
      {"tinker-cookbook",
       "max_steps_off_policy",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      {"tinker-cookbook", "groups_per_batch", {"orchestrator.prompts_per_batch"}, ""},
      {"tinker-cookbook",
       "num_substeps",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "with optimizer_steps = \"minibatch\" each part of a batch is a step"},
      {"tinker-cookbook",
       "kl_penalty_coef",
       {"trainer.loss.ref_kl"},
       "of grpo; a penalty in the loss instead of in the advantages"},
      {"tinker-cookbook", "loss_fn", {"trainer.loss.preset"}, "tinker/NAME computes its formulas"},
      {"tinker-cookbook",
       "clip_low_threshold",
       {"trainer.loss.ratio_low"},
       "of cispo; ppo has distances from one, eps_low"},
      {"tinker-cookbook",
       "clip_high_threshold",
       {"trainer.loss.ratio_high"},
       "of cispo; ppo has distances from one, eps_high"},
      // verl
      {"verl",
       "actor_rollout_ref.actor.policy_loss.loss_mode",
       {"trainer.loss.preset"},
       "vanilla is ppo with dual_clip; verl/NAME computes its formulas as they are"},
      {"verl",
       "actor_rollout_ref.actor.clip_ratio",
       {"trainer.loss.eps_low", "trainer.loss.eps_high"},
       kEpsilon},
      {"verl", "actor_rollout_ref.actor.clip_ratio_low", {"trainer.loss.eps_low"}, kEpsilon},
      {"verl", "actor_rollout_ref.actor.clip_ratio_high", {"trainer.loss.eps_high"}, kEpsilon},
      {"verl",
       "actor_rollout_ref.actor.clip_ratio_c",
       {"trainer.loss.dual_clip"},
       "off by default here, 3 there"},
      {"verl",
       "actor_rollout_ref.actor.loss_agg_mode",
       {"trainer.loss.reduction"},
       "token-mean is token_mean, seq-mean-token-sum seq_mean_token_sum, seq-mean-token-mean "
       "seq_mean_token_mean"},
      {"verl", "actor_rollout_ref.actor.use_kl_loss", {"trainer.loss.ref_kl"}, kRefKl},
      {"verl", "actor_rollout_ref.actor.kl_loss_coef", {"trainer.loss.ref_kl"}, kRefKl},
      {"verl",
       "actor_rollout_ref.actor.kl_loss_type",
       {},
       "trainer.loss.ref_kl uses the k3 estimator (low_var_kl), without verl's clamps"},
      {"verl", "actor_rollout_ref.actor.entropy_coeff", {"trainer.entropy_bonus"}, ""},
      {"verl",
       "actor_rollout_ref.actor.ppo_mini_batch_size",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "counts prompts of an optimizer step: minibatches is train_batch_size / "
       "ppo_mini_batch_size, with optimizer_steps = \"minibatch\""},
      {"verl",
       "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
       {"trainer.max_tokens"},
       kMicroBatch},
      {"verl",
       "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
       {"trainer.max_tokens"},
       kMicroBatch},
      {"verl", "actor_rollout_ref.actor.ppo_epochs", {"trainer.epochs"}, ""},
      {"verl", "actor_rollout_ref.actor.grad_clip", {"trainer.max_grad_norm"}, ""},
      {"verl", "actor_rollout_ref.actor.optim.lr", {"trainer.learning_rate"}, ""},
      {"verl", "actor_rollout_ref.model.path", {"model.path"}, ""},
      {"verl",
       "actor_rollout_ref.model.enable_gradient_checkpointing",
       {"trainer.recompute_activations"},
       ""},
      {"verl", "actor_rollout_ref.rollout.n", {"orchestrator.group_size"}, ""},
      {"verl", "actor_rollout_ref.rollout.temperature", {"rollout.temperature"}, ""},
      {"verl", "actor_rollout_ref.rollout.response_length", {"rollout.max_new_tokens"}, ""},
      {"verl", "actor_rollout_ref.rollout.gpu_memory_utilization", {"rollout.kv_bytes"}, "bytes"},
      {"verl",
       "algorithm.adv_estimator",
       {"orchestrator.advantage"},
       "grpo is group_deviation, rloo leave_one_out, reinforce_plus_plus_baseline reinforce_pp; "
       "gae needs a critic, and there is none"},
      {"verl",
       "algorithm.norm_adv_by_std_in_grpo",
       {"orchestrator.advantage"},
       "true is group_deviation, false group_mean"},
      {"verl", "algorithm.use_kl_in_reward", {}, kNoKlInReward},
      {"verl", "algorithm.kl_ctrl.kl_coef", {}, kNoKlInReward},
      {"verl",
       "algorithm.filter_groups.enable",
       {"orchestrator.filter_zero_advantages"},
       "such groups are left out of the update; no others are sampled for them"},
      {"verl",
       "algorithm.rollout_correction.rollout_is",
       {"trainer.loss.preset", "trainer.loss.tis_level"},
       "+tis, with tis_level = \"token\" or \"sequence\""},
      {"verl", "algorithm.rollout_correction.rollout_is_threshold", {"trainer.loss.tis_cap"}, kTis},
      {"verl",
       "algorithm.rollout_correction.rollout_rs",
       {"trainer.loss.preset"},
       "geo_mask and seq_mis drop sequences; verl/vanilla+RS computes its formulas as they are"},
      {"verl",
       "algorithm.rollout_correction.rollout_rs_threshold",
       {"trainer.loss.geo_ratio_high", "trainer.loss.seq_ratio_high"},
       "of geo_mask and of seq_mis"},
      {"verl",
       "algorithm.rollout_correction.bypass_mode",
       {"trainer.prox_forward", "trainer.loss.anchor"},
       "prox_forward = \"never\" takes the sampler's log-probabilities for prox"},
      {"verl", "algorithm.gamma", {}, kNoCritic},
      {"verl", "algorithm.lam", {}, kNoCritic},
      {"verl", "critic", {}, kNoCritic},
      {"verl", "data.train_batch_size", {"orchestrator.prompts_per_batch"}, "counts prompts"},
      {"verl", "data.max_response_length", {"rollout.max_new_tokens"}, "of a turn"},
      {"verl", "data.train_files", {"environment.data"}, "JSON lines; of environment jsonl"},
      {"verl", "data.val_files", {"environment.eval_data"}, "JSON lines; of environment jsonl"},
      {"verl", "data.prompt_key", {"environment.prompt_key"}, ""},
      {"verl", "trainer.total_training_steps", {"trainer.max_steps"}, "batches of rollouts"},
      {"verl",
       "trainer.total_epochs",
       {"trainer.max_steps"},
       "counts batches, not passes over the prompts"},
      {"verl", "trainer.save_freq", {"checkpoint.every"}, ""},
      {"verl", "trainer.test_freq", {"eval.every"}, ""},
      {"verl", "trainer.n_gpus_per_node", {}, kNoGpuLayout},
      {"verl", "trainer.nnodes", {}, kNoGpuLayout},
      {"verl", "trainer.experiment_name", {"output_dir"}, "a run is known by its folder"},
      {"verl", "trainer.default_local_dir", {"output_dir"}, ""},
      {"verl",
       "async_training.staleness_threshold",
       {"orchestrator.max_off_policy_steps"},
       "whole updates, not a share of samples"},
      // TRL
      {"TRL",
       "loss_type",
       {"trainer.loss.preset", "trainer.loss.reduction"},
       "grpo is reduction seq_mean_token_mean, bnpo and dapo token_mean, dr_grpo fixed_length; "
       "liger/NAME computes its formulas as they are"},
      {"TRL", "importance_sampling_level", {"trainer.loss.preset"}, "\"sequence\" is preset gspo"},
      {"TRL", "epsilon", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"TRL",
       "epsilon_high",
       {"trainer.loss.eps_high"},
       "a distance from one; for cispo TRL's is absolute, ratio_high"},
      {"TRL",
       "delta",
       {"trainer.loss.dual_clip"},
       "it caps the ratio before the clip, which is the same above it"},
      {"TRL", "beta", {"trainer.loss.ref_kl"}, kRefKl},
      {"TRL",
       "scale_rewards",
       {"orchestrator.advantage"},
       "\"group\" is group_deviation, \"none\" group_mean, \"batch\" reinforce_pp"},
      {"TRL",
       "num_iterations",
       {"trainer.epochs", "trainer.optimizer_steps"},
       "passes over each batch"},
      {"TRL", "num_generations", {"orchestrator.group_size"}, ""},
      {"TRL",
       "per_device_train_batch_size",
       {"orchestrator.prompts_per_batch", "trainer.max_tokens"},
       "a batch is counted in prompts; passes are cut by tokens"},
      {"TRL", "gradient_accumulation_steps", {"trainer.max_tokens"}, kMicroBatch},
      {"TRL",
       "generation_batch_size",
       {"orchestrator.prompts_per_batch", "orchestrator.group_size"},
       "counts rollouts: prompts_per_batch times group_size"},
      {"TRL",
       "steps_per_generation",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "with optimizer_steps = \"minibatch\" each part of a batch is a step"},
      {"TRL", "max_completion_length", {"rollout.max_new_tokens"}, "of a turn"},
      {"TRL",
       "vllm_importance_sampling_correction",
       {"trainer.loss.preset"},
       "+tis weighs by prox/rollout, +icepop_tis drops what is outside its band"},
      {"TRL", "vllm_importance_sampling_cap", {"trainer.loss.tis_cap"}, kTis},
      {"TRL", "use_vllm", {}, "the sampler is built in (rollout)"},
      {"TRL", "use_liger_kernel", {}, "the fused head and loss are built in"},
      {"TRL", "gradient_checkpointing", {"trainer.recompute_activations"}, ""},
      {"TRL",
       "sync_ref_model",
       {},
       "the reference stays what trainer.reference names for the whole run"},
      {"TRL", "num_train_epochs", {"trainer.max_steps"}, "counts batches, not passes"},
      {"TRL", "lr_scheduler_type", {"trainer.schedule"}, ""},
      {"TRL", "warmup_ratio", {"trainer.warmup_steps"}, "optimizer steps, not a share"},
      {"TRL", "save_steps", {"checkpoint.every"}, ""},
      {"TRL", "report_to", {}, kNoTracker},
      // AReaL
      {"AReaL", "actor.eps_clip", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"AReaL", "actor.eps_clip_higher", {"trainer.loss.eps_high"}, kEpsilon},
      {"AReaL", "actor.c_clip", {"trainer.loss.dual_clip"}, kDualClip},
      {"AReaL", "actor.kl_ctl", {}, kNoKlInReward},
      {"AReaL",
       "actor.ppo_n_minibatches",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "AReaL takes a step after each part: optimizer_steps = \"minibatch\""},
      {"AReaL",
       "actor.use_decoupled_loss",
       {"trainer.loss.anchor", "trainer.loss.preset"},
       "anchor = \"prox\" with a correction of prox/rollout, as in \"grpo+tis\""},
      {"AReaL", "actor.recompute_logprob", {"trainer.prox_forward"}, "\"always\" or \"never\""},
      {"AReaL",
       "actor.behav_imp_weight_cap",
       {"trainer.loss.tis_ratio_high"},
       "tokens above it are dropped: of +icepop_tis"},
      {"AReaL",
       "actor.importance_sampling_level",
       {"trainer.loss.preset"},
       "\"sequence\" is preset gspo"},
      {"AReaL", "actor.sapo_tau_pos", {"trainer.loss.tau_pos"}, "of sapo"},
      {"AReaL", "actor.sapo_tau_neg", {"trainer.loss.tau_neg"}, "of sapo"},
      {"AReaL", "actor.path", {"model.path"}, ""},
      {"AReaL", "actor.optimizer.lr", {"trainer.learning_rate"}, ""},
      {"AReaL",
       "rollout.max_head_offpolicyness",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      {"AReaL", "rollout.max_concurrent_rollouts", {"orchestrator.max_inflight"}, ""},
      {"AReaL", "gconfig.n_samples", {"orchestrator.group_size"}, ""},
      {"AReaL", "gconfig.max_new_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"AReaL", "gconfig.temperature", {"rollout.temperature"}, ""},
      {"AReaL", "train_dataset.batch_size", {"orchestrator.prompts_per_batch"}, "counts prompts"},
      {"AReaL", "total_train_epochs", {"trainer.max_steps"}, "counts batches, not passes"},
  };
  return keys;
}

std::string_view last_part(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

// Whether `name` is `tail` or ends with a dot and `tail`.
bool ends_with_path(std::string_view name, std::string_view tail) {
  return name == tail || (name.size() > tail.size() && name.ends_with(tail) &&
                          name[name.size() - tail.size() - 1] == '.');
}

// How well a foreign key fits an unknown one. 2: its whole name with its tables is there. 1: its
// last part is, and that is more than a common word, which half of all programs use. 0: neither.
int likeness(std::string_view name, const ForeignKey& key) {
  const std::string_view whole = key.key, last = last_part(whole);
  if (whole != last && ends_with_path(name, whole)) return 2;
  const bool telling = whole == last || last.find('_') != std::string_view::npos;
  return telling && last_part(name) == last ? 1 : 0;
}

std::string joined(const std::vector<const char*>& names, const char* quote) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) {
    out += i == 0 ? "" : i + 1 == names.size() ? " and " : ", ";
    out += fmt::format("{}{}{}", quote, names[i], quote);
  }
  return out;
}

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) {
    text.replace(at, 1, "\\|");
  }
  return text;
}

}  // namespace

std::span<const ForeignKey> foreign_keys() { return table(); }

std::string foreign_hint(std::string_view name) {
  int most = 0;
  for (const ForeignKey& key : table()) most = std::max(most, likeness(name, key));
  if (most == 0) return "";
  // Code bases that agree are named together, in the words of the first.
  struct Group {
    const ForeignKey* first;
    std::vector<const char*> code_bases;
  };
  std::vector<Group> groups;
  for (const ForeignKey& key : table()) {
    if (likeness(name, key) != most) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      const auto text = [](const char* word) { return std::string_view(word); };
      return std::equal(key.ours.begin(), key.ours.end(), group.first->ours.begin(),
                        group.first->ours.end(),
                        [&](const char* a, const char* b) { return text(a) == text(b); });
    });
    if (same == groups.end()) {
      groups.push_back({&key, {key.code_base}});
    } else {
      same->code_bases.push_back(key.code_base);
    }
  }
  std::string out;
  for (const Group& group : groups) {
    const ForeignKey& key = *group.first;
    const std::string_view note = key.note;
    if (!out.empty()) out += "; ";
    out += fmt::format("{} is a key of {}, ", last_part(name), joined(group.code_bases, ""));
    if (key.ours.empty()) {
      out += fmt::format("without a counterpart here: {}", note);
    } else {
      out += fmt::format("here {}{}", joined(key.ours, ""),
                         note.empty() ? "" : fmt::format(" ({})", note));
    }
  }
  return out;
}

bool is_foreign_path(std::string_view name) {
  return std::any_of(table().begin(), table().end(),
                     [&](const ForeignKey& key) { return likeness(name, key) == 2; });
}

bool is_foreign_table(std::string_view name) {
  return std::any_of(table().begin(), table().end(), [&](const ForeignKey& key) {
    const std::string_view whole = key.key;
    for (size_t dot = 0; (dot = whole.find('.', dot)) != std::string_view::npos; ++dot) {
      if (ends_with_path(name, whole.substr(0, dot))) return true;
    }
    return false;
  });
}

std::string migration_markdown() {
  std::string out =
      "<!-- keys: printed by `leeway config --migration`; a test compares what is between the "
      "markers -->\n";
  std::string_view code_base;
  for (const ForeignKey& key : table()) {
    if (key.code_base != code_base) {
      code_base = key.code_base;
      out += fmt::format("\n### Keys of {}\n\n| {} | here | notes |\n|---|---|---|\n", code_base,
                         code_base);
    }
    out += fmt::format("| `{}` | {} | {} |\n", key.key,
                       key.ours.empty() ? "none" : joined(key.ours, "`"), cell(key.note));
  }
  return out + "\n<!-- end of keys -->\n";
}

}  // namespace leeway
