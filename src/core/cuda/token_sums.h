// Metric sums of the tokens one thread has seen, in the slots of leeway/metrics.h.
#pragma once

#include "core/cuda/sequence_math.h"
#include "leeway/metrics.h"

namespace leeway::cuda {

inline constexpr int kFirstBin = (127 - 12) << 5;  // 2^-12 in units of 1/32 octave

// See leeway::ratio_bin.
LEEWAY_HOST_DEVICE int bin_of(float ratio) {
  const float limited = ratio >= 0x1p-12f ? fminf(ratio, 0x1.ffffp11f) : 0x1p-12f;
#ifdef __CUDA_ARCH__
  return (__float_as_int(limited) >> 18) - kFirstBin;
#else
  int bits;
  __builtin_memcpy(&bits, &limited, sizeof bits);
  return (bits >> 18) - kFirstBin;
#endif
}

// k3 grows away from 0 on both sides: its largest value is at one of the extremes.
LEEWAY_HOST_DEVICE double largest_kl(double x_min, double x_max) {
  return fmax(expm1(x_min) - x_min, expm1(x_max) - x_max);
}

struct TokenSums {
  double loss = 0.0;  // scaled
  bool not_finite = false;
  uint32_t tokens = 0, positive = 0, negative = 0, dropped = 0, dropped_low = 0, dropped_high = 0,
           dropped_positive = 0, dropped_negative = 0, kept = 0, clip_binding = 0, clip_low = 0,
           clip_high = 0, clip_signed = 0, clip_dual = 0, weight_zero = 0;
  double kl = 0.0, kl_positive = 0.0, kl_negative = 0.0, kl_dropped = 0.0, abs_log_ratio = 0.0,
         ratio = 0.0, ratio_squared = 0.0, weight = 0.0, coefficient = 0.0,
         coefficient_squared = 0.0, penalty = 0.0, ref_kl = 0.0, teacher_kl = 0.0;
  float x_min = INFINITY, x_max = -INFINITY, weight_max = -INFINITY;
  float version_min = INFINITY, version_max = -INFINITY;

  // Adds a trained token; returns the bin its mismatch ratio falls into, -1 without rollouts.
  LEEWAY_HOST_DEVICE int add(const LossPlan& plan, const LossBatch& batch, int64_t i,
                             const TokenIn& in, const TokenOut& out) {
    constexpr float kCap = 1e18f;  // one runaway token cannot turn a mean into infinity
    const float pi = in.streams[static_cast<int>(Stream::pi)];
    const bool up = in.advantage > 0.0f, down = in.advantage < 0.0f;
    loss += static_cast<double>(in.scale) * out.loss;
    not_finite |= !(fabsf(out.sanity) <= 3.402823466e38f);
    ++tokens;
    positive += up;
    negative += down;
    dropped += out.gone;
    dropped_low += out.below;
    dropped_high += out.above;
    dropped_positive += out.gone && up;
    dropped_negative += out.gone && down;
    kept += out.kept;
    penalty += out.penalty;
    const float c = fminf(out.coefficient, kCap);
    coefficient += c;
    coefficient_squared += static_cast<double>(c) * c;
    weight += out.weight;
    weight_zero += out.weight == 0.0f;
    weight_max = fmaxf(weight_max, out.weight);
    if (plan.has_clip) {
      const bool low = out.ratio<plan.clip_low, high = out.ratio> plan.clip_high;
      clip_binding += out.clip_binding;
      clip_low += low;
      clip_high += high;
      clip_signed += (low && down) || (high && up);
      clip_dual += out.dual_clipped;
    }
    if (batch.versions != nullptr) {
      const float version = static_cast<float>(batch.versions[i]);
      version_min = fminf(version_min, version);
      version_max = fmaxf(version_max, version);
    }
    if (batch.streams[static_cast<int>(Stream::ref)] != nullptr) {
      const float x = in.streams[static_cast<int>(Stream::ref)] - pi;
      ref_kl += k3_of(x, exp_of(x));
    }
    if (batch.streams[static_cast<int>(Stream::teacher)] != nullptr) {
      teacher_kl += in.streams[static_cast<int>(Stream::teacher)] - pi;
    }
    if (batch.streams[static_cast<int>(Stream::rollout)] == nullptr) return -1;
    const float x = pi - in.streams[static_cast<int>(Stream::rollout)];
    const float r = exp_of(x), of_token = k3_of(x, r), summed = fminf(r, kCap);
    kl += of_token;
    kl_positive += up ? of_token : 0.0f;
    kl_negative += down ? of_token : 0.0f;
    kl_dropped += out.gone ? of_token : 0.0f;
    abs_log_ratio += fabsf(x);
    ratio += summed;
    ratio_squared += static_cast<double>(summed) * summed;
    x_min = fminf(x_min, x);
    x_max = fmaxf(x_max, x);
    return bin_of(r);
  }

  // What threads join of a slot: its value, but for extremes of ratios, which are joined as
  // extremes of log ratios and made at the end.
  LEEWAY_HOST_DEVICE double joinable(Slot slot) const {
    switch (slot) {
      case Slot::ratio_min: return x_min;
      case Slot::ratio_max: return x_max;
      case Slot::kl_max: return -INFINITY;
      default: return this->slot(slot);
    }
  }

  // The value of a slot; `sequences` and `sequences_dropped` are not a token's to know.
  LEEWAY_HOST_DEVICE double slot(Slot slot) const {
    switch (slot) {
      case Slot::tokens: return tokens;
      case Slot::positive_tokens: return positive;
      case Slot::negative_tokens: return negative;
      case Slot::kl: return kl;
      case Slot::kl_positive: return kl_positive;
      case Slot::kl_negative: return kl_negative;
      case Slot::kl_dropped: return kl_dropped;
      case Slot::abs_log_ratio: return abs_log_ratio;
      case Slot::ratio: return ratio;
      case Slot::ratio_squared: return ratio_squared;
      case Slot::dropped: return dropped;
      case Slot::dropped_low: return dropped_low;
      case Slot::dropped_high: return dropped_high;
      case Slot::dropped_positive: return dropped_positive;
      case Slot::dropped_negative: return dropped_negative;
      case Slot::kept: return kept;
      case Slot::clip_binding: return clip_binding;
      case Slot::clip_low: return clip_low;
      case Slot::clip_high: return clip_high;
      case Slot::clip_signed: return clip_signed;
      case Slot::clip_dual: return clip_dual;
      case Slot::weight: return weight;
      case Slot::weight_zero: return weight_zero;
      case Slot::coefficient: return coefficient;
      case Slot::coefficient_squared: return coefficient_squared;
      case Slot::penalty: return penalty;
      case Slot::ref_kl: return ref_kl;
      case Slot::teacher_kl: return teacher_kl;
      case Slot::ratio_min: return exp(static_cast<double>(x_min));
      case Slot::ratio_max: return exp(static_cast<double>(x_max));
      case Slot::kl_max: return largest_kl(x_min, x_max);
      case Slot::weight_max: return weight_max;
      case Slot::version_min: return version_min;
      case Slot::version_max: return version_max;
      default: return 0.0;
    }
  }
};

}  // namespace leeway::cuda
