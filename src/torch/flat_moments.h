// AdamW's moments over flat memory (flat_layout.h): float32, or codes of a byte each
// (cuda/moment_codes.h) for matrices, and float32 for norms and biases, which are few and whose
// sizes have little to do with their neighbours'.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "config/settings.h"
#include "torch/flat_layout.h"
#include "trainer/optimizer.h"

namespace leeway {

struct FlatMoments {
  at::Tensor first, second;  // of the numbers that have no codes
  // Of the numbers before those; undefined: none has.
  at::Tensor first_codes, second_codes;    // int8, uint8
  at::Tensor first_scales, second_scales;  // a number for each block

  int64_t coded() const { return first_codes.defined() ? first_codes.numel() : 0; }
  FlatMoments clone() const;
  int64_t bytes() const;
};

// Zeros, of all numbers or of a part that begins with a block.
FlatMoments make_moments(const FlatLayout& layout, at::Device device, OptimizerState state,
                         std::optional<FlatRange> part = {});

// The coded moments from number `begin` on, which begins a block, as float32 [count]: first and
// second. And back: from numbers that were decoded they give the same codes.
std::pair<at::Tensor, at::Tensor> decoded(const FlatMoments& moments, int64_t begin, int64_t count);
void encode(const at::Tensor& first, const at::Tensor& second, int64_t begin,
            const FlatMoments& moments);

// Between the device and the host's float32, without a second copy on the device. `moments` are of
// the numbers from `first_number` on.
void copy_to_flat(const FlatLayout& layout, const AdamW& host, const FlatMoments& moments,
                  int64_t first_number = 0);
void copy_to_host(const FlatLayout& layout, const FlatMoments& moments, AdamW& host,
                  int64_t first_number = 0);

}  // namespace leeway
