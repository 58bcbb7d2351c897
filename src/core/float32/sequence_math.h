// What is decided once per sequence, and what a token needs of it. Text for host and device alike:
// `Block` is the team of threads that works on one sequence (on the host a team of one, for tests),
// and sums of a team have one order.
//
// The steps of an evaluation, as in core/cpu/evaluator.cpp:
//   token level:  count_sequence (where counts are needed) -> scales -> tokens
//   otherwise:    m2 -> prepare_first -> mean weight -> prepare_second -> covariance -> scales
//                 -> tokens -> route_through_mean
#pragma once

#include <cstdint>

#include "core/float32/scalar.h"

namespace leeway::float32 {

// A packed batch on the device; null where the batch lacks something. Sequence s holds positions
// offsets[s] .. offsets[s+1].
struct LossBatch {
  int64_t tokens = 0, sequences = 0;
  const int64_t* offsets = nullptr;         // [S + 1]
  const float* streams[kStreamCount] = {};  // [N]
  const float* advantages = nullptr;        // [N]
  const float* weights = nullptr;           // [N]
  const uint8_t* mask = nullptr;            // [N]
  const int32_t* versions = nullptr;        // [N]
  const int32_t* rollout_ids = nullptr;     // [S]
  // The head's own log-probabilities stand for the proximal ones: what they are when no optimizer
  // step lies between the two.
  bool prox_is_pi = false;
  // What corrections that the caller computes give, for plans that are not `token_level`: a factor
  // of each weight, and 0 where a token loses its policy term and its penalties.
  const float* correction_weights = nullptr;  // [N]
  const uint8_t* correction_mask = nullptr;   // [N]
  // [N], written by the loss: 1 where a token's policy term carries gradient. Null: not wanted.
  uint8_t* kept = nullptr;
};

struct SequenceState {
  float scale, log_ratio, mean_advantage;
  uint32_t seen, seen_kept;  // a token of it is trained, and keeps its policy term
  double exact_scale, statistic_count;
  double counted, in_mask;          // tokens
  double weight_sum, weight_count;  // over trained tokens
};

// Per token, for specs above token level; null otherwise.
struct Prepared {
  SequenceState* sequences = nullptr;  // [S]
  uint8_t* trained = nullptr;          // [N]
  uint8_t* flags = nullptr;            // [N]
  float* weights = nullptr;            // [N]
  float* through = nullptr;            // [N]
};

// A weight of 0 takes a position out of everything, also of what looks past the mask.
LEEWAY_HOST_DEVICE bool has_weight(const LossBatch& batch, int64_t i) {
  return batch.weights == nullptr || batch.weights[i] != 0.0f;
}

LEEWAY_HOST_DEVICE bool in_mask(const LossBatch& batch, int64_t i) {
  return (batch.mask == nullptr || batch.mask[i] != 0) && has_weight(batch, i);
}

// Positions of sequence s from its first weight that is not 0.
LEEWAY_HOST_DEVICE int64_t sequence_length(const LossBatch& batch, int64_t s) {
  int64_t first = batch.offsets[s];
  while (first < batch.offsets[s + 1] && !has_weight(batch, first)) ++first;
  return batch.offsets[s + 1] - first;
}

LEEWAY_HOST_DEVICE bool participates(const LossPlan& plan, const LossBatch& batch, int64_t i) {
  return plan.positions_all ? has_weight(batch, i) : in_mask(batch, i);
}

// Whether position i enters its sequence's ratio.
LEEWAY_HOST_DEVICE bool in_statistic(const LossPlan& plan, const LossBatch& batch,
                                     const Prepared& prepared, int64_t i) {
  if (plan.ratio_over_all) return has_weight(batch, i);
  return plan.positions_all ? in_mask(batch, i) : prepared.trained[i] != 0;
}

// The gate's value for a whole sequence, over trained positions; `count` 0 if there are none. The
// ratio aggregates in log space, exp comes last.
template <class Block>
LEEWAY_HOST_DEVICE float sequence_gate_value(const PlannedGate& gate, const LossBatch& batch,
                                             const Prepared& prepared, int64_t begin, int64_t end,
                                             Block& block, double& count) {
  const float* num = batch.streams[gate.num];
  const float* den = batch.streams[gate.den];
  double sum = 0.0, counted = 0.0;
  float largest = -INFINITY, smallest = INFINITY;
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    if (!prepared.trained[i]) continue;
    const float x = clamped(num[i] - den[i], -gate.log_clamp, gate.log_clamp);
    const float value =
        gate.quantity == Quantity::ratio ? x : quantity_of_pair(gate, num[i], den[i], x);
    sum += value;
    counted += 1.0;
    largest = fmaxf(largest, value);
    smallest = fminf(smallest, value);
  }
  count = block.sum(counted);
  if (count == 0.0) return 0.0f;
  double value = 0.0;
  if (gate.level == Level::max) {
    value = block.max(largest);
  } else if (gate.level == Level::min) {
    value = block.min(smallest);
  } else {
    value = block.sum(sum);
    if (gate.level == Level::geometric) value /= count;
  }
  return static_cast<float>(gate.quantity == Quantity::ratio ? exp(value) : value);
}

// Applies gates of scope `mask` (or all others) to a sequence's flags.
template <class Block>
LEEWAY_HOST_DEVICE void apply_gates(const LossPlan& plan, bool mask_gates, const LossBatch& batch,
                                    const Prepared& prepared, int64_t begin, int64_t end,
                                    Block& block) {
  for (int g = 0; g < plan.gate_count; ++g) {
    const PlannedGate& gate = plan.gates[g];
    if ((gate.scope == GateScope::mask) != mask_gates) continue;
    double count = 1.0;
    const bool whole = gate.level != Level::token;
    const float of_all =
        whole ? sequence_gate_value(gate, batch, prepared, begin, end, block, count) : 0.0f;
    if (count == 0.0) continue;
    const float* num = batch.streams[gate.num];
    const float* den = batch.streams[gate.den];
    for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
      if (!prepared.trained[i]) continue;
      const float value = whole ? of_all : gate_value(gate, num[i], den[i]);
      const GateSides<float> sides = judge(gate, value, batch.advantages[i]);
      uint8_t flags = 0;
      if (sides.low || sides.high) {
        flags = mask_gates ? kNarrowed : kPolicyDropped;
        if (!mask_gates) flags |= (sides.low ? kBelow : 0) | (sides.high ? kAbove : 0);
        if (gate.scope == GateScope::policy_and_penalty) flags |= kPenaltyDropped;
      }
      prepared.flags[i] |= flags;
    }
  }
}

// Tokens that take part, by sequence: all that a token-level spec's denominator needs.
template <class Block>
LEEWAY_HOST_DEVICE void count_sequence(const LossPlan& plan, const LossBatch& batch,
                                       const Prepared& prepared, int64_t s, Block& block) {
  double counted = 0.0;
  for (int64_t i = batch.offsets[s] + block.thread(); i < batch.offsets[s + 1];
       i += block.threads()) {
    counted += participates(plan, batch, i);
  }
  counted = block.sum(counted);
  if (block.thread() == 0) prepared.sequences[s].counted = counted;
}

// Who takes part, gates of scope `mask`, and the corrections' weights. `flags` may hold what M2PO
// dropped.
template <class Block>
LEEWAY_HOST_DEVICE void prepare_first(const LossPlan& plan, const LossBatch& batch,
                                      const Prepared& prepared, int64_t s, Block& block) {
  const int64_t begin = batch.offsets[s], end = batch.offsets[s + 1];
  double counted = 0.0, masked_in = 0.0;
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    const bool part = participates(plan, batch, i);
    prepared.trained[i] = part;
    prepared.weights[i] =
        part && batch.correction_weights != nullptr ? batch.correction_weights[i] : 1.0f;
    if (part && batch.correction_mask != nullptr && batch.correction_mask[i] == 0) {
      prepared.flags[i] |= kPolicyDropped | kPenaltyDropped;
    }
    counted += part;
    masked_in += in_mask(batch, i);
  }
  counted = block.sum(counted);
  masked_in = block.sum(masked_in);
  apply_gates(plan, true, batch, prepared, begin, end, block);
  block.sync();
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    if (prepared.flags[i] & kNarrowed) prepared.trained[i] = 0;
  }
  block.sync();
  for (int w = 0; w < plan.weight_count; ++w) {
    const PlannedWeight& weight = plan.weights[w];
    const float* num = batch.streams[weight.num];
    const float* den = batch.streams[weight.den];
    float factor = 1.0f;
    if (weight.level != Level::token) {
      double sum = 0.0, count = 0.0;
      for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
        if (weight.over_all ? !has_weight(batch, i) : !prepared.trained[i]) continue;
        sum += clamped(num[i] - den[i], -weight.token_log_clamp, weight.token_log_clamp);
        count += 1.0;
      }
      sum = block.sum(sum);
      count = block.sum(count);
      const double x = weight.level == Level::geometric && count > 0.0 ? sum / count : sum;
      if (count > 0.0) factor = weight_of(weight, static_cast<float>(x));
    }
    for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
      if (!prepared.trained[i]) continue;
      prepared.weights[i] *=
          weight.level == Level::token ? weight_of(weight, num[i] - den[i]) : factor;
    }
  }
  double weight_sum = 0.0, weight_count = 0.0;
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    if (!prepared.trained[i]) continue;
    weight_sum += prepared.weights[i];
    weight_count += 1.0;
  }
  weight_sum = block.sum(weight_sum);
  weight_count = block.sum(weight_count);
  if (block.thread() != 0) return;
  SequenceState& state = prepared.sequences[s];
  state.counted = counted;
  state.in_mask = masked_in;
  state.weight_sum = weight_sum;
  state.weight_count = weight_count;
}

// What all weights are divided by; a mean of (almost) zero leaves them alone. One team for the
// whole batch.
template <class Block>
LEEWAY_HOST_DEVICE double mean_weight(const LossPlan& plan, const SequenceState* states,
                                      int64_t sequences, Block& block) {
  if (plan.normalisation == WeightNormalisation::none) return 1.0;
  const bool by_token = plan.normalisation == WeightNormalisation::token;
  double sum = 0.0, count = 0.0;
  for (int64_t s = block.thread(); s < sequences; s += block.threads()) {
    if (states[s].weight_count == 0.0) continue;
    sum += by_token ? states[s].weight_sum : states[s].weight_sum / states[s].weight_count;
    count += by_token ? states[s].weight_count : 1.0;
  }
  sum = block.sum(sum);
  count = block.sum(count);
  const double mean = count > 0.0 ? sum / count : 0.0;
  return mean <= 1e-8 ? 1.0 : mean;
}

// Gates, the sequence's ratio and mean advantage, and what the kept denominator counts. Weights are
// divided by `mean_weight`.
template <class Block>
LEEWAY_HOST_DEVICE void prepare_second(const LossPlan& plan, const LossBatch& batch,
                                       const Prepared& prepared, double mean_weight, int64_t s,
                                       Block& block) {
  const int64_t begin = batch.offsets[s], end = batch.offsets[s + 1];
  if (mean_weight != 1.0) {
    for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
      prepared.weights[i] = static_cast<float>(prepared.weights[i] / mean_weight);
    }
  }
  apply_gates(plan, false, batch, prepared, begin, end, block);
  const bool has_ratio = plan.uses_ratio && !plan.token_ratio;
  const float* num = batch.streams[plan.ratio_num];
  const float* den = batch.streams[plan.ratio_den];
  double trained = 0.0, advantage = 0.0, log_ratio = 0.0, statistics = 0.0, kept = 0.0;
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    if (prepared.trained[i]) {
      trained += 1.0;
      advantage += batch.advantages[i];
      kept += !(prepared.flags[i] & kPolicyDropped) && prepared.weights[i] != 0.0f;
    }
    if (has_ratio && in_statistic(plan, batch, prepared, i)) {
      float slope;
      log_ratio += statistic_of(plan, num[i], den[i], batch.advantages[i], slope);
      statistics += 1.0;
    }
  }
  trained = block.sum(trained);
  advantage = block.sum(advantage);
  kept = block.sum(kept);
  log_ratio = block.sum(log_ratio);
  statistics = block.sum(statistics);
  if (block.thread() != 0) return;
  SequenceState& state = prepared.sequences[s];
  state.mean_advantage = static_cast<float>(advantage / fmax(trained, 1.0));
  state.statistic_count = fmax(statistics, 1.0);
  state.log_ratio =
      static_cast<float>(plan.geometric_ratio ? log_ratio / state.statistic_count : log_ratio);
  if (plan.kept_denominator) state.counted = kept;
}

// Trained tokens of the rollout that sequence s belongs to, and whether s is its first sequence.
LEEWAY_HOST_DEVICE double unit_tokens(const LossBatch& batch, const SequenceState* states,
                                      int64_t s, bool& first) {
  first = true;
  if (batch.rollout_ids == nullptr) return states[s].counted;
  double tokens = 0.0;
  for (int64_t other = 0; other < batch.sequences; ++other) {
    if (batch.rollout_ids[other] != batch.rollout_ids[s]) continue;
    if (other < s) first = false;
    tokens += states[other].counted;
  }
  return tokens;
}

// Fills every sequence's scale from counts. `given` is the global denominator, negative: the
// batch's own. One team for the whole batch.
template <class Block>
LEEWAY_HOST_DEVICE void set_scales(const LossPlan& plan, const LossBatch& batch,
                                   const Prepared& prepared, double given, Block& block) {
  SequenceState* states = prepared.sequences;
  double divisor = given;
  if (given < 0.0) {
    double tokens = 0.0, units = 0.0;
    float longest = 0.0f;
    for (int64_t s = block.thread(); s < batch.sequences; s += block.threads()) {
      bool first;
      tokens += states[s].counted;
      if (plan.reduction != ReductionKind::token_mean) {
        const double of_unit = unit_tokens(batch, states, s, first);
        units += first && (plan.count_empty || of_unit > 0.0);
      }
      longest = fmaxf(longest, static_cast<float>(sequence_length(batch, s)));
    }
    tokens = block.sum(tokens);
    units = block.sum(units);
    longest = block.max(longest);
    switch (plan.reduction) {
      case ReductionKind::token_mean: divisor = tokens; break;
      case ReductionKind::sum: divisor = 1.0; break;
      case ReductionKind::padded_length_mean:
        divisor = static_cast<double>(batch.sequences) * longest;
        break;
      case ReductionKind::fixed_length:
        divisor = units * (plan.fixed_length > 0.0 ? plan.fixed_length : longest);
        break;
      default: divisor = units; break;
    }
  }
  divisor = fmax(1.0, divisor);
  for (int64_t s = block.thread(); s < batch.sequences; s += block.threads()) {
    double scale = 1.0 / divisor;
    bool first;
    if (plan.reduction == ReductionKind::seq_mean_token_mean) {
      scale /= fmax(1.0, unit_tokens(batch, states, s, first));
    } else if (plan.reduction == ReductionKind::padded_length_mean) {
      scale *= states[s].in_mask;
    }
    states[s].exact_scale = scale;
    states[s].scale = static_cast<float>(scale);
  }
}

// Position i of sequence s as evaluate_alone takes it. False: it does not take part.
LEEWAY_HOST_DEVICE bool load_token(const LossPlan& plan, const LossBatch& batch,
                                   const Prepared& prepared, int64_t i, const SequenceState& state,
                                   TokenIn& in) {
  in.prepared = prepared.trained != nullptr;
  if (in.prepared ? prepared.trained[i] == 0 : !participates(plan, batch, i)) return false;
  for (int k = 0; k < kStreamCount; ++k) {
    in.streams[k] = batch.streams[k] != nullptr ? batch.streams[k][i] : 0.0f;
  }
  in.advantage = batch.advantages[i];
  in.weight_in_batch = batch.weights != nullptr ? batch.weights[i] : 1.0f;
  in.in_mask = batch.mask == nullptr || batch.mask[i] != 0;
  in.sequence_scale = state.scale;
  if (in.prepared) {
    in.sequence_log_ratio = state.log_ratio;
    in.sequence_advantage = state.mean_advantage;
    in.token_flags = prepared.flags[i];
    in.correction_weight = prepared.weights[i];
  }
  return true;
}

// Loss and gradient by the sequence's log ratio of the positions up to the longest sequence, where
// a source pads with the sequence's advantage and counts them.
LEEWAY_HOST_DEVICE void padding_of(const LossPlan& plan, const LossBatch& batch,
                                   const SequenceState& state, int64_t s, double longest,
                                   double& loss, double& by_ratio) {
  loss = by_ratio = 0.0;
  const int64_t length = sequence_length(batch, s);
  if (plan.reduction != ReductionKind::padded_length_mean || length == 0) return;
  const double pads = longest - static_cast<double>(length);
  const float A = batch.advantages[batch.offsets[s + 1] - 1];
  const float r = plan.token_ratio ? 1.0f : exp_of(state.log_ratio);
  const PolicyTerm<float> pad = surrogate_of(plan.kind, plan, r, A, A, 0.0f);
  loss = state.exact_scale * pads * pad.loss;
  by_ratio = state.exact_scale * pads * pad.by_ratio;
}

// Gradients that go through the sequence's mean, after all tokens; returns the padding's loss.
template <class Block>
LEEWAY_HOST_DEVICE double finish_sequence(const LossPlan& plan, const LossBatch& batch,
                                          const Prepared& prepared, double longest, int64_t s,
                                          float* grad, Block& block) {
  const int64_t begin = batch.offsets[s], end = batch.offsets[s + 1];
  const SequenceState& state = prepared.sequences[s];
  double padding = 0.0, sum = 0.0;
  padding_of(plan, batch, state, s, longest, padding, sum);
  if (!plan.through_mean) return padding;
  double routed = 0.0;
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    routed += prepared.through[i];
  }
  sum += block.sum(routed);
  if (plan.geometric_ratio) sum /= state.statistic_count;
  const float* num = batch.streams[plan.ratio_num];
  const float* den = batch.streams[plan.ratio_den];
  for (int64_t i = begin + block.thread(); i < end; i += block.threads()) {
    if (!in_statistic(plan, batch, prepared, i)) continue;
    float slope;
    statistic_of(plan, num[i], den[i], batch.advantages[i], slope);
    if (slope != 0.0f) grad[i] += static_cast<float>(sum * slope);
  }
  return padding;
}

}  // namespace leeway::float32
