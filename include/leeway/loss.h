// The loss algebra: every policy loss and off-policy correction is a value of one `LossSpec`.
//
// A spec says, per token t of a sequence, with r the ratio it names and A the shaped advantage:
//
//   loss_t = keep_t * weight_t * surrogate(r_t, A_t, log pi_t)  +  sum of penalties
//   loss   = sum over trained tokens of batch_weight_t * loss_t / denominator
//
// and has a closed-form gradient g_t = d loss / d log pi_t, so nothing here needs autograd.
//
// Invariants every implementation keeps:
// - Select, never multiply: a masked or dropped token contributes nothing, whatever it holds.
// - A value equal to a bound is kept. Bounds are compared in float32, the precision the
//   log-probabilities were recorded in.
// - Weights, gates and the teacher term are detached: no gradient flows through them.
// - Results depend neither on the number of threads nor, beyond rounding, on micro-batches.
//
// All types are plain values and may be copied between threads; functions are thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace leeway {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------
// Axes of the algebra

// Log-probability streams of the taken tokens. `pi` alone carries gradient.
enum class Stream { pi, prox, rollout, ref, teacher };
inline constexpr int kStreamCount = 5;
const char* name_of(Stream stream);

// log ratio = log numerator - log denominator.
struct Pair {
  Stream numerator = Stream::pi;
  Stream denominator = Stream::rollout;
  bool operator==(const Pair&) const = default;
};

// How per-token log ratios become one number: the token's own, the mean over the sequence, the sum
// over it (a product of ratios), or the extreme one.
enum class Level { token, geometric, sequence, max, min };

// Which positions a sequence statistic runs over. `all` reproduces sources that forget the mask:
// every position whose weight is not 0.
enum class Positions { trained, all };

// Inclusive interval.
struct Bounds {
  double low = -kInfinity;
  double high = kInfinity;
  bool operator==(const Bounds&) const = default;
};

// Where the gradient of a sequence-level ratio goes: to each token as if the ratio were its own, or
// through the mean (or sum) to every token of the sequence.
enum class Route { straight_through, through_mean };

struct Ratio {
  Pair pair;
  Level level = Level::token;
  Route route = Route::straight_through;
  double log_clamp = kInfinity;           // |log ratio| is limited to this; no gradient beyond it
  double log_cap = kInfinity;             // the same from above only
  std::optional<Bounds> signed_log_clip;  // GMPO: each log ratio clipped on the advantage's side
  Positions over = Positions::trained;
};

enum class SurrogateKind {
  ratio,           // -A r
  log_prob,        // -A log pi
  clipped,         // max(-A r, -A clip(r)), optionally dual clipped
  detached_ratio,  // -A stop(clip(r)) log pi
  soft_gate,       // -A (4/tau) sigmoid(tau (r - 1)), tau by the advantage's sign
};

struct Surrogate {
  SurrogateKind kind = SurrogateKind::ratio;
  Bounds clip;                   // clipped, detached_ratio
  double dual_clip = kInfinity;  // clipped: at A < 0 the loss is at most -A dual_clip
  double ratio_cap = kInfinity;  // clipped: the unclipped branch uses min(r, ratio_cap)
  double tau_pos = 1.0;          // soft_gate, raw A (its mean with Shaping::sequence_mean) > 0
  double tau_neg = 1.0;          // soft_gate, A <= 0
};

enum class Quantity {
  ratio,             // e^x, x the log ratio of the pair
  difference,        // e^numerator - e^denominator
  k1,                // x
  k2,                // x^2 / 2
  k3,                // e^x - 1 - x
  binary_kl,         // the larger of both directions, over {taken token, any other}
  signed_binary_kl,  // KL(denominator || numerator), negative where the numerator is smaller
};

// Which bound a gate applies at which sign of the raw advantage.
enum class SignRule {
  both,            // both bounds, whatever the sign
  zero_takes_low,  // A > 0: the upper bound alone; A <= 0: the lower one alone
  zero_is_kept,    // A > 0: the upper bound alone; A < 0: the lower one alone; A = 0: kept
};

enum class GateScope {
  policy,              // a dropped token loses its policy term
  policy_and_penalty,  // and its penalties
  mask,                // it leaves the batch: sequence statistics, metrics, kept denominators
};

struct Gate {
  Quantity quantity = Quantity::ratio;
  Pair pair;
  Level level = Level::token;
  Bounds keep;
  SignRule sign = SignRule::both;
  GateScope scope = GateScope::policy;
  double log_clamp = kInfinity;  // on each token's log ratio, before the level
};

enum class PenaltyKind { k1, k2, k3, squared_log, absolute };
enum class PenaltyGate { all, kept, nonzero_advantage, selected };

// coefficient * kind(log ratio of the pair), optionally times the spec's own ratio.
struct Penalty {
  PenaltyKind kind = PenaltyKind::squared_log;
  Pair pair;
  double coefficient = 0.0;
  PenaltyGate gate = PenaltyGate::all;
  bool gradient = true;
  bool times_ratio = false;
};

// A' = adv_tau * A + teacher_tau * stop(log teacher - log pi).
struct Shaping {
  double adv_tau = 1.0;
  double teacher_tau = 0.0;
  Stream teacher = Stream::teacher;
  bool sequence_mean = false;  // A is replaced by its mean over the trained tokens
  bool constant_one = false;   // A = 1 everywhere: cross entropy
  bool times_mask = false;     // A is multiplied by the batch's mask (with Positions::all)
};

enum class ReductionKind {
  token_mean,           // / trained tokens of the whole batch
  seq_mean_token_mean,  // mean over sequences of each one's token mean
  seq_mean_token_sum,   // mean over sequences of each one's sum
  fixed_length,         // / (sequences * fixed_length)
  sum,                  // / 1
  padded_length_mean,   // LUSPO: mean over a padded rectangle of loss * trained length
};
enum class Denominator { original, kept };

// "Sequences" are rollouts where the batch names them (several samples of one rollout count once).
// Sequences without a trained token never count, unless `count_empty`.
struct Reduction {
  ReductionKind kind = ReductionKind::token_mean;
  Denominator denominator = Denominator::original;
  double fixed_length = 0.0;  // 0 with `fixed_length`: the longest sequence of the batch
  bool count_empty = false;
};

// ---------------------------------------------------------------------------------------------
// The hook: corrections as functions

// One sequence as a correction sees it. Streams the batch lacks are empty. Masked positions may
// hold anything: look at `mask` before using a value.
template <class T>
struct SequenceView {
  std::span<const T> pi, prox, rollout, ref, teacher;
  std::span<const T> advantages;
  std::span<const uint8_t> mask;
  std::span<const int32_t> versions;

  std::span<const T> stream(Stream s) const {
    switch (s) {
      case Stream::pi: return pi;
      case Stream::prox: return prox;
      case Stream::rollout: return rollout;
      case Stream::ref: return ref;
      case Stream::teacher: return teacher;
    }
    return {};
  }
};

// What a correction changes. `weights` starts as ones, `mask` as the trained positions. Weights
// multiply the policy term alone and are detached. A position cleared in `mask` loses its policy
// term and its penalties; denominators stay.
template <class T>
struct SequenceEffect {
  std::span<T> weights;
  std::span<uint8_t> mask;
};

// The built-in shape of a detached weight: the ratio of `pair` at `level`, limited to `clamp`, and
// zero where the unlimited ratio lies outside `keep`.
struct Weight {
  Pair pair{Stream::prox, Stream::rollout};
  Level level = Level::token;
  Bounds clamp;
  Bounds keep;
  double log_clamp = kInfinity;         // on the log ratio at its level, before exp
  double token_log_clamp = kInfinity;   // on each token's log ratio, before the level
  Positions over = Positions::trained;  // positions of the sequence statistic
};

// A named correction. `apply_double` serves the reference, `apply_float` the SIMD implementation;
// both must be safe to call from several threads at once, for different sequences.
struct Correction {
  std::string name;
  std::string formula;        // shown by `explain`, e.g. "min(prox/rollout, 5)"
  std::vector<Stream> reads;  // refused when the batch lacks one of them
  std::function<void(const SequenceView<double>&, SequenceEffect<double>)> apply_double;
  std::function<void(const SequenceView<float>&, SequenceEffect<float>)> apply_float;
  std::optional<Weight> weight;  // what it is, if it is nothing but the built-in weight
};

// From one generic function: `fn(sequence, effect)` is compiled for double and for float.
template <class Function>
Correction make_correction(std::string name, std::string formula, std::vector<Stream> reads,
                           Function fn) {
  return {std::move(name),
          std::move(formula),
          std::move(reads),
          [fn](const SequenceView<double>& s, SequenceEffect<double> e) { fn(s, e); },
          [fn](const SequenceView<float>& s, SequenceEffect<float> e) { fn(s, e); },
          std::nullopt};
}

// The built-in weight as a correction.
Correction weight_correction(std::string name, const Weight& weight);

// Batch-normalised weights: all weights are divided by their mean over trained tokens, or by the
// mean over sequences of each one's mean. Needs the whole batch; not micro-batch invariant.
enum class WeightNormalisation { none, token, sequence };

// ---------------------------------------------------------------------------------------------
// Metrics of one's own

// What one sequence adds to a metric, which is the sum of `sum` over all sequences divided by that
// of `count`.
struct MetricShare {
  double sum = 0.0, count = 0.0;
};

// A metric of a program or a plugin, of whole batches, shown as plugin/NAME. `share` sees the
// sequence as a correction does, and is called by one thread at a time.
struct OwnMetric {
  std::string name;
  std::string definition;     // one line, shown by `explain`
  std::vector<Stream> reads;  // a batch that lacks one of them does not have the metric
  std::function<MetricShare(const SequenceView<double>&)> share;
};

// ---------------------------------------------------------------------------------------------
// The spec

// kl_cov: the `ratio` share of trained tokens with the largest covariance of advantage and
// log-probability. Penalties gated `selected` act on those. Needs the whole batch.
struct CovarianceSelection {
  double ratio = 0.0;
};

struct LossSpec {
  std::string preset;

  Ratio ratio;
  Surrogate surrogate;
  std::vector<Gate> gates;
  std::vector<Correction> corrections;
  WeightNormalisation weight_normalisation = WeightNormalisation::none;
  std::vector<Penalty> penalties;
  Shaping shaping;
  Reduction reduction;
  // `all`: ignores the batch's mask, but not its weights.
  Positions positions = Positions::trained;

  // Named extensions: what cannot be said per token.
  std::optional<double> m2_threshold;  // M2PO, see narrow_mask()
  std::optional<CovarianceSelection> covariance_selection;

  std::vector<OwnMetric> metrics;  // beside those of metrics.h; the catalog's

  // The effective settings the spec was made from, `key = value`, those without effect, and
  // warnings about settings that the source accepts although they leave nothing to train on.
  std::vector<std::pair<std::string, std::string>> settings;
  std::vector<std::string> inert, warnings;

  bool reads(Stream stream) const;
  // True when one number per sequence is needed before any token's gradient.
  bool needs_sequence_statistics() const;
  // True when the denominator depends on the log-probabilities.
  bool denominator_depends_on_pi() const;
};

// ---------------------------------------------------------------------------------------------
// Batches

// A view of a packed batch: sequence s holds positions offsets[s] .. offsets[s+1]. Streams the
// batch lacks are empty; `mask`, `weights`, `versions` and `rollout_ids` may be empty (all ones;
// none). `pi` and `advantages` are required, one value per position. A weight of 0 takes a position
// out of everything, and a sequence begins at its first weight that is not 0: zeros before the
// first sampled token keep a prompt from losses that look past the mask.
template <class T>
struct BatchView {
  std::span<const int64_t> offsets;  // [S + 1]
  std::span<const T> pi, prox, rollout, ref, teacher;
  std::span<const T> advantages;
  std::span<const T> weights;
  std::span<const uint8_t> mask;
  std::span<const int32_t> versions;
  std::span<const int32_t> rollout_ids;  // [S], equal numbers = samples of one rollout

  int64_t token_count() const { return offsets.empty() ? 0 : offsets.back(); }
  int64_t sequence_count() const {
    return offsets.empty() ? 0 : static_cast<int64_t>(offsets.size()) - 1;
  }
  std::span<const T> stream(Stream s) const {
    return SequenceView<T>{pi, prox, rollout, ref, teacher, {}, {}, {}}.stream(s);
  }
};

// A batch that owns its values, in double.
struct Batch {
  std::vector<int64_t> offsets{0};
  std::vector<double> pi, prox, rollout, ref, teacher;
  std::vector<double> advantages, weights;
  std::vector<uint8_t> mask;
  std::vector<int32_t> versions;
  std::vector<int32_t> rollout_ids;
  std::vector<std::string> groups;  // [S] or empty

  BatchView<double> view() const;
};

// The same batch in float32, for the SIMD implementation.
struct FloatBatch {
  explicit FloatBatch(const Batch& batch);
  BatchView<float> view() const;

  std::vector<int64_t> offsets;
  std::vector<float> pi, prox, rollout, ref, teacher, advantages, weights;
  std::vector<uint8_t> mask;
  std::vector<int32_t> versions, rollout_ids;
};

// Sequences [first, last) of a batch: a micro-batch.
Batch slice(const Batch& batch, int64_t first, int64_t last);

// ---------------------------------------------------------------------------------------------
// Evaluation

class MetricSums;  // metrics.h

// What happened to one token; filled by the reference on request.
struct TokenTrace {
  bool trained = false;  // in mask, after gates of scope `mask`
  bool dropped = false;  // a gate or a correction's mask took its policy term away
  bool kept = false;     // its policy term carries gradient: no gate, clip or zero weight cut it
  bool below = false;    // dropped by a gate's lower bound
  bool above = false;    // dropped by a gate's upper bound
  bool clip_binding = false;  // the clipped branch was taken
  bool dual_clipped = false;
  double ratio = 0.0;   // the spec's ratio, after log clamps
  double weight = 1.0;  // product of the corrections' weights, normalised
  double policy = 0.0;  // keep * weight * surrogate, before reduction
  double penalty = 0.0;
  double coefficient = 0.0;  // what multiplies the shaped advantage in -g_t
};

struct LossResult {
  double loss = 0.0;
  std::vector<double> grad;  // d loss / d log pi, [N]
  double denominator = 1.0;
  std::vector<TokenTrace> trace;  // [N] when asked for
};

// The denominator of `spec` over `batch`: trained (or kept) tokens, sequences, sequences times the
// fixed length, or 1. Denominators of the parts of a batch add up to the whole one's (but for
// `sum`, and if no rollout is split), which is what makes micro-batches exact. May be 0: evaluation
// divides by at least 1.
double denominator_of(const LossSpec& spec, const BatchView<double>& batch);

// The slow, readable implementation, in double: the definition of what a spec means. Without
// `denominator` the batch's own is used. `metrics`, if given, is added to.
// Throws Error when a stream the spec reads is missing, or holds NaN or infinity on a token that
// takes part, naming sequence and position.
LossResult evaluate_reference(const LossSpec& spec, const BatchView<double>& batch,
                              std::optional<double> denominator = {}, MetricSums* metrics = nullptr,
                              bool want_trace = false);

// Batch-wide extensions, applied before a batch is cut into micro-batches: the mask M2PO leaves.
// Returns `mask` narrowed; equal to it for specs without such an extension.
template <class T>
std::vector<uint8_t> narrow_mask(const LossSpec& spec, const BatchView<T>& batch);

// Proximal log-probabilities guessed from versions instead of a forward pass. A token sampled by
// version v of current version c lies at alpha = (c - 1 - v) / (c - v) between rollout and pi.
enum class ProxApproximation { loglinear, linear, rollout };
std::vector<double> approximate_prox(ProxApproximation method, std::span<const double> pi,
                                     std::span<const double> rollout,
                                     std::span<const int32_t> versions, int32_t current_version);

}  // namespace leeway
