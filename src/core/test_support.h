// Shared by the tests of this folder: random batches and the list of everything that can be
// evaluated.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "leeway/loss.h"
#include "leeway/presets.h"

namespace leeway::testing {

// A batch with every stream, ragged masks, advantages of both signs and exact zeros, and ratios
// from tiny to large. Masked positions contain garbage, including NaN and infinities, unless
// `clean`.
inline Batch random_batch(uint64_t seed, const std::vector<int>& lengths, bool clean = false) {
  Rng rng(seed);
  Batch batch;
  const double kGarbage[] = {std::nan(""), kInfinity, -kInfinity, 1e300, 0.0};
  int sequence = 0;
  for (int length : lengths) {
    const int signs = sequence++ % 4;  // all positive, all negative, all zero, mixed
    const double advantage = signs == 0   ? 0.2 + rng.uniform()
                             : signs == 1 ? -0.2 - rng.uniform()
                                          : 0.0;
    const double spread = rng.uniform() < 0.3 ? 2.0 : 0.4;
    for (int t = 0; t < length; ++t) {
      const bool trained = rng.uniform() < 0.75;
      auto log_prob = [&](double center, double sd) {
        if (!trained && !clean) return kGarbage[rng.below(5)];
        return std::min(-1e-4, center + sd * rng.normal());
      };
      const double center = -std::abs(1.5 * rng.normal()) - 0.01;
      batch.pi.push_back(log_prob(center, 0.0));
      batch.prox.push_back(log_prob(center, 0.5 * spread));
      batch.rollout.push_back(log_prob(center, spread));
      batch.ref.push_back(log_prob(center, 0.5));
      batch.teacher.push_back(log_prob(center, 0.5));
      batch.advantages.push_back(!trained && !clean ? kGarbage[rng.below(5)]
                                 : signs == 3       ? rng.normal()
                                                    : advantage);
      batch.mask.push_back(trained);
      batch.versions.push_back(static_cast<int32_t>(rng.below(6)));
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
  }
  return batch;
}

// The same batch with garbage prompts of weight 0 before its sequences.
inline Batch behind_prompts(const Batch& batch) {
  Batch out = batch;
  out.offsets = {0};
  const auto put = [&](const auto& from, auto& to, auto prompt_value) {
    if (from.empty()) return;
    to.clear();
    for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
      to.insert(to.end(), 1 + s % 4, prompt_value);
      to.insert(to.end(), from.begin() + batch.offsets[s], from.begin() + batch.offsets[s + 1]);
    }
  };
  for (auto stream : {&Batch::pi, &Batch::prox, &Batch::rollout, &Batch::ref, &Batch::teacher,
                      &Batch::advantages}) {
    put(batch.*stream, out.*stream, std::nan(""));
  }
  const std::vector<double> ones(batch.pi.size(), 1.0);
  put(batch.weights.empty() ? ones : batch.weights, out.weights, 0.0);
  put(batch.mask, out.mask, uint8_t{1});
  put(batch.versions, out.versions, int32_t{99});
  for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
    out.offsets.push_back(out.offsets.back() + 1 + static_cast<int64_t>(s % 4) +
                          batch.offsets[s + 1] - batch.offsets[s]);
  }
  return out;
}

// The batch rounded to float32.
inline Batch rounded(Batch batch) {
  for (auto* values : {&batch.pi, &batch.prox, &batch.rollout, &batch.ref, &batch.teacher,
                       &batch.advantages, &batch.weights}) {
    for (double& value : *values) value = static_cast<float>(value);
  }
  return batch;
}

// Whether a spec reads positions that are masked, as some code bases do: such a batch must be
// clean.
inline bool looks_at_masked(const LossSpec& spec) {
  bool all = spec.positions == Positions::all || spec.ratio.over == Positions::all ||
             spec.reduction.kind == ReductionKind::padded_length_mean;
  for (const Correction& c : spec.corrections) {
    all |= c.weight && c.weight->over == Positions::all;
  }
  return all;
}

struct NamedPreset {
  std::string preset;
  Settings settings;
  std::string label() const {
    std::string text = preset;
    for (const Setting& s : settings) text += " " + s.key + "=" + value_text(s.value);
    return text;
  }
};

inline NamedPreset with(std::string preset,
                        std::vector<std::pair<std::string, Value>> settings = {}) {
  NamedPreset named{std::move(preset), {}};
  for (auto& [key, value] : settings) named.settings.push_back({key, value, ""});
  return named;
}

// Every native preset and correction, with every option that changes a code path.
inline std::vector<NamedPreset> native_list(const Catalog& catalog) {
  std::vector<NamedPreset> list;
  const std::string off_policy = "+off_policy_is";
  for (const PresetInfo& preset : catalog.presets()) list.push_back(with(preset.name));
  for (const char* base : {"reinforce", "is", "ppo", "icepop", "gspo", "dro", "ipo_kl"}) {
    for (const CorrectionInfo& c : catalog.corrections()) {
      list.push_back(with(std::string(base) + "+" + c.name));
    }
  }
  list.push_back(with("grpo+tis+off_policy_is", {{"ref_kl", 0.1}}));
  list.push_back(with("icepop", {{"icepop_rollout_min_ratio", 0.05}}));
  list.push_back(with("icepop", {{"icepop_ratio_low", 0.9}, {"icepop_ratio_high", 1.1}}));
  list.push_back(with("icepop", {{"adv_tau", 0.5}, {"teacher_tau", 0.3}}));
  list.push_back(with("ipo_kl", {{"kl_tau", 0.3}, {"ipo_ratio_high", 1.2}}));
  list.push_back(with("dppo_kl", {{"kl_tau", 0.3}, {"dppo_diff_low", 0.05}}));
  list.push_back(with("is", {{"log_clamp", 0.3}}));
  list.push_back(with("ppo", {{"dual_clip", 1.5}, {"anchor", std::string("rollout")}}));
  list.push_back(with("grpo", {{"ref_kl", 0.2}, {"anchor", std::string("rollout")}}));
  list.push_back(with("gspo", {{"gradient", std::string("through_mean")}}));
  list.push_back(with("gspo", {{"log_cap", 0.05}}));
  list.push_back(with("cispo", {{"eps_low", 0.2}, {"eps_high", 0.3}}));
  list.push_back(with("cispo", {{"anchor", std::string("prox")}, {"ratio_high", 1.3}}));
  list.push_back(with("m2po", {{"m2_threshold", 0.2}}));
  list.push_back(with("kpop", {{"kpop_threshold", 0.02}}));
  list.push_back(with("ppo+tis", {{"tis_level", std::string("geometric")}}));
  list.push_back(with("ppo+tis", {{"tis_level", std::string("sequence")}, {"tis_cap", 1.5}}));
  list.push_back(with("reinforce" + off_policy, {{"ois_eps_low", 0.2}, {"ois_eps_high", 0.3}}));
  for (const char* reduction :
       {"seq_mean_token_mean", "seq_mean_token_sum", "sum", "fixed_length"}) {
    std::vector<std::pair<std::string, Value>> settings{{"reduction", std::string(reduction)}};
    if (std::string(reduction) == "fixed_length") settings.emplace_back("fixed_length", 40.0);
    list.push_back(with("icepop", settings));
    list.push_back(with("gspo", settings));
    list.push_back(with("grpo+tis", settings));
  }
  for (const char* base : {"icepop", "ipo_kl", "geo_mask", "m2po", "ppo+icepop_tis"}) {
    list.push_back(with(base, {{"denominator", std::string("kept")}}));
  }
  list.push_back(with("icepop", {{"denominator", std::string("kept")},
                                 {"reduction", std::string("seq_mean_token_mean")}}));
  return list;
}

// Every foreign preset, with the variants its keys select.
inline std::vector<NamedPreset> foreign_list(const Catalog& catalog) {
  std::vector<NamedPreset> list;
  for (const ForeignPreset& f : catalog.foreign()) list.push_back(with(f.name));
  const std::string sequence = "sequence";
  for (const char* level : {"token", "sequence"}) {
    list.push_back(with("verl/vanilla+IS", {{"level", std::string(level)}, {"batch_norm", true}}));
    list.push_back(with("verl/vanilla+IS",
                        {{"level", std::string(level)}, {"threshold", std::string("0.5_2.0")}}));
  }
  for (const char* option : {"token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_mean_k2",
                             "seq_mean_k1", "seq_max_k3", "seq_max_k2"}) {
    list.push_back(with("verl/vanilla+RS",
                        {{"rs", std::string(option)}, {"rs_threshold", std::string("1.4")}}));
  }
  list.push_back(with("verl/vanilla+RS", {{"rs", std::string("token_k1,seq_mean_k3")},
                                          {"rs_threshold", std::string("0.5_2.0,0.2")},
                                          {"agg", std::string("seq-mean-token-mean")}}));
  list.push_back(with("verl/kl_cov", {{"kl_cov_ratio", 0.2}}));
  for (const char* metric : {"ratio", "kl_k1", "kl_k2", "kl_k3"}) {
    for (const char* agg : {"sum", "mean", "max"}) {
      list.push_back(with("areal/ppo+RS", {{"metric", std::string(metric)},
                                           {"agg", std::string(agg)},
                                           {"level", sequence},
                                           {"upper", 1.1}}));
    }
  }
  list.push_back(with("areal/ppo+RS", {{"action", std::string("clamp")}, {"upper", 1.3}}));
  list.push_back(with("areal/sapo", {{"level", sequence}}));
  for (const char* loss : {"grpo", "dr_grpo", "luspo"}) {
    const std::string name = std::string("liger/") + loss;
    list.push_back(with(name, {{"level", sequence}, {"delta", 1.1}}));
    list.push_back(with(name, {{"level", sequence}, {"use_bias_correction_kl", true}}));
    list.push_back(with(name, {{"delta", 1.5}, {"is_ratio", std::string("on")}}));
  }
  list.push_back(with("liger/vespo", {{"is_ratio", std::string("on")}}));
  list.push_back(with("slime/ppo+mis", {{"tis_level", sequence}, {"rs_level", sequence}}));
  list.push_back(with("slime/ppo+mis", {{"tis_mode", std::string("mask")}}));
  list.push_back(with("slime/ppo+mis", {{"rs_veto_threshold", 0.3}}));
  for (const char* loss : {"grpo", "dapo", "gspo", "cispo"}) {
    list.push_back(with(std::string("cookbook_PR169/") + loss, {{"tis_level", sequence}}));
    list.push_back(with(std::string("cookbook/") + loss, {{"icepop_threshold", 1.5}}));
  }
  return list;
}

}  // namespace leeway::testing
