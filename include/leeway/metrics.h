// Metrics of a loss: raw (before any clamp or mask), mergeable, each with one definition.
//
// `MetricSums` holds sums, extremes and a histogram of ratios. Micro-batches, threads and ranks are
// joined by `merge`, which is exact; shares, means, effective sample size and p99 are made from the
// joined sums by `finalize_metrics`, never from averages of averages.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "leeway/loss.h"
#include "leeway/metric_list.h"

namespace leeway {

// Sums add up; slots from `first_extreme` on are joined by minimum or maximum.
enum class Slot : int {
  tokens,
  positive_tokens,
  negative_tokens,
  kl,
  kl_positive,
  kl_negative,
  kl_dropped,
  abs_log_ratio,
  ratio,
  ratio_squared,
  dropped,
  dropped_low,
  dropped_high,
  dropped_positive,
  dropped_negative,
  kept,
  clip_binding,
  clip_low,
  clip_high,
  clip_signed,
  clip_dual,
  weight,
  weight_zero,
  coefficient,
  coefficient_squared,
  penalty,
  ref_kl,
  teacher_kl,
  sequences,
  sequences_dropped,
  first_extreme,
  ratio_min = first_extreme,
  ratio_max,
  kl_max,
  weight_max,
  version_min,
  version_max,
  count
};
inline constexpr int kSlotCount = static_cast<int>(Slot::count);
inline constexpr bool is_extreme(Slot slot) {
  return slot >= Slot::first_extreme && slot < Slot::count;
}
inline constexpr bool is_minimum(Slot slot) {
  return slot == Slot::ratio_min || slot == Slot::version_min;
}
// How two parts of a batch join in a slot, and what a slot holds before any token.
inline constexpr double joined(Slot slot, double a, double b) {
  if (!is_extreme(slot)) return a + b;
  return is_minimum(slot) ? (b < a ? b : a) : (a < b ? b : a);
}
inline constexpr double empty_value(Slot slot) {
  if (!is_extreme(slot)) return 0.0;
  return is_minimum(slot) ? kInfinity : -kInfinity;
}

// Ratios fall into bins of 1/32 of an octave between 2^-12 and 2^12; the bin is the top bits of the
// float32 value, so that a SIMD lane finds it with a shift.
inline constexpr int kRatioBins = 24 * 32;
int ratio_bin(float ratio);
double ratio_bin_upper(int bin);

class MetricSums {
 public:
  MetricSums();
  double& operator[](Slot slot) { return slots_[static_cast<size_t>(slot)]; }
  double operator[](Slot slot) const { return slots_[static_cast<size_t>(slot)]; }
  std::array<int64_t, kRatioBins>& histogram() { return histogram_; }
  const std::array<int64_t, kRatioBins>& histogram() const { return histogram_; }
  void raise(Slot slot, double value);  // maximum or minimum, by the slot's kind
  void merge(const MetricSums& other);

  // One flat row of numbers and back, for tensors and files.
  static constexpr int kFlatSize = kSlotCount + kRatioBins;
  std::vector<double> flatten() const;
  static MetricSums from_flat(std::span<const double> flat);

 private:
  std::array<double, kSlotCount> slots_;
  std::array<int64_t, kRatioBins> histogram_;
};

struct MetricInfo {
  const char* name;
  const char* definition;  // one sentence with its formula, for docs and `explain`
  // Whether the metric is defined for this spec on a batch with these streams.
  bool (*applies)(const LossSpec& spec, bool has_rollout, bool has_ref, bool has_teacher);
  double (*compute)(const MetricSums& sums);  // NaN where undefined (no such token)
};

// Every native metric, in the order it is shown.
std::span<const MetricInfo> metric_table();

Metrics finalize_metrics(const LossSpec& spec, const MetricSums& sums, bool has_rollout,
                         bool has_ref, bool has_teacher);

}  // namespace leeway
