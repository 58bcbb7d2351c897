// Metrics of other code bases, under their names, with their masks and their means.

#include <fmt/format.h>

#include <cmath>

#include "core/foreign/foreign.h"
#include "core/participation.h"
#include "core/quantities.h"

namespace leeway {
namespace {

using Values = std::vector<double>;

// What the definitions below need: streams, masks and helpers over one batch.
struct Context {
  const LossSpec& spec;
  const BatchView<double>& batch;
  const LossResult& result;

  size_t n() const { return static_cast<size_t>(batch.token_count()); }
  bool masked_in(size_t i) const { return in_mask(batch, i); }

  // value(i) for every position that counts, by sequence.
  template <class Value, class Counts>
  Values sequence_means(Value value, Counts counts) const {
    Values means;
    for (int64_t s = 0; s < batch.sequence_count(); ++s) {
      double sum = 0.0, count = 0.0;
      for (size_t i = static_cast<size_t>(batch.offsets[s]);
           i < static_cast<size_t>(batch.offsets[s + 1]); ++i) {
        if (counts(i)) sum += value(i), count += 1.0;
      }
      means.push_back(sum / std::max(count, 1.0));
    }
    return means;
  }
  template <class Value, class Counts>
  double token_mean(Value value, Counts counts) const {
    double sum = 0.0, count = 0.0;
    for (size_t i = 0; i < n(); ++i) {
      if (counts(i)) sum += value(i), count += 1.0;
    }
    return sum / std::max(count, 1.0);
  }
};

double mean(const Values& values) {
  double sum = 0.0;
  for (double v : values) sum += v;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

void add(std::vector<ForeignMetric>& out, std::string name, double value) {
  out.push_back({std::move(name), false, {value}});
}
void add_list(std::vector<ForeignMetric>& out, std::string name, Values values) {
  out.push_back({std::move(name), true, std::move(values)});
}

// prime-rl: one value a sequence, each a mean over its mask, 0 where empty.
void prime_metrics(const Context& c, std::string_view loss, std::vector<ForeignMetric>& out) {
  const auto& b = c.batch;
  auto in_mask = [&](size_t i) { return c.masked_in(i); };
  if (loss == "ce") {
    add_list(out, "nll", c.sequence_means([&](size_t i) { return -b.pi[i]; }, in_mask));
    return;
  }
  // The token gate alone; the whole-rollout floor of the first draft has a metric of its own.
  const Gate& gate = c.spec.gates.front();
  struct Verdict {
    bool low, high;
  };
  auto judge = [&](size_t i) {
    const double value =
        quantity_value(gate.quantity, b.pi[i], b.rollout[i], b.pi[i] - b.rollout[i]);
    Verdict v{below(value, gate.keep.low), above(value, gate.keep.high)};
    if (gate.sign == SignRule::zero_takes_low) {
      v.low = v.low && b.advantages[i] <= 0;
      v.high = v.high && b.advantages[i] > 0;
    }
    return v;
  };
  auto dropped = [&](size_t i) { return judge(i).low || judge(i).high; };
  auto kl = [&](size_t i) { return k3(b.pi[i] - b.rollout[i]); };
  auto in_dropped = [&](size_t i) { return c.masked_in(i) && dropped(i); };
  auto in_kept = [&](size_t i) { return c.masked_in(i) && !dropped(i); };
  const std::string prefix = loss == "ref_kl" ? "ref_kl/" : "";
  const bool seed = loss.starts_with("PR");

  if (seed) add_list(out, "mismatch_kl", c.sequence_means(kl, in_mask));
  add_list(out, prefix + "masked_mismatch_kl", c.sequence_means(kl, in_dropped));
  add_list(out, prefix + "unmasked_mismatch_kl", c.sequence_means(kl, in_kept));
  add_list(out, prefix + "is_masked",
           c.sequence_means([&](size_t i) { return dropped(i) ? 1.0 : 0.0; }, in_mask));
  const auto teacher = b.stream(c.spec.shaping.teacher);
  auto teacher_kl = [&](size_t i) { return teacher[i] - b.pi[i]; };
  if (loss == "ref_kl") {
    add_list(out, "ref_kl", c.sequence_means(teacher_kl, in_mask));
    return;
  }
  if (loss == "ipo") return;
  // By sign, A = 0 counts as dropped and as neither low nor high.
  auto low = [&](size_t i) {
    return judge(i).low && (gate.sign == SignRule::both || b.advantages[i] < 0) ? 1.0 : 0.0;
  };
  add_list(out, "is_masked_low", c.sequence_means(low, in_mask));
  add_list(out, "is_masked_high",
           c.sequence_means([&](size_t i) { return judge(i).high ? 1.0 : 0.0; }, in_mask));
  if (loss == "default_dppo_kl") {
    add_list(
        out, "masked_advantage_positive",
        c.sequence_means([&](size_t i) { return b.advantages[i] > 0 ? 1.0 : 0.0; }, in_dropped));
    add_list(
        out, "masked_advantage_negative",
        c.sequence_means([&](size_t i) { return b.advantages[i] < 0 ? 1.0 : 0.0; }, in_dropped));
  }
  if (loss == "PR2401_first_rollout_min") {
    const double floor = c.spec.gates.back().keep.low;
    Values flags;
    for (int64_t s = 0; s < b.sequence_count(); ++s) {
      bool any = false;
      for (size_t i = static_cast<size_t>(b.offsets[s]); i < static_cast<size_t>(b.offsets[s + 1]);
           ++i) {
        any |= c.masked_in(i) && below(std::exp(b.pi[i] - b.rollout[i]), floor);
      }
      flags.push_back(any ? 1.0 : 0.0);
    }
    add_list(out, "rollout_dropped", flags);
  }
  if (c.spec.shaping.teacher_tau != 0 && !teacher.empty()) {
    add_list(out, "teacher_kl", c.sequence_means(teacher_kl, in_mask));
  }
}

// slime: every metric goes through the loss's own reducer, hooks' metrics over the original mask.
void slime_metrics(const Context& c, std::vector<ForeignMetric>& out) {
  const auto& b = c.batch;
  const auto old = b.stream(c.spec.ratio.pair.denominator);
  auto original = [&](size_t i) { return c.masked_in(i); };
  const bool by_sample = c.spec.reduction.kind == ReductionKind::seq_mean_token_mean;
  auto reduce = [&](auto value) {
    return by_sample ? mean(c.sequence_means(value, original)) : c.token_mean(value, original);
  };
  // A mask changed by a hook acts on the numerator alone.
  auto still_in = [&](size_t i) { return !c.result.trace[i].dropped; };
  const SurrogateKind kind = c.spec.surrogate.kind;
  auto clipped = [&](size_t i) {
    const TokenTrace& t = c.result.trace[i];
    const Bounds& clip = c.spec.surrogate.clip;
    if (kind == SurrogateKind::clipped) return t.clip_binding && still_in(i) ? 1.0 : 0.0;
    if (kind == SurrogateKind::detached_ratio) {
      return below(t.ratio, clip.low) || above(t.ratio, clip.high) ? 1.0 : 0.0;
    }
    return 0.0;
  };
  for (const Correction& hook : c.spec.corrections) {
    if (hook.name == "mis") continue;
    const auto num = b.stream(hook.reads[0]), den = b.stream(hook.reads[1]);
    auto raw = [&](size_t i) { return std::exp(num[i] - den[i]); };
    add(out, "tis", reduce(raw));
    add(out, "tis_clipfrac",
        reduce([&](size_t i) { return c.result.trace[i].weight != raw(i) ? 1.0 : 0.0; }));
    add(out, "tis_abs", reduce([&](size_t i) { return std::abs(raw(i) - 1.0); }));
  }
  add(out, "pg_clipfrac", reduce(clipped));
  if (!old.empty())
    add(out, "ppo_kl", reduce([&](size_t i) { return still_in(i) ? old[i] - b.pi[i] : 0.0; }));
}

// cookbook PR 169: means over sequences, masked positions included.
void cookbook_pr169_metrics(const Context& c, std::string_view loss,
                            std::vector<ForeignMetric>& out) {
  const auto& b = c.batch;
  auto everywhere = [&](size_t i) { return has_weight(b, i); };
  auto by_sequence = [&](auto value) { return mean(c.sequence_means(value, everywhere)); };
  if (!b.ref.empty()) {
    add(out, "mean_kl", c.token_mean([&](size_t i) { return b.pi[i] - b.ref[i]; }, everywhere));
  }
  const Bounds& clip = c.spec.surrogate.clip;
  if (loss == "cispo") {
    add(out, "cispo_mask_frac", by_sequence([&](size_t i) {
          return c.result.trace[i].below || c.result.trace[i].above ? 1.0 : 0.0;
        }));
  } else {
    const std::string name = loss == "grpo" ? "ppo_clip_frac" : std::string(loss) + "_clip_frac";
    add(out, name, by_sequence([&](size_t i) {
          const double r = c.result.trace[i].ratio;
          return below(r, clip.low) || above(r, clip.high) ? 1.0 : 0.0;
        }));
  }
  add(out, "ppo_ratio_mean", by_sequence([&](size_t i) { return c.result.trace[i].ratio; }));
  if (!b.rollout.empty()) {
    add(out, "inference_diff",
        by_sequence([&](size_t i) { return std::abs(b.pi[i] - b.rollout[i]); }));
    add(out, "inference_kld", by_sequence([&](size_t i) { return k3(b.pi[i] - b.rollout[i]); }));
  }
  add(out, "tis/weight_mean", by_sequence([&](size_t i) { return c.result.trace[i].weight; }));
  double cap = kInfinity;
  bool geometric = false;
  for (const auto& [key, value] : c.spec.settings) {
    if (key == "tis_cap") cap = std::stod(value);
    if (key == "tis_level") geometric = value == "sequence";
  }
  const Values log_means = c.sequence_means(
      [&](size_t i) { return std::clamp(b.prox[i] - b.rollout[i], -20.0, 20.0); }, everywhere);
  Values seq_ratio, capped_sequences;
  for (double x : log_means) {
    seq_ratio.push_back(std::exp(x));
    capped_sequences.push_back(above(seq_ratio.back(), cap) ? 1.0 : 0.0);
  }
  if (geometric) {
    add(out, "tis/clip_frac", mean(capped_sequences));
    add(out, "tis/seq_ratio", mean(seq_ratio));
  } else {
    add(out, "tis/clip_frac", by_sequence([&](size_t i) {
          return above(std::exp(std::clamp(b.prox[i] - b.rollout[i], -20.0, 20.0)), cap) ? 1.0
                                                                                         : 0.0;
        }));
  }
}

// verl: masked token means with 1e-8 in the denominator.
void verl_metrics(const Context& c, std::string_view loss, std::vector<ForeignMetric>& out) {
  if (loss == "gpg") return;
  const auto& b = c.batch;
  auto masked_mean = [&](auto value) {
    double sum = 0.0, count = 0.0;
    for (size_t i = 0; i < c.n(); ++i) {
      if (c.result.trace[i].trained) sum += value(i), count += 1.0;
    }
    return sum / (count + 1e-8);
  };
  const bool absolute = loss == "kl_cov";
  auto ppo_kl = masked_mean([&](size_t i) {
    const double x = b.prox[i] - b.pi[i];
    return absolute ? std::abs(x) : x;
  });
  add(out, "actor/ppo_kl", ppo_kl);
  if (loss == "dro" || absolute || loss == "geo_mean") return;
  const bool gated = !c.spec.gates.empty() && c.spec.gates.front().scope == GateScope::policy;
  add(out, "actor/pg_clipfrac", masked_mean([&](size_t i) {
        const TokenTrace& t = c.result.trace[i];
        if (gated) return t.below || t.above ? 1.0 : 0.0;
        if (c.spec.surrogate.kind == SurrogateKind::detached_ratio) {
          return below(t.ratio, c.spec.surrogate.clip.low) ||
                         above(t.ratio, c.spec.surrogate.clip.high)
                     ? 1.0
                     : 0.0;
        }
        return t.clip_binding ? 1.0 : 0.0;
      }));
  add(out, "actor/pg_clipfrac_lower", masked_mean([&](size_t i) {
        const TokenTrace& t = c.result.trace[i];
        if (gated) return t.kept && above(t.ratio, c.spec.surrogate.clip.high) ? 1.0 : 0.0;
        return t.dual_clipped ? 1.0 : 0.0;
      }));
}

// Liger: the penalty before its coefficient, and clips on the side the advantage pushes to.
void liger_metrics(const Context& c, std::vector<ForeignMetric>& out) {
  auto in_mask = [&](size_t i) { return c.masked_in(i); };
  if (!c.spec.penalties.empty()) {
    const double beta = c.spec.penalties.front().coefficient;
    add(out, "kl",
        c.token_mean([&](size_t i) { return c.result.trace[i].penalty / beta; }, in_mask));
  }
  const Bounds& clip = c.spec.surrogate.clip;
  if (c.spec.surrogate.kind != SurrogateKind::clipped) return;
  add(out, "clip",
      c.token_mean(
          [&](size_t i) {
            const double r = c.result.trace[i].ratio, A = c.batch.advantages[i];
            return (below(r, clip.low) && A < 0) || (above(r, clip.high) && A > 0) ? 1.0 : 0.0;
          },
          in_mask));
}

}  // namespace

std::vector<ForeignMetric> verl_offpolicy_metrics(const BatchView<double>& b) {
  constexpr double kEpsilon = 1e-8;
  double tokens = 0.0, kl = 0.0, k3_sum = 0.0, chi2_token = 0.0, S = 0.0;
  double train_ppl = 0.0, train_log = 0.0, roll_ppl = 0.0, roll_log = 0.0, chi2_seq = 0.0;
  double diff = 0.0, abs_diff = 0.0, ratio = 0.0, diff_max = -kInfinity, diff_min = kInfinity;
  for (int64_t s = 0; s < b.sequence_count(); ++s) {
    double n = 0.0, train = 0.0, roll = 0.0;
    for (size_t i = static_cast<size_t>(b.offsets[s]); i < static_cast<size_t>(b.offsets[s + 1]);
         ++i) {
      if (!in_mask(b, i)) continue;
      const double d = b.prox[i] - b.rollout[i];
      n += 1.0, train += b.prox[i], roll += b.rollout[i];
      kl -= d, k3_sum += k3(d), chi2_token += std::exp(2.0 * std::clamp(d, -20.0, 20.0));
    }
    if (n == 0.0) continue;
    const double log_sum = train - roll;
    tokens += n, S += 1.0, train /= n + kEpsilon, roll /= n + kEpsilon;
    train_ppl += std::exp(-train), train_log -= train, roll_ppl += std::exp(-roll),
        roll_log -= roll;
    const double delta = roll - train;
    diff += delta, abs_diff += std::abs(delta), ratio += std::exp(delta);
    diff_max = std::max(diff_max, delta), diff_min = std::min(diff_min, delta);
    chi2_seq += std::exp(2.0 * std::clamp(log_sum, -20.0, 20.0));
  }
  std::vector<ForeignMetric> out;
  if (S == 0.0) return out;
  add(out, "training_ppl", train_ppl / S);
  add(out, "training_log_ppl", train_log / S);
  add(out, "kl", kl / (tokens + kEpsilon));
  add(out, "k3_kl", k3_sum / (tokens + kEpsilon));
  add(out, "rollout_ppl", roll_ppl / S);
  add(out, "rollout_log_ppl", roll_log / S);
  add(out, "log_ppl_diff", diff / S);
  add(out, "log_ppl_abs_diff", abs_diff / S);
  add(out, "log_ppl_diff_max", diff_max);
  add(out, "log_ppl_diff_min", diff_min);
  add(out, "ppl_ratio", ratio / S);
  add(out, "chi2_token", chi2_token / (tokens + kEpsilon) - 1.0);
  add(out, "chi2_seq", chi2_seq / S - 1.0);
  return out;
}

std::vector<ForeignMetric> foreign_metrics(const LossSpec& spec, const BatchView<double>& batch,
                                           const LossResult& result) {
  std::vector<ForeignMetric> out;
  const Context context{spec, batch, result};
  const std::string_view name = spec.preset;
  const std::string_view family = name.substr(0, name.find('/'));
  const std::string_view loss = name.substr(name.find('/') + 1);
  if (family == "prime") prime_metrics(context, loss, out);
  if (family == "slime") slime_metrics(context, out);
  if (family == "cookbook_PR169") cookbook_pr169_metrics(context, loss, out);
  if (family == "verl") verl_metrics(context, loss, out);
  if (family == "liger") liger_metrics(context, out);
  return out;
}

}  // namespace leeway
