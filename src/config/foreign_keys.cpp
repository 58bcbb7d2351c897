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
// prime-rl's loss up to 0.4, and what one key of it means in several of its losses.
constexpr const char* kTokenMask = "up to 0.4; an absolute bound of pi/rollout; of icepop";
constexpr const char* kGeoMask =
    "up to 0.4; of geo_mask, which drops whole sequences by their geometric mean";
constexpr const char* kDppoMask =
    "a probability difference in the default loss (dppo_kl), a ratio bound in pull request 2423 "
    "(ipo_kl)";
constexpr const char* kTis = "an absolute bound of prox/rollout; of the correction +tis";

const std::vector<ForeignKey>& table() {
  static const std::vector<ForeignKey> keys = {
      // prime-rl
      {"prime-rl",
       "loss.type",
       {"trainer.loss.preset"},
       "default is dppo_kl, ipo is prime/ipo; `leeway loss list` prints the names"},
      {"prime-rl",
       "loss.ratio_type",
       {"trainer.loss.preset", "trainer.loss.tis_level"},
       "up to 0.4; \"token\" is icepop, \"sequence\" is nearest reinforce+tis with tis_level = "
       "\"sequence\""},
      {"prime-rl", "loss.token_mask_low", {"trainer.loss.icepop_ratio_low"}, kTokenMask},
      {"prime-rl", "loss.token_mask_high", {"trainer.loss.icepop_ratio_high"}, kTokenMask},
      {"prime-rl", "loss.geo_mask_low", {"trainer.loss.geo_ratio_low"}, kGeoMask},
      {"prime-rl", "loss.geo_mask_high", {"trainer.loss.geo_ratio_high"}, kGeoMask},
      {"prime-rl",
       "loss.sequence_mask_low",
       {"trainer.loss.icepop_rollout_min_ratio"},
       "up to 0.4; of icepop: a sequence with one token below it is dropped"},
      {"prime-rl",
       "loss.sequence_mask_high",
       {"trainer.loss.seq_ratio_high"},
       "up to 0.4; of seq_mis, which bounds the product over the sequence, not its largest token"},
      {"prime-rl",
       "loss.dppo_mask_low",
       {"trainer.loss.dppo_diff_low", "trainer.loss.ipo_ratio_low"},
       kDppoMask},
      {"prime-rl",
       "loss.dppo_mask_high",
       {"trainer.loss.dppo_diff_high", "trainer.loss.ipo_ratio_high"},
       kDppoMask},
      {"prime-rl",
       "loss.ipo_threshold",
       {"trainer.loss.dppo_diff_low", "trainer.loss.dppo_diff_high"},
       "of dppo_tv, which has no KL term; both bounds are the threshold; prime/ipo has both terms"},
      {"prime-rl",
       "loss.kl_tau",
       {"trainer.loss.kl_tau"},
       "of dppo_kl, paid on every trained token as there, and ipo_kl, paid on kept tokens; icepop "
       "and dppo_tv have no KL term"},
      {"prime-rl", "loss.adv_tau", {"trainer.loss.adv_tau"}, ""},
      {"prime-rl",
       "loss.teacher_tau",
       {"trainer.loss.teacher_tau"},
       "up to 0.5; trainer.teacher names the teacher"},
      {"prime-rl", "algo.type", {"orchestrator.advantage"}, "grpo is group_mean, max_rl is max_rl"},
      {"prime-rl",
       "max_async_level",
       {"orchestrator.max_off_policy_steps"},
       "up to 0.5; how many updates a trained token may be behind"},
      {"prime-rl",
       "strict_async_level",
       {"orchestrator.schedule"},
       "up to 0.5; true is \"lockstep\", a lag of exactly max_off_policy_steps, false \"free\", at "
       "most that"},
      {"prime-rl",
       "rollouts_per_example",
       {"orchestrator.group_size"},
       "up to 0.5; rollouts of a prompt"},
      {"prime-rl",
       "orchestrator.batch_size",
       {"orchestrator.prompts_per_batch", "orchestrator.group_size"},
       "counts rollouts: prompts_per_batch times group_size"},
      {"prime-rl",
       "orchestrator.sampling.max_tokens",
       {"rollout.max_new_tokens"},
       "up to 0.5; of a turn"},
      {"prime-rl",
       "online_difficulty_filtering",
       {"orchestrator.filter_zero_advantages"},
       "up to 0.5, where a mean reward of 0 or 1 leaves a group out; here equal rewards do, "
       "whatever they are"},
      {"prime-rl", "max_completion_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"prime-rl",
       "seq_len",
       {"model.max_position_embeddings", "trainer.max_tokens"},
       "the longest sequence is the model's; a pass is cut by max_tokens"},
      {"prime-rl",
       "model.name",
       {"model.path"},
       "a folder with the weights; names are not looked up"},
      {"prime-rl", "optim.lr", {"trainer.learning_rate"}, ""},
      {"prime-rl", "optim.max_norm", {"trainer.max_grad_norm"}, ""},
      {"prime-rl", "ckpt.interval", {"checkpoint.every"}, ""},
      {"prime-rl", "ckpt.keep_last", {"checkpoint.keep_last"}, ""},
      {"prime-rl", "eval.interval", {"eval.every"}, ""},
      {"prime-rl", "eval.num_examples", {"eval.prompts"}, "-1 is all of them there"},
      {"prime-rl", "eval.group_size", {"eval.samples"}, ""},
      {"prime-rl", "wandb", {}, kNoTracker},
      {"prime-rl", "monitors", {}, kNoTracker},
      // slime
      {"slime",
       "advantage_estimator",
       {"orchestrator.advantage", "trainer.loss.preset"},
       "one word there chooses both: grpo is group_deviation with preset grpo, gspo and cispo are "
       "presets, reinforce_plus_plus_baseline is reinforce_pp; reinforce_plus_plus has no baseline "
       "of the group: batch_mean is nearest, which does not divide; ppo needs a critic, and there "
       "is "
       "none"},
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
       "of +icepop_tis, which drops what is below; slime's own TIS raises weights to it, +tis does "
       "not"},
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
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "counts samples of an optimizer step: prompts_per_batch * group_size / minibatches here, "
       "with optimizer_steps = \"minibatch\""},
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
       "the one filter there is; no other groups are sampled for those left out"},
      {"slime", "lr", {"trainer.learning_rate"}, ""},
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
       "apply_chat_template",
       {"orchestrator.renderer.name"},
       "a renderer writes the conversation as tokens"},
      {"slime",
       "rm_type",
       {"environment.verifier"},
       "of environment jsonl; rewards of your own are environment process"},
      {"slime", "eval_interval", {"eval.every"}, ""},
      {"slime",
       "eval_prompt_data",
       {"environment.eval_data"},
       "of environment jsonl; the path alone, without a name"},
      {"slime", "n_samples_per_eval_prompt", {"eval.samples"}, ""},
      {"slime", "save_interval", {"checkpoint.every"}, ""},
      {"slime",
       "partial_rollout",
       {"rollout.kv_after_swap"},
       "unfinished rollouts always go on with new weights; this says what becomes of their KV "
       "cache"},
      {"slime", "colocate", {}, kNoGpuLayout},
      {"slime", "tensor_model_parallel_size", {}, kNoGpuLayout},
      // cookbook
      {"cookbook",
       "ppo_n_minibatches",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "optimizer_steps = \"minibatch\" takes a step after each part, \"batch\" one after all"},
      {"cookbook",
       "policy_loss",
       {"trainer.loss.preset"},
       "of recipes up to July 2026; cookbook/NAME computes its formulas as they are"},
      {"cookbook", "eps_clip", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"cookbook", "eps_clip_high", {"trainer.loss.eps_high"}, kEpsilon},
      {"cookbook", "eps_clip_c", {"trainer.loss.dual_clip"}, kDualClip},
      {"cookbook", "kl_beta", {"trainer.loss.ref_kl"}, kRefKl},
      {"cookbook", "tis.cap", {"trainer.loss.tis_cap"}, kTis},
      {"cookbook", "tis.level", {"trainer.loss.tis_level"}, "sequence there is geometric here"},
      {"cookbook",
       "tis.icepop_threshold",
       {"trainer.loss.tis_ratio_low", "trainer.loss.tis_ratio_high"},
       "the band [1/x, x] of +icepop_tis"},
      {"cookbook",
       "anchor_logp",
       {"trainer.loss.anchor"},
       "what the clipped ratio is taken against: \"old_policy\" is prox, \"rollout\" rollout"},
      {"cookbook", "ratio_log_cap", {"trainer.loss.log_clamp"}, "of is; others clamp nothing"},
      {"cookbook", "seq_ratio_log_cap", {"trainer.loss.log_cap"}, "of gspo"},
      {"cookbook", "prompt_groups_per_step", {"orchestrator.prompts_per_batch"}, ""},
      {"cookbook", "completions_per_prompt", {"orchestrator.group_size"}, ""},
      {"cookbook",
       "max_head_offpolicy_versions",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      {"cookbook", "max_completion_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"cookbook",
       "base_model",
       {"model.path"},
       "a folder with the weights; names are not looked up"},
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
      {"tinker-cookbook",
       "max_tokens",
       {"rollout.max_new_tokens"},
       "of a turn; trainer.max_tokens here cuts passes"},
      {"tinker-cookbook",
       "model_name",
       {"model.path"},
       "a folder with the weights; names are not looked up"},
      {"tinker-cookbook", "eval_every", {"eval.every"}, ""},
      {"tinker-cookbook", "save_every", {"checkpoint.every"}, ""},
      // verl
      {"verl",
       "actor_rollout_ref.actor.policy_loss.loss_mode",
       {"trainer.loss.preset"},
       "vanilla is ppo with dual_clip; verl/NAME computes its formulas as they are"},
      {"verl",
       "actor_rollout_ref.actor.clip_ratio",
       {"trainer.loss.eps_low", "trainer.loss.eps_high"},
       "a distance from one; verl reads it only where clip_ratio_low or clip_ratio_high is null"},
      {"verl", "actor_rollout_ref.actor.clip_ratio_low", {"trainer.loss.eps_low"}, kEpsilon},
      {"verl", "actor_rollout_ref.actor.clip_ratio_high", {"trainer.loss.eps_high"}, kEpsilon},
      {"verl",
       "actor_rollout_ref.actor.clip_ratio_c",
       {"trainer.loss.dual_clip"},
       "off by default here, 3 there"},
      {"verl",
       "actor_rollout_ref.actor.loss_agg_mode",
       {"trainer.loss.reduction"},
       "token-mean is token_mean, token-sum sum, seq-mean-token-sum seq_mean_token_sum, "
       "seq-mean-token-mean seq_mean_token_mean, seq-mean-token-sum-norm fixed_length"},
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
      {"verl",
       "actor_rollout_ref.rollout.response_length",
       {"rollout.max_new_tokens"},
       "of all turns there, of a turn here"},
      {"verl",
       "actor_rollout_ref.rollout.gpu_memory_utilization",
       {"rollout.kv_bytes"},
       "bytes, not a share of the device's memory"},
      {"verl",
       "algorithm.adv_estimator",
       {"orchestrator.advantage"},
       "grpo is group_deviation, rloo leave_one_out, reinforce_plus_plus_baseline reinforce_pp "
       "(its deviation is over rollouts here, over tokens there), reinforce_plus_plus nearest to "
       "batch_mean, which does not divide; gae needs a critic, and there is "
       "none"},
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
      {"verl",
       "algorithm.rollout_correction.rollout_is_threshold",
       {"trainer.loss.tis_cap", "trainer.loss.tis_ratio_low", "trainer.loss.tis_ratio_high"},
       "one number is the cap of +tis, two (\"0.5_2.0\") the band of +icepop_tis"},
      {"verl",
       "algorithm.rollout_correction.rollout_rs",
       {"trainer.loss.preset"},
       "seq_mean_k1 is nearest geo_mask, seq_sum_k1 seq_mis; verl/vanilla+RS computes its formulas "
       "as they are"},
      {"verl",
       "algorithm.rollout_correction.rollout_rs_threshold",
       {"trainer.loss.geo_ratio_low", "trainer.loss.geo_ratio_high", "trainer.loss.seq_ratio_high"},
       "of geo_mask and of seq_mis; ratios for k1, divergences for k2 and k3"},
      {"verl",
       "algorithm.rollout_correction.bypass_mode",
       {"trainer.prox_forward", "trainer.loss.anchor"},
       "prox_forward = \"never\" takes the sampler's log-probabilities for prox"},
      {"verl", "algorithm.gamma", {}, kNoCritic},
      {"verl", "algorithm.lam", {}, kNoCritic},
      {"verl", "critic", {}, kNoCritic},
      {"verl", "data.train_batch_size", {"orchestrator.prompts_per_batch"}, "counts prompts"},
      {"verl",
       "data.max_response_length",
       {"rollout.max_new_tokens"},
       "of all turns there, of a turn here"},
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
      {"verl", "actor_rollout_ref.rollout.tensor_model_parallel_size", {}, kNoGpuLayout},
      {"verl", "trainer.experiment_name", {"output_dir"}, "a run is known by its folder"},
      {"verl", "trainer.default_local_dir", {"output_dir"}, ""},
      {"verl", "trainer.logger", {}, kNoTracker},
      {"verl",
       "async_training.staleness_threshold",
       {"orchestrator.max_off_policy_steps"},
       "whole updates, not a share of samples"},
      {"verl",
       "trainer.v1.sampler.max_off_policy_threshold",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      // TRL
      {"TRL",
       "loss_type",
       {"trainer.loss.preset", "trainer.loss.reduction"},
       "grpo is reduction seq_mean_token_mean, bnpo and dapo token_mean, dr_grpo fixed_length; "
       "cispo and sapo are presets; liger/NAME computes its formulas as they are"},
      {"TRL", "importance_sampling_level", {"trainer.loss.preset"}, "\"sequence\" is preset gspo"},
      {"TRL", "epsilon", {"trainer.loss.eps_low", "trainer.loss.eps_high"}, kEpsilon},
      {"TRL",
       "epsilon_high",
       {"trainer.loss.eps_high"},
       "a distance from one; for cispo TRL's is absolute, ratio_high"},
      {"TRL",
       "delta",
       {"trainer.loss.dual_clip"},
       "it caps the ratio before the clip: the same where it is above 1 + epsilon_high"},
      {"TRL", "beta", {"trainer.loss.ref_kl"}, kRefKl},
      {"TRL",
       "scale_rewards",
       {"orchestrator.advantage"},
       "\"group\" is group_deviation, \"none\" group_mean; \"batch\" is nearest reinforce_pp, "
       "whose deviation is that of r - mean, not of r"},
      {"TRL",
       "num_iterations",
       {"trainer.epochs", "trainer.optimizer_steps"},
       "passes over each batch"},
      {"TRL", "num_generations", {"orchestrator.group_size"}, ""},
      {"TRL",
       "per_device_train_batch_size",
       {"orchestrator.prompts_per_batch", "trainer.max_tokens"},
       "counts rollouts of a micro-batch: times steps_per_generation / num_generations it is "
       "prompts_per_batch; passes are cut by tokens"},
      {"TRL",
       "gradient_accumulation_steps",
       {"orchestrator.prompts_per_batch", "trainer.minibatches"},
       "micro-batches of an optimizer step there, and of a batch without steps_per_generation"},
      {"TRL",
       "generation_batch_size",
       {"orchestrator.prompts_per_batch", "orchestrator.group_size"},
       "counts rollouts: prompts_per_batch times group_size"},
      {"TRL",
       "steps_per_generation",
       {"trainer.minibatches", "trainer.optimizer_steps"},
       "micro-batches of a batch: minibatches is this / gradient_accumulation_steps, with "
       "optimizer_steps = \"minibatch\""},
      {"TRL", "max_completion_length", {"rollout.max_new_tokens"}, "of a turn"},
      {"TRL",
       "vllm_importance_sampling_correction",
       {"trainer.loss.preset"},
       "on by default there; here a part of the preset's name, as in \"grpo+tis\""},
      {"TRL",
       "vllm_importance_sampling_mode",
       {"trainer.loss.preset", "trainer.loss.tis_level"},
       "token_truncate is +tis, sequence_truncate +tis with tis_level = \"sequence\", token_mask "
       "+icepop_tis; sequence_mask, the default there, is nearest seq_mis"},
      {"TRL",
       "vllm_importance_sampling_clip_max",
       {"trainer.loss.tis_cap", "trainer.loss.tis_ratio_high"},
       "absolute bounds of prox/rollout; of +tis and of +icepop_tis"},
      {"TRL",
       "vllm_importance_sampling_cap",
       {"trainer.loss.tis_cap", "trainer.loss.tis_ratio_high"},
       "older name of vllm_importance_sampling_clip_max"},
      {"TRL", "use_vllm", {}, "the sampler is built in (rollout)"},
      {"TRL",
       "model_name_or_path",
       {"model.path"},
       "a folder with the weights; names are not looked up"},
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
      {"AReaL",
       "actor.recompute_logprob",
       {"trainer.prox_forward"},
       "true is \"always\", false \"never\""},
      {"AReaL",
       "actor.behav_imp_weight_cap",
       {"trainer.loss.tis_ratio_high"},
       "up to 1.0.0; tokens above it are dropped: of +icepop_tis"},
      {"AReaL",
       "actor.rejection_sampling.upper",
       {"trainer.loss.tis_ratio_high", "trainer.loss.tis_cap"},
       "of +icepop_tis for action mask, of +tis for clamp"},
      {"AReaL",
       "actor.importance_sampling_level",
       {"trainer.loss.preset"},
       "\"sequence\" is preset gspo"},
      {"AReaL", "actor.sapo_tau_pos", {"trainer.loss.tau_pos"}, "of sapo"},
      {"AReaL", "actor.sapo_tau_neg", {"trainer.loss.tau_neg"}, "of sapo"},
      {"AReaL", "actor.path", {"model.path"}, ""},
      {"AReaL", "actor.optimizer.lr", {"trainer.learning_rate"}, ""},
      {"AReaL", "actor.mb_spec.max_tokens_per_mb", {"trainer.max_tokens"}, kMicroBatch},
      {"AReaL",
       "rollout.max_head_offpolicyness",
       {"orchestrator.max_off_policy_steps"},
       "how many updates a trained token may be behind"},
      {"AReaL",
       "rollout.max_concurrent_rollouts",
       {"orchestrator.max_inflight"},
       "counts groups there, rollouts here"},
      {"AReaL", "gconfig.n_samples", {"orchestrator.group_size"}, ""},
      {"AReaL", "gconfig.max_new_tokens", {"rollout.max_new_tokens"}, "of a turn"},
      {"AReaL", "gconfig.temperature", {"rollout.temperature"}, ""},
      {"AReaL", "train_dataset.batch_size", {"orchestrator.prompts_per_batch"}, "counts prompts"},
      {"AReaL", "train_dataset.path", {"environment.data"}, "JSON lines; of environment jsonl"},
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
