// The vector kernel: loss, gradient and metrics of a run of tokens that share one sequence's
// numbers. evaluator.cpp prepares what it needs and joins what it gives.
#pragma once

#include <cstdint>

#include "core/float32/plan.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"

namespace leeway {

// Pointers to the first token of a run; streams the batch lacks are null, as is whatever is not
// needed: `mask` (all trained), `batch_weights` (ones), `weights` (ones), `flags` (zeros),
// `through`, `kept`.
struct TokenInputs {
  const float* streams[kStreamCount] = {};
  const float* advantages = nullptr;
  const float* batch_weights = nullptr;
  const uint8_t* mask = nullptr;
  const float* weights = nullptr;
  const uint8_t* flags = nullptr;
  const uint8_t* loss_mask = nullptr;  // the batch's own mask, for advantages times mask
  bool gates_in_flags = false;         // token-level gates are decided already
  float* grad = nullptr;
  float* through = nullptr;  // where gradients that go through a mean are gathered
  uint8_t* kept = nullptr;   // with metrics: whether a token's policy term carries gradient
};

// What a sequence's tokens share.
struct SequenceNumbers {
  float scale = 1.0f;
  float log_ratio = 0.0f;       // above token level
  float mean_advantage = 0.0f;  // with Shaping::sequence_mean
};

// Ratios are counted in four histograms that take turns, so that equal neighbours, the usual case,
// do not wait for each other's store.
struct KernelHistogram {
  uint32_t bins[4][kRatioBins];
};

// Sums of one run, in the order of Slot.
template <int kSlots>
struct TokenTotals {
  double slots[kSlots];
  double loss;
  bool not_finite;  // an input, a loss or a gradient that counts is not finite
};
using KernelSums = TokenTotals<kSlotCount>;

// Evaluates `count` tokens and adds to `sums` and, if not null, to `histogram`; without a histogram
// no metrics are gathered. Gates above token level and of scope `mask` are in the flags and the
// mask already.
void run_token_kernel(const LossPlan& plan, const TokenInputs& in, const SequenceNumbers& sequence,
                      size_t count, KernelSums& sums, KernelHistogram* histogram);

}  // namespace leeway
