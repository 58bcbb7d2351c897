// Constants of the float32 formulas, and what is made in double from their sums.
#pragma once

#include <cmath>
#include <limits>

#include "core/float32/host_device.h"
#include "core/participation.h"
#include "leeway/metrics.h"

namespace leeway {

inline constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLargestFloat = std::numeric_limits<float>::max();
inline constexpr float kSumCap = static_cast<float>(kRatioSumCap);
inline constexpr int kFirstRatioBin = (127 - 12) << 5;  // 2^-12 in units of 1/32 octave

// The extremes of ratios from those of log ratios, which are what is gathered. k3 grows away from 0
// on both sides, so its largest value is at one of the extremes.
LEEWAY_HOST_DEVICE double finished_slot(Slot slot, double x_min, double x_max) {
  if (slot == Slot::ratio_min) return exp(x_min);
  if (slot == Slot::ratio_max) return exp(x_max);
  return fmax(expm1(x_min) - x_min, expm1(x_max) - x_max);
}

}  // namespace leeway
