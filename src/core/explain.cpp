#include "core/explain.h"

#include <fmt/format.h>

#include "core/participation.h"
#include "core/spec_text.h"

namespace leeway {
namespace {

std::string bounds_text(const std::string& value, const Bounds& bounds) {
  const bool low = bounds.low > -kInfinity, high = bounds.high < kInfinity;
  if (low && high) {
    return fmt::format("{} <= {} <= {}", number_text(bounds.low), value, number_text(bounds.high));
  }
  return low ? fmt::format("{} >= {}", value, number_text(bounds.low))
             : fmt::format("{} <= {}", value, number_text(bounds.high));
}

std::string quantity_text(const Gate& gate) {
  const char* num = name_of(gate.pair.numerator);
  const char* den = name_of(gate.pair.denominator);
  std::string token;
  switch (gate.quantity) {
    case Quantity::ratio: return ratio_text(gate.pair, gate.level);
    case Quantity::difference: token = fmt::format("{} - {}", num, den); break;
    case Quantity::k1: token = fmt::format("log({}/{})", num, den); break;
    case Quantity::k2: token = fmt::format("log({}/{})^2/2", num, den); break;
    case Quantity::k3: token = fmt::format("k3(log({}/{}))", num, den); break;
    case Quantity::binary_kl:
      token = fmt::format("max(KL({0} || {1}), KL({1} || {0})) over {{token, rest}}", num, den);
      break;
    case Quantity::signed_binary_kl:
      token = fmt::format("sign({0} - {1}) KL({1} || {0}) over {{token, rest}}", num, den);
      break;
  }
  switch (gate.level) {
    case Level::token: return token;
    case Level::geometric: return fmt::format("mean over the sequence of {}", token);
    case Level::sequence: return fmt::format("sum over the sequence of {}", token);
    case Level::max: return fmt::format("max over the sequence of {}", token);
    case Level::min: return fmt::format("min over the sequence of {}", token);
  }
  return token;
}

std::string gate_text(const Gate& gate) {
  const std::string value = quantity_text(gate);
  if (gate.sign == SignRule::both) return bounds_text(value, gate.keep);
  return fmt::format("{} <= {} where A > 0, {} >= {} where A {} 0{}", value,
                     number_text(gate.keep.high), value, number_text(gate.keep.low),
                     gate.sign == SignRule::zero_takes_low ? "<=" : "<",
                     gate.sign == SignRule::zero_is_kept ? ", always where A = 0" : "");
}

std::string surrogate_text(const LossSpec& spec) {
  const Surrogate& s = spec.surrogate;
  const std::string band = fmt::format("{}, {}", number_text(s.clip.low), number_text(s.clip.high));
  switch (s.kind) {
    case SurrogateKind::ratio: return "(-A_t r_t)";
    case SurrogateKind::log_prob: return "(-A_t log pi_t)";
    case SurrogateKind::clipped: {
      const std::string inner =
          s.ratio_cap < kInfinity ? fmt::format("min(r_t, {})", number_text(s.ratio_cap)) : "r_t";
      std::string text = fmt::format("max(-A_t {}, -A_t clip(r_t, {}))", inner, band);
      if (s.dual_clip < kInfinity) {
        text = fmt::format("(A_t < 0 ? min({}, -{} A_t) : the same without min)", text,
                           number_text(s.dual_clip));
      }
      return text;
    }
    case SurrogateKind::detached_ratio:
      return s.clip.low == -kInfinity
                 ? fmt::format("(-A_t stop(min(r_t, {})) log pi_t)", number_text(s.clip.high))
                 : fmt::format("(-A_t stop(clip(r_t, {})) log pi_t)", band);
    case SurrogateKind::soft_gate:
      return fmt::format("(-A_t (4/tau) sigmoid(tau (r_t - 1)), tau = {} where A > 0, else {})",
                         number_text(s.tau_pos), number_text(s.tau_neg));
  }
  return "";
}

std::string penalty_text(const Penalty& p) {
  const std::string x =
      fmt::format("log({}/{})", name_of(p.pair.numerator), name_of(p.pair.denominator));
  std::string value;
  switch (p.kind) {
    case PenaltyKind::k1: value = x; break;
    case PenaltyKind::k2: value = x + "^2/2"; break;
    case PenaltyKind::k3: value = fmt::format("k3({})", x); break;
    case PenaltyKind::squared_log: value = x + "^2"; break;
    case PenaltyKind::absolute: value = fmt::format("|{}|", x); break;
  }
  if (!p.gradient) value = fmt::format("stop({})", value);
  std::string text = fmt::format("{} {}", number_text(p.coefficient), value);
  if (p.times_ratio) text += " r_t";
  if (p.gate == PenaltyGate::kept) text = "keep_t " + text;
  if (p.gate == PenaltyGate::nonzero_advantage) text = "[A_t != 0] " + text;
  if (p.gate == PenaltyGate::selected) text = "[selected] " + text;
  return text;
}

std::string division_text(const LossSpec& spec) {
  switch (spec.reduction.kind) {
    case ReductionKind::token_mean: return "1/N sum_t";
    case ReductionKind::seq_mean_token_mean: return "1/S sum_s 1/N_s sum_t";
    case ReductionKind::seq_mean_token_sum: return "1/S sum_s sum_t";
    case ReductionKind::fixed_length:
      return spec.reduction.fixed_length > 0
                 ? fmt::format("1/({} S) sum_t", number_text(spec.reduction.fixed_length))
                 : "1/(longest S) sum_t";
    case ReductionKind::sum: return "sum_t";
    case ReductionKind::padded_length_mean: return "1/(longest S) sum_s N_s sum_t";
  }
  return "";
}

void explain_objective(const LossSpec& spec, Explanation& out) {
  bool keep = false;
  for (const Gate& gate : spec.gates) keep |= gate.scope != GateScope::mask;
  std::string terms = surrogate_text(spec);
  if (!spec.corrections.empty()) terms = "w_t " + terms;
  if (keep) terms = "keep_t " + terms;
  for (const Penalty& p : spec.penalties) terms += " + " + penalty_text(p);
  out.objective.push_back(fmt::format("L = {} [ {} ]", division_text(spec), terms));
  if (uses_ratio_of(spec)) {
    std::string r = ratio_text(spec.ratio.pair, spec.ratio.level);
    if (spec.ratio.signed_log_clip) {
      r += fmt::format(", each log ratio clipped to [{}, {}] on the advantage's side",
                       number_text(spec.ratio.signed_log_clip->low),
                       number_text(spec.ratio.signed_log_clip->high));
    }
    if (spec.ratio.log_clamp < kInfinity) {
      r += fmt::format(", |log| at most {}", number_text(spec.ratio.log_clamp));
    }
    if (spec.ratio.log_cap < kInfinity) {
      r += fmt::format(", log at most {}", number_text(spec.ratio.log_cap));
    }
    out.objective.push_back("r_t = " + r);
  }
  for (const Gate& gate : spec.gates) {
    if (gate.scope != GateScope::mask)
      out.objective.push_back("keep_t = 1 where " + gate_text(gate));
  }
  for (const Correction& c : spec.corrections) {
    out.objective.push_back(fmt::format("w_t: {} = {}, detached", c.name, c.formula));
  }
  if (spec.weight_normalisation != WeightNormalisation::none) {
    out.objective.push_back(spec.weight_normalisation == WeightNormalisation::token
                                ? "w_t is divided by its mean over the batch's trained tokens"
                                : "w_t is divided by the mean over sequences of its means");
  }
  const Shaping& shaping = spec.shaping;
  std::string A = shaping.constant_one ? "1"
                  : shaping.adv_tau == 1.0
                      ? "advantage_t"
                      : fmt::format("{} advantage_t", number_text(shaping.adv_tau));
  if (shaping.sequence_mean) A += ", averaged over the sequence";
  if (shaping.times_mask) A += " times the mask";
  if (shaping.teacher_tau != 0.0) {
    A += fmt::format(" + {} stop(log {} - log pi)", number_text(shaping.teacher_tau),
                     name_of(shaping.teacher));
  }
  out.objective.push_back("A_t = " + A);
  if (spec.covariance_selection) {
    out.objective.push_back(fmt::format(
        "selected: the {} share of tokens with the largest (A - mean A)(log pi - mean log pi)",
        number_text(spec.covariance_selection->ratio)));
  }
}

void explain_dropped(const LossSpec& spec, Explanation& out) {
  for (const Gate& gate : spec.gates) {
    const char* unit = gate.level == Level::token ? "tokens" : "whole sequences";
    const char* fate =
        gate.scope == GateScope::mask                 ? "leave the batch: loss, penalties, metrics"
        : gate.scope == GateScope::policy_and_penalty ? "lose their policy term and their penalty"
        : spec.penalties.empty()                      ? "lose their policy term"
                                 : "lose their policy term; the penalty is still paid";
    out.dropped.push_back(fmt::format("{} outside {} {}", unit, gate_text(gate), fate));
  }
  for (const Correction& c : spec.corrections) {
    if (c.weight && c.weight->keep != Bounds{}) {
      out.dropped.push_back(
          fmt::format("tokens whose {} weight is 0 lose their policy term", c.name));
    } else if (!c.weight) {
      out.dropped.push_back(fmt::format("whatever {} takes out of the mask", c.name));
    }
  }
  if (spec.m2_threshold) {
    out.dropped.push_back(
        fmt::format("tokens of largest log(rollout/prox)^2, over the whole batch, until the mean "
                    "of the rest is "
                    "below {}",
                    number_text(*spec.m2_threshold)));
  }
  if (spec.surrogate.kind == SurrogateKind::clipped) {
    out.dropped.push_back(
        "no token by the clip, but beyond the band on the advantage's side the gradient is 0");
  }
  if (out.dropped.empty()) out.dropped.push_back("nothing");
  if (spec.positions == Positions::all) {
    out.dropped.push_back("masked positions take part, as in the source");
  }
}

void explain_gradient(const LossSpec& spec, Explanation& out) {
  switch (spec.surrogate.kind) {
    case SurrogateKind::log_prob:
    case SurrogateKind::detached_ratio:
      out.gradient.push_back(
          "through log pi_t alone; every kept token has one, however bounded r_t is");
      break;
    default:
      if (spec.ratio.level == Level::token) {
        out.gradient.push_back("through r_t: d r_t / d log pi_t = r_t, so it fades as pi_t falls");
      } else if (spec.ratio.route == Route::through_mean) {
        out.gradient.push_back("through the sequence's ratio to every token of it alike");
      } else {
        out.gradient.push_back(
            "to each token as if the sequence's ratio were its own (straight through)");
      }
  }
  if (spec.ratio.over == Positions::all && spec.ratio.level != Level::token) {
    out.gradient.push_back("the sequence's mean runs over masked positions too, as in the source");
  }
  std::string none = "none through comparisons";
  if (!spec.corrections.empty()) none += ", weights";
  if (spec.shaping.teacher_tau != 0.0) none += ", the teacher term";
  out.gradient.push_back(none);
  for (const Penalty& p : spec.penalties) {
    if (!p.gradient)
      out.gradient.push_back("the penalty has no gradient: it only changes the value");
  }
}

void explain_denominator(const LossSpec& spec, Explanation& out) {
  const bool kept = spec.reduction.denominator == Denominator::kept;
  const char* fate = kept ? "dropped ones excluded" : "dropped ones included";
  switch (spec.reduction.kind) {
    case ReductionKind::token_mean:
      out.denominator.push_back(fmt::format(
          "N = trained tokens of the whole batch, {}; masked and zero-weight tokens never "
          "count",
          fate));
      break;
    case ReductionKind::seq_mean_token_mean:
      out.denominator.push_back(fmt::format("N_s = trained tokens of the sequence, {}", fate));
      [[fallthrough]];
    case ReductionKind::seq_mean_token_sum:
    case ReductionKind::fixed_length:
      out.denominator.push_back(
          spec.reduction.count_empty
              ? "S = sequences of the whole batch"
              : "S = sequences (rollouts, where named) with a trained token, over the whole batch");
      break;
    case ReductionKind::sum: out.denominator.push_back("none: a plain sum"); break;
    case ReductionKind::padded_length_mean:
      out.denominator.push_back(
          "the padded rectangle of all sequences; padding counts, as in the source");
      break;
  }
}

void explain_notes(const LossSpec& spec, Explanation& out) {
  out.notes = spec.warnings;
  const bool ratio_has_rollout =
      uses_ratio_of(spec) && spec.ratio.pair.denominator == Stream::rollout;
  int from_rollout = ratio_has_rollout ? 1 : 0;
  for (const Correction& c : spec.corrections) {
    if (c.weight && c.weight->pair.denominator == Stream::rollout) ++from_rollout;
  }
  if (from_rollout > 1) {
    out.notes.push_back("the rollout policy is corrected for more than once: the factors multiply");
  }
  if (uses_ratio_of(spec) && spec.ratio.pair.denominator == Stream::prox &&
      spec.surrogate.kind == SurrogateKind::clipped) {
    out.notes.push_back(
        "with one optimizer step per batch prox equals pi, r_t is 1 and the clip cannot act");
  }
  if (!spec.reads(Stream::rollout)) {
    out.notes.push_back("nothing here corrects for the policy that sampled the tokens");
  }
}

}  // namespace

Explanation explain(const LossSpec& spec) {
  Explanation out;
  explain_objective(spec, out);
  explain_dropped(spec, out);
  explain_gradient(spec, out);
  explain_denominator(spec, out);
  explain_notes(spec, out);
  for (int k = 0; k < kStreamCount; ++k) {
    if (spec.reads(static_cast<Stream>(k))) out.streams.push_back(name_of(static_cast<Stream>(k)));
  }
  return out;
}

}  // namespace leeway
