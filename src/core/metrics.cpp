#include "leeway/metrics.h"

#include <bit>
#include <cmath>

#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr int kFirstBinBits = (127 - 12) << 5;  // 2^-12, in units of 1/32 octave

double share(double part, double whole) { return whole > 0 ? part / whole : std::nan(""); }

double effective_share(double sum, double squares, double n) {
  return n > 0 && squares > 0 ? sum * sum / (squares * n) : std::nan("");
}

double ratio_p99(const MetricSums& sums) {
  int64_t total = 0;
  for (int64_t count : sums.histogram()) total += count;
  if (total == 0) return std::nan("");
  // The smallest bin edge with at least 99 % of the tokens at or below it.
  const double wanted = 0.99 * static_cast<double>(total);
  int64_t seen = 0;
  for (int bin = 0; bin < kRatioBins; ++bin) {
    seen += sums.histogram()[static_cast<size_t>(bin)];
    if (static_cast<double>(seen) >= wanted) {
      if (bin == kRatioBins - 1) break;
      return std::min(ratio_bin_upper(bin), sums[Slot::ratio_max]);
    }
  }
  return sums[Slot::ratio_max];
}

using Applies = bool (*)(const LossSpec&, bool, bool, bool);
constexpr Applies kAlways = [](const LossSpec&, bool, bool, bool) { return true; };
constexpr Applies kRollout = [](const LossSpec&, bool rollout, bool, bool) { return rollout; };
constexpr Applies kClip = [](const LossSpec& spec, bool, bool, bool) { return has_clip(spec); };
constexpr Applies kBinding = [](const LossSpec& spec, bool, bool, bool) {
  return has_clip(spec) && spec.surrogate.kind == SurrogateKind::clipped;
};
constexpr Applies kDual = [](const LossSpec& spec, bool, bool, bool) {
  return spec.surrogate.dual_clip < kInfinity;
};
constexpr Applies kWeight = [](const LossSpec& spec, bool, bool, bool) {
  return !spec.corrections.empty();
};
constexpr Applies kPenalty = [](const LossSpec& spec, bool, bool, bool) {
  return !spec.penalties.empty();
};
constexpr Applies kRef = [](const LossSpec&, bool, bool ref, bool) { return ref; };
constexpr Applies kTeacher = [](const LossSpec&, bool, bool, bool teacher) { return teacher; };

// x = log pi - log rollout; r = e^x; k3(x) = e^x - 1 - x; "dropped": a gate, a correction's mask or
// a zero weight took the policy term away.
const MetricInfo kTable[] = {
    {"mismatch_kl", "mean of k3(x), x = log pi - log rollout, over trained tokens", kRollout,
     [](const MetricSums& s) { return share(s[Slot::kl], s[Slot::tokens]); }},
    {"mismatch_kl_positive", "mean of k3(x) over trained tokens with advantage > 0", kRollout,
     [](const MetricSums& s) { return share(s[Slot::kl_positive], s[Slot::positive_tokens]); }},
    {"mismatch_kl_negative", "mean of k3(x) over trained tokens with advantage < 0", kRollout,
     [](const MetricSums& s) { return share(s[Slot::kl_negative], s[Slot::negative_tokens]); }},
    {"mismatch_kl_max", "largest k3(x) of a trained token", kRollout,
     [](const MetricSums& s) { return s[Slot::tokens] > 0 ? s[Slot::kl_max] : std::nan(""); }},
    {"masked_mismatch_kl", "mean of k3(x) over dropped tokens; 0 if none is", kRollout,
     [](const MetricSums& s) { return s[Slot::kl_dropped] / std::max(1.0, s[Slot::dropped]); }},
    {"unmasked_mismatch_kl", "mean of k3(x) over trained tokens that are not dropped; 0 if all are",
     kRollout,
     [](const MetricSums& s) {
       return (s[Slot::kl] - s[Slot::kl_dropped]) /
              std::max(1.0, s[Slot::tokens] - s[Slot::dropped]);
     }},
    {"is_masked",
     "share of trained tokens whose policy term a gate, a correction's mask or a zero weight drops",
     kAlways, [](const MetricSums& s) { return share(s[Slot::dropped], s[Slot::tokens]); }},
    {"is_masked_low", "share of trained tokens below a gate's lower bound", kAlways,
     [](const MetricSums& s) { return share(s[Slot::dropped_low], s[Slot::tokens]); }},
    {"is_masked_high", "share of trained tokens above a gate's upper bound", kAlways,
     [](const MetricSums& s) { return share(s[Slot::dropped_high], s[Slot::tokens]); }},
    {"is_masked_positive", "share of dropped ones among trained tokens with advantage > 0", kAlways,
     [](const MetricSums& s) {
       return share(s[Slot::dropped_positive], s[Slot::positive_tokens]);
     }},
    {"is_masked_negative", "share of dropped ones among trained tokens with advantage < 0", kAlways,
     [](const MetricSums& s) {
       return share(s[Slot::dropped_negative], s[Slot::negative_tokens]);
     }},
    {"kept_share",
     "share of trained tokens whose policy term carries gradient: neither dropped nor cut by a "
     "clip",
     kAlways, [](const MetricSums& s) { return share(s[Slot::kept], s[Slot::tokens]); }},
    {"logprob_abs_diff", "mean of |x| over trained tokens", kRollout,
     [](const MetricSums& s) { return share(s[Slot::abs_log_ratio], s[Slot::tokens]); }},
    {"ratio_mean", "mean of r = pi/rollout over trained tokens, each at most 1e18", kRollout,
     [](const MetricSums& s) { return share(s[Slot::ratio], s[Slot::tokens]); }},
    {"ratio_min", "smallest r of a trained token", kRollout,
     [](const MetricSums& s) { return s[Slot::tokens] > 0 ? s[Slot::ratio_min] : std::nan(""); }},
    {"ratio_max", "largest r of a trained token", kRollout,
     [](const MetricSums& s) { return s[Slot::tokens] > 0 ? s[Slot::ratio_max] : std::nan(""); }},
    {"ratio_p99", "the ratio that 99 % of trained tokens do not exceed, rounded up by at most 1/32",
     kRollout, ratio_p99},
    {"effective_sample_size", "(sum r)^2 / (tokens * sum r^2) over trained tokens: 1 on-policy",
     kRollout,
     [](const MetricSums& s) {
       return effective_share(s[Slot::ratio], s[Slot::ratio_squared], s[Slot::tokens]);
     }},
    {"update_effective_sample_size",
     "(sum c)^2 / (tokens * sum c^2), c what multiplies the advantage in the gradient (0 if cut)",
     kAlways,
     [](const MetricSums& s) {
       return effective_share(s[Slot::coefficient], s[Slot::coefficient_squared], s[Slot::tokens]);
     }},
    {"clip_fraction_binding",
     "share of trained tokens where the clipped branch is the larger loss (slime, verl, AReaL)",
     kBinding, [](const MetricSums& s) { return share(s[Slot::clip_binding], s[Slot::tokens]); }},
    {"clip_fraction_band",
     "share of trained tokens with a ratio outside the clip band, whatever the sign (cookbook, "
     "CISPO)",
     kClip,
     [](const MetricSums& s) {
       return share(s[Slot::clip_low] + s[Slot::clip_high], s[Slot::tokens]);
     }},
    {"clip_fraction_low", "share of trained tokens with a ratio below the clip band", kClip,
     [](const MetricSums& s) { return share(s[Slot::clip_low], s[Slot::tokens]); }},
    {"clip_fraction_high", "share of trained tokens with a ratio above the clip band", kClip,
     [](const MetricSums& s) { return share(s[Slot::clip_high], s[Slot::tokens]); }},
    {"clip_fraction_signed",
     "share of trained tokens below the band at advantage < 0 or above it at > 0 (TRL, Liger)",
     kClip, [](const MetricSums& s) { return share(s[Slot::clip_signed], s[Slot::tokens]); }},
    {"clip_fraction_dual", "share of trained tokens held by the dual clip", kDual,
     [](const MetricSums& s) { return share(s[Slot::clip_dual], s[Slot::tokens]); }},
    {"weight_mean", "mean of the corrections' detached weight over trained tokens", kWeight,
     [](const MetricSums& s) { return share(s[Slot::weight], s[Slot::tokens]); }},
    {"weight_max", "largest detached weight of a trained token", kWeight,
     [](const MetricSums& s) { return s[Slot::tokens] > 0 ? s[Slot::weight_max] : std::nan(""); }},
    {"weight_zero_share", "share of trained tokens with weight 0", kWeight,
     [](const MetricSums& s) { return share(s[Slot::weight_zero], s[Slot::tokens]); }},
    {"penalty_mean", "mean of the penalties over trained tokens, coefficients included", kPenalty,
     [](const MetricSums& s) { return share(s[Slot::penalty], s[Slot::tokens]); }},
    {"ref_kl", "mean of k3(log ref - log pi) over trained tokens", kRef,
     [](const MetricSums& s) { return share(s[Slot::ref_kl], s[Slot::tokens]); }},
    {"teacher_kl", "mean of log teacher - log pi over trained tokens", kTeacher,
     [](const MetricSums& s) { return share(s[Slot::teacher_kl], s[Slot::tokens]); }},
    {"tokens", "number of trained tokens", kAlways,
     [](const MetricSums& s) { return s[Slot::tokens]; }},
    {"sequences", "number of sequences with a trained token", kAlways,
     [](const MetricSums& s) { return s[Slot::sequences]; }},
    {"sequences_dropped", "share of those in which no token keeps its policy term", kAlways,
     [](const MetricSums& s) { return share(s[Slot::sequences_dropped], s[Slot::sequences]); }},
    {"version_min", "oldest policy version of a trained token", kAlways,
     [](const MetricSums& s) {
       return std::isinf(s[Slot::version_min]) ? std::nan("") : s[Slot::version_min];
     }},
    {"version_max", "newest policy version of a trained token", kAlways,
     [](const MetricSums& s) {
       return std::isinf(s[Slot::version_max]) ? std::nan("") : s[Slot::version_max];
     }},
};

}  // namespace

int ratio_bin(float ratio) {
  if (!(ratio > 0.0f)) return 0;
  const int bits = static_cast<int>(std::bit_cast<uint32_t>(ratio) >> 18);
  return std::clamp(bits - kFirstBinBits, 0, kRatioBins - 1);
}

double ratio_bin_upper(int bin) {
  return std::bit_cast<float>(static_cast<uint32_t>(bin + 1 + kFirstBinBits) << 18);
}

MetricSums::MetricSums() {
  histogram_.fill(0);
  for (int k = 0; k < kSlotCount; ++k) {
    slots_[static_cast<size_t>(k)] = empty_value(static_cast<Slot>(k));
  }
}

void MetricSums::raise(Slot slot, double value) {
  (*this)[slot] = joined(slot, (*this)[slot], value);
}

void MetricSums::merge(const MetricSums& other) {
  for (int k = 0; k < kSlotCount; ++k) {
    const Slot slot = static_cast<Slot>(k);
    (*this)[slot] = joined(slot, (*this)[slot], other[slot]);
  }
  for (size_t b = 0; b < histogram_.size(); ++b) histogram_[b] += other.histogram_[b];
}

std::vector<double> MetricSums::flatten() const {
  std::vector<double> flat(slots_.begin(), slots_.end());
  for (int64_t count : histogram_) flat.push_back(static_cast<double>(count));
  return flat;
}

MetricSums MetricSums::from_flat(std::span<const double> flat) {
  LEEWAY_CHECK(flat.size() == static_cast<size_t>(kFlatSize), "a row made by flatten()");
  MetricSums sums;
  std::copy_n(flat.begin(), kSlotCount, sums.slots_.begin());
  for (size_t b = 0; b < sums.histogram_.size(); ++b) {
    sums.histogram_[b] = static_cast<int64_t>(flat[static_cast<size_t>(kSlotCount) + b]);
  }
  return sums;
}

std::span<const MetricInfo> metric_table() { return kTable; }

Metrics finalize_metrics(const LossSpec& spec, const MetricSums& sums, bool has_rollout,
                         bool has_ref, bool has_teacher) {
  Metrics metrics;
  for (const MetricInfo& info : kTable) {
    if (info.applies(spec, has_rollout, has_ref, has_teacher)) {
      metrics.emplace_back(info.name, info.compute(sums));
    }
  }
  return metrics;
}

}  // namespace leeway
