// The optimizer's step and the gradient's norm over flat memory (flat_layout.h): one kernel each on
// CUDA (cuda/adamw.h), plain ATen elsewhere.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "config/run_config.h"
#include "torch/flat_moments.h"
#include "torch/split_masters.h"

namespace leeway {

// Of one layout and, but for `copy` and codes, float32.
struct FlatAdamW {
  at::Tensor parameters, gradients;
  FlatMoments moments;   // coded: all that decay, or none
  at::Tensor copy;       // receives the new parameters in its type; may be undefined
  at::Tensor low;        // in the place of `parameters`: they are SplitMasters{copy, low}
  int64_t decaying = 0;  // as many numbers decay, from the first
};

// Step number `step` (1, 2, ..) of AdamW (trainer/optimizer.h) with gradients times `scale`. What
// is stored as codes is rounded after the step. Afterwards the gradients are unspecified.
void adamw_step(const FlatAdamW& tensors, const OptimizerTable& table, int64_t step, double rate,
                double scale);

// The Euclidean norm of float32 numbers, summed in double in an order that their count decides; not
// finite if any of them is not. Waits for the device.
double norm_of(const at::Tensor& flat);

}  // namespace leeway
