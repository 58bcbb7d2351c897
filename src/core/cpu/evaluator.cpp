// Splits a batch into runs of tokens, prepares what is decided once per sequence, runs the vector
// kernel over the runs on a thread pool, and combines the sums in a fixed order.
//
// The split depends on the batch alone: at most kParts parts of whole blocks. The sums of the parts
// are combined in order, so the number of threads cannot change a bit of the result.

#include "leeway/evaluator.h"

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <tuple>

#include "base/thread_pool.h"
#include "core/cpu/token_kernel.h"
#include "core/extensions.h"
#include "core/gates.h"
#include "core/participation.h"
#include "core/sequence_math.h"
#include "core/vector_math.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr size_t kBlock = 4096;  // tokens whose float32 sums are carried before doubles take over
constexpr size_t kParts = 64;

struct Part {
  KernelSums sums;
  uint32_t histogram[kRatioBins];
};

bool has_mask_gates(const LossSpec& spec) {
  return std::any_of(spec.gates.begin(), spec.gates.end(),
                     [](const Gate& gate) { return gate.scope == GateScope::mask; });
}

}  // namespace

struct Evaluator::Impl {
  explicit Impl(int threads) : pool(threads) {}

  double evaluate(const LossSpec& spec, const BatchView<float>& batch, std::span<float> grad,
                  std::optional<double> denominator, MetricSums* metrics, std::span<uint8_t> kept);

 private:
  void prepare();
  void check_what_bounds_hide() const;
  void narrow_by_mask_gates();
  void apply_corrections();
  void gather_sequence(size_t s);
  void set_scales(std::optional<double> denominator);
  void run_part(size_t part, size_t part_tokens);
  void route_through_mean(size_t s);
  void add_metrics(MetricSums& metrics, size_t part_count) const;
  [[noreturn]] void throw_not_finite() const;

  ThreadPool pool;
  std::vector<Part> parts = std::vector<Part>(kParts);

  // Of the current call.
  const LossSpec* spec = nullptr;
  LossPlan plan;
  BatchView<float> batch;
  std::span<float> grad;
  std::span<uint8_t> kept;
  bool want_metrics = false;
  bool own_mask = false;        // `trained` replaces the batch's mask, and `flags` are set
  bool gates_in_flags = false;  // kept denominators need the gates before the kernel runs
  std::vector<uint8_t> original, trained, narrowed, flags;
  std::vector<float> weights, factor, through;
  std::vector<SequenceNumbers> numbers;      // [S]
  std::vector<double> scales;                // [S]
  std::vector<double> statistic_count;       // [S]
  std::vector<uint32_t> tokens_in, kept_in;  // [S]
};

// A bound can turn NaN into a finite number: min(NaN, cap) is the cap. What goes into corrections'
// weights, and weights of tokens, is looked at here; of the rest the kernel sees that it is finite.
void Evaluator::Impl::check_what_bounds_hide() const {
  const auto is_finite = [this](std::span<const float> values) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i]) && (spec->positions == Positions::all || in_mask(batch, i))) {
        return false;
      }
    }
    return true;
  };
  bool finite = is_finite(batch.weights);
  for (const Correction& correction : spec->corrections) {
    for (const Stream stream : correction.reads) finite = finite && is_finite(batch.stream(stream));
  }
  if (!finite) check_finite(*spec, batch);
}

// Everything that is decided before a token's own arithmetic.
void Evaluator::Impl::prepare() {
  const size_t n = static_cast<size_t>(batch.token_count());
  const size_t S = static_cast<size_t>(batch.sequence_count());
  const ReductionKind kind = spec->reduction.kind;
  gates_in_flags = spec->reduction.denominator == Denominator::kept;
  own_mask = has_mask_gates(*spec) || spec->positions == Positions::all || spec->m2_threshold ||
             !spec->corrections.empty() || spec->needs_sequence_statistics() || gates_in_flags ||
             spec->covariance_selection ||
             (kind != ReductionKind::token_mean && kind != ReductionKind::sum);
  numbers.assign(S, {});
  statistic_count.assign(S, 1.0);
  through.resize(plan.through_mean ? n : 0);
  if (!own_mask) return;

  if (batch.weights.empty() && spec->positions == Positions::trained && !batch.mask.empty()) {
    original.assign(batch.mask.begin(), batch.mask.end());
  } else {
    original = participating(*spec, batch);
  }
  trained = original;
  flags.assign(n, 0);
  if (spec->m2_threshold) {
    const std::vector<uint8_t> stays = narrow_mask(*spec, batch);
    for (size_t i = 0; i < n; ++i) {
      if (trained[i] && !stays[i]) flags[i] |= kPolicyDropped | kPenaltyDropped;
    }
  }
  if (has_mask_gates(*spec)) narrow_by_mask_gates();
  if (!spec->corrections.empty()) apply_corrections();
  if (spec->needs_sequence_statistics() || gates_in_flags) {
    pool.run(S, [this](size_t s) { gather_sequence(s); });
  }
  if (spec->covariance_selection) {
    const auto selected = select_by_covariance(*spec, batch, trained);
    for (size_t i = 0; i < n; ++i) {
      if (selected[i]) flags[i] |= kSelected;
    }
  }
}

void Evaluator::Impl::narrow_by_mask_gates() {
  narrowed = trained;
  pool.run(static_cast<size_t>(batch.sequence_count()), [this](size_t s) {
    const size_t first = first_position(batch, static_cast<int64_t>(s));
    for (const Gate& gate : spec->gates) {
      if (gate.scope != GateScope::mask) continue;
      apply_gate(gate, sequence_of(batch, static_cast<int64_t>(s), trained),
                 [&](size_t t, GateVerdict verdict) {
                   if (verdict.dropped()) narrowed[first + t] = 0;
                 });
    }
  });
  trained.swap(narrowed);
}

void Evaluator::Impl::apply_corrections() {
  const size_t n = trained.size();
  weights.resize(n);
  factor.resize(n);
  narrowed.resize(n);
  pool.run(static_cast<size_t>(batch.sequence_count()), [this](size_t s) {
    const auto seq = sequence_of(batch, static_cast<int64_t>(s), trained);
    const size_t first = first_position(batch, static_cast<int64_t>(s)), length = seq.mask.size();
    for (size_t c = 0; c < spec->corrections.size(); ++c) {
      float* out = (c == 0 ? weights : factor).data() + first;
      uint8_t* mask = narrowed.data() + first;
      std::fill_n(out, length, 1.0f);
      std::copy_n(trained.data() + first, length, mask);
      spec->corrections[c].apply_float(seq, {{out, length}, {mask, length}});
      for (size_t t = 0; t < length && c > 0; ++t) weights[first + t] *= out[t];
      if (std::equal(mask, mask + length, seq.mask.begin())) continue;
      for (size_t t = 0; t < length; ++t) {
        if (seq.mask[t] && !mask[t]) flags[first + t] |= kPolicyDropped | kPenaltyDropped;
      }
    }
  });
  normalise_weights(*spec, batch, std::span<const uint8_t>(trained), std::span(weights));
}

// Gates above token level, the sequence's ratio and its mean advantage.
void Evaluator::Impl::gather_sequence(size_t s) {
  const auto seq = sequence_of(batch, static_cast<int64_t>(s), trained);
  const size_t first = first_position(batch, static_cast<int64_t>(s));
  for (const Gate& gate : spec->gates) {
    if (gate.scope == GateScope::mask || (gate.level == Level::token && !gates_in_flags)) continue;
    apply_gate(gate, seq, [&](size_t t, GateVerdict verdict) {
      uint8_t& flag = flags[first + t];
      if (verdict.below) flag |= kBelow;
      if (verdict.above) flag |= kAbove;
      if (verdict.dropped()) flag |= kPolicyDropped;
      if (verdict.dropped() && gate.scope == GateScope::policy_and_penalty) flag |= kPenaltyDropped;
    });
  }
  if (spec->shaping.sequence_mean) {
    double trained_count = 0.0, advantage = 0.0;
    for (size_t t = 0; t < seq.mask.size(); ++t) {
      if (seq.mask[t]) trained_count += 1.0, advantage += static_cast<double>(seq.advantages[t]);
    }
    numbers[s].mean_advantage = static_cast<float>(advantage / std::max(trained_count, 1.0));
  }
  if (!uses_ratio_of(*spec) || spec->ratio.level == Level::token) return;
  const auto num = seq.stream(spec->ratio.pair.numerator);
  const auto den = seq.stream(spec->ratio.pair.denominator);
  double sum = 0.0, count = 0.0;
  if (!spec->ratio.signed_log_clip && spec->positions == Positions::trained &&
      spec->ratio.over == Positions::trained) {
    std::tie(sum, count) = log_ratio_sum(num, den, seq.mask);
  } else {
    for (size_t t = 0; t < seq.mask.size(); ++t) {
      if (!in_statistic(*spec, batch, seq, first, t)) continue;
      sum += clipped_log_ratio(*spec, num[t], den[t], static_cast<double>(seq.advantages[t])).first;
      count += 1.0;
    }
  }
  statistic_count[s] = std::max(count, 1.0);
  if (spec->ratio.level == Level::geometric) sum /= statistic_count[s];
  numbers[s].log_ratio = static_cast<float>(sum);
}

void Evaluator::Impl::set_scales(std::optional<double> denominator) {
  std::span<const uint8_t> counted = original;
  if (gates_in_flags) {
    narrowed.resize(trained.size());
    for (size_t i = 0; i < trained.size(); ++i) {
      narrowed[i] = trained[i] && !(flags[i] & kPolicyDropped) &&
                    (spec->corrections.empty() || weights[i] != 0.0f);
    }
    counted = narrowed;
  }
  if (!denominator) {
    if (own_mask) {
      denominator = count_denominator(*spec, batch, counted);
    } else if (spec->reduction.kind == ReductionKind::sum) {
      denominator = 1.0;
    } else if (batch.mask.empty() && batch.weights.empty()) {
      denominator = static_cast<double>(batch.token_count());
    } else {
      size_t tokens = 0;
      const size_t n = static_cast<size_t>(batch.token_count());
      for (size_t begin = 0; begin < n; begin += 128) {
        uint8_t few = 0;  // a short count in bytes is what the compiler turns into vectors
        const size_t end = std::min(n, begin + 128);
        if (batch.weights.empty()) {
          for (size_t i = begin; i < end; ++i)
            few = static_cast<uint8_t>(few + (batch.mask[i] != 0));
        } else {
          for (size_t i = begin; i < end; ++i) few = static_cast<uint8_t>(few + in_mask(batch, i));
        }
        tokens += few;
      }
      denominator = static_cast<double>(tokens);
    }
  }
  const double divisor = std::max(1.0, *denominator);
  if (spec->reduction.kind == ReductionKind::seq_mean_token_mean ||
      spec->reduction.kind == ReductionKind::padded_length_mean) {
    scales = sequence_scales(*spec, batch, counted, divisor);
  } else {
    scales.assign(numbers.size(), 1.0 / divisor);
  }
  for (size_t s = 0; s < numbers.size(); ++s) numbers[s].scale = static_cast<float>(scales[s]);
}

void Evaluator::Impl::run_part(size_t part, size_t part_tokens) {
  const size_t n = static_cast<size_t>(batch.token_count());
  Part& out = parts[part];
  for (int k = 0; k < kSlotCount; ++k) out.sums.slots[k] = empty_value(static_cast<Slot>(k));
  out.sums.loss = 0.0;
  out.sums.not_finite = false;
  KernelHistogram histogram;
  if (want_metrics) std::memset(&histogram, 0, sizeof histogram);

  auto run = [&](size_t begin, size_t end, size_t s) {
    TokenInputs in;
    for (int k = 0; k < kStreamCount; ++k) {
      const auto values = batch.stream(static_cast<Stream>(k));
      in.streams[k] = values.empty() ? nullptr : values.data() + begin;
    }
    in.advantages = batch.advantages.data() + begin;
    if (!batch.weights.empty()) in.batch_weights = batch.weights.data() + begin;
    if (!batch.mask.empty()) in.loss_mask = batch.mask.data() + begin;
    in.mask = own_mask ? trained.data() + begin : in.loss_mask;
    if (own_mask) in.flags = flags.data() + begin;
    in.gates_in_flags = gates_in_flags;
    if (!spec->corrections.empty()) in.weights = weights.data() + begin;
    if (!through.empty()) in.through = through.data() + begin;
    in.grad = grad.data() + begin;
    if (!kept.empty()) in.kept = kept.data() + begin;
    const double tokens = out.sums.slots[static_cast<int>(Slot::tokens)];
    const double kept_tokens = out.sums.slots[static_cast<int>(Slot::kept)];
    run_token_kernel(plan, in, numbers[s], end - begin, out.sums,
                     want_metrics ? &histogram : nullptr);
    if (!want_metrics) return;
    // A sequence may be cut between parts: counts add up in any order.
    auto count = [](uint32_t& total, double added) {
      std::atomic_ref(total).fetch_add(static_cast<uint32_t>(added), std::memory_order_relaxed);
    };
    count(tokens_in[s], out.sums.slots[static_cast<int>(Slot::tokens)] - tokens);
    count(kept_in[s], out.sums.slots[static_cast<int>(Slot::kept)] - kept_tokens);
  };

  const size_t first = part * part_tokens, last = std::min(n, first + part_tokens);
  size_t s = static_cast<size_t>(std::upper_bound(batch.offsets.begin(), batch.offsets.end(),
                                                  static_cast<int64_t>(first)) -
                                 batch.offsets.begin()) -
             1;
  for (size_t begin = first; begin < last;) {
    while (static_cast<size_t>(batch.offsets[s + 1]) <= begin) ++s;
    const size_t end = std::min({last, begin + kBlock, static_cast<size_t>(batch.offsets[s + 1])});
    run(begin, end, s);
    begin = end;
  }
  if (!want_metrics) return;
  for (int b = 0; b < kRatioBins; ++b) {
    out.histogram[b] =
        histogram.bins[0][b] + histogram.bins[1][b] + histogram.bins[2][b] + histogram.bins[3][b];
  }
}

// Gradients that go through the sequence's mean.
void Evaluator::Impl::route_through_mean(size_t s) {
  const auto seq = sequence_of(batch, static_cast<int64_t>(s), trained);
  const size_t first = first_position(batch, static_cast<int64_t>(s));
  double sum = padding_of(*spec, batch, static_cast<int64_t>(s),
                          static_cast<double>(numbers[s].log_ratio), scales[s])
                   .by_ratio;
  for (size_t t = 0; t < seq.mask.size(); ++t) sum += static_cast<double>(through[first + t]);
  if (spec->ratio.level == Level::geometric) sum /= statistic_count[s];
  const auto num = seq.stream(spec->ratio.pair.numerator);
  const auto den = seq.stream(spec->ratio.pair.denominator);
  for (size_t t = 0; t < seq.mask.size(); ++t) {
    if (!in_statistic(*spec, batch, seq, first, t)) continue;
    const double A = static_cast<double>(seq.advantages[t]);
    const double slope = clipped_log_ratio(*spec, num[t], den[t], A).second;
    grad[first + t] += static_cast<float>(sum * slope);
  }
}

void Evaluator::Impl::add_metrics(MetricSums& metrics, size_t part_count) const {
  for (size_t p = 0; p < part_count; ++p) {
    for (int k = 0; k < kSlotCount; ++k) {
      const Slot slot = static_cast<Slot>(k);
      metrics[slot] = joined(slot, metrics[slot], parts[p].sums.slots[k]);
    }
    for (size_t b = 0; b < kRatioBins; ++b) metrics.histogram()[b] += parts[p].histogram[b];
  }
  for (size_t s = 0; s < numbers.size(); ++s) {
    metrics[Slot::sequences] += tokens_in[s] > 0;
    metrics[Slot::sequences_dropped] += tokens_in[s] > 0 && kept_in[s] == 0;
  }
  for (size_t i = 0; i < batch.versions.size(); ++i) {
    if (own_mask ? !trained[i] : !in_mask(batch, i)) continue;
    metrics.raise(Slot::version_min, batch.versions[i]);
    metrics.raise(Slot::version_max, batch.versions[i]);
  }
}

void Evaluator::Impl::throw_not_finite() const {
  check_finite(*spec, batch);
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
      const size_t k = static_cast<size_t>(i);
      if (std::isfinite(grad[k])) continue;
      const auto num = batch.stream(spec->ratio.pair.numerator);
      const auto den = batch.stream(spec->ratio.pair.denominator);
      throw_overflow(
          s, i - batch.offsets[s],
          num.empty() || den.empty() ? 1.0 : std::exp(static_cast<double>(num[k] - den[k])));
    }
  }
  throw Error("the loss is not finite in float32 although every gradient is: scale the advantages");
}

double Evaluator::Impl::evaluate(const LossSpec& the_spec, const BatchView<float>& the_batch,
                                 std::span<float> the_grad, std::optional<double> denominator,
                                 MetricSums* metrics, std::span<uint8_t> the_kept) {
  spec = &the_spec;
  plan = make_loss_plan(the_spec);
  batch = the_batch;
  grad = the_grad;
  kept = the_kept;
  want_metrics = metrics != nullptr;
  const size_t n = static_cast<size_t>(batch.token_count());
  LEEWAY_CHECK(grad.size() == n, "grad holds one value per position");
  LEEWAY_CHECK(kept.empty() || (kept.size() == n && want_metrics),
               "kept comes with metrics and holds one flag per position");
  check_streams(*spec, batch);
  check_what_bounds_hide();
  prepare();
  set_scales(denominator);
  if (want_metrics) {
    tokens_in.assign(numbers.size(), 0);
    kept_in.assign(numbers.size(), 0);
  }

  const size_t blocks = (n + kBlock - 1) / kBlock;
  const size_t part_tokens = (blocks + kParts - 1) / kParts * kBlock;
  const size_t part_count = n == 0 ? 0 : (n + part_tokens - 1) / part_tokens;
  const auto run = [this, part_tokens](size_t part) { run_part(part, part_tokens); };
  pool.run(part_count, std::ref(run));
  if (!through.empty()) {
    pool.run(numbers.size(), [this](size_t s) { route_through_mean(s); });
  }

  double loss = 0.0;
  bool not_finite = false;
  for (size_t p = 0; p < part_count; ++p) {
    loss += parts[p].sums.loss;
    not_finite |= parts[p].sums.not_finite;
  }
  if (spec->reduction.kind == ReductionKind::padded_length_mean) {
    for (size_t s = 0; s < numbers.size(); ++s) {
      loss += padding_of(*spec, batch, static_cast<int64_t>(s),
                         static_cast<double>(numbers[s].log_ratio), scales[s])
                  .loss;
    }
  }
  if (not_finite || !std::isfinite(loss)) throw_not_finite();
  if (want_metrics) add_metrics(*metrics, part_count);
  return loss;
}

Evaluator::Evaluator(int threads) : impl_(std::make_unique<Impl>(threads)) {}
Evaluator::~Evaluator() = default;
Evaluator::Evaluator(Evaluator&&) noexcept = default;
Evaluator& Evaluator::operator=(Evaluator&&) noexcept = default;

double Evaluator::evaluate(const LossSpec& spec, const BatchView<float>& batch,
                           std::span<float> grad, std::optional<double> denominator,
                           MetricSums* metrics, std::span<uint8_t> kept) {
  return impl_->evaluate(spec, batch, grad, denominator, metrics, kept);
}

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t bit = 1; bit != 0 && bit <= HWY_SCALAR; bit <<= 1) {
    if ((targets & bit) != 0) names.emplace_back(hwy::TargetName(bit));
  }
  return names;
}

PinSimdLevel::PinSimdLevel(const std::string& level) {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t bit = 1; bit != 0 && bit <= HWY_SCALAR; bit <<= 1) {
    if ((targets & bit) != 0 && level == hwy::TargetName(bit)) {
      hwy::SetSupportedTargetsForTest(bit);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
  }
  throw Error("this machine has no SIMD level " + level);
}

PinSimdLevel::~PinSimdLevel() {
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace leeway
